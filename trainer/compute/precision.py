"""Mixed precision: which floating-point type a device computes in fastest, and how models compute in it.

trained weights, gradients                       fp32
AdamW's moments                                  ``--moments_dtype``: fp32, or bf16 (runs/optimizer_step.py)
matrix products, in training and sampling        ``--dtype``: bf16 or fp16 under autocast, or fp32
softmax of the logits, log-probs, entropy,
values, advantages, losses                       fp32 (in fp16 multiplied by a scale: ``LossScale``)
the sampler's copy of the weights                ``--dtype`` (generation/sampler_copy.py)
linear layers of frozen models                   ``--dtype`` (``round_frozen``; not with ``--lora_r``)
frozen weights that ``--dtype`` holds exactly    ``--dtype`` (``halve_exact``)
reward models, before they are rounded so        ``--reward_dtype`` (rewards/reward_models.py)
value heads, score heads                         fp32, never TF32 (``ScoreHead`` in model/weights.py)
the result, ppo_actor_*.pth                      ``--save_dtype``: fp16 where nothing is lost, else fp32
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from errors import InputError
from model.weights import HalfEmbedding, HalfLinear

LINEAR = (nn.Linear, HalfLinear)
PRODUCT_ROW_MULTIPLE = 64  # where new shapes cost time, products have a multiple of this many rows
FIRST_SCALE = 2.0**16  # of fp16's losses
LEAST_SCALE = 1.0
INTERVAL = 2000  # good optimizer steps in a row after which the scale is doubled


def fast_dtype(name: str, device: torch.device) -> torch.dtype:
    """``--dtype`` -> the dtype of mixed precision and of sampling. "auto": bf16 where the device computes in
    it natively, else fp16 on a GPU that is fast in it, else fp32. InputError for another one than fp32 on a
    Mac's GPU."""
    if device.type == "mps":
        if name not in ("auto", "float32"):
            raise InputError(f"--dtype {name}: --device mps computes in float32 only; leave the flag out")
        return torch.float32
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        if not native and torch.cuda.get_device_capability(device) >= (7, 0):  # V100, T4, RTX 20
            return torch.float16
    else:
        able = torch.cpu.get_capabilities()
        native = onednn_takes_bf16() and any(able.get(x) for x in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.bfloat16 if native else torch.float32


def onednn_takes_bf16() -> bool:
    """Whether oneDNN multiplies in bf16 here. ONEDNN_MAX_CPU_ISA may forbid it where the CPU could."""
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return asked is not None and asked()


def set_precision(name: str, device: torch.device, deterministic: int = 0) -> torch.dtype:
    """-> ``fast_dtype``. On a GPU, what autocast leaves in fp32 runs in TF32, unless ``--dtype float32``; and
    products in 16 bits are summed in fp32 all the way: partial sums might exceed fp16's range, and in bf16,
    torch's default, they would round decoding's long sums over few rows more than training's.

    deterministic: --deterministic; 1 gives the same bits in every run on the same machine.
    """
    # Whoever derives a size from the memory that is free asks ``are_deterministic_algorithms_enabled`` and
    # takes a fixed size then. An operation that has no deterministic form raises a RuntimeError.
    torch.use_deterministic_algorithms(bool(deterministic))
    if deterministic:  # before the first product on a GPU: cuBLAS reads its variable only then
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Nothing here reads such memory. The type is that of a module, which torch gives a property.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        # It builds a plan for each new shape, and packed rows have new shapes in every micro-batch.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if name != "float32":
            torch.set_float32_matmul_precision("high")
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return fast_dtype(name, device)


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """A context of mixed precision: products run in ``dtype``, weights stay fp32. fp32 changes nothing."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def round_frozen(models: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Convert the weights of the linear layers of models that do not train to ``dtype``, in place.
    ``autocast`` would do so at every call, so results stay the same. Embeddings, a head tied to them, and
    heads of reward models stay as they are; with fp32 everything does. Fingerprints must be taken before
    this, because they must not depend on the machine."""
    if dtype != torch.float32:
        for p in _weights_of(LINEAR, models):
            p.data = p.data.to(dtype)


def _weights_of(kinds, models):
    """The parameters of the models that only modules of these kinds have, and no adapter."""
    found: set[nn.Parameter] = set()
    elsewhere: set[nn.Parameter] = set()
    for model in models:
        for name, module in model.named_modules():
            able = type(module) in kinds and "lora_" not in name
            (found if able else elsewhere).update(module.parameters(recurse=False))
    return found - elsewhere


def halve_exact(models: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Keep frozen weights of linear layers and embeddings in ``dtype``, in place, where they are the same
    numbers in it. A model that was saved in 16 bits has such weights. Results stay the same.

    models: all that share these weights. Weights of theirs that train, and adapters, stay as they are.
    """
    if dtype == torch.float32:
        return
    for p in _weights_of((*LINEAR, nn.Embedding, HalfEmbedding), models):
        if not p.requires_grad and is_exact(p, dtype):
            p.data = p.data.to(dtype)
    for model in models:
        for module in model.modules():
            if type(module) is nn.Embedding and module.weight.dtype == dtype:
                module.__class__ = HalfEmbedding  # it returns fp32


def is_exact(p: Tensor, dtype: torch.dtype) -> bool:
    """Whether every number of this tensor is the same in ``dtype``. One without memory counts as exact."""
    return p.is_meta or p.to(dtype).to(p.dtype).equal(p)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a product of this tensor is computed here: autocast's if it is on, else x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def rows_to_add(count: int, weight: Tensor) -> int:
    """How many rows to add to ``count``, so that products with this weight have few different shapes.

    oneDNN, which computes in bf16 on CPUs, compiles code for each shape that it has not met. That takes one
    to two milliseconds, and the product itself a tenth of one. Elsewhere the answer is 0.
    """
    compiles = weight.device.type == "cpu" and compute_dtype(weight) == torch.bfloat16
    return -count % PRODUCT_ROW_MULTIPLE if compiles else 0


class LossScale:
    """The loss scale of a run in fp16, for actor and critic alike: a power of two by which losses, and with
    them all gradients, are multiplied, because fp16 has no number between 0 and 6e-8. The gradients of the
    weights, in fp32, are divided by it again before they are clipped. In other types it is 1.
    Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; the numbers are those of torch's GradScaler.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.active = dtype == torch.float16
        self.value = FIRST_SCALE if self.active else 1.0
        self.good_steps = 0

    def unscale(self, model: nn.Module) -> None:
        """Divide a model's gradients by the scale, in place."""
        for p in model.parameters():
            if self.active and p.grad is not None:
                p.grad /= self.value

    def adapt(self, finite: bool) -> bool:
        """Halve the scale after a minibatch whose gradients were not all finite, or double it after
        ``INTERVAL`` good ones in a row -> whether it was halved. ``LEAST_SCALE`` is not halved any more."""
        if not self.active:
            return False
        before = self.value
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, LEAST_SCALE)
        elif self.good_steps == INTERVAL:
            self.value *= 2
            self.good_steps = 0
        return self.value < before

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it; {} unless the run is in fp16."""
        return {"value": self.value, "good_steps": self.good_steps} if self.active else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse. {}, of a run in another type, changes nothing."""
        if self.active:
            vars(self).update(state)
