"""Triton kernels of layers: gates. One program computes one row, or a part of it; sums are in fp32."""

import triton
import triton.language as tl


@triton.jit
def silu_mul(gate, up, y, width, stride, BLOCK: tl.constexpr):
    """y = silu(gate) * up; gate and up have rows ``stride`` apart, y is contiguous. Grid: (rows, blocks)"""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * stride + column, inside).to(tl.float32)
    u = tl.load(up + row * stride + column, inside).to(tl.float32)
    tl.store(y + row * width + column, g * tl.sigmoid(g) * u, inside)
