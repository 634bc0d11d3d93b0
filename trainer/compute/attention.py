"""Attention for training and sampling, registered with transformers as one attention implementation.

transformers passes the queries, keys and values of every layer to the function registered under the name of
the model's attention implementation. Ours handles two layouts that plain attention does not:

- packed: sequences one behind the other in one row, so that the rest of the model computes real tokens only
  (packing.py). On a CPU ``rotated_attention``, which is compiled, computes them as they lie, on a GPU
  ``flash_attention`` does. Where these cannot run, sequences of similar length are padded to a batch, for
  attention alone;
- decode: one query a row, over a preallocated cache (generation/kv_cache.py).

On a CPU, attention that is not compiled (other families, long sequences, no compiler) runs torch's fused
kernel. For short sequences, and in bf16, it runs two batched products and a softmax, which take less time.
"""

import warnings
from functools import cache, cached_property

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trainer.compute.batching import ragged, send_arrays, take_rows
from trainer.compute.kernels import difference, differentiable, kernels_for, kernels_of
from trainer.compute.precision import compute_dtype

ATTENTION = "small_lm"
# Largest length times head_dim of compiled attention: its arrays lie on a thread's stack
MAX_COMPILED_SIZE = 1 << 16
LANES = 16  # the size of the largest vector; compiled attention fills head_dim up to whole vectors
SDPA_LENGTH = 128  # from this length on, torch's fused kernel is faster in fp32 on a CPU; below, it is not
FLASH_DEVICE = "cuda"
TRIED_LENGTHS = [9, 1, 6]  # of the sequences with which flash attention is tried
WASTE = 1.1  # one attention call has at most this many times its real tokens, padding included


def attention(module, query, key, value, attention_mask, packing=None, **kwargs):
    """Attention as transformers calls it: query [B, heads, T, head_dim], key and value with their own number
    of heads -> ([B, T, heads, head_dim], None). packing: a ``Packing`` if the row is packed. attention_mask:
    additive, None for causal attention, or the positions [B, 1, 1, 1] of single queries over a cache."""
    window = kwargs.get("sliding_window")
    scaling = kwargs.get("scaling") or query.shape[3] ** -0.5
    if packing is not None:
        rows = [x[0].transpose(0, 1) for x in (query, key, value)]
        out = flash_attention(*rows, packing, window, scaling)
        if out is None:
            out = padded_attention(*rows, packing, window, scaling)
        return out[None], None
    if attention_mask is not None and attention_mask.dtype == torch.int64:  # KVCache gives positions instead
        attend = kernels_of(query.device.type).cached_attention
        return attend(query[:, :, 0], attention_mask.flatten(), key, value, window, scaling)[:, None], None
    if query.is_cpu and query.shape[2] == 1 and attention_mask is not None:
        out = matmul_attention(query.to(key.dtype), key, value, attention_mask, scaling)
        return out.to(query.dtype), None
    if attention_mask is None and query.shape[2] == key.shape[2] and getattr(module, "is_causal", True):
        return causal_attention(query, key, value, window, scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def causal_attention(query, key, value, window, scaling):
    """Attention where each token sees itself and earlier ones, within the sliding window if there is one."""
    length = query.shape[2]
    products = query.is_cpu and (length < SDPA_LENGTH or value.dtype != torch.float32)
    mask = None
    if products or (window and window < length):
        mask = causal_mask(length, window, query.dtype, query.device)
    if products:
        return matmul_attention(query, key, value, mask, scaling)
    return fused_attention(query, key, value, mask, scaling)


def fused_attention(query, key, value, mask, scaling):
    """torch's fused attention -> [B, T, heads, dim]. On a GPU only its flash kernel takes grouped heads as
    they are, and it takes no fp32, no mask and no GPU before sm80. Elsewhere keys and values are repeated:
    with ``enable_gqa`` torch would write all T x T scores to memory."""
    repeats = query.shape[1] // key.shape[1]
    grouped = repeats > 1 and mask is None and query.shape[3] == value.shape[3] <= 256
    if query.is_cuda:
        grouped = grouped and compute_dtype(query) != torch.float32
        grouped = grouped and torch.cuda.get_device_capability(query.device) >= (8, 0)
    if repeats > 1 and not grouped:
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    more = {"scale": scaling, "is_causal": mask is None, "enable_gqa": grouped}
    return F.scaled_dot_product_attention(query, key, value, mask, **more).transpose(1, 2)


def matmul_attention(query, key, value, mask, scaling):
    """Attention as two batched products over the key/value heads; query heads with the same key are its rows.

    mask: additive, [1, 1, T, S] or, for one query a row, [B, 1, 1, S]. -> [B, T, heads, dim of values].
    """
    batch, heads, width, dim = query.shape
    groups, length = key.shape[1:3]
    packed = query.reshape(batch * groups, heads // groups * width, dim)
    if len(mask) == 1:
        mask = mask[0].expand(heads // groups, -1, -1).reshape(1, -1, length)
    else:
        mask = mask[:, 0].repeat_interleave(groups, 0)
    scores = torch.baddbmm(mask, packed, key.flatten(0, 1).transpose(1, 2), alpha=scaling)
    out = torch.bmm(scores.softmax(-1), value.flatten(0, 1))
    return out.view(batch, heads, width, -1).transpose(1, 2)


# ------------------------------------------------------------------------------------------------ packed rows


class Packing:
    """Where the sequences of a packed row lie, for attention, which reads this in every layer.

    lengths: list of B ints; ``starts``: each sequence's first place and the end, int64 [B + 1].
    """

    def __init__(self, lengths, device):
        self.lengths = lengths
        self.device = device
        self.longest = max(lengths)
        (self.starts,) = send_arrays([np.cumsum([0, *lengths])], device)

    @cached_property
    def starts_int32(self):
        """``starts`` in the type that flash attention reads."""
        return self.starts.int()

    @cached_property
    def groups(self):
        """The lengths in groups of neighbours: each is computed as one padded batch where attention has no
        kernel for packed rows. Sorted lengths need less padding."""
        groups = [[]]
        for length in self.lengths:
            group = [*groups[-1], length]
            if len(group) * max(group) <= WASTE * sum(group):
                groups[-1] = group
            else:
                groups.append([length])
        return groups

    @property
    def sizes(self):
        """Tokens of each group, padding included."""
        return [len(group) * max(group) for group in self.groups]

    @cached_property
    def place(self):
        """[tokens] where each token lies in the padded groups, one behind the other."""
        longest = np.concatenate([[max(group)] * len(group) for group in self.groups])  # [B]
        row, column = ragged(self.lengths)
        (place,) = send_arrays([(np.cumsum(longest) - longest)[row] + column], self.device)
        return place


def padded_attention(query, key, value, packing, window, scaling):
    """Causal attention in each sequence of a packed row, group by group -> [N, heads, dim of values].

    query [N, heads, dim], key and value [N, their own number of heads, their dim].
    """
    sizes = packing.sizes
    padded = []
    parts = []
    for x in (query, key, value):
        empty = x.new_zeros(sum(sizes), *x.shape[1:])
        padded.append(empty.index_copy_(0, packing.place, x).split(sizes))
    for group, *rows in zip(packing.groups, *padded, strict=True):
        batch = [x.unflatten(0, (len(group), -1)).transpose(1, 2) for x in rows]
        parts.append(causal_attention(*batch, window, scaling).flatten(0, 1))
    return take_rows(torch.cat(parts), packing.place)


def rotated_attention(query, key, value, cos, sin, packing, window, scaling):
    """Compiled attention of a packed row -> the shape of query; None where it cannot run.

    query, key, value [1, tokens, heads, head_dim]; cos and sin [1, tokens, 1, head_dim], by which queries and
    keys are rotated here.
    """
    fits = packing is not None and packing.longest * max(LANES, query.shape[3]) <= MAX_COMPILED_SIZE
    kernels = kernels_for(query, key, value, cos, sin) if fits and query.is_cpu else None
    if kernels is None:
        return None
    starts = packing.starts

    def forward(query, key, value):
        out = kernels.attention(query, key, value, cos, sin, starts, window, scaling)
        return out, (query, key, value)

    def gradient(query, key, value, grad):
        return kernels.attention_backward(query, key, value, cos, sin, starts, window, scaling, grad)

    return differentiable(forward, gradient, query, key, value)


def flash_attention(query, key, value, packing, window, scaling):
    """torch's flash attention for sequences of different lengths, causal in each sequence of a packed row
    -> [N, heads, dim]; None where it cannot run.

    It computes the whole row in one call, without padding, grouped heads and sliding windows included. It
    takes fp16 and bf16 on GPUs from Ampere (sm80) on. Whether it works here is tried once for each kind of
    layer; where it does not, a warning says why. Shapes: those of ``padded_attention``.
    """
    dtype = compute_dtype(query)
    if query.device.type != FLASH_DEVICE or dtype == torch.float32:
        return None
    if window and window >= packing.longest:
        window = None
    shapes = query.shape[1:], key.shape[1:], value.shape[1:]
    if not _flash_works(query.device, dtype, shapes, windowed=bool(window)):
        return None
    return _flash(*(x.to(dtype) for x in (query, key, value)), packing, window, scaling)


def _flash(query, key, value, packing, window, scaling):
    from torch.nn.attention import varlen

    starts = packing.starts_int32
    longest = packing.longest
    back = (window or 0) - 1  # how many earlier tokens one sees, -1: all
    more = {"scale": scaling, "window_size": (back, 0)}
    if "enable_gqa" in varlen.varlen_attn.__kwdefaults__:  # torch 2.11 takes grouped heads as they are
        more["enable_gqa"] = True
    return varlen.varlen_attn(query, key, value, starts, starts, longest, longest, **more)


@cache
def _flash_works(device, dtype, shapes, windowed):
    """Whether flash attention gives the values and gradients of padded attention in fp32 for such heads."""
    packing = Packing(TRIED_LENGTHS, device)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(sum(TRIED_LENGTHS), *shape, generator=generator) for shape in shapes]
    rows = [x.to(device, dtype).requires_grad_() for x in rows]
    window = 3 if windowed else None

    def padded():
        return padded_attention(*(x.float() for x in rows), packing, window, 0.2)

    def flash():
        return _flash(*rows, packing, window, 0.2)

    reason = difference(padded, flash, device, rows, tolerance=0.03)  # bf16 has eight bits
    if reason:
        warnings.warn(f"no flash attention of packed rows, which is faster: {reason}", stacklevel=2)
    return not reason


# ------------------------------------------------------------------------------------------------ masks

_MASKS = {}  # the largest mask of each kind so far; smaller ones are cut from it


def causal_mask(length, window, dtype, device):
    """Additive mask [1, 1, length, length]: a token sees itself and earlier ones, in the window if any."""
    kind = (window, dtype, device)
    if kind not in _MASKS or len(_MASKS[kind]) < length:
        with torch.inference_mode(False):  # the sampler may make a mask that training uses later
            behind = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
            mask = torch.zeros(behind.shape, dtype=dtype, device=device)
            _MASKS[kind] = mask.masked_fill_(hidden_places(behind, window), -torch.inf)
    return _MASKS[kind][None, None, :length, :length]


def hidden_places(behind, window):
    """-> bool, True for places that a token may not see: later ones, and those that a sliding window has left
    behind (window None: no window). behind: how far behind the token each place lies, in tokens (int)."""
    return behind < 0 if window is None else (behind < 0) | (behind >= window)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
