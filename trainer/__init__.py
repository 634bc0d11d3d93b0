"""The trainer: one script for each stage of training, what they share, and four folders."""
