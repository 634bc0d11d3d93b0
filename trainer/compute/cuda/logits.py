"""Triton kernels from logits on: log-probs of tokens, with their gradient, and sampling.

Log-probs: z = scale * logits [rows, size], scale = 1 / temperature. The logits are in fp32 on a GPU. The sums
are so in any case.

Sampling: one program a row, which is read once. Of each block of the vocabulary two numbers stay in
registers: its largest logit, and the sum of its probabilities relative to that one. They tell in which block
the token lies, and only that block is read again. Sums over blocks, and running sums inside one, are in fp64,
as in ``generation.sampling.sample_tokens``.
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
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
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
    logits, targets, log_sum, grad, entropy, grad_entropy, out, size, scale, BLOCK: tl.constexpr
):  # fmt: skip
    """out = grad scale (onehot(target) - p) [rows, size], p = e^(z - log_sum): the gradient of the logits.

    grad [rows] is that of the log-prob, log_sum [rows] is log sum e^z. Less grad_entropy scale p (log p +
    entropy), where entropy [rows] and its gradient are not None. Grid: (rows, blocks)
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    z = tl.load(logits + row * size + column, inside, other=0).to(tl.float32) * scale
    log_p = z - tl.load(log_sum + row)
    p = tl.exp(log_p)
    own = (column == tl.load(targets + row)).to(tl.float32)
    slope = tl.load(grad + row) * scale * (own - p)
    if entropy is not None:  # where p is 0 its logarithm may be -inf
        pull = p * (tl.where(p == 0, 0, log_p) + tl.load(entropy + row))
        slope -= tl.load(grad_entropy + row) * scale * pull
    tl.store(out + row * size + column, slope, inside)


@triton.jit
def _first_beyond(weights, target, places, none):
    """The first place where the running sum of the weights exceeds the target; the last one with any weight
    if none does, because sums that were made in another order differ in their last bit. It always has a
    weight above 0, unless there is none or a weight is NaN: then any place, at least 0. none: above all
    places."""
    place = tl.min(tl.where((tl.cumsum(weights, 0) > target) & (weights > 0), places, none), 0)
    return tl.where(place < none, place, tl.max(tl.where(weights > 0, places, 0), 0))


@triton.jit
def _draw(logits, size, scale, u, GREEDY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """-> (the token that ``u`` in [0, 1) draws from the softmax of scale * logits [size], its log-prob).
    GREEDY: the first of the largest logits. Logits with a NaN give some token, and the log-prob NaN."""
    column = tl.arange(0, BLOCK)
    block = tl.arange(0, BLOCKS)
    largest = tl.full([BLOCKS], -float("inf"), tl.float32)
    sums = tl.zeros([BLOCKS], tl.float32)
    for start in tl.range(0, size, BLOCK, num_stages=3):
        z = scale * tl.load(logits + start + column, start + column < size, -float("inf")).to(tl.float32)
        high = tl.max(z, 0)
        p = tl.exp(z - tl.where(high == -float("inf"), 0.0, high))  # a block may hold nothing but -inf
        largest = tl.where(block == start // BLOCK, high, largest)
        sums = tl.where(block == start // BLOCK, tl.sum(p, 0), sums)
    most = tl.max(largest, 0)
    shares = tl.exp(largest - most)
    weights = (sums * shares).to(tl.float64)
    total = tl.sum(weights, 0)
    if GREEDY:
        chosen = tl.min(tl.where(largest == most, block, BLOCKS - 1), 0)
    else:
        chosen = _first_beyond(weights, u * total, block, BLOCKS)
    column += chosen * BLOCK
    z = scale * tl.load(logits + column, column < size, -float("inf")).to(tl.float32)
    if GREEDY:
        token = tl.min(tl.where(z == most, column, size - 1), 0)
    else:
        below = u * total - tl.sum(tl.where(block < chosen, weights, 0.0), 0)
        here = block == chosen  # inside, probabilities are relative to the block's largest, as its sum is
        below /= tl.sum(tl.where(here, shares, 0.0), 0)
        high = tl.max(tl.where(here, largest, -float("inf")), 0)
        token = _first_beyond(tl.exp(z - high).to(tl.float64), below, column, size)
    token = tl.minimum(token, size - 1)
    logprob = tl.sum(tl.where(column == token, z, 0.0), 0) - most - tl.log(total.to(tl.float32))
    return token, logprob


@triton.jit
def sample_and_store(
    logits, size, scale, noise, row, token, count, done, ends, ends_count, limit,
    tokens, logprobs, response_len, finished, width,
    GREEDY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """``Engine._sample_and_store`` of n slots. Slots that are done stay as they are. Grid: (n,)

    row, token, count and done [n] describe the slots; noise, tokens and logprobs [rows, width], response_len
    and finished [rows] have a row for each prompt; ends [ends_count], limit [1] say where a response ends.
    """
    slot = tl.program_id(0).to(tl.int64)
    if tl.load(done + slot) == 0:
        own = tl.load(row + slot)
        before = tl.load(count + slot)
        place = own * width + before
        u = tl.load(noise + place)
        drawn, logprob = _draw(logits + slot * size, size, scale, u, GREEDY, BLOCK, BLOCKS)
        end = tl.arange(0, ENDS)
        ended = tl.max((tl.load(ends + end, end < ends_count, -1) == drawn).to(tl.int32), 0)
        tl.store(tokens + place, drawn)
        tl.store(logprobs + place, logprob)
        tl.store(response_len + own, before + 1)
        tl.store(finished + own, ended)
        tl.store(token + slot, drawn)
        tl.store(count + slot, before + 1)
        tl.store(done + slot, ended | (before + 1 >= tl.load(limit)))
