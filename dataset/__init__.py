"""The data: files -> records -> prompts, demonstrations, pairs, and the order in which they come."""
