"""``--filter_groups N``: prompts whose answers all score the same are sampled again, up to N times.

``--advantage rloo`` and ``group`` compare the answers to a prompt. Where they all score the same, there is
nothing to learn. DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2) takes other prompts in their place.
Here the same prompts get new answers, with other noise: the batch keeps its size, and which prompts a step
takes depends on nothing that was sampled. What still scores the same after N times stays in the batch.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainer.collect import Batch, noise_of_step, raw_scores, respond, sampling_from
from trainer.compute.rollout_data import join_rollouts
from trainer.rewards.combine import OF_LENGTH, RawScores, Reward


def rows_of_equal_groups(scores: Tensor, answers: int) -> list[int]:
    """Scores [B] -> the rows of the prompts whose answers all score the same; NaN, no score, differs from
    none."""
    groups = scores.view(-1, answers)
    equal = groups.nan_to_num(-torch.inf).amax(1) <= groups.nan_to_num(torch.inf).amin(1)
    return equal.repeat_interleave(answers).nonzero()[:, 0].tolist()


def scores_to_compare(reward: Reward, raw: RawScores) -> Tensor:
    """-> [B]: the scores as they will be learned from, without what is taken off for length: a group that is
    all wrong with one answer cut is no lesson. In the first batch with ``--normalize_reward``, which has no
    running mean yet and whose clip would make all scores equal, the plain sum of the raw parts."""
    judged = {name: scores for name, scores in raw.parts.items() if name not in OF_LENGTH}
    scores = reward.combine(replace(raw, parts=judged))
    return scores["score"] if reward.running else scores.get("score_raw", scores["score"])


def sample_again(run: Any, batch: Batch, step: int) -> None:
    """Sample this process' prompts whose answers all score the same again, in place. run: a ``PpoRun``.

    Processes sample different numbers of times, so they exchange nothing until all are done.
    """
    args = run.args
    with run.world.all_or_none(), sampling_from(run, run.old_actor):
        for times in range(1, args.filter_groups + 1):
            rows = rows_of_equal_groups(scores_to_compare(run.reward, batch.raw), args.num_generations)
            if not rows:
                break
            asked = [batch.prompts[row] for row in rows]
            keys = noise_of_step(args, step, [run.positions[row] for row in rows], times)
            with batch.seconds.of("rollout"):
                new = respond(run, asked, keys, args.temperature)
            with batch.seconds.of("reward"):
                batch.raw.replace(rows, raw_scores(run, run.reward, new))
            order = list(range(len(batch.prompts)))
            for place, row in enumerate(rows):
                order[row] = len(batch.prompts) + place
                batch.texts[row] = new.texts[place]
            batch.rollout = join_rollouts([batch.rollout, new.rollout]).rows(order)
            batch.again += len(rows)
