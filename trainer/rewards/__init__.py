"""Rewards: responses -> scores."""
