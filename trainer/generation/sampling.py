"""Logits -> sampled tokens: softmax(logits / temperature) over the whole vocabulary, no top-k and no top-p.

Every log-prob of training divides by the same temperature, so the policy that is sampled is the one that is
scored. The random number behind each token comes from sampling_noise.py.
"""

import torch
import torch.nn.functional as F

from trainer.compute.kernels import kernels_for

BLOCK = 64  # tokens in one block of the CDF's coarse level


def sample_tokens(logits, temperature, u):
    """Inverse-CDF sampling. logits [B, V], u [B] fp64 in [0, 1) -> (tokens [B], their log-probs [B] fp32).

    The token is the first whose cumulative probability exceeds u. Temperature 0 is greedy, with log-probs at
    temperature 1. The CDF has two levels, blocks and the tokens of one block, so that no running sum passes
    over the whole vocabulary. u * total stays below the total, so no token of probability 0 is ever drawn.
    Logits with a NaN give some token and the log-prob NaN (``Sampler.sample`` raises the error).
    """
    if (kernels := kernels_for(logits)) is not None:
        return kernels.sample_tokens(logits, temperature, u)
    if temperature not in (0, 1):
        logits = logits.float() / temperature
    probs = logits.softmax(-1, dtype=torch.float32)
    if temperature == 0:
        token = logits.argmax(-1, keepdim=True)
        return token.squeeze(1), probs.gather(1, token).squeeze(1).log()
    probs = F.pad(probs, (0, -probs.shape[1] % BLOCK)).view(len(u), -1, BLOCK)
    coarse = running_sum(probs.sum(-1).double())  # [B, blocks]
    target = u[:, None] * coarse[:, -1:]
    block = torch.searchsorted(coarse, target, right=True).clamp_(max=coarse.shape[1] - 1)
    inside = probs.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)  # [B, BLOCK]
    fine = running_sum(inside.double())
    end, total = coarse.gather(1, block), fine[:, -1:]
    # How much of the block lies below the target. Clamped, because the two levels round differently.
    below = (target - end + total).clamp(min=0).minimum(total * (1 - 2**-33))
    column = torch.searchsorted(fine, below, right=True).clamp_(max=BLOCK - 1)
    token = (block * BLOCK + column).clamp_(max=logits.shape[1] - 1)
    return token.squeeze(1), probs.flatten(1).gather(1, token).squeeze(1).log()


def running_sum(x):
    """x [B, n] -> its cumulative sums. torch's on a GPU are refused under ``--deterministic 1``: there they
    are a product with a triangle, whose rounding may not let a sum be below the one before it."""
    if not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(-1)
    return triangle_sum(x)


def triangle_sum(x):
    """The cumulative sums of x [B, n] >= 0 by a matrix product."""
    triangle = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device).triu_()
    return (x @ triangle).cummax(-1).values
