"""Which floating-point type a device computes in fastest, and computing in it."""

import torch
from torch import nn

SHAPES = 64  # products have multiples of this many rows where it pays to meet the same shapes again


def fast_dtype(name, device):
    """``--dtype`` -> the type of mixed precision and sampling; "auto": bf16 where the device computes in it,
    else fp32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        native = any(able.get(x) for x in ("avx512_bf16", "amx_bf16", "bf16"))
    return torch.bfloat16 if native else torch.float32


def set_precision(name, device):
    """``fast_dtype``, and TF32 for what autocast leaves in fp32 on a GPU, unless fp32 was asked for."""
    if device.type == "cuda" and name != "float32":
        torch.set_float32_matmul_precision("high")
    return fast_dtype(name, device)


def autocast(device, dtype):
    """Mixed precision for what runs inside: weights stay fp32. fp32 as ``dtype`` changes nothing."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def round_linears(model, dtype):
    """Hold the weights of a frozen model's linear layers in the type that ``autocast`` would convert them to
    at every call: the same numbers, sooner. Embeddings, and a head tied to them, stay as they are."""
    elsewhere = {
        id(p)
        for module in model.modules()
        if type(module) is not nn.Linear
        for p in module.parameters(recurse=False)
    }
    for module in model.modules():
        for p in module.parameters(recurse=False) if type(module) is nn.Linear else ():
            if id(p) not in elsewhere:
                p.data = p.data.to(dtype)


def compute_dtype(x):
    """The type in which a product of this tensor would be computed here: autocast's, or its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def rows_to_add(count, weight):
    """How many rows make ``count`` a number for which a product with this weight is not slow to start.

    oneDNN, which computes in bf16 on CPUs, compiles code for each shape that it has not met (one to two
    milliseconds, where the product takes a tenth of one).
    """
    compiles = weight.device.type == "cpu" and compute_dtype(weight) == torch.bfloat16
    return -count % SHAPES if compiles else 0
