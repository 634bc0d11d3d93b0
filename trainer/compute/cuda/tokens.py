"""Triton kernels of token log-probs, from logits [rows, size]; z = scale * logits, scale = 1 / temperature.

The logits are in fp32 on a GPU. The sums are so in any case.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # stands for -inf, whose difference to -inf would be NaN


@triton.jit
def token_logprobs(logits, targets, logprobs, entropy, log_sum, size, scale, BLOCK: tl.constexpr):
    """The log-prob of each row's target, the entropy, and log sum e^z.

    One pass over the logits. Each of BLOCK lanes sees every BLOCK-th z, and keeps the largest one so far
    (most), the sum of e^(z - most) (total) and that of e^(z - most) (z - most) (mean). They are put together
    at the end. Grid: rows
    """
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits += row * size
    most = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mean = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        inside = start + lane < size
        z = tl.load(logits + start + lane, inside, other=0).to(tl.float32) * scale
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


@triton.jit
def token_logprobs_backward(
    logits, targets, log_sum, grad, entropy, grad_entropy, out, size, scale,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = grad scale (onehot(target) - p) [rows, size], p = e^(z - log_sum): the gradient of the logits.

    grad [rows] is that of the log-prob, log_sum [rows] is log sum e^z. ENTROPY: less grad_entropy scale
    p (log p + entropy), with entropy [rows] and its gradient. Grid: (rows, blocks)
    """
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    z = tl.load(logits + row * size + column, inside, other=0).to(tl.float32) * scale
    log_p = z - tl.load(log_sum + row)
    p = tl.exp(log_p)
    own = (column == tl.load(targets + row)).to(tl.float32)
    slope = tl.load(grad + row) * scale * (own - p)
    if ENTROPY:  # where p is 0 its logarithm may be -inf
        pull = p * (tl.where(p == 0, 0, log_p) + tl.load(entropy + row))
        slope -= tl.load(grad_entropy + row) * scale * pull
    tl.store(out + row * size + column, slope, inside)
