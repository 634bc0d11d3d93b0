"""The sampler's own copy of a policy. It only samples, and its weights are laid out for speed.

In PPO it gets the weights of the old actor before every rollout, and those of the actor before an evaluation
(``PpoRun.respond``). Training keeps fp32 weights. Sampling reads every weight once a token, so it
gains most from a faster dtype. The old log-probs of the ratio come from the scoring forward
(compute/scoring.py), not from this copy; ``rollout/sampler_gap`` logs how far the two differ.
"""

import copy
from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn

from model.lora import merged
from model.model_minimind import MoEFeedForward
from trainer.compute.fused_layers import attention_forward, is_fused, mlp_forward
from trainer.compute.kernels import difference
from trainer.compute.packing import pack_sequences
from trainer.compute.precision import onednn_takes_bf16


class JoinedLinear(nn.Module):
    """Linear layers with the same input, computed as one, from a copy of their weights. On a CPU these are
    laid out for products of few rows, in oneDNN's blocked layout (bf16) or transposed (fp32): once a rollout,
    not once a call. ``pack`` writes to the same memory each time: CUDA graphs have captured its address, and
    on a CPU new memory would leave gaps that nothing else fits into."""

    def __init__(self, linears, on_cpu):
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        self.dtype = linears[0].weight.dtype
        self.transposed = on_cpu
        self.blocked = on_cpu and self.dtype == torch.bfloat16 and onednn_takes_bf16()
        self.weight = self.bias = None
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.pack([linear.weight for linear in linears], biases)

    def pack(self, weights, biases):
        """Copy the weights [out, in] and the biases, if any, of the linear layers into the layout."""
        if biases:
            self.bias = self._join(self.bias, biases, 0)
        if self.blocked:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self._join(None, weights, 0), 64)
        elif self.transposed:
            self.weight = self._join(self.weight, [x.t() for x in weights], 1)
        else:
            self.weight = self._join(self.weight, weights, 0)

    def _join(self, joined, parts, dim):
        if joined is None:
            return torch.cat([x.to(self.dtype) for x in parts], dim)
        for own, part in zip(joined.split(self.sizes, dim), parts, strict=True):
            own.copy_(part)
        return joined

    def forward(self, x):
        if self.blocked:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        if not self.transposed:
            return F.linear(x, self.weight, self.bias)
        y = x.reshape(-1, x.shape[-1])
        y = y @ self.weight if self.bias is None else torch.addmm(self.bias, y, self.weight)
        return y.view(*x.shape[:-1], y.shape[1])


class SamplerCopy:
    """``model`` is the copy that samples. policy: has no adapters; dtype, device: of the copy's weights.

    ``load`` copies the weights of a policy of the same architecture into it, with adapters, if any, merged.
    It raises KeyError if that policy lacks a weight.
    """

    def __init__(self, policy, dtype, device):
        self.model = copy.deepcopy(policy).eval().requires_grad_(False)
        pack_sequences(self.model.float().base_model)
        self._cast(dtype)
        self.weights = dict(self.model.named_parameters())  # those that are copied as they are
        self.joined = {}  # {name of a weight or bias: the joined layer that has it}
        self.freed = []  # (storage, its size in bytes)
        self.model.to(device)
        self._lay_out(torch.device(device).type == "cpu")

    def _cast(self, dtype):
        """Convert all but the frequencies of rotary positions: in bf16, position 1000 is off by radians."""
        for p in self.model.parameters():
            p.data = p.data.to(dtype)
        for module in self.model.modules():
            for name, x in module.named_buffers(recurse=False):
                if x.is_floating_point() and "inv_freq" not in name:
                    setattr(module, name, x.to(dtype))

    def _lay_out(self, on_cpu):
        """Lay the weights out as products read them fastest: linear layers of a fused layer that have the
        same input are joined, and on a CPU all others are laid out too. One after the other, so that there
        are never two copies of all weights."""
        names, modules = {id(p): name for name, p in self.weights.items()}, list(self.model.modules())
        others = (module for module in modules if type(module) is not nn.Linear)
        read = {id(p) for module in others for p in module.parameters(recurse=False)}  # a tied head's weight

        def joined(*linears):
            layer = JoinedLinear(linears, on_cpu)
            layer.weight_names = [names[id(linear.weight)] for linear in linears]
            layer.bias_names = [names[id(linear.bias)] for linear in linears if linear.bias is not None]
            for linear in linears:
                for p in linear.parameters():
                    self.joined[names[id(p)]] = layer
                    if id(p) not in read:
                        del self.weights[names[id(p)]]
            return layer

        for module in modules:
            if is_fused(module, attention_forward):
                module.qkv = joined(module.q_proj, module.k_proj, module.v_proj)
                module.q_proj = module.k_proj = module.v_proj = None
            if is_fused(module, mlp_forward):
                module.gate_up = joined(module.gate_proj, module.up_proj)
                module.gate_proj = module.up_proj = None
        for module in modules if on_cpu else ():
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, joined(child))
        if not on_cpu:
            use_all_experts(self.model)

    def unload(self):
        """Free the memory of all weights, which keep their shapes and views, until the next ``load``."""
        for storage in (x.untyped_storage() for x in self.weights.values()):
            if storage.nbytes():
                self.freed.append((storage, storage.nbytes()))
                storage.resize_(0)
        for layer in self.joined.values():
            layer.weight = layer.bias = None

    @torch.no_grad()
    def load(self, policy):
        while self.freed:
            storage, size = self.freed.pop()
            storage.resize_(size)
        missing, arrived = self.weights.keys() | self.joined.keys(), {}
        for name, x in merged(policy):
            missing.discard(name)
            if name in self.weights:
                self.weights[name].copy_(x)
            if layer := self.joined.get(name):
                arrived[name] = x
                weights, biases = layer.weight_names, layer.bias_names
                if arrived.keys() >= {*weights, *biases}:
                    layer.pack([arrived.pop(x) for x in weights], [arrived.pop(x) for x in biases])
        if missing:
            raise KeyError(f"the policy has no {', '.join(missing)}")


# ------------------------------------------------------------------------------------------------ experts
# Usually an expert computes the tokens that chose it. How many that are is known only when the router has
# computed, so the host must wait for the GPU in each layer, and a step cannot be captured (cuda_graphs.py). A
# decoding step has few tokens: there every expert computes every token, what was not chosen counts 0, and the
# results are the same. Forwards of many tokens, which are prefills, stay as they are.

FEW_TOKENS = 1024  # up to so many tokens, every expert computes every token


def use_all_experts(model):
    """Replace the ``forward`` of a model's mixtures of experts, MiniMind's and transformers' own, where the
    new one gives the same results. Other modules do not change."""
    for module in model.modules():
        if isinstance(module, MoEFeedForward):
            module.forward = MethodType(_minimind_forward, module)
        elif getattr(getattr(module, "gate_up_proj", None), "ndim", 0) == 3 and _gives_same_results(module):
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


def _gives_same_results(experts):
    """Whether ``_joined_forward`` computes what the module's own forward does; it may lay out its weights in
    another way, or have biases. It is tried with other numbers: its own may be zeros."""
    experts = copy.deepcopy(experts, {id(p): _numbers_like(p) for p in experts.parameters()})
    weight, count = experts.gate_up_proj, len(experts.gate_up_proj)
    tokens = torch.linspace(-2, 3, 6 * weight.shape[2]).view(6, -1).sin().to(weight)
    chosen = torch.arange(12, device=weight.device).view(6, 2) % count
    weights = torch.linspace(0.1, 0.9, 12).view(6, 2).to(weight)
    inputs = experts, tokens, chosen, weights
    own = type(experts).forward
    return not difference(
        lambda: own(*inputs), lambda: _joined_forward(*inputs), weight.device, tolerance=1e-2
    )


def _numbers_like(p):
    """A parameter with other numbers, always the same ones."""
    numbers = torch.arange(p.numel(), device=p.device, dtype=torch.float32).mul(0.7).sin().mul(0.1)
    return nn.Parameter(numbers.view(p.shape).to(p.dtype), requires_grad=False)
