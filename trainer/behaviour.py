"""The behaviour copy: a private copy of a policy that only ever samples, laid out for speed.

Training keeps fp32 weights; sampling reads every weight once a token and gains most from a faster type. The
scoring forward, not this copy, gives the old log-probs of the ratio; ``rollout/sampler_gap`` logs how far the
two are apart.
"""

import copy

import torch
from torch import nn

from model.lora import merged
from trainer.layers import attention_forward, is_quick, mlp_forward
from trainer.packing import pack_sequences


class PackedLinear(nn.Module):
    """Linear layers with the same input as one, their weights laid out for few rows, once a rollout instead
    of once a call: in oneDNN's blocked layout (bf16), or transposed (fp32)."""

    def __init__(self, *linears):
        super().__init__()
        self.linears = linears  # a tuple, so no submodules: their weights are only read in pack()
        self.sizes = [linear.out_features for linear in linears]
        self.pack()

    def pack(self):
        """Take over the linear layers' weights as they are now."""
        weight = _joined([linear.weight for linear in self.linears])
        self.bias = None
        if self.linears[0].bias is not None:
            self.bias = _joined([linear.bias for linear in self.linears])
        self.blocked = weight.dtype == torch.bfloat16 and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        if self.blocked:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
        else:
            self.weight = weight.t().contiguous()

    def forward(self, x):
        if self.blocked:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        y = x.reshape(-1, x.shape[-1])
        y = y @ self.weight if self.bias is None else torch.addmm(self.bias, y, self.weight)
        return y.view(*x.shape[:-1], y.shape[1])


def _joined(parameters):
    """One below the other; a single one without a copy."""
    return torch.cat([p.detach() for p in parameters]) if len(parameters) > 1 else parameters[0].detach()


class BehaviourCopy:
    """``model`` samples; ``load`` gives it the weights of a policy of the same architecture, whose adapters,
    if it has any, are merged into them. ``policy``: one without adapters."""

    def __init__(self, policy, dtype):
        self.model = copy.deepcopy(policy).float().eval().requires_grad_(False)
        pack_sequences(self.model.base_model)
        self._cast(dtype)
        self.weights = dict(self.model.named_parameters())
        self.packed = []
        if self.model.device.type == "cpu":
            self._pack()

    def _cast(self, dtype):
        """All but the frequencies of rotary positions: in bf16, position 1000 would be off by radians."""
        for p in self.model.parameters():
            p.data = p.data.to(dtype)
        for module in self.model.modules():
            for name, x in module.named_buffers(recurse=False):
                if x.is_floating_point() and "inv_freq" not in name:
                    setattr(module, name, x.to(dtype))

    def _pack(self):
        """Put packed layers in the place of linear ones, one for all that have the same input."""
        for module in list(self.model.modules()):
            if is_quick(module, attention_forward):
                module.qkv = PackedLinear(module.q_proj, module.k_proj, module.v_proj)
                module.q_proj = module.k_proj = module.v_proj = None
            if is_quick(module, mlp_forward):
                module.gate_up = PackedLinear(module.gate_proj, module.up_proj)
                module.gate_proj = module.up_proj = None
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, PackedLinear(child))
        self.packed = [x for x in self.model.modules() if isinstance(x, PackedLinear)]

    @torch.no_grad()
    def load(self, policy):
        waiting = dict(self.weights)
        for name, x in merged(policy):
            if name in waiting:  # what is tied comes under two names
                waiting.pop(name).copy_(x)
        if waiting:
            raise KeyError(f"the policy has no {', '.join(waiting)}")
        for layer in self.packed:
            layer.pack()
