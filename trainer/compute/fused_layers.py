"""Fused layers: the layers of Llama and its relatives in fewer operations, for training and sampling.

transformers writes norms, rotary positions, gates and attention as dozens of small operations, each of which
reads and writes every activation. Here compiled kernels (kernels.py) compute the same, with gradients of
their own; where there are none, torch's operations do. A module keeps its class, parameters and names. Only
its ``forward`` is replaced, and only if the whole model then gives the same values and gradients
(``fuse_layers``). Models of other families do not change.

Sources: RMSNorm, Zhang and Sennrich 2019 (arXiv:1910.07467); rotary positions, Su et al. 2021
(arXiv:2104.09864); gated feed-forwards, Shazeer 2020 (arXiv:2002.05202).
"""

import warnings
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import rotate_half

from trainer.compute.attention import attention, rotated_attention
from trainer.compute.kernels import difference, differentiable, few_layers, kernels_for
from trainer.compute.precision import compute_dtype


def _add_norm(x, delta, norm):
    """-> (s, RMS norm y of s), s = x + delta, or x where delta is None: the step between attention and
    feed-forward.

    y = s r w with r = (mean(s^2) + eps)^-1/2, computed in fp32 and returned in the dtype of matrix products.
    """
    eps = norm.variance_epsilon
    dtype = compute_dtype(x)
    kernels = kernels_for(x, delta, norm.weight, result=dtype)
    if kernels is None:
        total = x if delta is None else x + delta
        return total, F.rms_norm(total.float(), norm.weight.shape, norm.weight.float(), eps).to(dtype)
    delta_dtype = None if delta is None else delta.dtype

    def forward(x, delta, weight):
        y = torch.empty_like(x, dtype=dtype)
        total = None if delta is None else torch.empty_like(x)
        r = torch.empty(x.shape[:-1], device=x.device)
        kernels.over_rows("rms_norm", x, delta, weight, total, y, r, float(eps))
        return (total, y), (x if delta is None else total, weight, r)

    def gradient(total, weight, r, grad_total, grad):
        grad_x = torch.empty_like(total)
        grad_delta = None if delta_dtype is None else torch.empty_like(total, dtype=delta_dtype)
        parts = torch.empty(kernels.PARTS, total.shape[-1], device=total.device)
        kernels.over_rows("rms_norm_backward", total, weight, r, grad, grad_total, grad_x, grad_delta, parts)
        return grad_x, grad_delta, parts.sum(0).to(weight.dtype)

    total, y = differentiable(forward, gradient, x, delta, norm.weight)
    return x if delta is None else total, y


def _norm_forward(norm, x):
    """``forward`` of an RMSNorm module: x [..., width] -> the same shape, in the dtype of matrix products."""
    return _add_norm(x, None, norm)[1]


def _rotate(x, cos, sin):
    """Rotary positions: x [B, T, heads, dim], cos and sin [B, T, 1, dim] -> x's shape. (x1, x2), the halves
    of a head, become (x1 cos - x2 sin, x2 cos + x1 sin). The gradient rotates back."""
    kernels = kernels_for(x, cos, sin) if len(cos) == len(x) else None
    if kernels is None:
        return x * cos.to(x.dtype) + rotate_half(x) * sin.to(x.dtype)

    def turned(x, direction):
        y = torch.empty_like(x)
        kernels.over_rows("rotate", x, cos, sin, y, x.shape[-2], direction)
        return y

    def forward(x):
        return turned(x, 1.0), ()

    def gradient(grad):
        return (turned(grad, -1.0),)

    return differentiable(forward, gradient, x)


def mlp_forward(mlp: Any, x: Tensor) -> Tensor:
    """``forward`` of the gated feed-forward: down(silu(gate(x)) * up(x))"""
    if hasattr(mlp, "gate_up"):  # the sampler's copy has the two in one layer
        gate_up = mlp.gate_up(x)
        gate, up = gate_up.chunk(2, -1)
        kernels = kernels_for(gate_up)
    else:
        gate = mlp.gate_proj(x)
        up = mlp.up_proj(x)
        kernels = kernels_for(gate, up)
    if kernels is None:
        return mlp.down_proj(F.silu(gate) * up)

    def forward(gate, up):
        y = gate.new_empty(gate.shape)
        kernels.over_rows("silu_mul", gate, up, y, gate.stride(-2))
        return y, (gate, up)

    def gradient(gate, up, grad):
        grads = torch.empty_like(gate), torch.empty_like(up)
        kernels.over_rows("silu_mul_backward", gate, up, grad, *grads)
        return grads

    return mlp.down_proj(differentiable(forward, gradient, gate, up))


def _cache_of(kwargs):
    """The ``KVCache`` of a forward, or None. It is called "cache" from transformers 5.24 on."""
    return kwargs.get("cache", kwargs.get("past_key_values"))


def attention_forward(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Sequence[Tensor],
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``forward`` of attention in Llama, Qwen2 and Qwen3: states [B, T, H] -> ([B, T, H], None)."""
    cache = _cache_of(kwargs)
    cos, sin = (x[:, :, None] for x in position_embeddings)
    window = getattr(layer, "sliding_window", None)
    if getattr(cache, "fused", False) and cache.positions is not None:
        out = cache.attend(layer, layer.qkv(hidden_states), cos, sin, window)
    else:
        if hasattr(layer, "qkv"):  # the sampler's copy computes the three at once
            parts = layer.qkv(hidden_states).split(layer.qkv.sizes, -1)
        else:
            parts = [p(hidden_states) for p in (layer.q_proj, layer.k_proj, layer.v_proj)]
        query, key, value = (part.contiguous().unflatten(-1, (-1, layer.head_dim)) for part in parts)
        if hasattr(layer, "q_norm"):
            query = layer.q_norm(query)
            key = layer.k_norm(key)
        out = rotated_attention(query, key, value, cos, sin, kwargs.get("packing"), window, layer.scaling)
        if out is None:
            query = _rotate(query, cos, sin).transpose(1, 2)
            key = _rotate(key, cos, sin).transpose(1, 2)
            value = value.transpose(1, 2)
            if cache is not None:
                key, value = cache.update(key, value, layer.layer_idx)
            out, _ = attention(
                layer,
                query,
                key,
                value,
                attention_mask,
                scaling=layer.scaling,
                sliding_window=window,
                **kwargs,
            )
    return layer.o_proj(out.reshape((*hidden_states.shape[:-1], -1))), None


def layer_forward(layer: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """``forward`` of a decoder layer: y = x + attention(norm(x)) -> y + feed-forward(norm(y)). While a GPU
    decodes, the next layer adds the last term (``KVCache.delta``): its norm does so in the same kernel."""
    cache = _cache_of(kwargs)

    def forward(x):
        x, normed = _add_norm(x, getattr(cache, "delta", None), layer.input_layernorm)
        out, _ = layer.self_attn(hidden_states=normed, **kwargs)
        x, normed = _add_norm(x, out, layer.post_attention_layernorm)
        delta = layer.mlp(normed)
        if getattr(cache, "fused", False) and cache.keeps(delta, layer.self_attn.layer_idx):
            return x
        return x + delta

    if layer.gradient_checkpointing and layer.training:  # as the replaced forward does
        return layer._gradient_checkpointing_func(forward, hidden_states)
    return forward(hidden_states)


FORWARDS: dict[str, Callable[..., Any]] = {
    "RMSNorm": _norm_forward,
    "MLP": mlp_forward,
    "Attention": attention_forward,
    "DecoderLayer": layer_forward,
}
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Qwen3Moe")
KNOWN = {family + kind: forward for family in FAMILIES for kind, forward in FORWARDS.items()}


def fuse_layers(backbone: PreTrainedModel, states: Callable[[], Tensor]) -> None:
    """Replace ``forward`` of the layers with known names, if the backbone's first layers (``few_layers``)
    give the same values and gradients with ours; a warning says where they do not. states(): some last hidden
    states of it."""
    layers = _known_layers(backbone)
    if not layers:
        return

    def fused():
        for layer in layers:
            layer.forward = MethodType(KNOWN[type(layer).__name__], layer)
        return states()

    with few_layers(backbone):
        tried = _known_layers(backbone)
        # Norms and biases of the last layer: their gradients are small, and pass through all of it.
        last = [layer for layer in tried if type(layer).__name__.endswith("DecoderLayer")][-1:] or tried
        vectors = {p: p.requires_grad for layer in last for p in layer.parameters() if p.dim() < 2}
        for p in vectors:
            p.requires_grad = True
        reason = difference(states, fused, backbone.device, list(vectors))
        for p, before in vectors.items():
            p.requires_grad = before
    if reason:
        for layer in layers:
            vars(layer).pop("forward", None)
        warnings.warn(f"{type(backbone).__name__}: not fused, which is slower: {reason}", stacklevel=2)


def _known_layers(backbone):
    return [module for module in backbone.modules() if type(module).__name__ in KNOWN]


def is_fused(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether ``fuse_layers`` has given this module that ``forward``."""
    return getattr(vars(module).get("forward"), "__func__", None) is forward
