"""LoRA: trains small matrices beside frozen ones, which several models share. Uses the library ``peft``.

A frozen layer x -> W x becomes x -> (W + (alpha / r) B A) x, with A [r, in] random and B [out, r] zero, so
that training begins at W (Hu et al. 2021, arXiv:2106.09685, section 4.1). alpha is 2 r, so the factor is 2 at
any rank. ``train_ppo.py --lora_r N`` switches it on (trainer/models.py): actor, old actor
and critic get adapters and share the frozen weights with the reference (docs/models.md). ``peft`` is imported
only where adapters are made.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from errors import InputError, first_line
from model.weights import full_tensor

ROUTER = re.compile(r"router|(^|\.)(gate|shared_expert_gate)(\.|$)")  # names of layers that choose experts
Model = TypeVar("Model", bound=nn.Module)


def frozen_copy(model: Model, lend: bool = False) -> Model:
    """A copy that does not train, of a model. Parameters that ``model`` has frozen are shared, not copied:
    for a model with adapters, that is everything but the adapters. lend: trainable matrices share their
    memory with the copy too, until both models are sharded. Neither model may train before that."""
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    if lend:
        shared |= {id(p): nn.Parameter(p.data, False) for p in trained(model) if p.dim() >= 2}
    return copy.deepcopy(model, shared).requires_grad_(False)


def add_adapters(backbone: nn.Module, rank: int, seed: int) -> None:
    """Freeze a backbone and put an adapter beside every matrix of its layers, in place.

    backbone: the ``base_model`` of a transformers model. Embeddings, head and routers of experts get no
    adapter. seed: of the A matrices; the global random state is not changed. Raises InputError without
    ``peft``.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:  # it is not there, or too old for this transformers
        raise InputError(
            f"--lora_r {rank}: needs peft; pip install 'peft>=0.18' ({first_line(error)})"
        ) from None
    targets = _targets(backbone)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="|".join(re.escape(f"0.{name}") for name in targets),
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in targets.values()),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # In a list: of a backbone with a config peft would adapt experts, whatever the targets are.
        inject_adapter_in_model(config, nn.ModuleList([backbone]))
    adapted = adapted_layers(backbone)
    if adapted.keys() != targets.keys():
        raise InputError(f"--lora_r {rank}: this peft adapts other layers than it is asked to; get another")
    for layer in adapted.values():
        layer.cast_input_dtype_enabled = False  # peft would cast to fp32, and autocast straight back


def adapter_size(backbone: nn.Module, rank: int) -> int:
    """How many numbers ``add_adapters`` would add."""
    return sum(rank * sum(layer.weight.shape) for layer in _targets(backbone).values())


def _targets(backbone: nn.Module) -> dict[str, nn.Linear | Conv1D]:
    """The linear layers (GPT-2's are called Conv1D) in the backbone's numbered layers, by name."""
    return {
        name: module
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and re.search(r"(^|\.)\d+\.", name)
        and not ROUTER.search(name)
    }


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """{name: layer} of the layers that have an adapter (peft gives them a ``lora_A``); may be empty."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@torch.no_grad()
def merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) for every entry of ``model.state_dict()`` as it would be without adapters, with
    W + (alpha / r) B A in the place of W. The result computes what the model computes. Tensors come one at a
    time, so there is never a second copy of all weights in memory. They are whole: if the model is sharded,
    all processes must go through them."""
    layers = adapted_layers(model)
    for name, x in model.state_dict().items():
        if ".lora_" not in name:
            layer = layers.get(name.removesuffix(".base_layer.weight"))
            plain = name.replace(".base_layer.", ".") if layers else name
            if layer:  # with --offload_frozen the old actor's adapters wait elsewhere
                x = x + layer.get_delta_weight("default").to(x.device)
            yield plain, full_tensor(x)


def learned(module: nn.Module) -> dict[str, nn.Parameter]:
    """{name: parameter} of what training changes: all, or with adapters these and what trains beside them
    (the critic's head). A parameter with several names is there under the first of them."""
    adapters = adapted_layers(module)
    names = {
        p: name
        for name, p in sorted(module.named_parameters(remove_duplicate=False), reverse=True)
        # The old actor's adapter has no gradient, but changes.
        if not adapters or p.requires_grad or ".lora_" in name
    }
    return {name: p for p, name in names.items()}


def trained(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer changes: those that require a gradient."""
    return [p for p in module.parameters() if p.requires_grad]


def describe(model: nn.Module) -> str:
    """One line: how many matrices have an adapter; '' without adapters."""
    layers = adapted_layers(model)
    size = sum(p.numel() for p in trained(model)) / 1e6
    return f"adapters beside {len(layers)} matrices: {size:.2f}M parameters train" if layers else ""
