"""Cosines and sines of rotary positions, looked up in a table while a GPU samples.

transformers computes them at every step, in nine small kernels, and a small model has about 80 in a step.
A table with a row for each column of the KV cache holds the same numbers.
"""

import torch

# Kinds of rotary positions whose angles depend on a token's own position alone. Those of "dynamic" and
# "longrope" depend on the length of the sequence too.
KINDS = ("default", "linear", "llama3", "yarn")


def tabulate_rotary(model, width):
    """Let the model look up the rotary positions below ``width``, in its own dtype. Models of other kinds
    stay as they are."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    if getattr(rotary, "rope_type", None) not in KINDS:
        return
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    tables = type(rotary).forward(rotary, like, torch.arange(width, device=model.device)[None])
    rotary.forward = lambda x, position_ids: tuple(table[0, position_ids] for table in tables)
