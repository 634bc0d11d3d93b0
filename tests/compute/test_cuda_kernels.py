"""The GPU kernels beside torch's operations: on a GPU where there is one, else in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton exists for Linux only")
from trainer.compute.cuda import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("halves", [False, True])
def test_silu_mul(dtype, halves):
    joint = numbers(3, 2, 1100, dtype=dtype)
    gate, up = joint.chunk(2, -1) if halves else (joint, numbers(3, 2, 1100, dtype=dtype, seed=1))
    wanted = (F.silu(gate.float()) * up.float()).to(dtype)
    torch.testing.assert_close(kernels.silu_mul(gate, up), wanted)
