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

import inspect
import warnings
from functools import cache

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trainer.compute.cpu import kernels
from trainer.compute.kernels import difference, kernels_for, kernels_of
from trainer.compute.precision import compute_dtype

ATTENTION = "small_lm"
# Largest length times head_dim of compiled attention: its arrays lie on a thread's stack
MAX_COMPILED_SIZE = 1 << 16
LANES = 16  # the size of the largest vector; compiled attention fills head_dim up to whole vectors
SDPA_LENGTH = 128  # from this length on, torch's fused kernel is faster in fp32 on a CPU; below, it is not
FLASH_DEVICE = "cuda"
TRIED_LENGTHS = [9, 1, 6]  # of the sequences with which flash attention is tried


def attention(module, query, key, value, attention_mask, packing=None, **kwargs):
    """Attention as transformers calls it: query [B, heads, T, head_dim], key and value with their own number
    of heads -> ([B, T, heads, head_dim], None). packing: a ``Packing`` if the row is packed. attention_mask:
    additive, None for causal attention, or the positions [B, 1, 1, 1] of single queries over a cache."""
    if packing is not None:
        return _packed(module, query, key, value, packing, **kwargs), None
    if attention_mask is not None and attention_mask.dtype == torch.int64:  # KVCache gives positions instead
        window, scale = kwargs.get("sliding_window"), kwargs.get("scaling") or query.shape[3] ** -0.5
        attend = kernels_of(query.device.type).cached_attention
        return attend(query[:, :, 0], attention_mask.flatten(), key, value, window, scale)[:, None], None
    if query.device.type == "cpu" and query.shape[2] == 1 and attention_mask is not None:
        out = matmul_attention(query.to(key.dtype), key, value, attention_mask, kwargs["scaling"])
        return out.to(query.dtype), None
    if attention_mask is None and query.shape[2] == key.shape[2] and getattr(module, "is_causal", True):
        return _causal(module, query, key, value, **kwargs), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _causal(module, query, key, value, **kwargs):
    """Attention where each token sees itself and earlier ones, within the sliding window if there is one."""
    length, window = query.shape[2], kwargs.get("sliding_window")
    products = query.device.type == "cpu" and (length < SDPA_LENGTH or value.dtype != torch.float32)
    mask = None
    if products or (window and window < length):
        mask = causal_mask(length, window, query.dtype, query.device)
    if products:
        return matmul_attention(query, key, value, mask, kwargs["scaling"])
    if query.device.type == "cuda":
        return _fused(query, key, value, mask, kwargs.get("scaling"))
    return sdpa_attention_forward(module, query, key, value, mask, is_causal=mask is None, **kwargs)[0]


def _fused(query, key, value, mask, scaling):
    """torch's fused attention on a GPU -> [B, T, heads, dim]. Only its flash kernel takes grouped heads as
    they are, and it takes no fp32, no mask and no GPU before sm80. Elsewhere keys and values are repeated:
    with ``enable_gqa`` torch would write all T x T scores to memory."""
    grouped = key.shape[1] < query.shape[1]
    flash = mask is None and compute_dtype(query) != torch.float32 and query.shape[3] == value.shape[3] <= 256
    flash = flash and torch.cuda.get_device_capability(query.device) >= (8, 0)
    if grouped and not flash:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    more = {"scale": scaling, "is_causal": mask is None, "enable_gqa": grouped and flash}
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


class _Compiled(torch.autograd.Function):
    """``kernels.attention`` with its gradient; tensors [1, tokens, heads, dim]"""

    @staticmethod
    def forward(ctx, query, key, value, cos, sin, starts, window, scaling):
        ctx.save_for_backward(query, key, value, cos, sin, starts)
        ctx.window, ctx.scaling = window, scaling
        return kernels.attention(query, key, value, cos, sin, starts, window, scaling)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        grads = kernels.attention_backward(*ctx.saved_tensors, ctx.window, ctx.scaling, grad.contiguous())
        return *grads, None, None, None, None, None


def rotated_attention(query, key, value, cos, sin, packing, window, scaling):
    """Compiled attention of a packed row -> the shape of query; None where it cannot run.

    query, key, value [1, tokens, heads, head_dim]; cos and sin [1, tokens, 1, head_dim], by which queries and
    keys are rotated here.
    """
    fits = packing is not None and packing.longest * max(LANES, query.shape[3]) <= MAX_COMPILED_SIZE
    if not (fits and query.is_cpu) or kernels_for(query, key, value, cos, sin) is None:
        return None
    return _Compiled.apply(query, key, value, cos, sin, packing.starts, window, scaling)


def _packed(module, query, key, value, packing, **kwargs):
    """Causal attention in each sequence of a packed row [1, heads, N, head_dim] -> [1, N, heads, dim]."""
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    out = flash_attention(*rows, packing, kwargs.get("sliding_window"), kwargs.get("scaling"))
    if out is not None:
        return out[None]
    groups = zip(*map(packing.pad, rows), strict=True)
    return packing.unpad([_causal(module, *group, **kwargs).transpose(1, 2) for group in groups])[None]


def flash_attention(query, key, value, packing, window, scaling):
    """torch's flash attention for sequences of different lengths, causal in each sequence of a packed row
    -> [N, heads, dim]; None where it cannot run.

    It computes the whole row in one call, without padding, grouped heads and sliding windows included. It
    takes fp16 and bf16 on GPUs from Ampere (sm80) on. Whether it works here is tried once for each kind of
    layer; where it does not, a warning says why.
    query [N, heads, dim], key and value [N, their own number of heads, dim]; packing: ``Packing``; window: of
    sliding attention, in tokens, or None; scaling: of the scores, None for dim ** -0.5.
    """
    dtype = compute_dtype(query)
    if query.device.type != FLASH_DEVICE or dtype == torch.float32:
        return None
    window = window if window and window < packing.longest else None
    (_, heads, dim), (_, groups, value_dim) = query.shape, value.shape
    if not _flash_works(query.device, dtype, heads, groups, dim, value_dim, windowed=window is not None):
        return None
    rows = [x.to(dtype) for x in (query, key, value)]
    return _flash(*rows, packing.starts_int32, packing.longest, window, scaling)


def _flash(query, key, value, starts, longest, window, scaling):
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
def _flash_works(device, dtype, heads, groups, dim, value_dim, windowed):
    """Whether flash attention gives the values and gradients of products in fp32 for such heads."""
    window, scaling, count = 3 if windowed else None, dim**-0.5, sum(TRIED_LENGTHS)
    starts = torch.tensor([0, *TRIED_LENGTHS]).cumsum(0).to(device, torch.int32)
    generator = torch.Generator().manual_seed(0)
    shapes = [(count, heads, dim), (count, groups, dim), (count, groups, value_dim)]
    rows = [torch.randn(x, generator=generator).to(device, dtype).requires_grad_() for x in shapes]

    def products():
        parts = [x.float().transpose(0, 1)[None].split(TRIED_LENGTHS, 2) for x in rows]
        masks = [causal_mask(length, window, torch.float32, device) for length in TRIED_LENGTHS]
        return torch.cat([matmul_attention(*x, scaling) for x in zip(*parts, masks, strict=True)], 1)[0]

    def flash():
        return _flash(*rows, starts, max(TRIED_LENGTHS), window, scaling)

    if reason := difference(products, flash, device, rows, tolerance=0.03):  # bf16 has eight bits
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
