"""The sampler's own copy of a policy. It only samples, and its weights are laid out for speed.

In PPO it gets the weights of the old actor before every rollout, and those of the actor before an evaluation
(``RolloutEngine.weights_of`` in rollout.py). Training keeps fp32 weights. Sampling reads every weight once a
token, so it gains most from a faster dtype. So the old log-probs of the ratio come from the training forward
(compute/scoring.py), but for fp32 on a CPU, where both are equal up to rounding (``sampler_has_scored`` in
models.py). ``rollout/sampler_gap`` logs how far the two differ."""

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from model.lora import merged
from model.model_minimind import MoEFeedForward
from trainer.compute.fused_layers import attention_forward, is_fused, mlp_forward
from trainer.compute.kernels import kernels_for
from trainer.compute.precision import onednn_takes_bf16
from trainer.compute.scoring import pack_sequences

# On a CPU in fp32, weights of at least so many numbers lie in panels: smaller ones stay in its caches, and
# torch multiplies them faster
PANELS_FROM = 1 << 18


class JoinedLinear(nn.Module):
    """Linear layers with the same input, computed as one, from a copy of their weights and biases.

    A CPU reads the weights of few rows' products from layouts of their own: in fp32 that of products.c, in
    bf16 oneDNN's, into which ``pack`` copies them once a rollout, not once a call. Other memory stays the
    same: CUDA graphs have captured its address, and on a CPU new memory would leave gaps that nothing else
    fits into."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor], on_cpu: bool) -> None:
        super().__init__()
        like = weights[0]
        self.sizes = [len(x) for x in weights]
        shape = sum(self.sizes), like.shape[1]
        large = on_cpu and shape[0] * shape[1] >= PANELS_FROM
        self.kernels: Any = kernels_for(like) if large and like.dtype == torch.float32 else None
        self.is_blocked = on_cpu and like.dtype == torch.bfloat16 and onednn_takes_bf16()
        if self.kernels is not None:
            self.weight = like.new_zeros(self.kernels.packed_shape(*shape))
        elif on_cpu and not self.is_blocked:  # transposed, which other libraries read faster
            self.weight = like.new_empty(shape[::-1]).t()
        else:
            self.weight = like.new_empty(shape)
        self.bias = like.new_empty(shape[0]) if biases else None
        for number, x in (*enumerate(weights), *enumerate(biases)):
            self.put(number, x)

    def put(self, number: int, x: Tensor) -> None:
        """Copy x, the weight [out, in] or the bias [out] of the layer with this number."""
        first = sum(self.sizes[:number])
        if x.dim() == 2 and self.kernels is not None:
            self.kernels.over_rows("pack_weight", x.float().contiguous(), self.weight, first)
        elif x.dim() == 2:
            self.weight[first : first + len(x)] = x
        elif self.bias is not None:
            self.bias[first : first + len(x)] = x

    def pack(self) -> None:
        """Make oneDNN's layout of the weights, which are not needed any more then."""
        if self.is_blocked:
            self.blocked: Tensor | None = torch.ops.mkldnn._reorder_linear_weight(self.weight, 64)
            self.weight.untyped_storage().resize_(0)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., sum of out]"""
        if self.kernels is not None:
            y = x.new_empty(*x.shape[:-1], sum(self.sizes))
            self.kernels.over_rows("linear", x.contiguous(), self.weight, self.bias, y, y.shape[-1])
            return y
        if self.is_blocked:
            return torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


class SamplerCopy:
    """``model`` is the copy that samples. policy: has no adapters; dtype, device: of the copy's weights.

    ``load`` copies the weights of a policy of the same architecture into it, with adapters, if any, merged.
    """

    def __init__(self, policy: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
        self.model = copy.deepcopy(policy).eval().requires_grad_(False)
        pack_sequences(self.model.float().base_model)
        for name, x in (*self.model.named_parameters(), *self.model.named_buffers()):
            # In bf16, rotary frequencies would put position 1000 off by radians.
            if x.is_floating_point() and "inv_freq" not in name:
                x.data = x.data.to(dtype)
        self.model.to(device)
        self._lay_out(device.type == "cpu")
        tensors = [p.data for p in self.model.parameters()]
        tensors += [x for layer in self.joined for x in (layer.weight, layer.bias) if x is not None]
        storages = [x.untyped_storage() for x in tensors]
        self.storages = [(storage, storage.nbytes()) for storage in storages]
        for layer in self.joined:
            layer.pack()

    def _lay_out(self, on_cpu):
        """Lay the weights out as products read them fastest: linear layers of a fused layer that have the
        same input are joined, and on a CPU all others are laid out too. ``places``: {name of a weight: what
        copies a new one to its place}, more than one for a tied head on a CPU."""
        names = {p: name for name, p in self.model.named_parameters()}
        self.places: dict[str, list[Callable[[Tensor], object]]] = defaultdict(list)
        self.joined: list[JoinedLinear] = []

        def joined(*linears):
            weights = [linear.weight for linear in linears]
            biases = [linear.bias for linear in linears if linear.bias is not None]
            layer = JoinedLinear(weights, biases, on_cpu)
            self.joined.append(layer)
            for number, p in (*enumerate(weights), *enumerate(biases)):
                self.places[names[p]].append(partial(layer.put, number))
            return layer

        # Not the linear layers: what has been joined goes, so that there are never two copies of all weights.
        for module in [module for module in self.model.modules() if type(module) is not nn.Linear]:
            if is_fused(module, attention_forward):
                module.qkv = joined(module.q_proj, module.k_proj, module.v_proj)
                module.q_proj = module.k_proj = module.v_proj = None
            if is_fused(module, mlp_forward):
                module.gate_up = joined(module.gate_proj, module.up_proj)
                module.gate_proj = module.up_proj = None
            for name, child in list(module.named_children()):
                if on_cpu and type(child) is nn.Linear:
                    setattr(module, name, joined(child))
            if isinstance(module, MoEFeedForward):
                module.all_in_steps = not on_cpu
        for p in self.model.parameters():
            self.places[names[p]].append(p.data.copy_)

    def unload(self) -> None:
        """Free the memory of all weights, which keep their shapes and views, until the next ``load``."""
        for storage, _ in self.storages:
            storage.resize_(0)
        for layer in self.joined:
            layer.blocked = None

    @torch.no_grad()
    def load(self, policy: PreTrainedModel) -> None:
        """Copy this policy's weights, one at a time."""
        for storage, size in self.storages:
            if not storage.nbytes():
                storage.resize_(size)
        for name, x in merged(policy):
            for copy_to_place in self.places.get(name, ()):
                copy_to_place(x)
        for layer in self.joined:
            layer.pack()
