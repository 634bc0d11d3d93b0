"""Mixtures of experts while decoding: every expert computes every token, and what was not chosen counts 0.

Usually an expert computes the tokens that chose it. How many that are is known only when the router has
computed, so the host must wait for the GPU in each layer, and a step cannot be captured (cuda_graphs.py). A
decoding step has few tokens: there it costs little to compute all, and the results are the same. Forwards of
many tokens, which are prefills, stay as they are.
"""

import copy
from types import MethodType

import torch
from torch import nn

from model.model_minimind import MoEFeedForward

FEW_TOKENS = 1024  # up to so many tokens, every expert computes every token


def use_all_experts(model):
    """Replace the ``forward`` of a model's mixtures of experts, MiniMind's and transformers' own, where the
    new one gives the same results. Other modules do not change."""
    for module in model.modules():
        if isinstance(module, MoEFeedForward):
            module.forward = MethodType(_minimind_forward, module)
        elif _has_joined_experts(module) and _gives_same_results(module):
            module.forward = MethodType(_joined_forward, module)


def _minimind_forward(moe, hidden):
    """``MoEFeedForward.forward``: hidden [B, T, H] -> the same shape."""
    tokens = hidden.reshape(-1, hidden.shape[-1])
    if len(tokens) > FEW_TOKENS:
        return type(moe).forward(moe, hidden)
    weights, chosen = moe.gate(tokens).softmax(dim=-1, dtype=torch.float32).topk(moe.top_k, dim=-1)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    shares = weights.new_zeros(len(tokens), len(moe.experts)).scatter(1, chosen, weights)
    out = torch.zeros_like(tokens)
    for share, expert in zip(shares.unsqueeze(-1).unbind(1), moe.experts, strict=True):
        out = out + _weighed(expert(tokens), share).to(out.dtype)
    for expert in moe.shared_experts:
        out = out + expert(tokens)
    return out.view_as(hidden)


def _joined_forward(experts, tokens, chosen, weights):
    """The forward of transformers' experts, whose weights are joined: tokens [N, H], chosen experts [N, k]
    and their weights [N, k] -> [N, H]."""
    if len(tokens) > FEW_TOKENS:
        return type(experts).forward(experts, tokens, chosen, weights)
    count = len(experts.down_proj)
    shares = weights.new_zeros(len(tokens), count).scatter(1, chosen, weights).t().unsqueeze(-1)  # [E, N, 1]
    inner = torch.bmm(tokens.expand(count, -1, -1), experts.gate_up_proj.transpose(1, 2))
    out = torch.bmm(experts._apply_gate(inner), experts.down_proj.transpose(1, 2))
    return _weighed(out, shares).sum(0).to(tokens.dtype)


def _weighed(results, shares):
    """Results of experts times their shares; 0 where the share is 0, even if the result is infinite."""
    return (results * shares).masked_fill(shares == 0, 0)


def _has_joined_experts(module):
    """Whether a module looks like the experts of transformers: joined weights and a gate."""
    joined = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return hasattr(module, "_apply_gate") and all(torch.is_tensor(x) and x.dim() == 3 for x in joined)


@torch.no_grad()
def _gives_same_results(experts):
    """Whether ``_joined_forward`` computes what the module's own forward does; it may lay out its weights in
    another way, or have biases. It is tried with other numbers, because a process of a sharded run may not
    have the weights yet."""
    experts = copy.deepcopy(experts, {id(p): _numbers_like(p) for p in experts.parameters()})
    weight, count = experts.gate_up_proj, len(experts.gate_up_proj)
    tokens = torch.linspace(-2, 3, 6 * weight.shape[2], device=weight.device, dtype=weight.dtype)
    tokens = tokens.view(6, -1).sin()
    chosen = torch.arange(12, device=weight.device).view(6, 2) % count
    weights = torch.linspace(0.1, 0.9, 12, device=weight.device, dtype=weight.dtype).view(6, 2)
    try:
        expected = type(experts).forward(experts, tokens, chosen, weights)
        found = _joined_forward(experts, tokens, chosen, weights)
    except (RuntimeError, TypeError, AttributeError):
        return False
    return torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())


def _numbers_like(p):
    """A parameter with other numbers, always the same ones; in main memory if it has no memory."""
    device = "cpu" if p.is_meta else p.device
    numbers = torch.arange(p.numel(), device=device, dtype=torch.float32).mul(0.7).sin().mul(0.1)
    return nn.Parameter(numbers.view(p.shape).to(p.dtype), requires_grad=False)
