"""Triton kernels of layers: RMS norms, rotary positions and gates, with their gradients.

A program computes a tile: some whole rows for a norm, the heads of one token for rotary positions, a block of
numbers for a gate. All of it is in fp32, and each result is rounded once, when it is written. No two programs
write to the same place, so a result does not depend on their order.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(row, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """-> (the rows of a tile [ROWS], places of its numbers in a tensor [rows, width], which of them exist)"""
    r = row + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (column < width)[None, :]
    return r, r.to(tl.int64)[:, None] * width + column[None, :], inside


@triton.jit(do_not_specialize=["rows"])
def rms_norm(x, delta, weight, s, y, r, rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """y = s r weight with r = (mean s^2 + eps)^-1/2. s is x, or with a delta x + delta, and is written then.

    x, delta, s, y [rows, width]; weight [width]; r [rows]. Grid: tiles of ROWS rows
    """
    row, place, inside = _tile(tl.program_id(0) * ROWS, rows, width, ROWS, BLOCK)
    column = tl.arange(0, BLOCK)
    v = tl.load(x + place, inside, other=0).to(tl.float32)
    if delta is not None:
        v += tl.load(delta + place, inside, other=0).to(tl.float32)
        tl.store(s + place, v, inside)
    scale = 1 / tl.sqrt_rn(tl.sum(v * v, 1) / width + eps)
    w = tl.load(weight + column, column < width, other=0).to(tl.float32)
    tl.store(y + place, v * scale[:, None] * w[None, :], inside)
    tl.store(r + row, scale, row < rows)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward(
    s, weight, r, grad_y, grad_s, grad_x, grad_delta, parts, rows, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of rms_norm, from the gradients of y and (if not None) of s: grad_x, its copy grad_delta
    (if not None), and a partial sum of the weight's gradient for each program, parts [programs, width].

    d y_i / d s_j = w_i (r [i = j] - r^3 s_i s_j / width). Grid: any number of programs; they share the tiles.
    """
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, column < width, other=0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row, place, inside = _tile(start, rows, width, ROWS, BLOCK)
        scale = tl.load(r + row, row < rows, other=0)[:, None]
        v = tl.load(s + place, inside, other=0).to(tl.float32) * scale
        d = tl.load(grad_y + place, inside, other=0).to(tl.float32)
        total += d * v
        d *= w[None, :]
        d = scale * (d - v * (tl.sum(d * v, 1) / width)[:, None])
        if grad_s is not None:
            d += tl.load(grad_s + place, inside, other=0).to(tl.float32)
        tl.store(grad_x + place, d, inside)
        if grad_delta is not None:
            tl.store(grad_delta + place, d, inside)
    tl.store(parts + tl.program_id(0) * width + column, tl.sum(total, 0), column < width)


@triton.jit
def rotate(x, cos, sin, y, heads, dim, sign, HEADS: tl.constexpr, HALF: tl.constexpr):
    """The halves (x1, x2) of each head become (x1 cos - x2 sin, x2 cos + x1 sin), with sin times ``sign``.

    x, y [tokens, heads, dim]; cos and sin [tokens, dim], of which the first half is read. Grid: tokens
    """
    token = tl.program_id(0).to(tl.int64)
    half = dim // 2
    head = tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    inside = (head < heads)[:, None] & (i < half)[None, :]
    place = token * heads * dim + head[:, None] * dim + i[None, :]
    c = tl.load(cos + token * dim + i, i < half, other=0).to(tl.float32)[None, :]
    s = tl.load(sin + token * dim + i, i < half, other=0).to(tl.float32)[None, :] * sign
    x1 = tl.load(x + place, inside).to(tl.float32)
    x2 = tl.load(x + place + half, inside).to(tl.float32)
    tl.store(y + place, x1 * c - x2 * s, inside)
    tl.store(y + place + half, x2 * c + x1 * s, inside)


@triton.jit
def silu_mul(gate, up, y, width, stride, BLOCK: tl.constexpr):
    """y = silu(gate) * up; gate and up have rows ``stride`` apart, y is contiguous. Grid: (rows, blocks)"""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * stride + column, inside).to(tl.float32)
    u = tl.load(up + row * stride + column, inside).to(tl.float32)
    tl.store(y + row * width + column, g * tl.sigmoid(g) * u, inside)


@triton.jit
def silu_mul_backward(gate, up, grad, grad_gate, grad_up, count, BLOCK: tl.constexpr):
    """The gradient of silu_mul for ``count`` numbers; silu'(g) = s (1 + g (1 - s)) with s the sigmoid of g.
    Grid: blocks"""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    g = tl.load(gate + place, inside).to(tl.float32)
    u = tl.load(up + place, inside).to(tl.float32)
    d = tl.load(grad + place, inside).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(grad_gate + place, d * u * s * (1 + g * (1 - s)), inside)
    tl.store(grad_up + place, d * g * s, inside)
