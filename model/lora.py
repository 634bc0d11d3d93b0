"""LoRA: small trained matrices beside frozen ones, whose weights several models share. Through ``peft``.

A frozen layer x -> W x becomes x -> (W + (alpha / r) B A) x, with A [r, in] random and B [out, r] zero, so
that training begins at W (Hu et al. 2021, arXiv:2106.09685, section 4.1). alpha is 2 r: the factor is 2 at
any rank, and a learning rate that suits one rank is a fair start for another.

``peft`` is imported where adapters are made, and only there: runs without them do not need it.
"""

import copy
import re

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from errors import InputError

ROUTER = re.compile(r"router|(^|\.)(gate|shared_expert_gate)(\.|$)")  # who chooses experts, by name


def frozen_copy(model):
    """A copy of a model that does not train, and that shares with it, instead of copying, what does not train
    there either: of a model with adapters, all but these."""
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    return copy.deepcopy(model, shared).requires_grad_(False)


def add_adapters(backbone, rank, seed):
    """Freeze a backbone and put an adapter beside every matrix of its layers, in place.

    backbone: the ``base_model`` of a model of transformers: embeddings and head get none, nor do routers of
    experts. seed: of the A matrices; no other random number is touched. Raises InputError, naming --lora_r,
    where there is no such matrix, where none has as high a rank, and without ``peft``.
    """
    targets = _targets(backbone)
    if not targets:
        raise InputError(
            f"--lora_r {rank}: models of type {backbone.config.model_type} have no linear layers to put "
            "adapters on; leave the flag out"
        )
    highest = max(min(layer.weight.shape) for layer in targets.values())
    if rank > highest:
        raise InputError(
            f"--lora_r {rank}: no matrix of this model has a rank above {highest}; give at most that, usual "
            "are 4 to 64"
        )
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise InputError(f"--lora_r {rank}: needs peft; pip install 'peft>=0.17,<1'") from None
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="|".join(map(re.escape, targets)),
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in targets.values()),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, backbone)
    for layer in adapted_layers(backbone).values():
        layer.cast_input_dtype_enabled = False  # to fp32 and, under autocast, straight back


def _targets(backbone):
    """The linear layers (GPT-2's are called Conv1D) in the backbone's numbered layers, by name."""
    return {
        name: module
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and re.search(r"(^|\.)\d+\.", name)
        and not ROUTER.search(name)
    }


def adapted_layers(model):
    """{name: layer} of the layers that have an adapter; peft's have a child of this name. Without: empty."""
    return {
        name: module for name, module in model.named_modules() if "lora_A" in dict(module.named_children())
    }


@torch.no_grad()
def merged(model):
    """(name, tensor) for all that ``model.state_dict()`` would hold without adapters, W + (alpha / r) B A in
    the place of W: what the model computes, in the form of one that never had any. One at a time, so that no
    second copy of the weights comes into being."""
    layers = adapted_layers(model)
    for name, x in model.state_dict().items():
        if ".lora_" not in name:
            layer = layers.get(name.removesuffix(".base_layer.weight"))
            plain = name.replace(".base_layer.", ".") if layers else name
            yield plain, x if layer is None else x + layer.get_delta_weight("default")


def merged_copy(model):
    """A copy of a model with its adapters, if any, merged: one that others can save as they save any."""
    plain, state = copy.deepcopy(model), dict(merged(model))
    for name, layer in adapted_layers(plain).items():
        plain.set_submodule(name, layer.base_layer)
    plain.load_state_dict(state, strict=True)
    return plain


def learned(module):
    """The part of a module that training changes, as a module of the same parameters: all of it or, with
    adapters, these and what trains beside them (the critic's head)."""
    if not adapted_layers(module):
        return module
    part = nn.Module()
    for name, p in module.named_parameters():
        if p.requires_grad or ".lora_" in name:  # the old actor's adapter does not train, but changes
            *path, last = name.split(".")
            place = part
            for step in path:
                if step not in dict(place.named_children()):
                    place.add_module(step, nn.Module())
                place = place.get_submodule(step)
            place.register_parameter(last, p)
    return part


def trained(module):
    """The parameters that an optimizer steps."""
    return [p for p in module.parameters() if p.requires_grad]


def describe(model):
    """What has an adapter and which matrices of the layers have none, in one line; '' without adapters."""
    layers = adapted_layers(model)
    if not layers:
        return ""
    kinds = sorted({name.rpartition(".")[2] for name in layers})
    size, ranks = sum(p.numel() for p in trained(model)), {layer.r["default"] for layer in layers.values()}
    text = f"rank {ranks.pop()} on {' '.join(kinds)}: {size / 1e6:.2f}M parameters train"
    others = [name for name, p in model.named_parameters() if p.dim() > 1 and not _inside(name, layers)]
    others = {re.sub(r"^.*?\.\d+\.", "", name) for name in others if re.search(r"\.\d+\.", name)}
    return text + (f"; without: {' '.join(sorted(others))}" if others else "")


def _inside(name, layers):
    return any(name.startswith(f"{layer}.") for layer in layers)
