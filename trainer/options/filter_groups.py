"""``--filter_groups N``: prompts whose answers all score the same are sampled again, up to N times.

``--advantage rloo`` and ``group`` compare the answers to a prompt. Where they all score the same, there is
nothing to learn. DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2) takes other prompts in their place.
Here the same prompts get new answers, with other noise: the batch keeps its size, and which prompts a step
takes depends on nothing that was sampled. What still scores the same after N times stays in the batch.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.compute.batch import Batch, RawScores, join_batches
from trainer.generation.sampling import noise_keys
from trainer.rewards.combine import OF_LENGTH, Reward
from trainer.rollout import RolloutEngine
from trainer.runs.distributed import World
from trainer.runs.metrics import Seconds


def rows_of_equal_groups(scores: Tensor, group_size: int) -> list[int]:
    """Scores [B] -> the rows of the prompts whose answers all score the same. An answer without a score (NaN)
    counts as equal to all others."""
    groups = scores.view(-1, group_size)
    equal = groups.nan_to_num(-torch.inf).amax(1) <= groups.nan_to_num(torch.inf).amin(1)
    return equal.repeat_interleave(group_size).nonzero()[:, 0].tolist()


def scores_to_compare(reward: Reward, raw: RawScores) -> Tensor:
    """-> [B]: the scores as they will be learned from, without what is taken off for length: a group that is
    all wrong with one answer cut is no lesson. In the first batch with ``--normalize_reward``, which has no
    running mean yet and whose clip would make all scores equal, the plain sum of the raw parts."""
    content = {name: scores for name, scores in raw.parts.items() if name not in OF_LENGTH}
    scores = reward.combine(replace(raw, parts=content))
    return scores["score"] if reward.running else scores.get("score_raw", scores["score"])


def sample_again(
    args: Namespace,
    step: int,
    batch: Batch,
    world: World,
    engine: RolloutEngine,
    old_actor: PreTrainedModel,
    reward: Reward,
    request_scores: Callable[[Batch], RawScores],
    positions: Sequence[int],
    seconds: Seconds,
) -> Batch:
    """Sample this process' prompts whose answers all score the same again -> the batch with the new answers.

    request_scores: of the reward; positions: of the batch's rows in the global batch. Processes sample
    different numbers of times, so they exchange nothing until all are done.
    """
    with world.all_or_none(), engine.weights_of(old_actor):
        for times in range(1, args.filter_groups + 1):
            rows = rows_of_equal_groups(scores_to_compare(reward, batch.raw), args.num_generations)
            if not rows:
                break
            prompt, answer = np.divmod([positions[row] for row in rows], args.num_generations)
            keys = noise_keys(args.seed, step, prompt, answer + times * args.num_generations)
            with seconds.of("rollout"):
                new = engine.respond([batch.prompts[row] for row in rows], keys, args.temperature)
            with seconds.of("reward"):
                batch.raw.replace(rows, request_scores(new))
            order = list(range(len(batch.prompts)))
            for place, row in enumerate(rows):
                order[row] = len(batch.prompts) + place
            joined = join_batches([batch, new]).rows(order)
            joined.raw = batch.raw
            joined.sampled_again = batch.sampled_again + len(rows)
            batch = joined
    return batch
