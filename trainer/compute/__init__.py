"""Compute: sequences -> log-probs, values and gradients."""
