"""The reward of a response: its parts, some normalised, clipped or weighed; their plain sum is its score.

    Request -> score_parts -> RawScores -> combine -> {part: [B], "score": their sum [B]}

The parts: the environment of --env (trainer/environments), rules about the text (rules.py), reward models
(reward_models.py), functions of the user's (reward_function.py), a reward server (reward_server.py). Reward
models read messages, the others text. A function in TRL's form also gets token ids, and rules about the
length get the number of tokens. Of a model that thinks, reward models and the repetition penalty see what
follows ``</think>``; all others see the whole response. With ``--reasoning 1`` all see the whole. Of several
turns "the response" is the last one, which reward models read behind all others; a server gets the whole.

A reward model's score is clipped to ±``SCORE_LIMIT`` = ±3, after normalising it if ``--normalize_reward`` is
on. If a response has an answer block, the whole response and the block are scored and clipped separately and
then mixed: 0.4 whole + 0.6 block, as MiniMind does. The model's weight comes last. With
``--normalize_reward`` a server's scores and those of several functions are normalised and clipped too. The
scores of rules never are.

Where to add a reward of one's own:

- without changing this program: a Python function (``--reward_fn``, see reward_function.py) or a server
  (``--reward_url``, see reward_server.py);
- as a new part: write the rule in rules.py, put its scores [B] into ``parts`` in ``Reward.score_parts``, add
  its flag to ``flag_parser`` in train_ppo.py, and pass the flag on in ``make_reward`` below. What a
  reward needs to know of a response is a field of ``Request`` (reward_function.py).

The evaluation reward (``EvalReward``: --eval_reward_model, --eval_reward_fn) never trains. Its metrics are
called "judge", which is a reward model or a function here, not an LLM that is asked in words. A policy can
raise the reward that it is trained on without getting better (reward hacking). Where the records have
answers, the accuracy shows it. Where they have none, a second reward can: one that PPO does not see.
"""

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dataset.answers import after_thinking, answer_text
from dataset.formats import begun
from dataset.lm_dataset import Prompt
from errors import InputError
from trainer.compute.batch import Parts, RawScores
from trainer.rewards import rules
from trainer.rewards.reward_function import (
    Request,
    RewardFunctions,
    call_reward_function,
    errors_renamed,
    named_in_errors,
)
from trainer.rewards.reward_models import (
    RewardModel,
    RewardModels,
    load_reward_models,
    merged_history,
    named_models,
)
from trainer.rewards.reward_server import RewardServer

SCORE_LIMIT = 3.0  # scores are clipped to ±3, as in MiniMind
SMALLEST_STD = 1e-6  # the least divisor of a normalised score: if all are equal, their std is 0
OF_LENGTH = ("missing_eos", "overlong")  # parts that judge the length, and not what a response says


@dataclass
class RunningStats:
    """Count, mean and sum of squared deviations from the mean of some numbers, in fp64.

    ``a + b`` gives the statistics of the numbers of both (Chan, Golub, LeVeque 1979, eq. 2.1; Welford's
    method is the case of one number at a time). So the result does not depend on batches or processes, up to
    rounding.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, x: Tensor) -> "RunningStats":
        """The statistics of a tensor's numbers, which must be finite, but for NaN, which are left out."""
        x = x[~x.isnan()].double()
        if not len(x):
            return cls()
        return cls(x.numel(), x.mean().item(), (x - x.mean()).square().sum().item())

    def __add__(self, other: "RunningStats") -> "RunningStats":
        count = self.count + other.count
        if not other.count:
            return self
        gap = other.mean - self.mean
        share = other.count / count
        squares = self.squares + other.squares + gap * gap * self.count * share
        return RunningStats(count, self.mean + gap * share, squares)

    @property
    def std(self) -> float:
        """The population's standard deviation."""
        return math.sqrt(self.squares / max(self.count, 1))


@dataclass(eq=False)
class Reward:
    """All reward parts of a run. Call it with a ``Request``; it returns each part and their sum. Most fields
    have the name of their flag.

    A call is ``score_parts`` followed by ``combine``. Training calls the two separately: ``score_parts`` may
    fail in one process, while ``combine`` exchanges statistics between all of them."""

    models: RewardModels = field(default_factory=dict)
    functions: RewardFunctions = field(default_factory=dict)  # the user's
    server: RewardServer | None = None
    reasoning: bool = False
    normalize_reward: bool = False
    environment: bool = False  # whether the environment of --env scores its response
    # None until ``PpoRun.begin`` has chosen it (options/missing_eos.py): no response pays it
    missing_eos_penalty: float | None = 0.0
    repetition_penalty: float = 0.0
    length_reward: float = 0.0
    reward_timeout: float = 0.0  # seconds that the function may take, 0 for no limit
    max_gen_len: int = 0
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    thinking_reward: float = 0.0
    merge_history: bool = False
    with_thoughts: bool = False  # reward models read thoughts too, as always with reasoning
    running: dict[str, RunningStats] = field(default_factory=dict)  # of the normalised parts' raw scores

    @property
    def normalised(self) -> list[str]:
        """The parts that are normalised: models, the server, and functions where there are several."""
        if not self.normalize_reward:
            return []
        functions = self.functions if len(self.functions) > 1 else ()
        return [*self.models, *functions, *(["server"] if self.server else [])]

    @property
    def names(self) -> list[str]:
        """The names of all scores that ``combine`` returns."""
        return list(self(Request([], [])))

    def __call__(self, request: Request) -> Parts:
        return self.combine(self.score_parts(request))

    def score_parts(self, request: Request) -> RawScores:
        """Score B responses. Raises InputError if a reward fails: it raises an exception, takes too long, or
        gives a score that is NaN or infinite."""
        texts = request.responses
        all_of_it = self.with_thoughts or self.reasoning
        visible = texts if all_of_it else [after_thinking(text) for text in texts]
        beginnings = request.beginnings
        raw = RawScores()
        parts: dict[str, Tensor | list[float]] = {}
        if self.environment:
            scores = [dialogue.score for dialogue in request.dialogues]
            parts["environment"] = finite("--env", scores, texts, request.prompts)
        if self.reasoning:  # 0.5 for the full form; 0.25 for each of the four tags that is there once
            full = [rules.from_thought(x) + text for x, text in zip(beginnings, texts, strict=True)]
            parts["format"] = [rules.format_reward(text) for text in full]
            parts["marks"] = [rules.mark_reward(text) for text in full]
        if self.thinking_reward:
            parts["thinking"] = [
                rules.thinking_reward(
                    prompt.text if beginning else prompt.text.removesuffix(begun(prompt.prompt)),
                    text,
                    self.thinking_reward,
                    beginning,
                )
                for prompt, text, beginning in zip(request.prompts, texts, beginnings, strict=True)
            ]
        if self.models:
            parts |= self._ask_models(request, raw)
        for name, (function, weight) in self.functions.items():
            with named_in_errors(name):
                scores, steps = call_reward_function(function, request, self.reward_timeout)
                parts[name] = finite("--reward_fn", scores, texts, request.prompts)
                if any(steps) and name in self.normalised:
                    raise InputError(
                        "--reward_fn: with several functions --normalize_reward 1 needs numbers, and this "
                        "one returned steps; leave the flag out"
                    )
            weighted = [[(offset, weight * x) for offset, x in pairs] for pairs in steps]
            raw.steps = [a + b for a, b in zip(raw.steps, weighted, strict=True)] if raw.steps else weighted
        raw.logged = request.logged
        if self.server:
            parts["server"] = finite("--reward_url", self.server(request), texts, request.prompts)
        if self.repetition_penalty:
            parts["repetition"] = [
                -rules.repetition_penalty(text, self.repetition_penalty) for text in visible
            ]
        if self.length_reward:
            parts["length_reward"] = [rules.length_reward(text, self.length_reward) for text in texts]
        if self.missing_eos_penalty != 0:
            penalty = self.missing_eos_penalty or 0.0
            parts["missing_eos"] = [-penalty * (not ended) for ended in request.finished]
        if self.overlong_buffer and self.overlong_penalty:
            parts["overlong"] = [
                -rules.overlong_penalty(n, self.max_gen_len, self.overlong_buffer, self.overlong_penalty)
                for n in request.lengths
            ]
        raw.parts = {name: torch.as_tensor(scores, dtype=torch.float32) for name, scores in parts.items()}
        return raw

    def _ask_models(self, request, raw):
        """Score every whole answer, and every answer block alone, in one call of each reward model."""
        exchanges = []
        rows = zip(request.exchanges, request.responses, request.beginnings, strict=True)
        for (question, answer), response, beginning in rows:
            if not (self.with_thoughts or self.reasoning):
                answer = after_thinking(response, beginning)
            exchanges.append((merged_history(question) if self.merge_history else question, answer))
        count = len(exchanges)
        answers = [answer_text(text) for _, text in exchanges] if self.reasoning else []
        blocks = {row: block for row, block in enumerate(answers) if block is not None}
        exchanges += [(exchanges[row][0], block) for row, block in blocks.items()]
        prompts = request.prompts + [request.prompts[row] for row in blocks]
        scores = {name: model(exchanges) for name, (model, _) in self.models.items()}
        for name, x in scores.items():  # all have scored: sharded ones need all processes
            finite("--reward_model", x, [text for _, text in exchanges], prompts)
            raw.blocks[name] = torch.full((count,), math.nan)
            raw.blocks[name][[*blocks]] = x[count:]
        return {name: x[:count] for name, x in scores.items()}

    def combine(self, raw: RawScores, world: Any = None) -> Parts:
        """``RawScores`` -> {part: [B], "score": their sum [B]}; {} without any. With ``--normalize_reward``
        also "score_raw": the sum with raw scores times weights. With several functions also "function": the
        sum of theirs. NaN where no part says anything of a response.

        world: of training, a ``World`` (runs/distributed.py): the running statistics first take in the raw
        scores of all its processes, so all must call this. Evaluation gives none: they stay as they are.
        """
        if not raw.parts:
            return {}
        if world:
            for name in self.normalised:
                new = world.gather(RunningStats.of(raw.parts[name]))
                self.running[name] = sum(new, self.running.get(name, RunningStats()))
        clipped = {name: self._clipped(name, raw.parts[name]) for name in {*self.models, *self.normalised}}
        blocks = {name: self._clipped(name, scores) for name, scores in raw.blocks.items()}
        parts = self._weighted(raw.parts | clipped, blocks)
        scores = parts | {"score": total(parts)}
        if self.normalised:
            scores["score_raw"] = total(self._weighted(raw.parts, raw.blocks))
        if len(self.functions) > 1:
            scores["function"] = total({name: parts[name] for name in self.functions})
        return scores

    def _weighted(self, parts: Parts, blocks: Parts) -> Parts:
        """{part: scores [B]}, those of models and functions times their weights; of a model 0.4 that of the
        whole response + 0.6 that of its answer block, if it has one."""
        weighted = dict(parts)
        for name, (_, weight) in self.models.items():
            block = blocks[name]
            weighted[name] = weight * torch.where(block.isnan(), parts[name], 0.4 * parts[name] + 0.6 * block)
        for name, (_, weight) in self.functions.items():
            weighted[name] = weight * parts[name]
        return weighted

    def _clipped(self, name: str, scores: Tensor) -> Tensor:
        """Scores clipped to ±3, normalised before if their part is."""
        if stats := self.running.get(name):
            scores = ((scores.double() - stats.mean) / max(stats.std, SMALLEST_STD)).float()
        return scores.clamp(-SCORE_LIMIT, SCORE_LIMIT)

    def at_limit(self, raw: RawScores) -> Tensor:
        """[B], True where the score of a whole response by a reward model is at the limit of the clip or
        beyond it (``--normalize_reward``: the normalised score). raw: ``RawScores`` that were combined."""
        clipped = [self._clipped(name, raw.parts[name]) for name in self.models]
        return torch.stack(clipped).abs().ge(SCORE_LIMIT).any(0)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: {part: {"count": …, "mean": …, "squares": …}}, and the penalty."""
        running = {part: vars(stats) for part, stats in self.running.items()}
        return {"missing_eos_penalty": self.missing_eos_penalty, **running}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned. A penalty that is given stays."""
        penalty = state.pop("missing_eos_penalty")
        if self.missing_eos_penalty is None:
            self.missing_eos_penalty = penalty
        self.running = {part: RunningStats(**stats) for part, stats in state.items()}


# Errors on --reward_fn and --reward_model name --eval_reward_fn and --eval_reward_model: the code that raises
# them is the same.
named_as_evaluation = partial(errors_renamed, r"--reward_(fn|model)\b", r"--eval_reward_\1")


class EvalReward(Reward):
    """The evaluation reward of a run; without any model or function it has no scores. Its scores are taken as
    they are, neither clipped nor normalised. Its models see a thought only with ``--reasoning 1``, as those
    that train."""

    score_parts = named_as_evaluation()(Reward.score_parts)

    def combine(self, raw: RawScores, world: Any = None) -> Parts:
        """``RawScores`` -> {name: scores [B]}, "judge" is the sum of the others; {} without any."""
        if not raw.parts:
            return {}
        parts = {f"judge_{name}": x for name, x in self._weighted(raw.parts, raw.blocks).items()}
        return {"judge": total(parts)} | (parts if len(parts) > 1 else {})


def total(parts: Parts) -> Tensor:
    """{part: [B]} -> the sum [B] of the parts that are not NaN; NaN where only ``OF_LENGTH`` say
    something."""
    stacked = torch.stack(list(parts.values()))
    silent = [scores.isnan() for name, scores in parts.items() if name not in OF_LENGTH]
    summed = torch.where(stacked.isnan(), 0.0, stacked).sum(0)
    return torch.where(torch.stack(silent).all(0), math.nan, summed) if silent else summed


def finite(
    flag: str, scores: Tensor | Sequence[float | None], texts: list[str], prompts: list[Prompt]
) -> Tensor:
    """Scores [B] of these texts, the responses to prompts -> the same in fp32, NaN for None. Raises
    InputError if a number is NaN or infinite: it would spoil the whole batch."""
    given = scores.tolist() if isinstance(scores, Tensor) else scores
    numbers = torch.tensor([math.nan if x is None else x for x in given], dtype=torch.float32)
    for row, score in enumerate(numbers.tolist()):
        if given[row] is not None and not math.isfinite(score):
            remedy = "; --dtype float32 may help" if flag == "--reward_model" else ""
            raise InputError(
                f"{flag}: the score {score} for the response "
                f"{json.dumps(texts[row], ensure_ascii=False)[:80]} to record {prompts[row].index + 1}; "
                f"scores must be finite{remedy}"
            )
    return numbers


def make_reward(args: Namespace, functions: RewardFunctions, environment: bool = False) -> Reward:
    """Flags -> the ``Reward`` of the run, whose models ``load_models`` loads. functions: of --reward_fn;
    environment: whether the class of --env scores its response. Raises InputError where nothing scores."""
    if args.env and not (environment or functions or args.reward_model or args.reward_url):
        raise InputError(
            f"--env {args.env}: its class has no get_reward, so nothing scores a response; write one, or "
            "give --reward_fn, --reward_model or --reward_url"
        )
    return Reward(
        environment=environment,
        models=not_loaded(args.reward_model),
        functions=functions,
        server=RewardServer(args.reward_url, args.reward_timeout) if args.reward_url else None,
        reasoning=args.reasoning,
        normalize_reward=args.normalize_reward,
        missing_eos_penalty=args.missing_eos_penalty,
        repetition_penalty=args.repetition_penalty,
        length_reward=args.length_reward,
        reward_timeout=args.reward_timeout,
        max_gen_len=args.max_gen_len,
        overlong_buffer=args.overlong_buffer,
        overlong_penalty=args.overlong_penalty,
        thinking_reward=args.thinking_reward,
        merge_history=args.merge_history,
    )


def make_eval_reward(args: Namespace, functions: RewardFunctions) -> EvalReward:
    """Flags -> the ``EvalReward`` of the run, as ``make_reward``. functions: of --eval_reward_fn."""
    return EvalReward(
        models=not_loaded(args.eval_reward_model),
        functions=functions,
        reward_timeout=args.reward_timeout,
        merge_history=args.merge_history,
        with_thoughts=args.reasoning,
    )


def not_loaded(specs: list[str]) -> RewardModels:
    """The names and weights of reward models, before they are loaded: that is enough for ``Reward.names``."""

    def model(conversations: list) -> Tensor:
        return torch.zeros(len(conversations))

    return {name: (model, weight) for name, (_, weight) in named_models(specs).items()}  # type: ignore[misc]


def load_models(reward: Reward, args: Namespace, device: torch.device, dtype: torch.dtype) -> None:
    """Load the models of a reward, which ``make_reward`` or ``make_eval_reward`` has made. Raises InputError,
    which names the flag."""
    if isinstance(reward, EvalReward):
        with named_as_evaluation():
            reward.models = load_reward_models(args.eval_reward_model, args, device, dtype)
    else:
        reward.models = load_reward_models(args.reward_model, args, device, dtype)


def scoring_models(*rewards: Reward) -> list[RewardModel]:
    """The reward models of these rewards."""
    return [model for reward in rewards for model, _ in reward.models.values()]


def modules_of(*rewards: Reward) -> list[PreTrainedModel]:
    """The frozen modules of the reward models of these rewards."""
    return [model.model for model in scoring_models(*rewards)]
