"""The behaviour copy: a private copy of a policy that only ever samples, laid out for speed.

Training keeps fp32 weights; sampling reads every weight once a token and gains most from a faster type. The
scoring forward, not this copy, gives the old log-probs of the ratio; ``rollout/sampler_gap`` logs how far the
two are apart.
"""

import copy

import torch
from torch import nn


class PackedLinear(nn.Module):
    """A linear layer whose weight has been put into oneDNN's blocked layout, once a rollout instead of once a
    call: for few rows 1.2 (bf16) to 2 (fp32) times as fast as ``nn.Linear``."""

    def __init__(self, linear):
        super().__init__()
        self.linear = [linear]  # in a list, so that it is not a submodule: its weight is only read in pack()
        self.pack()

    def pack(self):
        (linear,) = self.linear
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 64)

    def forward(self, x):
        bias = self.linear[0].bias
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")


class FusedRMSNorm(nn.Module):
    """An RMS norm in fewer and cheaper passes: the norm of a row is one, its mean square three."""

    def __init__(self, norm):
        super().__init__()
        self.weight = norm.weight
        self.eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))

    def forward(self, x):
        wide = x.float()
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        return (wide * mean_square.add_(self.eps).rsqrt_()).to(x.dtype) * self.weight

    @classmethod
    def of(cls, norm):
        """-> the fused norm, or None unless it computes what ``norm`` does: families differ in details."""
        if not type(norm).__name__.endswith("RMSNorm") or getattr(norm, "weight", None) is None:
            return None
        fused, weight = cls(norm), norm.weight.data
        ramp = torch.linspace(-2, 3, 3 * weight.numel(), device=weight.device)
        x = ramp.view(3, *weight.shape)
        norm.weight.data = x[1].cos() + 1.5  # ones or zeros, as weights begin, would hide a difference
        fits = fused.eps is not None and torch.allclose(fused(x), norm(x), rtol=1e-5, atol=1e-6)
        norm.weight.data = weight
        return fused if fits else None


class BehaviourCopy:
    """``model`` samples; ``load`` gives it the weights of a policy of the same architecture."""

    def __init__(self, policy, dtype):
        self.model = copy.deepcopy(policy).float().eval().requires_grad_(False)
        self._replace(FusedRMSNorm.of)
        self._cast(dtype)
        self.parameters = list(self.model.parameters())
        self.packed = []
        if self.model.device.type == "cpu" and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            self.packed = self._replace(lambda x: PackedLinear(x) if type(x) is nn.Linear else None)

    def _cast(self, dtype):
        """All but the frequencies of rotary positions: in bf16, position 1000 would be off by radians."""
        for p in self.model.parameters():
            p.data = p.data.to(dtype)
        for module in self.model.modules():
            for name, x in module.named_buffers(recurse=False):
                if x.is_floating_point() and "inv_freq" not in name:
                    setattr(module, name, x.to(dtype))

    def _replace(self, substitute):
        """Put ``substitute(module)`` in the place of every module for which it is not None. -> those"""
        made = []
        for parent in list(self.model.modules()):
            for name, child in list(parent.named_children()):
                new = substitute(child)
                if new is not None:
                    setattr(parent, name, new)
                    made.append(new)
        return made

    @torch.no_grad()
    def load(self, policy):
        torch._foreach_copy_(self.parameters, list(policy.parameters()))
        for layer in self.packed:
            layer.pack()
