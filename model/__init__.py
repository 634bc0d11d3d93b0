"""The models: loading, checks, critic, LoRA and saving."""
