"""What the responses of a batch look like: do they repeat themselves, are they all the same, how far apart
are their scores, and do long ones score more? These numbers are logged; nothing is trained with them.

Two processes with half a batch each get the numbers of the whole batch: they exchange, once a step, a hash,
the score and the length of each response.
"""

import torch

from trainer.compute.rollout_data import length_mask

ID_BITS = 21  # of a token id: three of them fit into 63 bits, and the largest vocabularies need 18
LEAST_SPREAD = 1e-6  # times the mean: a smaller standard deviation is rounding


def repetition(rollout):
    """[B]: the share of a response's trigrams of tokens, EOS included, that occurred before in the same
    response; 0 where it has fewer than four tokens. A GPU is not waited for."""
    tokens, width = rollout.tokens, rollout.sampler_logprobs.shape[1]
    places = rollout.prompt_len[:, None] + torch.arange(width, device=tokens.device)
    ids = tokens.gather(1, places.clamp(max=tokens.shape[1] - 1))
    trigrams = (ids[:, :-2] << 2 * ID_BITS) | (ids[:, 1:-1] << ID_BITS) | ids[:, 2:]
    count = (rollout.response_len - 2).clamp(min=0)
    there = length_mask(count, trigrams.shape[1])
    # Sorted, equal ones are neighbours. What is behind a response goes to the end, so ``there`` still fits.
    trigrams = torch.where(there, trigrams, torch.iinfo(torch.int64).max).sort(1)[0]
    repeated = (trigrams[:, 1:] == trigrams[:, :-1]) & there[:, 1:]
    return repeated.sum(1) / count.clamp(min=1)


def batch_metrics(rollout, scores, world):
    """{name: value} of the whole batch, the same in all processes, which must all call it.

    rollout: this process' responses [B]; scores [B]: theirs. "rollout/distinct": responses of which no two
    are equal, token by token, divided by all; "reward/score_std": population standard deviation of the
    scores; "rollout/score_length_corr": Pearson's correlation of score and length in tokens.
    """
    responses = zip(rollout.responses(), scores.tolist(), strict=True)
    mine = [(hash(tuple(ids)), score, len(ids)) for ids, score in responses]
    hashes, scores, lengths = zip(*(row for rows in world.gather(mine) for row in rows), strict=True)
    scores, lengths = (centred(torch.tensor(x, dtype=torch.float64)) for x in (scores, lengths))
    return {
        "rollout/distinct": len(set(hashes)) / len(hashes),
        "reward/score_std": scores.square().mean().sqrt().item(),
        "rollout/score_length_corr": correlation(scores, lengths),
    }


def centred(x):
    """x [N] less its mean; 0 everywhere where the numbers differ by no more than rounding."""
    mean = x.mean()
    x = x - mean
    return torch.zeros_like(x) if x.square().mean().sqrt() <= LEAST_SPREAD * mean.abs() else x


def correlation(x, y):
    """Pearson's correlation of two ``centred`` [N], as a float; 0 where one of them does not vary."""
    size = (x.square().sum() * y.square().sum()).sqrt().item()
    return (x @ y).item() / size if size else 0.0
