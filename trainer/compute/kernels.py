"""Faster paths: compiled kernels, and how any faster path is tried against its reference.

A CPU's kernels are C functions (cpu/kernels.py), a GPU's are written in Triton (cuda/kernels.py). A caller
asks ``kernels_for`` with its tensors, and computes with torch's operations where the answer is None. Both
start a kernel by its name over the rows of a tensor (``over_rows``) and have the same kernels of layers and
the same ``decode_attention``; those of token log-probs and of sampling differ (logprobs.py, engine.py).

``difference`` tries what is fast against what is known to be right, before it is used: packed rows
(scoring.py), fused layers (fused_layers.py), flash attention (attention.py) and a GPU's kernels
(cuda/kernels.py). Of a model, a trial needs ``few_layers``.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from errors import first_line
from trainer.compute.cpu import kernels as cpu
from trainer.compute.memory import is_out_of_memory


def kernels_of(device_type: str) -> ModuleType | None:
    """The kernels of this kind of device ("cpu", "cuda"), or None where they cannot be compiled or run,
    and for a Mac's GPU."""
    if device_type == "cpu":
        return cpu if cpu.library() else None
    return _cuda() if device_type == "cuda" else None


@cache
def _cuda():
    try:
        from trainer.compute.cuda import kernels as cuda

        cuda.check()
    except Exception as error:  # no Triton, a GPU too old for it, no compiler: whatever it raises
        if is_out_of_memory(error):  # says nothing about the kernels
            raise
        warnings.warn(
            f"no Triton kernels, plain torch is slower: {first_line(error)[:120]}; Triton needs a C compiler "
            "and Python's headers (python3-dev)",
            stacklevel=3,
        )
        return None
    return cuda


def kernels_for(*tensors: Tensor | None, result: torch.dtype = torch.float32) -> ModuleType | None:
    """The kernels that can compute with these tensors (None stands for one that is left out) and write a
    result in this dtype, where it is not that of the tensors; or None: in types that they do not have (a
    CPU's have no fp16), and where tensors are not contiguous."""
    there = [x for x in tensors if x is not None]
    device = there[0].device
    kernels = kernels_of(device.type)
    if kernels is None or result not in kernels.TYPES:
        return None
    able = all(x.device == device and x.dtype in kernels.TYPES and x.is_contiguous() for x in there)
    return kernels if able else None


class _Differentiable(torch.autograd.Function):
    """See ``differentiable``."""

    @staticmethod
    def forward(ctx, forward, gradient, *inputs):
        out, saved = forward(*inputs)
        ctx.save_for_backward(*saved)
        ctx.gradient = gradient
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        contiguous = [x if x is None else x.contiguous() for x in grads]
        return None, None, *ctx.gradient(*ctx.saved_tensors, *contiguous)


def differentiable(forward: Callable, gradient: Callable, *inputs: Tensor | None) -> Any:
    """A function that has a gradient of its own.

    forward(*inputs) -> (result, or several; the tensors that its gradient needs). gradient(*those tensors,
    *gradients of the results) -> the gradient of each input. Decoding, which needs none, calls many in a
    step: there it is the forward alone.
    """
    if torch.is_grad_enabled():
        return _Differentiable.apply(forward, gradient, *inputs)
    return forward(*inputs)[0]


def difference(
    reference: Callable[[], Tensor],
    faster: Callable[[], Tensor],
    device: torch.device,
    inputs: Sequence[Tensor] = (),
    tolerance: float = 1e-4,
) -> str:
    """Try a faster path against its reference -> "" where it gives the same, else why it cannot be used.

    Compared are the results of the two, and their gradients with respect to ``inputs``, where fp32 products
    are computed in fp32, without TF32 and autocast.
    tolerance: of differences, relative to the number itself and to the largest one: of the results, or of all
    gradients. Raised is only that memory ran out: it says nothing about a path.
    """

    def results(path):
        out = path().float()
        if not inputs:
            return [out]
        grads = torch.autograd.grad(out.sin().sum(), inputs, materialize_grads=True)
        return [out.detach(), torch.cat([x.flatten().float() for x in grads])]

    # Hooks of our own: those of gradient checkpointing would count what the trial keeps as the layer's.
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    in_fp32 = torch.autocast(device.type, enabled=False)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with hooks, in_fp32, torch.set_grad_enabled(bool(inputs)):
            pairs = zip(results(reference), results(faster), strict=True)
            same = all(torch.allclose(x, y, tolerance, tolerance * y.abs().max().item()) for y, x in pairs)
    except Exception as error:  # Triton and the code of models raise whatever they like
        if is_out_of_memory(error):
            raise
        return first_line(error)[:120]
    finally:
        torch.set_float32_matmul_precision(before)
    return "" if same else "its results differ"


# ----------------------------------------------------------------------------------- of a model, a few layers

LEAST_LAYERS = 2  # of a trial: with one, no layer could take the keys and values of another


@contextmanager
def few_layers(model: nn.Module) -> Iterator[None]:
    """In this block a model of transformers has its first layers only: at least ``LEAST_LAYERS``, and so many
    that each kind of layer is among them (sliding and full attention, dense and with experts). What goes
    wrong in a trial of all layers goes wrong with these. A model whose layers transformers does not mark
    keeps all."""
    config: Any = model.config
    lists = []  # (module, name of its list of layers, that list)
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and all(
                isinstance(layer, GradientCheckpointingLayer) for layer in child
            ):
                lists.append((module, name, child))
    before = getattr(config, "num_hidden_layers", None)
    if len(lists) != 1 or len(lists[0][2]) != before:  # several lists, as of an encoder and a decoder
        yield
        return
    [(module, name, layers)] = lists
    # What tells layers apart: their modules, with the sizes that these show, and lists in the config.
    listed = [x for x in vars(config).values() if isinstance(x, list) and len(x) == before]
    kinds = [
        (repr(layer), [type(part) for part in layer.modules()], [x[number] for x in listed])
        for number, layer in enumerate(layers)
    ]
    count = max(LEAST_LAYERS, *(kinds.index(kind) + 1 for kind in kinds))
    try:
        setattr(module, name, layers[:count])
        config.num_hidden_layers = min(count, before)
        yield
    finally:
        setattr(module, name, layers)
        config.num_hidden_layers = before
