"""Llama's layers in fewer operations, for training and sampling alike.

transformers writes norms, rotary positions and attention as dozens of small operations, each of which reads
and writes every activation. The same is computed here with gradients of our own. A module keeps its class,
parameters and names; only its ``forward`` is replaced, and only where it gives the same numbers
(``quicken`` compares), so models of other families stay what they are.

Sources: RMSNorm, Zhang and Sennrich 2019 (arXiv:1910.07467); rotary positions, Su et al. 2021
(arXiv:2104.09864).
"""

from types import MethodType

import torch

from trainer.attention import attention
from trainer.precision import compute_dtype


class _RMSNorm(torch.autograd.Function):
    """y = x r w with r = (mean(x^2) + eps)^-1/2, in fp32, handed on in the dtype that products will have."""

    @staticmethod
    def forward(ctx, x, weight, eps, dtype):
        y, r = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, r)
        return y.to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        """LayerNorm's own gradient for mean 0 and 1/std r is ours, but for a mean that it takes off."""
        x, weight, r = ctx.saved_tensors
        grad, width = grad.float(), x.shape[-1]
        zero, wanted = torch.zeros_like(r), [True, ctx.needs_input_grad[1], False]
        layer_norm = torch.ops.aten.native_layer_norm_backward
        grad_x, grad_weight, _ = layer_norm(grad, x.float(), [width], zero, r, weight, None, wanted)
        grad_x += torch.matmul(grad, weight)[..., None].mul_(r / width)
        return grad_x.to(x.dtype), grad_weight, None, None


def _normed(x, weight, eps):
    """-> x r w in the weight's dtype, r [..., 1] in fp32."""
    wide = x.float()
    # The norm of a row is one cheap pass, its mean square would be three.
    r = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    r = r.add_(eps).rsqrt_()
    return (wide * r).to(weight.dtype).mul_(weight), r


def rms_norm_forward(norm, x):
    eps = norm.variance_epsilon
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, norm.weight, eps, compute_dtype(x))
    return _normed(x, norm.weight, eps)[0].to(compute_dtype(x))


class _Rotate(torch.autograd.Function):
    """Rotary positions: x [B, T, heads, dim], cos and sin [B, T, 1, dim]. The gradient is the turn back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def rotate(x, cos, sin):
    return _Rotate.apply(x, cos, sin) if torch.is_grad_enabled() else _turn(x, cos, sin)


def _turn(x, cos, sin):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), where 1 and 2 are the halves of a head."""
    half = x.shape[-1] // 2
    if x.dtype == torch.bfloat16 and half < 32:  # where the operations below are slow
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin
    out, sin = x * cos, sin[..., :half]
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


def attention_forward(
    layer, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs
):
    """The attention layer of Llama, Qwen2 and Qwen3: hidden states [B, T, H] -> (the same, None)."""
    rows = hidden_states.shape[:-1]
    cos, sin = (x[:, :, None] for x in position_embeddings)
    query, key, value = _rotated(layer, hidden_states, cos, sin)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, layer.layer_idx)
    kwargs["scaling"], kwargs["sliding_window"] = layer.scaling, getattr(layer, "sliding_window", None)
    out, _ = attention(layer, query, key, value, attention_mask, **kwargs)
    return layer.o_proj(out.reshape(*rows, -1)), None


def _rotated(layer, x, cos, sin):
    """Hidden states -> queries and keys with their positions, values, all [B, T, heads, dim]."""
    shape, normed = (*x.shape[:-1], -1, layer.head_dim), hasattr(layer, "q_norm")
    if hasattr(layer, "qkv"):  # the behaviour copy computes the three at once
        joint, sizes = layer.qkv(x).view(shape), [size // layer.head_dim for size in layer.qkv.sizes]
        if not normed:  # and then turns queries and keys at once
            turned = rotate(joint[:, :, : sizes[0] + sizes[1]], cos, sin)
            return *turned.split(sizes[:2], 2), joint[:, :, sizes[0] + sizes[1] :]
        query, key, value = joint.split(sizes, 2)
    else:
        query, key, value = (p(x).view(shape) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    if normed:
        query, key = layer.q_norm(query), layer.k_norm(key)
    cos, sin = cos.to(query.dtype), sin.to(query.dtype)
    return rotate(query, cos, sin), rotate(key, cos, sin), value


FORWARDS = {"RMSNorm": rms_norm_forward, "Attention": attention_forward}
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Qwen3Moe")
KNOWN = {family + kind: forward for family in FAMILIES for kind, forward in FORWARDS.items()}


def quicken(backbone):
    """Replace ``forward`` in layers named after what the functions above compute, if they do compute it."""
    for module in backbone.modules():
        forward = KNOWN.get(type(module).__name__)
        if forward is not None and "forward" not in vars(module):
            case = _norm_case if forward is rms_norm_forward else _attention_case
            if _same(module, MethodType(forward, module), *case(module, backbone)):
                module.forward = MethodType(forward, module)


def is_quick_attention(module):
    """Whether ``quicken`` has replaced the forward of this attention layer."""
    return getattr(vars(module).get("forward"), "__func__", None) is attention_forward


def _norm_case(norm, _):
    return torch.linspace(-2, 3, 3 * norm.weight.numel(), device=norm.weight.device).view(3, -1), ()


def _attention_case(layer, backbone):
    places = torch.arange(5, device=backbone.device).expand(2, 5)
    x = torch.linspace(-2, 3, 10 * backbone.config.hidden_size, device=backbone.device).view(2, 5, -1).sin()
    return x, (backbone.rotary_emb(x, places), None)


@torch.enable_grad()
def _same(module, forward, x, others):
    """Whether values and gradients of both are the same."""
    results, trained = [], [p for p in module.parameters() if p.requires_grad]
    try:
        for function in (module, forward):
            y = function(x.requires_grad_(True), *others)
            y = y if torch.is_tensor(y) else y[0]
            results.append([y, *torch.autograd.grad(y.sin().sum(), [x, *trained])])
    except RuntimeError:  # sizes that do not fit, or an operation that this device does not have
        return False
    return all(_close(a, b) for a, b in zip(*results, strict=True))


def _close(a, b):
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5 * a.abs().max().item())
