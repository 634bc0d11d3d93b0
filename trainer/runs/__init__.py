"""A training run, the same for all three scripts: its folder, processes, steps, checkpoints and logs."""
