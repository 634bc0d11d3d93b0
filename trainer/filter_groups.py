"""Prompts whose answers all score the same are sampled again (``--filter_groups N``: up to N times).

``--advantage rloo`` and ``group`` compare the answers to a prompt. Where they all score the same, there is
nothing to learn. A reward of 0 or 1 leaves many such prompts: those that the policy always solves, and those
that it never does. DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2) takes other prompts in their place.
Here the same prompts get new answers, with other noise: the batch keeps its size, and which prompts a step
takes depends on nothing that was sampled. What still scores the same after N times stays in the batch.
"""

import time
from dataclasses import replace

import torch

from trainer.compute.rollout_data import join_rollouts
from trainer.generation.sampling_noise import noise_keys

OF_LENGTH = ("missing_eos", "overlong")  # parts of the score: whether an answer was cut says nothing of it


def step_noise(run, step, positions, times=0):
    """The noise keys of responses: positions [B] in the global batch; times: how often they were sampled."""
    count = run.args.num_generations
    places = torch.as_tensor(positions)
    return noise_keys(run.args.seed, step, places // count, places % count + times * count)


def rows_of_equal_groups(scores, answers):
    """Scores [B] -> the rows of the prompts whose answers all score the same, as a list."""
    groups = scores.view(-1, answers)
    equal = groups.amax(1) == groups.amin(1)
    return equal.repeat_interleave(answers).nonzero()[:, 0].tolist()


def scores_to_compare(reward, raw):
    """``RawScores`` -> [B]: the scores as they will be learned from, without what is taken off for length:
    a group that is all wrong with one answer cut is no lesson. In the first batch of a run with
    ``--normalize_reward`` there is no running mean and standard deviation yet, and the clip would make all
    normalised scores equal: there the plain sum of the raw parts."""
    judged = {name: scores for name, scores in raw.parts.items() if name not in OF_LENGTH}
    scores = reward.combine(replace(raw, parts=judged))
    return scores["score"] if reward.running else scores.get("score_raw", scores["score"])


def sample_again(run, step, positions, prompts, rollout, texts, raw):
    """Sample this process' prompts whose answers all score the same again -> (rollout, texts, ``RawScores``,
    how many responses were sampled again, the seconds that sampling took).

    Arguments: as ``collect`` of train_ppo.py has them. Processes sample different numbers of times. So
    nothing is exchanged between them here.
    """
    args, again, seconds = run.args, 0, 0.0
    for times in range(1, args.filter_groups + 1):
        scores = scores_to_compare(run.reward, raw)
        rows = rows_of_equal_groups(scores, args.num_generations)
        if not rows:
            break
        asked = [prompts[row] for row in rows]
        keys = step_noise(run, step, torch.tensor(positions)[rows], times)
        start = time.perf_counter()
        new, new_texts = run.respond(asked, keys, args.temperature)
        seconds += time.perf_counter() - start
        raw = raw.replaced(rows, run.raw_scores(run.reward, asked, new, new_texts))
        order, count = list(range(len(prompts))), len(prompts)
        for place, row in enumerate(rows):
            order[row], texts[row] = count + place, new_texts[place]
        rollout = join_rollouts([rollout, new]).rows(order)
        again += len(rows)
    return rollout, texts, raw, again, seconds
