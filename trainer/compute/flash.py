"""Attention of a packed row on a GPU, by torch's flash attention for sequences of different lengths.

They compute the whole row in one call, without padding, grouped heads and sliding windows included. They take
fp16 and bf16 on GPUs from Ampere (sm80) on. Whether they work here is tried once for each kind of layer, with
values and gradients; where they do not, a warning says why, and attention.py computes group by group.
"""

import inspect
import warnings
from functools import cache

import torch

from errors import first_line
from trainer.compute.layout import ragged
from trainer.compute.precision import compute_dtype

DEVICE = "cuda"
LENGTHS = (9, 1, 6)  # of the sequences with which the kernel is tried
TOLERANCE = 0.03  # of the largest number: bf16 has eight bits


def flash_attention(query, key, value, packing, window, scaling):
    """Causal attention in each sequence of a packed row -> [N, heads, dim], or None where it cannot run.

    query [N, heads, dim], key and value [N, their own number of heads, dim]; packing: ``Packing``; window: of
    sliding attention, in tokens, or None; scaling: of the scores, None for dim ** -0.5.
    """
    dtype = compute_dtype(query)
    if query.device.type != DEVICE or dtype == torch.float32:
        return None
    window = window if window and window < packing.longest else None
    heads = query.shape[1], key.shape[1], query.shape[2], value.shape[2]
    if not _works(query.device, dtype, *heads, window is not None):
        return None
    rows = [x.to(dtype) for x in (query, key, value)]
    return _attend(*rows, packing.starts_int32, packing.longest, window, scaling)


def _attend(query, key, value, starts, longest, window, scaling):
    from torch.nn.attention import varlen

    rows = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)]
    size = (window - 1 if window else -1, 0)  # how far a token sees back and ahead; -1: to the end
    more = {"scale": scaling, "window_size": size, **_grouped(varlen.varlen_attn)}
    return varlen.varlen_attn(*rows, starts, starts, longest, longest, **more)


@cache
def _grouped(kernel):
    """The argument that grouped heads need: torch 2.11 takes them as they are."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}


@cache
def _works(device, dtype, heads, groups, dim, value_dim, windowed):
    """Whether the kernel gives the values and gradients of ``_by_definition`` for such heads."""
    window, generator = 3 if windowed else None, torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), n, d) for n, d in ((heads, dim), (groups, dim), (groups, value_dim))]
    rows = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, torch.int32)
    try:
        # Hooks of our own: those of gradient checkpointing would count what the trial keeps as the layer's.
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        off = torch.autocast(device.type, enabled=False)
        with torch.inference_mode(False), torch.enable_grad(), hooks, off:
            results = []
            for attend in (_attend, _by_definition):
                copies = [x.clone().requires_grad_(True) for x in rows]
                out = attend(*copies, starts, max(LENGTHS), window, dim**-0.5)
                results.append([out.detach(), *torch.autograd.grad(out.float().sin().sum(), copies)])
        reason = "" if all(map(_close, *results)) else "its results differ"
    except torch.OutOfMemoryError:  # says nothing about the kernel
        raise
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        reason = first_line(error)[:120]
    if reason:
        warnings.warn(f"no flash attention of packed rows, which is faster: {reason}", stacklevel=2)
    return not reason


def _close(a, b):
    return (a.float() - b.float()).abs().max() <= TOLERANCE * b.abs().max()


def _by_definition(query, key, value, starts, longest, window, scaling):
    """The same in fp32, with all scores of the row at once."""
    row, place = (torch.from_numpy(x).to(query.device) for x in ragged(starts.diff().cpu()))
    behind = place[:, None] - place
    seen = (row[:, None] == row) & (behind >= 0) & (behind < (window or longest))
    key, value = (x.float().repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scaling
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)
