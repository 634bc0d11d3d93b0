"""The sampler's own copy of a policy. It only samples, and its weights are laid out for speed.

In PPO it gets the weights of the old actor before every rollout, and those of the actor before an evaluation
(``PpoRun.respond``). Training keeps fp32 weights. Sampling reads every weight once a token, so it
gains most from a faster dtype. The old log-probs of the ratio come from the scoring forward
(compute/scoring.py), not from this copy; ``rollout/sampler_gap`` logs how far the two differ.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from model.lora import merged
from model.shards import with_memory
from trainer.compute.fused_layers import attention_forward, is_fused, mlp_forward
from trainer.compute.packing import pack_sequences
from trainer.compute.precision import onednn_takes_bf16
from trainer.generation.experts import use_all_experts


class PackedLinear(nn.Module):
    """Linear layers with the same input, computed as one. Their weights are laid out for products of few
    rows, in oneDNN's blocked layout (bf16) or transposed (fp32): once a rollout, not once a call. After that
    the layers' own weights are empty, until ``SamplerCopy.load`` fills them again."""

    def __init__(self, *linears):
        super().__init__()
        self.linears = linears  # a tuple, so no submodules: their weights are only read in pack()
        self.sizes = [linear.out_features for linear in linears]
        self.weight = self.bias = None
        self.pack()

    def pack(self):
        """Copy the linear layers' present weights into the layout."""
        if self.linears[0].bias is not None:
            self.bias = _joined([linear.bias for linear in self.linears])
        weights = [linear.weight.detach() for linear in self.linears]
        self.blocked = weights[0].dtype == torch.bfloat16 and onednn_takes_bf16()
        if self.blocked:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(_joined(weights), 64)
            return
        if self.weight is None:  # later in place: new memory would leave gaps that nothing else fits into
            self.weight = weights[0].new_empty(weights[0].shape[1], sum(self.sizes))
        for part, weight in zip(self.weight.split(self.sizes, 1), weights, strict=True):
            part.copy_(weight.t())

    def forward(self, x):
        if self.blocked:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        y = x.reshape(-1, x.shape[-1])
        y = y @ self.weight if self.bias is None else torch.addmm(self.bias, y, self.weight)
        return y.view(*x.shape[:-1], y.shape[1])


class JoinedLinear(nn.Module):
    """Linear layers with the same input, computed as one on a GPU. Their own weights and biases become views
    of the joined ones: nothing is stored twice, and what is copied into them later is in place at once, at
    the addresses that CUDA graphs have captured."""

    def __init__(self, *linears):
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        self.weight = self._join([linear.weight for linear in linears])
        self.bias = None
        if linears[0].bias is not None:
            self.bias = self._join([linear.bias for linear in linears])

    def _join(self, parameters):
        joined = _joined(parameters)
        for p, part in zip(parameters, joined.split(self.sizes), strict=True):
            p.data = part
        return joined

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def _joined(parameters):
    """The parameters, concatenated along dimension 0; a single one is not copied."""
    return torch.cat([p.detach() for p in parameters]) if len(parameters) > 1 else parameters[0].detach()


class SamplerCopy:
    """``model`` is the copy that samples. policy: has no adapters; dtype, device: of the copy's weights.

    ``load`` copies the weights of a policy of the same architecture into it, with adapters, if any, merged.
    It raises KeyError if that policy lacks a weight.
    """

    def __init__(self, policy, dtype, device):
        self.model = copy.deepcopy(policy, with_memory(policy, dtype, device)).eval().requires_grad_(False)
        if policy.device.type != "meta":  # else it has been tried by the process that has the numbers
            pack_sequences(self.model.float().base_model)
        self._cast(dtype)
        self.weights = dict(self.model.named_parameters())
        self.packed, self.freed = {}, {}  # {name of a weight: its packed layer}, {storage: its size in bytes}
        self._lay_out(torch.device(device))

    def _lay_out(self, device):
        """Move the model to the device, and lay its weights out as its products read them fastest."""
        self.model.to(device)
        if device.type == "cpu":
            self._pack()
        else:
            use_all_experts(self.model)
            self._join(JoinedLinear)

    def _cast(self, dtype):
        """Convert all but the frequencies of rotary positions: in bf16, position 1000 is off by radians."""
        for p in self.model.parameters():
            p.data = p.data.to(dtype)
        for module in self.model.modules():
            for name, x in module.named_buffers(recurse=False):
                if x.is_floating_point() and "inv_freq" not in name:
                    setattr(module, name, x.to(dtype))

    def _join(self, kind):
        """Replace the linear layers of one fused layer that have the same input by one of this kind."""
        for module in self.model.modules():
            if is_fused(module, attention_forward):
                module.qkv = kind(module.q_proj, module.k_proj, module.v_proj)
                module.q_proj = module.k_proj = module.v_proj = None
            if is_fused(module, mlp_forward):
                module.gate_up = kind(module.gate_proj, module.up_proj)
                module.gate_proj = module.up_proj = None

    def _pack(self):
        """Replace all linear layers by packed ones, which have the only copy of most weights. One after the
        other, so that there are never two copies of all."""
        names, modules = {id(p): name for name, p in self.weights.items()}, list(self.model.modules())
        others = (module for module in modules if type(module) is not nn.Linear)
        read = {id(p) for module in others for p in module.parameters(recurse=False)}  # a tied head's weight

        def packed(*linears):
            layer = PackedLinear(*linears)
            layer.names = {names[id(p)] for linear in linears for p in linear.parameters()}
            self.packed |= dict.fromkeys(layer.names, layer)
            weights = (linear.weight for linear in linears)  # biases are read where they are
            layer.own = [p.untyped_storage() for p in weights if id(p) not in read]
            self._free(layer.own)
            return layer

        self._join(packed)
        for module in modules:
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, packed(child))

    def _free(self, storages):
        """Free the memory of these weights, which keep their shapes and views of each other."""
        for storage in storages:
            if storage.nbytes():
                self.freed[storage] = storage.nbytes()
                storage.resize_(0)

    def unload(self):
        """Free the memory of all weights, until the next ``load``."""
        self._free({x.untyped_storage() for x in self.weights.values()})
        for layer in self.packed.values():
            layer.weight = layer.bias = None

    @torch.no_grad()
    def load(self, policy):
        waiting = dict(self.weights)
        for name, x in merged(policy):
            if name not in waiting:  # a tied weight comes under two names
                continue
            p, layer = waiting.pop(name), self.packed.get(name)
            if size := self.freed.pop(storage := p.untyped_storage(), 0):
                storage.resize_(size)
            p.copy_(x)
            if layer and waiting.keys().isdisjoint(layer.names):
                layer.pack()
                self._free(layer.own)
        if waiting:
            raise KeyError(f"the policy has no {', '.join(waiting)}")
