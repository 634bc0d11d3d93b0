"""Prompts -> responses -> raw scores: one batch of PPO, before anything is learned from it."""

import time
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dataset.lm_dataset import Prompt
from trainer.compute.batching import send
from trainer.compute.memory import free_unused_memory
from trainer.compute.rollout_data import Rollout
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import decode, response_texts
from trainer.rewards.combine import Parts, RawScores, Reward, modules_of
from trainer.rewards.reward_function import Request, values_of_run


class Seconds(dict[str, float]):
    """{phase of a step: how long it took}"""

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """In this block the time counts as this phase's."""
        start = time.perf_counter()
        yield
        self[phase] = self.get(phase, 0.0) + time.perf_counter() - start


@dataclass
class Batch:
    """Prompts of this process, their responses and scores: of a step, or of an evaluation."""

    prompts: list[Prompt]
    rollout: Rollout
    texts: list[str]  # of the responses
    raw: RawScores = field(default_factory=RawScores)  # before they are normalised, clipped and weighed
    scores: Parts = field(default_factory=dict)  # of parts [B], and "score"
    seconds: Seconds = field(default_factory=Seconds)
    again: int = 0  # responses that --filter_groups sampled again


def noise_of_step(args: Namespace, step: int, positions: Sequence[int], times: int = 0) -> Tensor:
    """The noise keys [B] of responses. positions: theirs in the global batch; times: how often these prompts
    were sampled before in this step."""
    places = np.asarray(positions)
    answers = args.num_generations
    return noise_keys(args.seed, step, places // answers, places % answers + times * answers)


# ------------------------------------------------------------------ prompts -> responses -> raw scores


@contextmanager
def sampling_from(run: Any, model: PreTrainedModel) -> Iterator[None]:
    """In this block ``respond`` samples from this model's weights. run, here and below: a ``PpoRun``."""
    if run.in_step:
        free_unused_memory()  # the gaps that the last update has left
    run.sampler.load(model)
    try:
        yield
    finally:
        if run.in_step:
            run.sampler.release()
            run.sampler.copy.unload()


def respond(run: Any, prompts: list[Prompt], keys: Tensor, temperature: float) -> Batch:
    """Prompts -> their responses, not scored. Only inside ``sampling_from``, whose weights it samples
    from."""
    rollout = run.sampler.sample(
        [prompt.prompt_ids for prompt in prompts],
        keys,
        eos_ids=run.endings.eos,
        max_gen_len=run.args.max_gen_len,
        temperature=temperature,
        min_gen_len=run.args.min_gen_len,
        stops=run.endings.stops,
        never=run.endings.forbidden.never,
    )
    if run.plan.release_cache:  # memory is short in the phases after sampling
        run.sampler.release()
    return Batch(prompts, rollout, response_texts(rollout, run.tokenizer, run.endings.stops))


def raw_scores(run: Any, reward: Reward, batch: Batch) -> RawScores:
    """What each part of a reward (``Reward`` or ``Judge``) says of the responses, before it is normalised,
    clipped and weighed."""
    with run.host.on_device(*modules_of(reward)):
        finished = batch.rollout.finished.tolist()
        lengths = batch.rollout.layout.response_len
        of_run = values_of_run(run.names_of_run, run.progress.step, run.total_steps)
        prompts = joined(batch, run.tokenizer) if run.args.reward_url else batch.prompts
        ids = batch.rollout.responses()
        return reward.raw_scores(Request(prompts, batch.texts, finished, lengths, ids, of_run))


def joined(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The batch's prompts; their texts end with the space with which the response begins where its own text
    has none, as with Llama 2's tokenizer. So prompt and response together are the text that was sampled."""
    found = []
    for prompt, ids, text in zip(batch.prompts, batch.rollout.responses(), batch.texts, strict=True):
        before = decode(tokenizer, prompt.prompt_ids)
        behind = decode(tokenizer, [*prompt.prompt_ids, *ids])[len(before) :]
        space = behind.startswith(" " + text) and not prompt.text.endswith(" ")
        found.append(replace(prompt, text=prompt.text + " ") if space else prompt)
    return found


# ---------------------------------------------------------------------------- rewards of steps in a response


def step_rewards(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> Tensor | None:
    """-> [B, R] fp32 on the rollout's device: the sum of the steps that end with each token; None without a
    reward function. ``RawScores.steps``: of each response [(character offset, score)]."""
    steps = batch.raw.steps
    if not steps:
        return None
    rollout = batch.rollout
    rewards = torch.zeros(rollout.sampler_logprobs.shape)
    for row, (pairs, text, ids) in enumerate(zip(steps, batch.texts, rollout.responses(), strict=True)):
        places = token_places([offset for offset, _ in pairs], text, ids, tokenizer)
        for place, (_, score) in zip(places, pairs, strict=True):
            rewards[row, place] += score
    return send(rewards, rollout.tokens.device)


def token_places(
    offsets: Sequence[int], text: str, ids: list[int], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Character offsets in the text of a response -> the places of their tokens. The token of a character is
    the first after which the decoded text reaches and includes it, even where it is gone again while the
    next character is incomplete (byte fallback). The end of the text, or a character that only the whole
    decodes to: the last token."""

    @cache
    def decoded(count):
        return decode(tokenizer, ids[:count])

    def place(offset):
        if offset >= len(text):
            return len(ids) - 1
        wanted = text[: offset + 1]
        found = bisect_left(
            range(1, len(ids)), True, key=lambda count: decoded(count)[: offset + 1] == wanted
        )
        # An incomplete character is as long as its bytes, or longer.
        for count in range(found, 0, -1):
            if len(decoded(count)) <= offset:
                break
            if decoded(count)[: offset + 1] == wanted:
                found = count - 1
        return found

    return [place(offset) for offset in offsets]
