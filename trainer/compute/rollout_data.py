"""The rollout: all data of one batch, in one dataclass whose fields stand in the order of their filling.

A sequence is a prompt, then its response, from position 0 on, padded on the right. Nothing is ever padded on
the left. So padding comes after every token that matters, and a causal model needs no attention mask in
training. The responses are samples of the old actor (``collect`` in train_ppo.py), drawn by
generation/engine.py from a copy of its weights (generation/sampler_copy.py).

[B, R] fields are in response coordinates: B sequences, R response columns. Column t belongs to response token
t. Its state, which is what policy and critic have read when that token is chosen, is at sequence position
prompt_len + t - 1.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.compute.batching import Layout, pad_right, send


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """lengths [B] -> bool [B, width], True where column < length."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


LATER: Any = None  # of a field that is filled later


@dataclass
class Rollout:
    """B sequences of one process. The sampler fills the first five fields, the training step the others."""

    tokens: Tensor  # [B, T] int64, prompt + response, right-padded
    prompt_len: Tensor  # [B] int64
    response_len: Tensor  # [B] int64, at least 1; includes the EOS, if one was sampled
    finished: Tensor  # [B] bool; True: ended by an EOS or a stop string, False: cut at max_gen_len
    sampler_logprobs: Tensor  # [B, R] the sampler's own
    scores: Tensor = LATER  # [B] the rewards' sum, NaN where no part of the reward says anything
    step_rewards: Tensor | None = None  # [B, R] what of it belongs to tokens inside the response
    ref_logprobs: Tensor = LATER  # [B, R]
    old_logprobs: Tensor = LATER  # [B, R] of the training forward, or the sampler's (``sampler_has_scored``)
    values: Tensor = LATER  # [B, R] with a critic
    importance_weights: Tensor = LATER  # [B, R] what sampler and old log-probs make of the loss
    counted: Tensor = LATER  # [B, R] bool, which tokens the policy loss is of
    rewards: Tensor = LATER  # [B, R]
    outcomes: Tensor = LATER  # [B, R] their discounted sums from each token on (Monte Carlo)
    returns: Tensor = LATER  # [B, R] what the critic learns, if there is one: lambda-returns
    advantages: Tensor = LATER  # [B, R] whitened
    advantage_std: float = 1.0  # before they were divided, in units of the reward
    advantage_unit: float = 1.0  # what they were divided by (value_scale.py)

    @property
    def mask(self) -> Tensor:
        """[B, R] bool, True on response tokens, but for responses without a score: nothing is learned from
        these. From lengths, never from ``== pad``: pad may equal EOS."""
        mask = length_mask(self.response_len, self.sampler_logprobs.shape[1])
        return mask if self.scores is LATER else mask & ~self.scores.isnan()[:, None]

    @cached_property
    def layout(self) -> Layout:
        """The ``Layout`` of the sequences, the same for every forward over them. A GPU is waited for if the
        rollout was joined from several."""
        prompt_len, response_len = torch.stack([self.prompt_len, self.response_len]).tolist()
        return Layout.of_responses(prompt_len, response_len, self.tokens.device)

    def rows(self, rows: Sequence[int]) -> "Rollout":
        """-> a rollout of these rows only, cut to the longest of them. Waits for no GPU."""
        device = self.tokens.device
        prompt_len = [self.layout.prompt_len[row] for row in rows]
        response_len = [self.layout.response_len[row] for row in rows]
        layout = Layout.of_responses(prompt_len, response_len, device)
        places = send(torch.tensor(rows), device)
        picked = {}
        for name, x in self.filled().items():
            if x.dim() == 2:
                x = x[:, : layout.longest if name == "tokens" else layout.shape[1]]
            picked[name] = x[places]
        part = replace(self, **picked)
        part.layout = layout
        return part

    def responses(self) -> list[list[int]]:
        """The sampled token ids of every row, as lists; the EOS, if any, is included."""
        layout = self.layout
        rows = zip(self.tokens.tolist(), layout.prompt_len, layout.response_len, strict=True)
        return [tokens[start : start + count] for tokens, start, count in rows]

    def filled(self) -> dict[str, Any]:
        """-> {name: tensor} of the fields that are filled"""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}


def join_rollouts(parts: Iterable[Rollout]) -> Rollout:
    """Rollouts one below the other -> one of all their rows, as wide as the widest. A field that one of them
    lacks is lacking in the result."""
    found = [part.filled() for part in parts]
    joined: dict[str, Any] = {}
    for name in set(found[0]).intersection(*found):
        tensors = [x[name] for x in found]
        if tensors[0].dim() == 2:
            width = max(x.shape[1] for x in tensors)
            tensors = [F.pad(x, (0, width - x.shape[1])) for x in tensors]
        joined[name] = torch.cat(tensors)
    return Rollout(**joined)


def as_rollout(
    prompt_ids: Sequence[Sequence[int]],
    tokens: Tensor,
    logprobs: Tensor,
    response_len: Tensor,
    finished: Tensor,
) -> Rollout:
    """-> ``Rollout`` with its first five fields: each response directly behind its prompt. A GPU is waited
    for.

    prompt_ids: B lists of ids; tokens and logprobs [B, columns]: of the responses, column t is their token t,
    what lies behind a response is not used; response_len and finished [B].
    """
    counts = response_len.tolist()
    width = max(counts)
    answers = zip(prompt_ids, tokens.tolist(), counts, strict=True)
    whole, lengths = pad_right([[*prompt, *ids[:n]] for prompt, ids, n in answers], tokens.device)
    return Rollout(
        tokens=whole,
        prompt_len=lengths - response_len,
        response_len=response_len.clone(),  # the engine's own tensors change in its next call
        finished=finished.clone(),
        sampler_logprobs=logprobs[:, :width].masked_fill(~length_mask(response_len, width), 0),
    )
