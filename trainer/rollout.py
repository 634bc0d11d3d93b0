"""Rollout: prompts -> responses of a policy, drawn by the sampler (generation/engine.py), as a ``Batch``.

Also here: the noise of a step's responses, and where rewards at characters of a text land among its tokens.
"""

import time
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dataset.lm_dataset import Prompt
from trainer.compute.batch import Batch
from trainer.compute.batching import send
from trainer.compute.memory import free_unused_memory
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import Endings, decode, response_texts


class Seconds(dict[str, float]):
    """{phase of a step: how long it took, without the phases inside it}"""

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """In this block the time counts as this phase's."""
        start = time.perf_counter()
        before = sum(self.values())
        yield
        inside = sum(self.values()) - before
        self[phase] = self.get(phase, 0.0) + time.perf_counter() - start - inside


def noise_of_step(args: Namespace, step: int, positions: Sequence[int], times: int = 0) -> Tensor:
    """The noise keys [B] of responses. positions: theirs in the global batch; times: how often these prompts
    were sampled before in this step."""
    places = np.asarray(positions)
    group_size = args.num_generations
    return noise_keys(args.seed, step, places // group_size, places % group_size + times * group_size)


@dataclass
class RolloutEngine:
    """Samples responses from the weights of one model at a time.

    with engine.weights_of(old_actor):
        batch = engine.respond(prompts, keys, temperature)
    """

    sampler: Sampler
    tokenizer: PreTrainedTokenizerBase
    endings: Endings  # what ends a response
    args: Namespace  # max_gen_len and min_gen_len
    sharded: bool  # --shard 1: a whole copy of the weights is in memory only while it samples

    @contextmanager
    def weights_of(self, model: PreTrainedModel) -> Iterator[None]:
        """In this block ``respond`` samples from this model's weights."""
        if self.sharded:
            free_unused_memory()  # the gaps that the last update has left
        self.sampler.load(model)
        try:
            yield
        finally:
            if self.sharded:
                self.sampler.release()
                self.sampler.copy.unload()

    def respond(
        self, prompts: list[Prompt], keys: Tensor, temperature: float, greedy: Sequence[bool] = ()
    ) -> Batch:
        """Prompts -> their responses, not scored. keys [B]: of ``noise_keys``; greedy: as in ``sample``."""
        batch = self.sampler.sample(
            [prompt.prompt_ids for prompt in prompts],
            keys,
            eos_ids=self.endings.eos,
            max_gen_len=self.args.max_gen_len,
            temperature=temperature,
            min_gen_len=self.args.min_gen_len,
            stops=self.endings.stops,
            never=self.endings.forbidden.never,
            greedy=greedy,
        )
        batch.prompts = prompts
        batch.texts = response_texts(batch, self.tokenizer, self.endings.stops)
        return batch


def with_sampled_space(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The batch's prompts. Some tokenizers (Llama 2's) decode a response without the space with which it
    begins. There the prompt's text ends with that space. So prompt and response together are the text that
    was sampled."""
    found = []
    for prompt, ids, text in zip(batch.prompts, batch.responses(), batch.texts, strict=True):
        before = decode(tokenizer, prompt.prompt_ids)
        behind = decode(tokenizer, [*prompt.prompt_ids, *ids])[len(before) :]
        space = behind.startswith(" " + text) and not prompt.text.endswith(" ")
        found.append(replace(prompt, text=prompt.text + " ") if space else prompt)
    return found


# ---------------------------------------------------------------------------- rewards of steps in a response


def step_rewards(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> Tensor | None:
    """-> [B, R] fp32 on the batch's device: the sum of the steps that end with each token; None without a
    reward function. ``RawScores.steps``: of each response [(character offset, score)]."""
    steps = batch.raw.steps
    if not steps:
        return None
    rewards = torch.zeros(batch.sampler_logprobs.shape)
    for row, (pairs, text, ids) in enumerate(zip(steps, batch.texts, batch.responses(), strict=True)):
        places = token_places([offset for offset, _ in pairs], text, ids, tokenizer)
        for place, (_, score) in zip(places, pairs, strict=True):
            rewards[row, place] += score
    return send(rewards, batch.tokens.device)


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
