"""GPU kernels: the Triton functions of this folder as functions of tensors.

Triton comes with torch for CUDA and compiles each kernel at its first use. ``ready`` says whether they can
compute with given tensors. Where they cannot, or where there is no Triton (``check``), the callers use
torch's operations; tests/compute/test_cuda_kernels.py compares the two, without a GPU in Triton's
interpreter.
"""

import torch
import triton

from trainer.compute.cuda import layers

TYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 1024  # numbers that one program of a pointwise kernel computes


def check():
    """Compile and run one kernel. Raises whatever Triton raises where it cannot work on this GPU."""
    gate = torch.zeros(2, 8, device="cuda")
    silu_mul(gate, gate)


def ready(*tensors, result=torch.float32):
    """Whether the kernels can compute with these tensors (None stands for one that is left out) and write a
    result in this dtype, where it is not that of the tensors."""
    if result not in TYPES:
        return False
    return all(x is None or (x.is_cuda and x.dtype in TYPES and x.is_contiguous()) for x in tensors)


def launch(kernel, grid, *args, **constants):
    """Start a kernel. Every kernel starts here: a program that counts or replaces them has one place to do
    so. grid: the number of programs; constants: its ``tl.constexpr`` arguments and ``num_warps``."""
    kernel[grid](*args, **constants)


def silu_mul(gate, up):
    """silu(gate) * up of [..., width], both contiguous, or the two halves of one contiguous tensor"""
    width = gate.shape[-1]
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grid = (y.numel() // width, triton.cdiv(width, BLOCK))
    launch(layers.silu_mul, grid, gate, up, y, width, gate.stride(-2), BLOCK=BLOCK)
    return y
