"""Prompts -> scored responses: what ``collect`` of train_ppo.py samples, before anything is learned from it.

**``--filter_groups N``: prompts whose answers all score the same are sampled again, up to N times.**
``--advantage rloo`` and ``group`` compare the answers to a prompt. Where they all score the same, there is
nothing to learn. A reward of 0 or 1 leaves many such prompts: those that the policy always solves, and those
that it never does. DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2) takes other prompts in their place.
Here the same prompts get new answers, with other noise: the batch keeps its size, and which prompts a step
takes depends on nothing that was sampled. What still scores the same after N times stays in the batch.

**``--missing_eos_penalty``: what a response without an EOS loses, where it is not given.** The penalty has to
follow the rewards. One that is large beside them teaches the policy to end, and little else: its gradient
points the same way in every response. So the policy answers some prompts before step 1, and the penalty is
the standard deviation of their scores without it. It stays the same for the whole run.

**Rewards of steps inside a response.** A reward function may give a score to a character. It lands on the
token that completes this character: the first one after which the tokens so far decode to a text that has it,
and all before it, as the whole response's text does. So tokens may cut a text in any way, and a character may
be made of several. ``ppo.token_rewards`` adds what the rest of the score is worth on the last token.
"""

import time
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from dataset.data_order import global_batch
from trainer.compute.batching import send
from trainer.compute.rollout_data import Rollout, join_rollouts
from trainer.generation.sampling import noise_keys
from trainer.rewards.reward import RawScores, RunningStats
from trainer.runs.distributed import share_of


@dataclass
class Batch:
    """What a step samples: this process' prompts, their responses and scores."""

    prompts: list  # of Prompt
    rollout: Rollout
    texts: list[str]  # of the responses
    raw: RawScores  # before they are normalised, clipped and weighed
    scores: dict[str, torch.Tensor] = field(default_factory=dict)  # of parts [B], and "score"
    seconds: dict[str, float] = field(default_factory=dict)  # {phase: how long it took}
    again: int = 0  # responses that --filter_groups sampled again


def step_noise(run, step, positions, times=0):
    """The noise keys of responses: positions [B] in the global batch; times: how often they were sampled."""
    count = run.args.num_generations
    places = torch.as_tensor(positions)
    return noise_keys(run.args.seed, step, places // count, places % count + times * count)


def sample_and_score(run, prompts, keys) -> Batch:
    """A response of the old actor to each prompt, and what each part of the reward says of it; not yet
    ``scores``. keys [B]: of the noise. Raises InputError on all processes where a reward of one fails."""
    start = time.perf_counter()
    with run.world.all_or_none(), run.sampling_from(run.old_actor):
        rollout, texts = run.respond(prompts, keys, run.args.temperature)
    seconds = {"rollout": time.perf_counter() - start}
    with run.world.all_or_none():
        raw = run.raw_scores(run.reward, prompts, rollout, texts)
    return Batch(prompts, rollout, texts, raw, seconds=seconds)


# ----------------------------------------------------------------------------------------- --filter_groups

OF_LENGTH = ("missing_eos", "overlong")  # parts of the score: whether an answer was cut says nothing of it


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


def sample_again(run, step, positions, batch: Batch) -> None:
    """Sample this process' prompts whose answers all score the same again, in place.

    Processes sample different numbers of times. So nothing is exchanged between them here.
    """
    args = run.args
    for times in range(1, args.filter_groups + 1):
        rows = rows_of_equal_groups(scores_to_compare(run.reward, batch.raw), args.num_generations)
        if not rows:
            break
        asked = [batch.prompts[row] for row in rows]
        keys = step_noise(run, step, torch.tensor(positions)[rows], times)
        start = time.perf_counter()
        new, texts = run.respond(asked, keys, args.temperature)
        batch.seconds["rollout"] += time.perf_counter() - start
        batch.raw.replace(rows, run.raw_scores(run.reward, asked, new, texts))
        order = list(range(len(batch.prompts)))
        for place, row in enumerate(rows):
            order[row] = len(batch.prompts) + place
            batch.texts[row] = texts[place]
        batch.rollout = join_rollouts([batch.rollout, new]).rows(order)
        batch.again += len(rows)


# ----------------------------------------------------------------------------------- --missing_eos_penalty

PROBE_STEP = -2  # the step of these samples in the sampling noise: neither training nor evaluation has it
RESPONSES = 64  # at most; never more than a batch, for which there is room
LEAST_SPREAD = 1e-4  # standard deviation of scores that are all alike
UNKNOWN = 0.5  # the penalty then: half of a reward of 1


def choose_missing_eos_penalty(run, logger):
    """Choose the penalty of a run that begins and that has no --missing_eos_penalty; print it.

    The same for any number of processes. Raises InputError on all of them where a reward fails.
    """
    args = run.args
    world = run.world
    reward = run.reward
    if reward.missing_eos_penalty is not None:
        return
    count = min(RESPONSES, args.batch_size * world.size)
    places = global_batch(len(run.prompts), args.seed, 0, count)
    mine = share_of(range(count), world)
    with world.all_or_none():
        prompts = [run.prompts[places[i]] for i in mine]
    batch = sample_and_score(run, prompts, noise_keys(args.seed, PROBE_STEP, mine))
    scores = reward.combine(batch.raw, world)["score"]
    reward.running = {}  # the statistics of --normalize_reward begin with the first batch
    spread = sum(world.gather(RunningStats.of(scores)), RunningStats()).std
    reward.missing_eos_penalty = UNKNOWN if spread < LEAST_SPREAD else float(f"{spread:.2g}")
    with world.all_or_none():  # the disk may be full
        logger.keep_choice("missing_eos_penalty", reward.missing_eos_penalty)
    logger.say(
        f"penalty  {reward.missing_eos_penalty:g} for a response that does not end (--missing_eos_penalty): "
        f"the scores of {count} responses have the standard deviation {spread:.2g}"
    )


# ---------------------------------------------------------------------------- rewards of steps


def step_rewards(steps, texts, rollout, tokenizer):
    """-> [B, R] fp32 on the rollout's device: the sum of the steps that end with each token; None without a
    reward function.

    steps: for each response a list of (character offset or None, score), or [] in all (``RawScores.steps``);
    texts: of the B responses, as the reward function got them; rollout: theirs.
    """
    if not steps:
        return None
    rewards = torch.zeros(rollout.sampler_logprobs.shape)
    for row, (pairs, text, ids) in enumerate(zip(steps, texts, rollout.responses(), strict=True)):
        if pairs:
            places = token_places([offset for offset, _ in pairs], text, ids, tokenizer)
            for place, (_, score) in zip(places, pairs, strict=True):
                rewards[row, place] += score
    return send(rewards, rollout.tokens.device)


def token_places(offsets, text, ids, tokenizer):
    """Character offsets in the text of a response -> the places of the tokens that complete them. None and
    the length of the text mean the last token, as does a character that no tokens but all decode to."""

    @cache
    def decoded(count):
        return tokenizer.decode(ids[:count], skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def place(offset):
        if offset is None or offset >= len(text):
            return len(ids) - 1
        wanted = text[: offset + 1]
        counts = range(1, len(ids))
        return bisect_left(counts, True, key=lambda count: decoded(count)[: offset + 1] == wanted)

    return [place(offset) for offset in offsets]
