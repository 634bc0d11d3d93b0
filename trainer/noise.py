"""Sampling noise as a pure function of what is sampled, and the token that it picks.

Each token needs one uniform number, u(seed, step, prompt, sample, token), turned into a token through the
inverse CDF of softmax(logits / temperature): the whole vocabulary, no top-k and no top-p. So the same prompt
gets the same response whatever slot, batch or process it sits in, and a resumed run draws what the
uninterrupted one would have.
"""

import torch
import torch.nn.functional as F

from trainer import kernels

BLOCK = 64  # columns of the CDF's coarse level


def _signed(x):
    """A 64-bit constant as the int64 torch stores."""
    return x - (1 << 64) if x >= 1 << 63 else x


def _mix(x):
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on int64 tensors, which wrap as uint64 does."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _absorb(state, value):
    """Fold one more index into a hash state."""
    return _mix((state ^ _mix(value + _signed(0x9E3779B97F4A7C15))) * 3 + _signed(0xD1B54A32D192ED03))


def noise_keys(seed, step, prompt_index, sample_index=0):
    """[B] int64 keys of a batch's rows. prompt_index [B]: the place of each prompt in the *global* batch."""
    prompt_index = torch.as_tensor(prompt_index, dtype=torch.int64)
    state = torch.full_like(prompt_index, seed)
    for value in (step, prompt_index, sample_index):
        state = _absorb(state, value + torch.zeros_like(prompt_index))
    return state


def uniform(keys, count):
    """keys [B] -> fp64 [B, count] in [0, 1), 32 random bits each: column t is for response token t."""
    bits = _absorb(keys[:, None], torch.arange(count, device=keys.device)) >> 32 & 0xFFFFFFFF
    return bits.double() / (1 << 32)


def pick_tokens(logits, temperature, u):
    """Inverse-CDF sampling. logits [B, V], u [B] fp64 in [0, 1) -> (tokens [B], their log-probs [B] fp32).

    Temperature 0 is greedy, with log-probs at temperature 1. The CDF has two levels, blocks and the tokens of
    one block, so that no running sum passes over the whole vocabulary. u * total stays below the total, and
    no token of probability 0 is ever drawn.
    """
    if kernels.ready(logits):
        return kernels.pick_tokens(logits, temperature, u)
    if temperature not in (0, 1):
        logits = logits.float() / temperature
    probs = logits.softmax(-1, dtype=torch.float32)
    if temperature == 0:
        token = logits.argmax(-1, keepdim=True)
        return token.squeeze(1), probs.gather(1, token).squeeze(1).log()
    probs = F.pad(probs, (0, -probs.shape[1] % BLOCK)).view(len(u), -1, BLOCK)
    coarse = probs.sum(-1).double().cumsum(-1)  # [B, blocks]
    target = u[:, None] * coarse[:, -1:]
    block = torch.searchsorted(coarse, target, right=True)
    inside = probs.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)  # [B, BLOCK]
    fine = inside.double().cumsum(-1)
    end, total = coarse.gather(1, block), fine[:, -1:]
    # What of the block lies below the target; clamped, for the two levels are rounded differently.
    below = (target - end + total).clamp(min=0).minimum(total * (1 - 2**-33))
    column = torch.searchsorted(fine, below, right=True)
    return (block * BLOCK + column).squeeze(1), inside.gather(1, column).squeeze(1).log()
