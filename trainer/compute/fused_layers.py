"""Fused layers: the layers of Llama and its relatives in fewer operations, for training and sampling.

transformers writes norms, rotary positions, gates and attention as dozens of small operations, each of which
reads and writes every activation. Here the same is computed with gradients of our own, by compiled kernels
(kernels.py) where there are any, elsewhere by fewer torch operations. A module keeps its class, parameters
and names. Only its ``forward`` is replaced, and only where ``fuse_layers`` finds the same values and
gradients. Models of other families do not change.

Sources: RMSNorm, Zhang and Sennrich 2019 (arXiv:1910.07467); rotary positions, Su et al. 2021
(arXiv:2104.09864); gated feed-forwards, Shazeer 2020 (arXiv:2002.05202).
"""

import warnings
from functools import partial
from types import MethodType

import torch
import torch.nn.functional as F

from trainer.compute.attention import attention, rotated_attention
from trainer.compute.kernels import kernels_for
from trainer.compute.precision import compute_dtype


class _RMSNorm(torch.autograd.Function):
    """RMS norm: y = x r w with r = (mean(x^2) + eps)^-1/2, computed in fp32 and returned in ``dtype``."""

    @staticmethod
    def forward(ctx, x, weight, eps, dtype):
        y, _, r = _normed(x, None, weight, eps, dtype)
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        grad_x, _, grad_weight = _norm_backward(*ctx.saved_tensors, grad)
        return grad_x, grad_weight if ctx.needs_input_grad[1] else None, None, None


class _AddNorm(torch.autograd.Function):
    """(s, RMS norm of s) with s = x + delta: the step between attention and feed-forward."""

    @staticmethod
    def forward(ctx, x, delta, weight, eps, dtype):
        y, total, r = _normed(x, delta, weight, eps, dtype)
        ctx.save_for_backward(total, weight, r)
        ctx.delta_dtype = delta.dtype
        return total, y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_total, grad):
        grad_x, grad_delta, grad_weight = _norm_backward(
            *ctx.saved_tensors, grad, grad_total, ctx.delta_dtype
        )
        return grad_x, grad_delta, grad_weight if ctx.needs_input_grad[2] else None, None, None


def _normed(x, delta, weight, eps, dtype):
    """-> (y in ``dtype``, x + delta or None, r [rows] in fp32)"""
    if (kernels := kernels_for(x, delta, weight, result=dtype)) is not None:
        return kernels.rms_norm(x, weight, eps, dtype, delta)
    total = None if delta is None else x + delta
    wide = (x if delta is None else total).float()
    # vector_norm passes over a row once; the mean of squares would take three passes.
    r = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    r = r.add_(eps).rsqrt_()
    return (wide * r).to(weight.dtype).mul_(weight).to(dtype), total, r.flatten()


def _norm_backward(x, weight, r, grad, grad_x=None, delta_dtype=None):
    """-> gradients of x, of delta in its dtype, and of the weight. grad_x: a further gradient of x, added."""
    grad = grad.contiguous()
    grad_x = None if grad_x is None else grad_x.contiguous()
    if (kernels := kernels_for(x, weight, grad, grad_x)) is not None:
        return kernels.rms_norm_backward(x, weight, r, grad, grad_x, delta_dtype)
    grad, width, r = grad.float(), x.shape[-1], r.view(*x.shape[:-1], 1)
    # LayerNorm's gradient with mean 0 and 1/std = r is ours minus a mean, which is added again below.
    layer_norm = torch.ops.aten.native_layer_norm_backward
    known = [x.float(), [width], torch.zeros_like(r), r, weight, None, [True, True, False]]
    out, grad_weight, _ = layer_norm(grad, *known)
    out += torch.matmul(grad, weight.float())[..., None].mul_(r / width)
    if grad_x is not None:
        out += grad_x
    return out.to(x.dtype), None if delta_dtype is None else out.to(delta_dtype), grad_weight


def rms_norm_forward(norm, x):
    """``forward`` of an RMSNorm module: x [..., width] -> the same shape, in the dtype of matrix products."""
    eps, dtype = norm.variance_epsilon, compute_dtype(x)
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, norm.weight, eps, dtype)
    return _normed(x, None, norm.weight, eps, dtype)[0]


def add_norm(x, delta, norm):
    """-> (s, RMS norm of s) with s = x + delta"""
    eps, dtype = norm.variance_epsilon, compute_dtype(x)
    if torch.is_grad_enabled():
        return _AddNorm.apply(x, delta, norm.weight, eps, dtype)
    y, total, _ = _normed(x, delta, norm.weight, eps, dtype)
    return total, y


class _Rotate(torch.autograd.Function):
    """Rotary positions: x [B, T, heads, dim], cos and sin [B, T, 1, dim]. The gradient rotates back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return _rotate(grad.contiguous(), *ctx.saved_tensors, back=True), None, None


def rotate(x, cos, sin):
    """Rotary positions, with a gradient: x [B, T, heads, dim], cos and sin [B, T, 1, dim] -> x's shape."""
    return _Rotate.apply(x, cos, sin) if torch.is_grad_enabled() else _rotate(x, cos, sin)


def _rotate(x, cos, sin, back=False):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), where x1 and x2 are the halves of a head."""
    kernels = kernels_for(x, cos, sin) if cos.shape == (*x.shape[:2], 1, x.shape[3]) else None
    if kernels is not None:
        return kernels.rotate(x, cos, sin, back)
    half, cos, sin = x.shape[-1] // 2, cos.to(x.dtype), sin[..., : x.shape[-1] // 2].to(x.dtype)
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=1 if back else -1)
    out[..., half:].addcmul_(x[..., :half], sin, value=-1 if back else 1)
    return out


class _SiluMul(torch.autograd.Function):
    """silu(gate) * up, with its gradient"""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return kernels_for(gate, up).silu_mul(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return kernels_for(gate, up).silu_mul_backward(gate, up, grad.contiguous())


def mlp_forward(mlp, x):
    """``forward`` of the gated feed-forward: down(silu(gate(x)) * up(x))"""
    if hasattr(mlp, "gate_up"):  # the sampler's copy has the two in one
        joint = mlp.gate_up(x)
        gate, up = joint.chunk(2, -1)
        kernels = kernels_for(joint)
        return mlp.down_proj(F.silu(gate) * up if kernels is None else kernels.silu_mul(gate, up))
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    return mlp.down_proj(F.silu(gate) * up if kernels_for(gate, up) is None else _SiluMul.apply(gate, up))


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
        query, key, value = rotate(query, cos, sin), rotate(key, cos, sin), value
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
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
        if _gives_same_results(module, MethodType(forward, module), *_test_inputs(module, forward, backbone)):
            module.forward = MethodType(forward, module)
        else:
            kept.add(type(module).__name__)
    if kept:
        warnings.warn(f"{', '.join(sorted(kept))}: not fused, which is slower", stacklevel=2)


def is_fused(module, forward):
    """Whether ``fuse_layers`` has given this module that ``forward``."""
    return getattr(vars(module).get("forward"), "__func__", None) is forward


def _test_inputs(module, forward, backbone):
    """Inputs on which the two forwards of a module are compared -> (x, further arguments)"""
    device, width = backbone.device, backbone.config.hidden_size
    if forward is rms_norm_forward:  # norms of heads are narrower than hidden_size
        width = module.weight.numel()
    x = torch.linspace(-2, 3, 10 * width, device=device).view(2, 5, width).sin()
    if forward not in (attention_forward, layer_forward):
        return x, {}
    places = torch.arange(5, device=device).expand(2, 5)
    return x, {"position_embeddings": backbone.rotary_emb(x, places), "attention_mask": None}


@torch.enable_grad()
def _gives_same_results(module, forward, x, others):
    """Whether the module and ``forward`` give the same values and gradients."""
    results, trained = [], [p for p in module.parameters() if p.requires_grad]
    try:
        for function in (module, forward):
            y = function(x.requires_grad_(True), **others)
            y = y if torch.is_tensor(y) else y[0]
            results.append([y, *torch.autograd.grad(y.sin().sum(), [x, *trained])])
    except RuntimeError:  # sizes do not fit, or this device lacks an operation
        return False
    return all(_all_close(a, b) for a, b in zip(*results, strict=True))


def _all_close(a, b):
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5 * a.abs().max().item())
