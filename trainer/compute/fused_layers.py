"""Fused layers: the layers of Llama and its relatives in fewer operations, for training and sampling.

transformers writes norms, rotary positions, gates and attention as dozens of small operations, each of which
reads and writes every activation. Here compiled kernels (kernels.py) compute the same, with gradients of
their own; where there are none, torch's operations do. A module keeps its class, parameters and names. Only
its ``forward`` is replaced, and only where ``fuse_layers`` finds the same values and gradients. Models of
other families do not change.

Sources: RMSNorm, Zhang and Sennrich 2019 (arXiv:1910.07467); rotary positions, Su et al. 2021
(arXiv:2104.09864); gated feed-forwards, Shazeer 2020 (arXiv:2002.05202).
"""

import warnings
from functools import partial
from types import MethodType, SimpleNamespace

import torch
import torch.nn.functional as F

from trainer.compute.attention import attention, rotated_attention
from trainer.compute.kernels import difference, kernels_for
from trainer.compute.precision import compute_dtype


def _apply(function, *inputs):
    """An autograd function; without gradients its forward alone, because decoding calls many in a step."""
    if torch.is_grad_enabled():
        return function.apply(*inputs)
    return function.forward(SimpleNamespace(save_for_backward=lambda *tensors: None), *inputs)


class _AddNorm(torch.autograd.Function):
    """``add_norm`` by compiled kernels; s is None where delta is."""

    @staticmethod
    def forward(ctx, kernels, x, delta, weight, eps, dtype):
        y, total, r = kernels.rms_norm(x, weight, eps, dtype, delta)
        ctx.save_for_backward(x if delta is None else total, weight, r)
        ctx.kernels, ctx.delta_dtype = kernels, None if delta is None else delta.dtype
        return total, y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_total, grad):
        grad_total = None if grad_total is None else grad_total.contiguous()
        found = ctx.kernels.rms_norm_backward(
            *ctx.saved_tensors, grad.contiguous(), grad_total, ctx.delta_dtype
        )
        return None, *found, None, None


def add_norm(x, delta, norm):
    """-> (s, RMS norm y of s), s = x + delta: the step between attention and feed-forward. delta may be None.

    y = s r w with r = (mean(s^2) + eps)^-1/2, computed in fp32 and returned in the dtype of matrix products.
    """
    eps, dtype, weight = norm.variance_epsilon, compute_dtype(x), norm.weight
    if (kernels := kernels_for(x, delta, weight, result=dtype)) is not None:
        return _apply(_AddNorm, kernels, x, delta, weight, eps, dtype)
    total = x if delta is None else x + delta
    return total, F.rms_norm(total.float(), weight.shape, weight.float(), eps).to(dtype)


def rms_norm_forward(norm, x):
    """``forward`` of an RMSNorm module: x [..., width] -> the same shape, in the dtype of matrix products."""
    return add_norm(x, None, norm)[1]


class _Rotate(torch.autograd.Function):
    """``rotate`` by compiled kernels. The gradient rotates back."""

    @staticmethod
    def forward(ctx, kernels, x, cos, sin):
        ctx.kernels = kernels
        ctx.save_for_backward(cos, sin)
        return kernels.rotate(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return None, ctx.kernels.rotate(grad.contiguous(), *ctx.saved_tensors, back=True), None, None


def rotate(x, cos, sin):
    """Rotary positions: x [B, T, heads, dim], cos and sin [B, T, 1, dim] -> x's shape. (x1, x2), the halves
    of a head, become (x1 cos - x2 sin, x2 cos + x1 sin)."""
    kernels = kernels_for(x, cos, sin) if cos.shape == (*x.shape[:2], 1, x.shape[3]) else None
    if kernels is not None:
        return _apply(_Rotate, kernels, x, cos, sin)
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


class _SiluMul(torch.autograd.Function):
    """silu(gate) * up by compiled kernels, with its gradient"""

    @staticmethod
    def forward(ctx, kernels, gate, up):
        ctx.kernels = kernels
        ctx.save_for_backward(gate, up)
        return kernels.silu_mul(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return None, *ctx.kernels.silu_mul_backward(*ctx.saved_tensors, grad.contiguous())


def mlp_forward(mlp, x):
    """``forward`` of the gated feed-forward: down(silu(gate(x)) * up(x))"""
    if hasattr(mlp, "gate_up"):  # the sampler's copy has the two in one
        joint = mlp.gate_up(x)
        gate, up = joint.chunk(2, -1)
        kernels = kernels_for(joint)
    else:
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        kernels = kernels_for(gate, up)
    return mlp.down_proj(F.silu(gate) * up if kernels is None else _apply(_SiluMul, kernels, gate, up))


def attention_forward(
    layer, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs
):
    """``forward`` of attention in Llama, Qwen2 and Qwen3: states [B, T, H] -> ([B, T, H], None)."""
    rows = hidden_states.shape[:-1]
    cos, sin = (x[:, :, None] for x in position_embeddings)
    window = getattr(layer, "sliding_window", None)
    if getattr(past_key_values, "fused", False) and past_key_values.positions is not None:
        norms = [getattr(layer, name, None) for name in ("q_norm", "k_norm")]
        out = past_key_values.attend(layer, layer.qkv(hidden_states), cos, sin, norms, window)
        return layer.o_proj(out.view(*rows, -1)), None
    query, key, value = _heads(layer, hidden_states)
    out = rotated_attention(query, key, value, cos, sin, kwargs.get("packing"), window, layer.scaling)
    if out is None:
        turned = rotate(query, cos, sin), rotate(key, cos, sin), value
        query, key, value = (x.transpose(1, 2) for x in turned)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, layer.layer_idx)
        kwargs["scaling"], kwargs["sliding_window"] = layer.scaling, window
        out, _ = attention(layer, query, key, value, attention_mask, **kwargs)
    return layer.o_proj(out.reshape(*rows, -1)), None


def _heads(layer, x):
    """Hidden states -> queries, keys and values [B, T, heads, dim], not rotated yet."""
    shape = (*x.shape[:-1], -1, layer.head_dim)
    if hasattr(layer, "qkv"):  # the sampler's copy computes the three at once
        sizes = [n // layer.head_dim for n in layer.qkv.sizes]
        query, key, value = (x.contiguous() for x in layer.qkv(x).view(shape).split(sizes, 2))
    else:
        query, key, value = (p(x).view(shape) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    if hasattr(layer, "q_norm"):
        query, key = layer.q_norm(query), layer.k_norm(key)
    return query, key, value


def layer_forward(layer, hidden_states, **kwargs):
    """``forward`` of a decoder layer: y = x + attention(norm(x)) -> y + feed-forward(norm(y))."""
    if layer.gradient_checkpointing and layer.training:  # as the replaced forward does
        return layer._gradient_checkpointing_func(partial(_layer, layer, **kwargs), hidden_states)
    return _layer(layer, hidden_states, **kwargs)


def _layer(layer, hidden_states, **kwargs):
    out, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    hidden_states, normed = add_norm(hidden_states, out, layer.post_attention_layernorm)
    return hidden_states + layer.mlp(normed)


FORWARDS = {
    "RMSNorm": rms_norm_forward,
    "MLP": mlp_forward,
    "Attention": attention_forward,
    "DecoderLayer": layer_forward,
}
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Qwen3Moe")
KNOWN = {family + kind: forward for family in FAMILIES for kind, forward in FORWARDS.items()}


def fuse_layers(backbone):
    """Replace ``forward`` of the layers with known names, where ours gives the same values and gradients. A
    warning names those where it does not."""
    kept = set()
    for module in reversed(list(backbone.modules())):  # inner modules before outer ones
        forward = KNOWN.get(type(module).__name__)
        if forward is None or "forward" in vars(module):
            continue
        if _gives_same_results(module, forward, backbone):
            module.forward = MethodType(forward, module)
        else:
            kept.add(type(module).__name__)
    if kept:
        warnings.warn(f"{', '.join(sorted(kept))}: not fused, which is slower", stacklevel=2)


def is_fused(module, forward):
    """Whether ``fuse_layers`` has given this module that ``forward``."""
    return getattr(vars(module).get("forward"), "__func__", None) is forward


def _gives_same_results(module, forward, backbone):
    """Whether a module and this ``forward`` give the same values and gradients."""
    device, width, others = backbone.device, backbone.config.hidden_size, {}
    if forward is rms_norm_forward:  # norms of heads are narrower than hidden_size
        width = module.weight.numel()
    x = torch.linspace(-2, 3, 10 * width, device=device).view(2, 5, width).sin().requires_grad_()
    if forward in (attention_forward, layer_forward):
        places = torch.arange(5, device=device).expand(2, 5)
        others = {"position_embeddings": backbone.rotary_emb(x, places), "attention_mask": None}

    def first(function):
        y = function(x, **others)
        return y if torch.is_tensor(y) else y[0]

    inputs = [x, *(p for p in module.parameters() if p.requires_grad)]
    fused = MethodType(forward, module)
    return not difference(lambda: first(module), lambda: first(fused), device, inputs, tolerance=3e-5)
