"""Mixed precision: which floating-point type a device computes in fastest, and how models compute in it.

trained weights, gradients                       fp32
AdamW's moments                                  ``--moments_dtype``: fp32, or bf16 (runs/adamw.py)
matrix products, in training and sampling        ``--dtype``: bf16 or fp16 under autocast, or fp32
softmax of the logits, log-probs, entropy,
values, advantages, losses                       fp32 (in fp16 multiplied by a scale: loss_scale.py)
the sampler's copy of the weights                ``--dtype`` (generation/sampler_copy.py)
linear layers of frozen models                   ``--dtype`` (``round_frozen``; not with ``--lora_r``)
frozen weights that ``--dtype`` holds exactly    ``--dtype`` (``keep_exact``)
reward models until then                         ``--reward_dtype`` (rewards/reward_models.py)
value heads, score heads                         fp32, never TF32 (``ScoreHead`` in model/weights.py)
the result, ppo_actor_*.pth                      fp16
"""

import os
from contextlib import contextmanager

import torch
from torch import nn

from errors import InputError
from model.weights import HalfEmbedding, HalfLinear

LINEAR = (nn.Linear, HalfLinear)
PRODUCT_ROW_MULTIPLE = 64  # where new shapes cost time, products have a multiple of this many rows


def fast_dtype(name, device):
    """``--dtype`` -> the dtype of mixed precision and of sampling. "auto": bf16 where the device computes in
    it natively, else fp16 on a GPU that is fast in it, else fp32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        capability = torch.cuda.get_device_capability(device)
        if not native and (capability >= (7, 0) or capability == (6, 0)):  # V100, T4, RTX 20; P100
            return torch.float16
    else:
        able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        native = onednn_takes_bf16() and any(able.get(x) for x in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.bfloat16 if native else torch.float32


def onednn_takes_bf16() -> bool:
    """Whether oneDNN multiplies in bf16 here. ONEDNN_MAX_CPU_ISA may forbid it where the CPU could."""
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return asked is not None and asked()


def set_precision(name, device, deterministic=0):
    """-> ``fast_dtype``. On a GPU, what autocast leaves in fp32 runs in TF32, unless ``--dtype float32``; and
    products in fp16 are summed in fp32 all the way, because partial sums might exceed fp16's range.

    deterministic: --deterministic; 1 gives the same bits in every run on the same machine (``repeatable``).
    """
    repeatable(bool(deterministic))
    if device.type == "cuda":
        # It builds a plan for each new shape, and packed rows have new shapes in every micro-batch.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if name != "float32":
            torch.set_float32_matmul_precision("high")
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return fast_dtype(name, device)


def repeatable(wanted):
    """Let every operation give the same bits for the same inputs, or (False) leave torch its own choice.

    Whoever derives a size from the memory that is free asks ``torch.are_deterministic_algorithms_enabled()``
    and takes a fixed size then. An operation that has no such form raises a
    RuntimeError. Call it before the first product on a GPU: cuBLAS reads its variable only then.
    """
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads such memory
    torch.use_deterministic_algorithms(wanted)


@contextmanager
def exact_products(device):
    """fp32 products are computed in fp32 in this block, without TF32 and without autocast: for comparisons.
    ``device``: where. Afterwards everything is as it was."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(torch.device(device).type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def check_range(model, dtype, what):
    """Raise InputError if ``dtype`` is fp16 and a weight of the model is too large for it. what: how the line
    begins, before the name of the weight."""
    limit = torch.finfo(torch.float16).max
    for name, p in model.named_parameters() if dtype == torch.float16 else ():
        if (p.abs() > limit).any():
            raise InputError(
                f"{what}{name} has numbers beyond {limit:.0f}, the limit of fp16; use --dtype float32"
            )


def check_finite(numbers, dtype, what):
    """Raise InputError if these numbers, computed in ``dtype``, hold a NaN or an infinity. what: whose they
    are."""
    if not numbers.isfinite().all():
        remedy = "use --dtype float32" if dtype == torch.float16 else "lower the learning rates"
        kind = str(dtype).removeprefix("torch.")
        raise InputError(f"in {kind} {what} gives numbers that are NaN or infinite; {remedy}")


def autocast(device, dtype):
    """A context of mixed precision: products run in ``dtype``, weights stay fp32. fp32 changes nothing."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def round_frozen(models, dtype):
    """Convert the weights of the linear layers of models that do not train to ``dtype``, in place.
    ``autocast`` would do so at every call, so results stay the same. Embeddings, a head tied to them, and
    heads of reward models stay as they are; with fp32 everything does. Fingerprints must be taken before
    this, because they must not depend on the machine."""
    if dtype != torch.float32:
        for p in _weights_of(LINEAR, models):
            p.data = p.data.to(dtype)


def _weights_of(kinds, models):
    """The parameters of the models that only modules of these kinds have, and no adapter."""
    found = {}
    elsewhere = set()
    for model in models:
        for name, module in model.named_modules():
            for p in module.parameters(recurse=False):
                found[id(p)] = p
                if type(module) not in kinds or "lora_" in name:
                    elsewhere.add(id(p))
    return [p for key, p in found.items() if key not in elsewhere]


def keep_exact(models, dtype):
    """Keep frozen weights of linear layers and embeddings in ``dtype``, in place, where they are the same
    numbers in it. A model that was saved in 16 bits has such weights. Results stay the same.

    models: all that share these weights. Weights of theirs that train, and adapters, stay as they are.
    """
    if dtype == torch.float32:
        return
    weights = _weights_of((*LINEAR, nn.Embedding, HalfEmbedding), models)
    kept = {id(p): p for p in weights if not p.requires_grad and holds(p, dtype)}
    for p in kept.values():
        p.data = p.data.to(dtype)
    for module in (module for model in models for module in model.modules()):
        if type(module) is nn.Embedding and id(module.weight) in kept:
            module.__class__ = HalfEmbedding  # it returns fp32


def holds(p, dtype):
    """Whether every number of this tensor is the same in ``dtype``. One without memory, of a model
    that is only planned, counts as if."""
    return p.is_meta or p.dtype == dtype or p.to(dtype).to(p.dtype).equal(p)


def compute_dtype(x):
    """The dtype in which a product of this tensor is computed here: autocast's if it is on, else x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def rows_to_add(count, weight):
    """How many rows to add to ``count``, so that products with this weight have few different shapes.

    oneDNN, which computes in bf16 on CPUs, compiles code for each shape that it has not met. That takes one
    to two milliseconds, and the product itself a tenth of one. Elsewhere the answer is 0.
    """
    compiles = weight.device.type == "cpu" and compute_dtype(weight) == torch.bfloat16
    return -count % PRODUCT_ROW_MULTIPLE if compiles else 0
