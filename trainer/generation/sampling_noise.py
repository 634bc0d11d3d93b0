"""Sampling noise as a pure function: one uniform number u(seed, step, prompt, sample, token) for each token.

sampling.py turns that number into a token. Because the noise depends on nothing else, a prompt gets the same
response in any slot, batch or process, and a resumed run draws what the uninterrupted run would have drawn.
There is no random state for a checkpoint to save.
"""

import torch


def _signed(x):
    """An unsigned 64-bit constant -> the int64 with the same bits, because torch computes in int64."""
    return x - (1 << 64) if x >= 1 << 63 else x


def _mix(x):
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on int64 tensors, which wrap as uint64 does."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _absorb(state, value):
    """Mix one more index (int64) into a hash state -> the new state."""
    return _mix((state ^ _mix(value + _signed(0x9E3779B97F4A7C15))) * 3 + _signed(0xD1B54A32D192ED03))


def noise_keys(seed, step, prompt_index, sample_index=0):
    """-> [B] int64 keys, one a row. prompt_index [B]: the place of each prompt in the *global* batch (of all
    processes); in evaluation, its place in the data."""
    prompt_index = torch.as_tensor(prompt_index, dtype=torch.int64)
    state = torch.full_like(prompt_index, seed)
    for value in (step, prompt_index, sample_index):
        state = _absorb(state, value + torch.zeros_like(prompt_index))
    return state


def uniform(keys, count):
    """keys [B] -> fp64 [B, count] in [0, 1), with 32 random bits each. Column t is for response token t."""
    bits = _absorb(keys[:, None], torch.arange(count, device=keys.device)) >> 32 & 0xFFFFFFFF
    return bits.double() / (1 << 32)
