"""The batch: all data of one step, in one dataclass whose fields stand in the order of their filling.

A sequence is a prompt, then its response, from position 0 on, padded on the right. Nothing is ever padded on
the left. So padding comes after every token that matters, and a causal model needs no attention mask in
training. The responses (completions, in the words of other trainers) are samples of the old actor, or logged
answers, replayed samples of an earlier actor, or an evaluation's. Between the turns of one of several turns
stand observations, which nobody sampled. The phases that fill the fields, ``sample`` to ``estimate``, are
functions of train_ppo.py.

[B, R] fields are in response coordinates: B sequences, R response columns. Column t belongs to response token
t. The state in which policy and critic choose that token is at sequence position prompt_len + t - 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dataset.formats import Messages
from dataset.lm_dataset import Prompt
from trainer.compute.batching import Layout, pad_right, send

Parts = dict[str, Tensor]  # {name of a part of the reward: scores [B]}, NaN where it says nothing
Steps = list[tuple[int, float]]  # of one response: (character offset, score)


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """lengths [B] -> bool [B, width], True where column < length."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


@dataclass
class RawScores:
    """The scores of B responses, part by part, not yet normalised, clipped or multiplied by weights."""

    parts: Parts = field(default_factory=dict)
    # {reward model: scores [B] of the answer blocks alone}, NaN where a response has no block
    blocks: Parts = field(default_factory=dict)
    steps: list[Steps] = field(default_factory=list)  # of the functions' scores; [] without a function
    logged: dict[str, list[float]] = field(default_factory=dict)  # {name: what functions gave log_metric}

    def replace(self, rows: list[int], new: "RawScores") -> None:
        """The responses of ``rows`` get what ``new`` says of them."""
        for mine, theirs in ((self.parts, new.parts), (self.blocks, new.blocks)):
            for name, scores in theirs.items():
                mine[name][rows] = scores
        for row, steps in zip(rows, new.steps, strict=False):
            self.steps[row] = steps
        for name, values in new.logged.items():
            self.logged.setdefault(name, []).extend(values)


class Dialogue(NamedTuple):
    """A response in several turns (--env, --tools), beside its tokens."""

    messages: Messages  # turns of the assistant, results of its calls, observations
    environment: Any  # the user's object, None with --tools
    score: float | None  # by the environment; None: it says nothing
    turns: int = 1
    calls: int = 0
    failed_calls: int = 0  # that could not be read or run, or raised an exception
    observation_tokens: int = 0
    hung: bool = False  # ended because its environment took too long
    no_room: bool = False  # ended because an observation did not fit


LATER: Any = None  # of a field that is filled later


@dataclass
class Batch:
    """B sequences of one process: a training step, a minibatch of it, or a part of an evaluation."""

    # ``sample`` (train_ppo.py): what the engine gives (generation/engine.py), and the words of it
    tokens: Tensor  # [B, T] int64, prompt + response, right-padded
    prompt_len: Tensor  # [B] int64
    response_len: Tensor  # [B] int64, at least 1; includes the EOS, if one was sampled
    finished: Tensor  # [B] bool; True: ended by an EOS or a stop string, False: cut at max_gen_len
    sampler_logprobs: Tensor  # [B, R] the sampler's own
    prompts: list[Prompt] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # of the responses; of several turns the last one's
    # ``sample`` with --env or --tools (trainer/environments)
    is_action: Tensor | None = None  # [B, R] bool, False on observations, which stand between turns
    turn_rewards: Tensor | None = None  # [B, R] of a text game, each on the last token of its turn
    dialogues: list[Dialogue] = field(default_factory=list)
    # ``score``
    sampled_again: int = 0  # responses that --filter_groups has replaced
    raw: RawScores = field(default_factory=RawScores)
    parts: Parts = field(default_factory=dict)  # normalised, clipped, weighed; their sum is "score"
    scores: Tensor = LATER  # [B] "score", NaN where no part of the reward says anything
    step_rewards: Tensor | None = None  # [B, R] what of it belongs to tokens inside the response
    # ``evaluate_tokens`` (``sampler_has_scored``: models.py)
    ref_logprobs: Tensor = LATER  # [B, R]
    old_logprobs: Tensor = LATER  # [B, R] of the training forward, or the sampler's (``sampler_has_scored``)
    values: Tensor = LATER  # [B, R] with a critic; ``ValueScale.fit`` corrects the first batch's
    importance_weights: Tensor = LATER  # [B, R] what sampler and old log-probs make of the loss
    # [B, R] bool, which of the action tokens the policy loss is of (--entropy_top, --mask_truncated)
    loss_mask: Tensor = LATER
    # ``reward_tokens`` and ``estimate``
    rewards: Tensor = LATER  # [B, R]
    mc_returns: Tensor = LATER  # [B, R] the discounted rewards from each token on (Monte Carlo)
    returns: Tensor = LATER  # [B, R] what the critic learns, if there is one: lambda-returns
    advantages: Tensor = LATER  # [B, R] whitened (advantages.py)
    advantage_std: float = 1.0  # before they were divided, in units of the reward
    advantage_scale: float = 1.0  # what they were divided by (``AdvantageScale``)

    @property
    def action_mask(self) -> Tensor:
        """[B, R] bool, True on sampled tokens, the end of each turn among them, but for responses without a
        score: nothing is learned from these. From lengths, never from ``== pad``: pad may equal EOS."""
        mask = length_mask(self.response_len, self.sampler_logprobs.shape[1])
        mask = mask if self.is_action is None else mask & self.is_action
        return mask if self.scores is LATER else mask & ~self.scores.isnan()[:, None]

    @property
    def action_order(self) -> Tensor | None:
        """[B, R] int64: the columns of each row, first those of its sampled tokens. None where all are."""
        if self.is_action is None:
            return None
        return torch.argsort(self.is_action.byte(), dim=1, descending=True, stable=True)

    @property
    def lengths(self) -> Tensor:
        """[B] int64: how many tokens of each response were sampled."""
        return self.response_len if self.is_action is None else self.is_action.sum(1)

    @cached_property
    def layout(self) -> Layout:
        """The ``Layout`` of the sequences. A GPU is waited for, but not for that of a batch of ``rows``."""
        prompt_len, response_len = torch.stack([self.prompt_len, self.response_len]).tolist()
        ids = zip(self.tokens.cpu().numpy(), prompt_len, strict=True)
        number: dict[bytes, int] = {}  # of each prompt
        prompt = [number.setdefault(row[:count].tobytes(), len(number)) for row, count in ids]
        return Layout.of_responses(prompt_len, response_len, self.tokens.device, prompt)

    def rows(self, rows: Sequence[int], shared: bool = False) -> "Batch":
        """-> a batch of these rows only, cut to the longest of them, without raw scores and parts. Waits for
        no GPU. shared: whether its layout has equal prompts once (``Scorer.shares_prompts``)."""
        device = self.tokens.device
        prompt_len = [self.layout.prompt_len[row] for row in rows]
        response_len = [self.layout.response_len[row] for row in rows]
        prompt = [self.layout.prompt[row] for row in rows]
        layout = Layout.of_responses(prompt_len, response_len, device, prompt, shared)
        index = send(torch.tensor(rows), device)
        picked: dict[str, Any] = {}
        for name, x in self.tensors().items():
            if x.dim() == 2:
                x = x[:, : layout.longest if name == "tokens" else layout.shape[1]]
            picked[name] = x[index]
        for name, items in self.lists().items():
            picked[name] = [items[row] for row in rows]
        part = replace(self, **picked, raw=RawScores(), parts={})
        part.layout = layout
        return part

    def newest(self, count: int) -> "Batch":
        """The last ``count`` rows: those of the new batch, where replayed ones come first."""
        first = len(self.tokens) - count
        return self.rows(range(first, len(self.tokens))) if first > 0 else self

    def responses(self) -> list[list[int]]:
        """The token ids of every response, as lists; the EOS, if any, and observations are included."""
        layout = self.layout
        rows = zip(self.tokens.tolist(), layout.prompt_len, layout.response_len, strict=True)
        return [tokens[start : start + count] for tokens, start, count in rows]

    def sampled(self) -> list[list[int]]:
        """``responses`` without observations."""
        responses = self.responses()
        if self.is_action is None:
            return responses
        return [[*compress(*row)] for row in zip(responses, self.is_action.tolist(), strict=True)]

    def last_turns(self) -> list[int]:
        """The column with which the last turn of every response begins."""
        if self.is_action is None:
            return [0] * len(self.tokens)
        width = self.is_action.shape[1]
        column = torch.arange(1, width + 1, device=self.tokens.device)
        observed = length_mask(self.response_len, width) & ~self.is_action
        return torch.where(observed, column, 0).amax(1).tolist()

    def tensors(self) -> dict[str, Any]:
        """-> {name: tensor} of the fields that are filled"""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def lists(self) -> dict[str, list]:
        """-> {name: a list with an item for each row} of the fields that are filled"""
        found: dict[str, list] = {"prompts": self.prompts, "texts": self.texts, "dialogues": self.dialogues}
        return {name: items for name, items in found.items() if items}


def join_batches(parts: Sequence[Batch]) -> Batch:
    """Batches one below the other -> one of all their rows, as wide as the widest. A field that one of them
    lacks is lacking in the result; raw scores and parts are."""
    found = [part.tensors() for part in parts]
    joined: dict[str, Any] = {}
    for name in set(found[0]).intersection(*found):
        tensors = [x[name] for x in found]
        if tensors[0].dim() == 2:
            width = max(x.shape[1] for x in tensors)
            tensors = [F.pad(x, (0, width - x.shape[1])) for x in tensors]
        joined[name] = torch.cat(tensors)
    lists = [part.lists() for part in parts]
    for name in set(lists[0]).intersection(*lists):
        joined[name] = [item for items in lists for item in items[name]]
    return Batch(**joined)


def new_batch(
    prompt_ids: Sequence[Sequence[int]],
    tokens: Tensor,
    logprobs: Tensor,
    response_len: Tensor,
    finished: Tensor,
) -> Batch:
    """-> ``Batch`` with its first five fields: each response directly behind its prompt. A GPU is waited
    for.

    prompt_ids: B lists of ids; tokens and logprobs [B, columns]: of the responses, column t is their token t,
    what lies behind a response is not used; response_len and finished [B].
    """
    counts = response_len.tolist()
    width = max(counts)
    answers = zip(prompt_ids, tokens.tolist(), counts, strict=True)
    padded, lengths = pad_right([[*prompt, *ids[:n]] for prompt, ids, n in answers], tokens.device)
    return Batch(
        tokens=padded,
        prompt_len=lengths - response_len,
        response_len=response_len.clone(),  # the engine's own tensors change in its next call
        finished=finished.clone(),
        sampler_logprobs=logprobs[:, :width].masked_fill(~length_mask(response_len, width), 0),
    )
