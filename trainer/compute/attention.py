"""Attention for training and sampling, registered with transformers as one attention implementation.

transformers passes the queries, keys and values of every layer to the function registered under the name of
the model's attention implementation. Ours handles two layouts that plain attention does not:

- packed: sequences one behind the other in one row, so that the rest of the model computes real tokens only
  (``Layout.cu_seqlens`` in batching.py: where each sequence begins, and where the last one ends). A prompt
  with several answers is there once. Each answer is a segment of its own then, with more keys than queries:
  it sees the prompt's too (``Layout.key_index``). On a CPU ``rotated_attention``, which is compiled, computes
  segments as they lie, on a GPU ``_flash_attention`` does. Where these cannot run, the segments are padded to
  batches, for attention alone;
- decode: one query a row, over a preallocated cache (generation/kv_cache.py).

Attention that is not compiled (other families, long sequences, no compiler) runs torch's fused kernel.
"""

import warnings
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trainer.compute.batching import Layout
from trainer.compute.kernels import difference, differentiable, kernels_for
from trainer.compute.precision import compute_dtype

ATTENTION = "small_lm"
# Largest length times head_dim of compiled attention: its arrays lie on a thread's stack
MAX_COMPILED_SIZE = 1 << 16
LARGEST_VECTOR = 16  # numbers; compiled attention fills head_dim up to whole vectors
FLASH_DEVICE = "cuda"
TRIED_LENGTHS = [9, 1, 6, 8]  # of the sequences with which flash attention is tried
TRIED_BEGINNINGS = [(0, 4), (1, 0), (2, 0), (0, 4)]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query [B, heads, T, head_dim], key and value with their own number
    of heads -> ([B, T, heads, head_dim], None). packing: of the sequences if the row is packed.
    attention_mask: additive, or None for causal attention."""
    window = kwargs.get("sliding_window")
    scaling = kwargs.get("scaling")
    if packing is not None:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # x[0]'s gradient is a copy
        shapes = q.shape[1:], k.shape[1:], v.shape[1:]
        shared = packing.key_index is not None
        flash = _flash_works(q.device, compute_dtype(q), shapes, bool(window), shared)
        out = (_flash_attention if flash else _padded_attention)(q, k, v, packing, window, scaling)
        return out[None], None
    if attention_mask is None and query.shape[2] == key.shape[2]:
        return _causal_attention(query, key, value, window, scaling), None
    # Single queries over a cache, whose dtype may be another; longer prompts than a sliding window
    out, _ = sdpa_attention_forward(module, query.to(key.dtype), key, value, attention_mask, **kwargs)
    return out.to(query.dtype), None


def _causal_attention(query, key, value, window, scaling, position=None):
    """Attention where each token sees itself and earlier ones, within the sliding window if there is one
    -> [B, T, heads, dim]. position [B, T]: of the queries among the keys; None: both begin together."""
    length = query.shape[2]
    mask = None
    if position is not None or (window and window < length):
        keys = torch.arange(key.shape[2], device=query.device)
        behind = keys[:, None] - keys if position is None else position[:, None, :, None] - keys
        mask = ~hidden_places(behind, window or None)
    if not query.is_cpu:  # with ``enable_gqa`` a GPU may write all T x T scores to memory
        repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=query.is_cpu
    ).transpose(1, 2)


def _padded_attention(query, key, value, packing, window, scaling):
    """Causal attention in each segment of a packed row -> [N, heads, dim of values].

    query [N, heads, dim], key and value [N, their own number of heads, their dim].
    """
    found = []
    for part in packing.padded:
        rows = _causal_attention(
            _pad(_at(query, part.tokens), part.segments, part.longest, part.places),
            _pad(_at(key, part.keys), part.segments, part.longest_k, part.key_places),
            _pad(_at(value, part.keys), part.segments, part.longest_k, part.key_places),
            window,
            scaling,
            part.position,
        )
        found.append(rows.flatten(0, 1).index_select(0, part.places))
    if packing.key_index is None:
        return found[0]
    out = torch.cat(found)
    return torch.empty_like(out).index_copy_(0, torch.cat([part.tokens for part in packing.padded]), out)


def _pad(x, count, width, places):
    """x [n, heads, dim] -> [count, heads, width, dim], with x at these places [n] of [count, width], flat"""
    flat = x.new_zeros(count * width, *x.shape[1:]).index_copy_(0, places, x)
    return flat.unflatten(0, (count, -1)).transpose(1, 2)


def _at(x, index):
    """x [N, heads, dim] -> what is at the places ``index`` [n]; None: all. The gradient of a key, which is a
    sum over all segments that see it, is made in fp32."""
    if index is None:
        return x
    return x.to(torch.promote_types(x.dtype, torch.float32)).index_select(0, index).to(x.dtype)


def rotated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    packing: Layout | None,
    window: int | None,
    scaling: float,
) -> Tensor | None:
    """Compiled attention of a packed row -> the shape of query; None where it cannot run.

    query, key, value [1, tokens, heads, head_dim]; cos and sin [1, tokens, 1, head_dim], by which queries and
    keys are rotated here.
    """
    if packing is None or packing.longest * max(LARGEST_VECTOR, query.shape[3]) > MAX_COMPILED_SIZE:
        return None
    kernels = kernels_for(query, key, value, cos, sin) if query.is_cpu else None
    if kernels is None:
        return None

    _, _, heads, dim = query.shape
    kv_heads = key.shape[2]
    sizes = (packing.segments, heads, kv_heads, dim, window or packing.longest, scaling)
    index = packing.key_index
    places = (packing.cu_seqlens, packing.cu_seqlens_k, index)

    def forward(query, key, value):
        out = torch.empty_like(query)
        kernels.call("attention", *sizes, query, key, value, cos, sin, *places, out)
        return out, (query, key, value)

    def gradient(query, key, value, grad):
        grad_query = torch.empty_like(query)
        shape = key.shape if index is None else (1, len(index), kv_heads, dim)
        dtype = key.dtype if index is None else torch.float32
        grads = [torch.empty(shape, dtype=dtype) for _ in range(2)]
        kernels.call(
            "attention_backward", *sizes, query, key, value, cos, sin, *places, grad, grad_query, *grads
        )
        if index is not None:  # the sum over all segments that see a key
            grads = [torch.zeros(key.shape).index_add_(1, index, x).to(key.dtype) for x in grads]
        return grad_query, *grads

    return differentiable(forward, gradient, query, key, value)


def _flash_attention(query, key, value, packing, window, scaling):
    """torch's flash attention of a packed row, in the dtype of matrix products -> [N, heads, dim]. It
    computes the whole row in one call, without padding, grouped heads and sliding windows included. Shapes:
    those of ``_padded_attention``."""
    from torch.nn.attention.varlen import varlen_attn

    dtype = compute_dtype(query)
    cu_seqlens = packing.cu_seqlens.int()
    cu_seqlens_k = packing.cu_seqlens_k.int()
    back = (window or 0) - 1  # how many earlier tokens one sees, -1: all
    # torch 2.11 takes grouped heads as they are
    more: Any = {"enable_gqa": True} if "enable_gqa" in (varlen_attn.__kwdefaults__ or ()) else {}
    key = _at(key, packing.key_index)
    value = _at(value, packing.key_index)
    # With more keys than queries, the last query sees all of them.
    return varlen_attn(
        query.to(dtype), key.to(dtype), value.to(dtype), cu_seqlens, cu_seqlens_k,
        packing.longest_q, packing.longest, scale=scaling, window_size=(back, 0), **more,
    )  # fmt: skip


@cache
def _flash_works(device, dtype, shapes, windowed, shared):
    """Whether flash attention runs here and gives the values and gradients of padded attention in fp32 for
    such heads; a warning says why it does not. It needs a GPU from Ampere (sm80) on, and fp16 or bf16. Tried
    once for each kind of layer, and once more where beginnings are shared."""
    if device.type != FLASH_DEVICE or dtype == torch.float32:
        return False
    packing = Layout(TRIED_LENGTHS, device=device, beginnings=TRIED_BEGINNINGS if shared else ())
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn((len(packing.row), *shape), generator=generator) for shape in shapes]
    query, key, value = rows = [x.to(device, dtype).requires_grad_() for x in rows]
    window = 3 if windowed else None

    reason = difference(
        lambda: _padded_attention(query.float(), key.float(), value.float(), packing, window, 0.2),
        lambda: _flash_attention(query, key, value, packing, window, 0.2),
        device,
        rows,
        tolerance=0.03,  # bf16 has eight bits
    )
    if reason:
        warnings.warn(f"no flash attention of packed rows, which is faster: {reason}", stacklevel=2)
    return not reason


def hidden_places(behind: Tensor, window: int | None) -> Tensor:
    """-> bool, True for places that a token may not see: later ones, and those that a sliding window has left
    behind (window None: no window). behind: how far behind the token each place lies, in tokens (int)."""
    return behind < 0 if window is None else (behind < 0) | (behind >= window)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
