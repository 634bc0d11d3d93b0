"""Logits -> sampled tokens: softmax(logits / temperature) over the whole vocabulary, no top-k and no top-p.

Every log-prob of training divides by the same temperature, so the policy that is sampled is the one that is
scored.

The noise behind each token is a pure function: one uniform number u(seed, step, prompt, sample, token).
Because it depends on nothing else, a prompt gets the same response in any slot, batch or process, and a
resumed run draws what the uninterrupted run would have drawn. There is no random state for a checkpoint to
save.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from trainer.compute.kernels import kernels_for

BLOCK = 64  # tokens in one block of the CDF's coarse level
GREEDY = -1.0  # in the place of the noise of a token: the likeliest one


def sample_tokens(logits: Tensor, temperature: float, u: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling. logits [B, V], u [B] fp64 in [0, 1) -> (tokens [B], their log-probs [B] fp32).

    The token is the first whose cumulative probability exceeds u; where u is ``GREEDY``, the likeliest one.
    The CDF has two levels, blocks and the tokens of one block, so that no running sum passes over the whole
    vocabulary. u * total stays below the total, so no token of probability 0 is ever drawn.
    Logits with a NaN give some token and the log-prob NaN (``Sampler.sample`` raises the error).
    """
    if logits.is_cpu and (kernels := kernels_for(logits)) is not None:  # a GPU's: ``sample_and_store``
        token = torch.empty(len(u), dtype=torch.int64)
        logprob = torch.empty(len(u))
        kernels.over_rows("sample_tokens", logits, u.contiguous(), token, logprob, float(temperature))
        return token, logprob
    if temperature != 1:
        logits = logits.float() / temperature
    probs = logits.softmax(-1, dtype=torch.float32)
    blocks = F.pad(probs, (0, -probs.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    block, inside = _first_beyond(blocks.sum(-1), u[:, None])
    column, _ = _first_beyond(blocks[torch.arange(len(u), device=u.device), block[:, 0]], inside)
    token = (block * BLOCK + column).clamp_(max=logits.shape[1] - 1)
    token = torch.where(u[:, None] < 0, logits.argmax(-1, keepdim=True), token)
    return token.squeeze(1), probs.gather(1, token).squeeze(1).log()


def _first_beyond(weights, u):
    """weights [B, n], u [B, 1] in [0, 1) -> (the first place [B, 1] where their running sum exceeds u of the
    total; how far into that place's own weight u is, [B, 1] in [0, 1))"""
    sums = running_sum(weights)
    target = u * sums[:, -1:]
    place = torch.searchsorted(sums, target, right=True).clamp_(max=weights.shape[1] - 1)
    # Clamped, because the weights are sums that round differently.
    inside = 1 + (target - sums.gather(1, place)) / weights.gather(1, place)
    return place, inside.clamp(0, 1 - 2**-33)


def running_sum(x: Tensor) -> Tensor:
    """Probabilities x [B, n] -> their cumulative sums, in fp64 and in steps of 2^-52: sums of whole numbers
    never fall, and a GPU's are the same in every run (``--deterministic 1`` refuses its others)."""
    return (x.double() * 2**52).long().cumsum(-1).double() / 2**52


def _mix(x):
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on an array of uint64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9
    x = (x ^ x >> 27) * 0x94D049BB133111EB
    return x ^ x >> 31


def _absorb(state, value):
    """Mix one more index into a hash state, both arrays of uint64 -> the new state."""
    return _mix((state ^ _mix(value + 0x9E3779B97F4A7C15)) * 3 + 0xD1B54A32D192ED03)


def noise_keys(seed: int, step: int, prompt_index: ArrayLike, sample_index: ArrayLike = 0) -> Tensor:
    """-> [B] int64 keys, one a row. prompt_index [B]: the place of each prompt in the *global* batch (of all
    processes); in evaluation, its place in the data."""
    indices = np.broadcast_arrays(seed, step, prompt_index, sample_index)
    state, *others = (x.astype(np.int64).astype(np.uint64) for x in indices)
    for value in others:
        state = _absorb(state, value)
    return torch.from_numpy(state.view(np.int64))


def uniform(keys: Tensor, count: int) -> Tensor:
    """keys [B] -> fp64 [B, count] in [0, 1), with 32 random bits each. Column t is for response token t."""
    bits = _absorb(keys.numpy().view(np.uint64)[:, None], np.arange(count, dtype=np.uint64)) >> 32
    return torch.from_numpy(bits.astype(np.float64) / 2**32)
