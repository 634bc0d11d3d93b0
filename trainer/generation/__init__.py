"""Generation: prompts -> responses, with a KV cache and continuous batching."""
