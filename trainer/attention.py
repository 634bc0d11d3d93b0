"""The attention of training and sampling, registered with transformers under one name.

transformers hands every layer's queries, keys and values to the function registered under the model's
attention implementation. Ours knows two layouts that plain attention does not:

- packed: sequences one behind the other in one row, so that the rest of the model computes real tokens only
  (``packing.py``). ``rotated_attention`` computes them as they stand; where it is not compiled, they are laid
  side by side by length, which costs padding in attention alone;
- decode: one query a row over a preallocated cache (``slots.py``).

What is not compiled on a CPU (other families, long sequences, no compiler) runs torch's fused kernels, but
for short sequences, and in bf16, two batched products and a softmax, which take less time.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trainer import kernels

ATTENTION = "small_lm"
COMPILED = 1 << 16  # length times head_dim up to which compiled attention has its arrays on a thread's stack,
LANES = 16  # where head_dim is filled up to a vector's size, this at the most
LONG = 128  # in fp32 a CPU's fused kernel is slower or equal below, and faster from here on


def attention(module, query, key, value, attention_mask, packing=None, **kwargs):
    """The interface of transformers: query [B, heads, T, head_dim], keys and values with their own number of
    heads -> ([B, T, heads, head_dim], None). ``packing``: a ``Packing`` where the row is packed."""
    if packing is not None:
        return _packed(module, query, key, value, packing, **kwargs), None
    if query.device.type == "cpu" and query.shape[2] == 1 and attention_mask is not None:
        out = by_products(query.to(key.dtype), key, value, attention_mask, kwargs["scaling"])
        return out.to(query.dtype), None
    if attention_mask is None and query.shape[2] == key.shape[2] and getattr(module, "is_causal", True):
        return _causal(module, query, key, value, **kwargs), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _causal(module, query, key, value, **kwargs):
    """Each token sees itself and what came before, within the sliding window if there is one."""
    length, window = query.shape[2], kwargs.get("sliding_window")
    products = query.device.type == "cpu" and (length < LONG or value.dtype != torch.float32)
    mask = None
    if products or (window and window < length):
        mask = causal_mask(length, window, query.dtype, query.device)
    if products:
        return by_products(query, key, value, mask, kwargs["scaling"])
    return sdpa_attention_forward(module, query, key, value, mask, is_causal=mask is None, **kwargs)[0]


def by_products(query, key, value, mask, scaling):
    """Attention as two batched products over the key/value heads; query heads that share one are its rows.

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


class _Compiled(torch.autograd.Function):
    """``kernels.attention``; tensors [1, tokens, heads, dim]"""

    @staticmethod
    def forward(ctx, query, key, value, cos, sin, starts, window, scaling):
        ctx.save_for_backward(query, key, value, cos, sin, starts)
        ctx.window, ctx.scaling = window, scaling
        return kernels.attention(query, key, value, cos, sin, starts, window, scaling)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        more = ctx.window, ctx.scaling, grad.contiguous()
        return *kernels.attention_backward(*ctx.saved_tensors, *more), None, None, None, None, None


def rotated_attention(query, key, value, cos, sin, packing, window, scaling):
    """Attention of a packed row, [1, tokens, heads, head_dim] each, whose queries and keys are still to be
    rotated by cos and sin [1, tokens, 1, head_dim] -> the same shape; None where it is not compiled."""
    fits = packing is not None and max(packing.lengths) * max(LANES, query.shape[3]) <= COMPILED
    if not fits or not kernels.ready(query, key, value, cos, sin):
        return None
    return _Compiled.apply(query, key, value, cos, sin, packing.starts, window, scaling)


def _packed(module, query, key, value, packing, **kwargs):
    """Causal attention within each sequence of a packed row [1, heads, N, head_dim] -> [1, N, heads, dim]."""
    parts = [packing.pad(x[0].transpose(0, 1)) for x in (query, key, value)]
    out = [_causal(module, *qkv, **kwargs).transpose(1, 2) for qkv in zip(*parts, strict=True)]
    return packing.unpad(out)[None]


_MASKS = {}  # the largest made so far of each kind: the smaller ones are its corners


def causal_mask(length, window, dtype, device):
    """Additive [1, 1, length, length]: a token sees itself and what came before, within the window if any."""
    kind = (window, dtype, device)
    if kind not in _MASKS or len(_MASKS[kind]) < length:
        with torch.inference_mode(False):  # sampling may make it, and training needs it
            behind = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
            mask = torch.zeros(behind.shape, dtype=dtype, device=device)
            _MASKS[kind] = mask.masked_fill_(out_of_sight(behind, window), -torch.inf)
    return _MASKS[kind][None, None, :length, :length]


def out_of_sight(behind, window):
    """What a token may not see, from how far behind it (int tensor) each place lies: what comes later, and
    what a sliding window (None: there is none) has left behind."""
    return behind < 0 if window is None else (behind < 0) | (behind >= window)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
