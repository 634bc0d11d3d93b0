"""Triton kernels: layers, attention of new tokens, log-probs and sampling.

All of it is computed in fp32, and each result is rounded once, when it is written. No two programs write to
the same place, so a result does not depend on their order.

Sources: scores and sums in one pass, Milakov and Gimelshein 2018 (arXiv:1805.02867); grouped heads, Ainslie
et al. 2023 (arXiv:2305.13245).
"""
# mypy: disallow-incomplete-defs=False
# Only constants have types: Triton compiles a kernel for the types of the other arguments that it meets.

import triton
import triton.language as tl
from triton.language import constexpr

MINUS_INF = constexpr(-float("inf"))
LOWEST = constexpr(-1e30)  # stands for -inf, whose difference to -inf would be NaN
# Kernels over the rows of a tensor [rows, width], in tiles [ROWS, BLOCK]. Grid: tiles, blocks of columns
over_rows = triton.jit(do_not_specialize=["rows"])


@triton.jit
def _read(x, inside):
    """The numbers at the pointers x in fp32, 0 where they are not inside"""
    return tl.load(x, inside, 0.0).to(tl.float32)


# ------------------------------------------------------------------------------------------------ layers


@triton.jit
def _tile(number, rows, width, ROWS: constexpr, BLOCK: constexpr):
    """-> of a tile: its rows [ROWS, 1], columns [1, BLOCK], offsets in the tensor, which of them exist"""
    row = number * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, row * width + column, (row < rows) & (column < width)


@over_rows
def rms_norm(x, delta, weight, s, y, r, eps, rows, width, ROWS: constexpr, BLOCK: constexpr):
    """y = s r weight with r = (mean s^2 + eps)^-1/2. s is x, or with a delta x + delta, and is written then.

    x, delta, s, y [rows, width]; weight [width]; r [rows]. One block is a whole row.
    """
    row, column, offset, inside = _tile(tl.program_id(0), rows, width, ROWS, BLOCK)
    v = _read(x + offset, inside)
    if delta is not None:
        v += _read(delta + offset, inside)
        tl.store(s + offset, v, inside)
    scale = 1 / tl.sqrt_rn(tl.sum(v * v, 1)[:, None] / width + eps)
    tl.store(y + offset, v * scale * _read(weight + column, column < width), inside)
    tl.store(r + row, scale, row < rows)


@over_rows
def rms_norm_backward(
    s, weight, r, grad_y, grad_s, grad_x, grad_delta, parts, rows, width,
    ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """The gradient of rms_norm, from the gradients of y and (if not None) of s: grad_x, its copy grad_delta
    (if not None), and a partial sum of the weight's gradient for each program, parts [programs, width].

    d y_i / d s_j = w_i (r [i = j] - r^3 s_i s_j / width). Any number of programs shares the tiles.
    """
    d_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    own = tl.arange(0, BLOCK)
    w = _read(weight + own, own < width)[None, :]
    for number in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row, _, offset, inside = _tile(number, rows, width, ROWS, BLOCK)
        scale = _read(r + row, row < rows)
        v = _read(s + offset, inside) * scale
        d = _read(grad_y + offset, inside)
        d_weight += d * v
        d *= w
        d = scale * (d - v * (tl.sum(d * v, 1) / width)[:, None])
        if grad_s is not None:
            d += _read(grad_s + offset, inside)
        tl.store(grad_x + offset, d, inside)
        if grad_delta is not None:
            tl.store(grad_delta + offset, d, inside)
    tl.store(parts + tl.program_id(0) * width + own, tl.sum(d_weight, 0), own < width)


@triton.jit
def _rotated(x, there, norm, cos, sin, dim, eps, direction, D: constexpr):
    """Heads at the pointers x [n, 1], normed if there are weights for that, and rotated -> [n, D]: the halves
    (x1, x2) of a head become (x1 cos - x2 sin, x2 cos + x1 sin)."""
    d = tl.arange(0, D)[None, :]
    inside = d < dim
    half = dim // 2
    other = tl.where(d < half, d + half, d - half)
    a = _read(x + d, there & inside)
    b = _read(x + other, there & inside)
    if norm is not None:
        r = tl.rsqrt(tl.sum(a * a, 1) / dim + eps)[:, None]
        a = a * r * _read(norm + d, inside)
        b = b * r * _read(norm + other, inside)
    b = tl.where(d < half, -b, b) * direction
    return a * _read(cos + d, inside) + b * _read(sin + d, inside)


@over_rows
def rotate(x, cos, sin, y, heads: constexpr, direction, rows, width, ROWS: constexpr, BLOCK: constexpr):
    """Rotary positions of heads x, y [rows, width], in which each token has ``heads`` heads; cos and sin
    [tokens, width]; direction -1 rotates back."""
    row, _, offset, inside = _tile(tl.program_id(0), rows, width, ROWS, BLOCK)
    turn = tl.minimum(row, rows - 1) // heads * width  # those of a row behind the last one do not exist
    there = row < rows
    turned = _rotated(x + row * width, there, None, cos + turn, sin + turn, width, 0.0, direction, BLOCK)
    tl.store(y + offset, turned, inside)


@over_rows
def silu_mul(gate, up, y, stride, rows, width, ROWS: constexpr, BLOCK: constexpr):
    """y = silu(gate) * up; gate and up have rows ``stride`` apart, y is contiguous."""
    row, column, offset, inside = _tile(tl.program_id(0), rows, width, ROWS, BLOCK)
    g = _read(gate + row * stride + column, inside)
    u = _read(up + row * stride + column, inside)
    tl.store(y + offset, g * tl.sigmoid(g) * u, inside)


@over_rows
def silu_mul_backward(gate, up, grad, grad_gate, grad_up, rows, width, ROWS: constexpr, BLOCK: constexpr):
    """The gradient of silu_mul; silu'(g) = s (1 + g (1 - s)) with s the sigmoid of g."""
    _, _, offset, inside = _tile(tl.program_id(0), rows, width, ROWS, BLOCK)
    g = _read(gate + offset, inside)
    d = _read(grad + offset, inside)
    s = tl.sigmoid(g)
    tl.store(grad_gate + offset, d * _read(up + offset, inside) * s * (1 + g * (1 - s)), inside)
    tl.store(grad_up + offset, d * g * s, inside)


# --------------------------------------------------------------------------------------------- attention


@triton.jit
def decode_attention(
    query, cos, sin, q_norm, k_norm, positions, keys, values, out,
    dim, width, window, scale, eps,
    SHARED: constexpr, ROWS: constexpr, D: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    """Attention of n queries, each at its position of its row of the cache. Grid: (n, kv_heads)

    query [n, heads + 2 kv_heads, dim]: queries, then the keys and values of the new tokens. Queries and keys
    are normed and rotated, keys and values written to the cache: keys and values [slots, kv_heads, width,
    dim]; out [n, heads, dim]. SHARED: query heads of a kv head; ROWS and D: SHARED and dim, rounded up for
    matrix products.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    end = tl.load(positions + row).to(tl.int32)  # the row's own token, which is taken from registers
    first = tl.maximum(end + 1 - window, 0)
    head = tl.arange(0, ROWS)
    there = (head < SHARED)[:, None]
    d = tl.arange(0, D)
    across = d[None, :]
    down = d[:, None]
    mine = (row * kv_heads + kv_head) * width * dim
    keys += mine
    values += mine
    kind = keys.dtype.element_ty
    heads = kv_heads * SHARED
    query += row * (heads + 2 * kv_heads) * dim
    cos += row * dim
    sin += row * dim
    asking = (kv_head * SHARED + head)[:, None] * dim
    q = _rotated(query + asking, there, q_norm, cos, sin, dim, eps, 1, D).to(kind)
    own = query + (heads + kv_head + tl.zeros([1, 1], tl.int32)) * dim
    own_k = _rotated(own, True, k_norm, cos, sin, dim, eps, 1, D).to(kind)
    own_v = _read(query + (heads + kv_heads + kv_head) * dim + d, d < dim).to(kind)
    tl.store(keys + end * dim + across, own_k, across < dim)
    tl.store(values + end * dim + d, own_v, d < dim)
    most = tl.sum(q.to(tl.float32) * own_k.to(tl.float32), 1) * scale
    total = tl.full([ROWS], 1.0, tl.float32)
    sums = tl.zeros([ROWS, D], tl.float32) + own_v.to(tl.float32)[None, :]
    for start in range(first, end, COLUMNS):
        t = start + tl.arange(0, COLUMNS)
        reached = t < end
        k = tl.load(keys + t[None, :] * dim + down, reached[None, :] & (down < dim), 0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(reached[None, :], scores, MINUS_INF)
        higher = tl.maximum(most, tl.max(scores, 1))
        p = tl.exp(scores - higher[:, None])
        keep = tl.exp(most - higher)
        v = tl.load(values + t[:, None] * dim + across, reached[:, None] & (across < dim), 0.0)
        total = total * keep + tl.sum(p, 1)
        sums = sums * keep[:, None] + tl.dot(p.to(kind), v, input_precision="ieee")
        most = higher
    out += row * heads * dim
    tl.store(out + asking + across, sums / total[:, None], there & (across < dim))


# ------------------------------------------------------------------------------------------------ logits


@triton.jit
def token_logprobs(logits, targets, logprobs, entropy, log_sum, size, scale, BLOCK: constexpr):
    """The log-prob of each row's target, the entropy, and log sum e^z, where z = scale * logits [rows, size].

    One pass over the logits. Each of BLOCK lanes sees every BLOCK-th z, and keeps the largest one so far
    (most), the sum of e^(z - most) (total) and that of e^(z - most) (z - most) (mean). They are put together
    at the end. Grid: rows
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    logits += row * size
    most = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mean = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        inside = start + lane < size
        z = _read(logits + start + lane, inside) * scale
        z = tl.where((z < LOWEST) | ~inside, LOWEST, z)  # a NaN stays one, and is seen in the result
        gap = z - most
        e = tl.where(inside, tl.exp(-tl.abs(gap)), 0)
        larger = gap > 0  # then z is the new largest one, and the sums shrink; else z is added to them
        mean = tl.where(larger, e * (mean - total * gap), mean + e * gap)
        total = tl.where(larger, total * e + 1, total + e)
        most = tl.where(larger, z, most)
    highest = tl.max(most, 0)
    gap = most - highest
    weight = tl.exp(gap)
    mean = tl.sum(weight * (mean + total * gap), 0)
    total = tl.sum(weight * total, 0)
    log_total = tl.log(total)
    own = tl.load(logits + tl.load(targets + row)).to(tl.float32) * scale
    own = tl.where(own < -3.4028234663852886e38, -3.4028234663852886e38, own)
    tl.store(logprobs + row, own - highest - log_total)
    tl.store(entropy + row, log_total - mean / total)
    tl.store(log_sum + row, highest + log_total)


@over_rows
def token_logprobs_backward(
    logits, targets, log_sum, grad, entropy, grad_entropy, out, scale, rows, width,
    ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """out = grad (onehot(target) - p) [rows, width], p = e^(z - log_sum): the gradient of the logits, which
    it may overwrite.

    grad [rows] is that of the log-prob, times scale, log_sum [rows] is log sum e^z. Less grad_entropy p
    (log p + entropy), where entropy [rows] and its gradient, times scale, are not None.
    """
    row, column, offset, inside = _tile(tl.program_id(0), rows, width, ROWS, BLOCK)
    there = row < rows
    log_p = _read(logits + offset, inside) * scale - _read(log_sum + row, there)
    p = tl.exp(log_p)
    own = (column == tl.load(targets + row, there, 0)).to(tl.float32)
    slope = _read(grad + row, there) * (own - p)
    if entropy is not None:  # where p is 0 its logarithm may be -inf
        pull = p * (tl.where(p == 0, 0, log_p) + _read(entropy + row, there))
        slope -= _read(grad_entropy + row, there) * pull
    tl.store(out + offset, slope, inside)


@triton.jit
def _first_beyond(weights, target, indices, none):
    """The first index where the running sum of the weights exceeds the target; the last one with any weight
    if none does, because sums that were made in another order differ in their last bit. It always has a
    weight above 0, unless there is none or a weight is NaN: then any index, at least 0. none: above all
    indices."""
    index = tl.min(tl.where((tl.cumsum(weights, 0) > target) & (weights > 0), indices, none), 0)
    return tl.where(index < none, index, tl.max(tl.where(weights > 0, indices, 0), 0))


# The states of slots are parts of one tensor, whose alignment depends on the number of slots: without this
# Triton would compile the kernel once more while a run samples.
@triton.jit(do_not_specialize_on_alignment=["row", "token", "count", "done"])
def sample_and_store(
    logits, size, scale, noise, row, token, count, done, ends, ends_count, limit,
    tokens, logprobs, width, BLOCK: constexpr, BLOCKS: constexpr,
):  # fmt: skip
    """``Engine._sample_and_store`` of n slots. Slots that are done stay as they are. Grid: (n,)

    row, token, count and done [n] describe the slots; noise, tokens and logprobs [rows, width] have a row for
    each prompt; a response ends at one of ends [ends_count], and at limit.
    """
    # A row of logits is read once. Of each block of the vocabulary two numbers stay in registers: its largest
    # logit, and the sum of its probabilities relative to that one. They tell in which block the token lies,
    # and only that block is read again. Sums over blocks, and running sums inside one, are in fp64, as in
    # ``generation.sampling.sample_tokens``. Logits with a NaN give some token, and the log-prob NaN.
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(done + slot) == 0:
        own = tl.load(row + slot)
        before = tl.load(count + slot)
        offset = own * width + before
        u = tl.load(noise + offset)
        logits += slot * size
        column = tl.arange(0, BLOCK)
        block = tl.arange(0, BLOCKS)
        largest = tl.full([BLOCKS], MINUS_INF, tl.float32)
        sums = tl.zeros([BLOCKS], tl.float32)
        for start in tl.range(0, size, BLOCK, num_stages=3):
            z = scale * tl.load(logits + start + column, start + column < size, MINUS_INF).to(tl.float32)
            high = tl.max(z, 0)
            p = tl.exp(z - tl.where(high == MINUS_INF, 0.0, high))  # a block may hold nothing but -inf
            largest = tl.where(block == start // BLOCK, high, largest)
            sums = tl.where(block == start // BLOCK, tl.sum(p, 0), sums)
        most = tl.max(largest, 0)
        weights = (sums * tl.exp(largest - most)).to(tl.float64)
        total = tl.sum(weights, 0)
        chosen = _first_beyond(weights, u * total, block, BLOCKS)
        if u < 0:  # greedy
            chosen = tl.min(tl.where(largest == most, block, BLOCKS), 0)
            chosen = tl.minimum(chosen, BLOCKS - 1)  # of NaN, none is the largest
        column += chosen * BLOCK
        z = scale * tl.load(logits + column, column < size, MINUS_INF).to(tl.float32)
        below = u * total - tl.sum(tl.where(block < chosen, weights, 0.0), 0)
        drawn = _first_beyond(tl.exp(z - most).to(tl.float64), below, column, size)
        if u < 0:
            drawn = tl.minimum(tl.min(tl.where(z == most, column, size), 0), size - 1)
        logprob = tl.sum(tl.where(column == drawn, z, 0.0), 0) - most - tl.log(total.to(tl.float32))
        ended = drawn < 0
        for i in range(ends_count):
            ended |= drawn == tl.load(ends + i)
        tl.store(tokens + offset, drawn)
        tl.store(logprobs + offset, logprob)
        tl.store(token + slot, drawn)
        tl.store(count + slot, before + 1)
        tl.store(done + slot, ended.to(tl.int64) * 2 | (before + 1 >= limit))
