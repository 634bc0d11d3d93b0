"""The behaviour copy: a private copy of a policy that only ever samples, laid out for speed.

Training keeps fp32 weights; sampling reads every weight once a token and gains most from a faster type. The
scoring forward, not this copy, gives the old log-probs of the ratio; ``rollout/sampler_gap`` logs how far the
two are apart.
"""

import copy
from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn

from trainer.layers import FAMILIES, is_quick_attention
from trainer.packing import pack_sequences


class PackedLinear(nn.Module):
    """Linear layers with the same input as one, whose weight has been put into oneDNN's blocked layout, once
    a rollout instead of once a call: for few rows 1.2 (bf16) to 2 (fp32) times as fast as ``nn.Linear``."""

    def __init__(self, *linears):
        super().__init__()
        self.linears = linears  # a tuple, so no submodules: their weights are only read in pack()
        self.sizes = [linear.out_features for linear in linears]
        self.pack()

    def pack(self):
        """Take over the linear layers' weights as they are now."""
        weight, bias = self.linears[0].weight, self.linears[0].bias
        if len(self.linears) > 1:
            weight = torch.cat([linear.weight for linear in self.linears])
            bias = None if bias is None else torch.cat([linear.bias for linear in self.linears])
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 64), bias

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def silu(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "swish", [], "")

    def times(self, x, factor):
        return torch.ops.mkldnn._linear_pointwise.binary(x, factor, self.weight, self.bias, "mul")


def gated_mlp_forward(mlp, x):
    """down(silu(gate(x)) * up(x)), both of what is in brackets computed along with the products."""
    return mlp.down_proj(mlp.up_proj.times(x, mlp.gate_proj.silu(x)))


class BehaviourCopy:
    """``model`` samples; ``load`` gives it the weights of a policy of the same architecture."""

    def __init__(self, policy, dtype):
        self.model = copy.deepcopy(policy).float().eval().requires_grad_(False)
        pack_sequences(self.model.base_model)
        self._cast(dtype)
        self.parameters = list(self.model.parameters())
        self.packed = []
        if self.model.device.type == "cpu" and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
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
        """Put packed layers in the place of every linear layer, one for queries, keys and values together."""
        for module in list(self.model.modules()):
            if is_quick_attention(module):
                module.qkv = PackedLinear(module.q_proj, module.k_proj, module.v_proj)
                module.q_proj = module.k_proj = module.v_proj = None
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, PackedLinear(child))
            if is_gated_mlp(module):
                module.forward = MethodType(gated_mlp_forward, module)
        self.packed = [x for x in self.model.modules() if isinstance(x, PackedLinear)]

    @torch.no_grad()
    def load(self, policy):
        torch._foreach_copy_(self.parameters, list(policy.parameters()))
        for layer in self.packed:
            layer.pack()


def is_gated_mlp(module):
    """Whether this is the feed-forward of Llama and its relatives, with packed layers."""
    if type(module).__name__ not in [family + "MLP" for family in FAMILIES]:
        return False
    x = torch.linspace(-3, 3, 31)
    return torch.allclose(module.act_fn(x), F.silu(x))
