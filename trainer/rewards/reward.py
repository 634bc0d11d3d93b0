"""The reward of a response: its score is the plain sum of several parts, and every part is logged as well.

    Request -> raw_scores -> RawScores -> combine -> {part: [B], "score": their sum [B]}

The parts: rules about the text (rules.py), reward models (reward_models.py), a function of the user's
(reward_function.py), a reward server (reward_server.py). All of them read text, never the policy's tokens;
reward models get messages as messages. Of a model that thinks, reward models and the repetition penalty see
what follows ``</think>``; all others see the whole response. With ``--reasoning 1`` all see the whole.

A reward model's score is clipped to ±``SCORE_LIMIT`` = ±3, after normalising it if ``--normalize_reward`` is
on. If a response has an answer block, the whole response and the block are scored and clipped separately and
then mixed: 0.4 whole + 0.6 block, as MiniMind does. The model's weight comes last. A server's scores are
clipped too, but only with ``--normalize_reward``.

Where to add a reward of one's own:

- without changing this program: a Python function (``--reward_fn``, see reward_function.py) or a server
  (``--reward_url``, see reward_server.py);
- as a new part: write the rule in rules.py, put its scores [B] into ``parts`` in ``Reward.raw_scores``, add
  its flag to ``flag_parser`` in train_ppo.py, and pass the flag on in ``load_reward`` below. What a
  reward needs to know of a response is a field of ``Request``.

The judge is an evaluation reward that never trains (--eval_reward_model, --eval_reward_fn). A policy can
raise the reward that it is trained on without getting better (reward hacking). Where the records have
answers, the accuracy shows it. Where they have none, a second reward can: one that PPO does not see.
"""

import json
import math
import re
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch

from dataset.lm_dataset import Prompt
from errors import InputError
from trainer.rewards import rules
from trainer.rewards.reward_function import call_reward_function, load_reward_function
from trainer.rewards.reward_models import load_reward_models
from trainer.rewards.reward_server import RewardServer

SCORE_LIMIT = 3.0  # scores are clipped to ±3, as in MiniMind
SMALLEST_STD = 1e-6  # the least divisor of a normalised score: if all are equal, their std is 0


@dataclass
class Request:
    """B responses, and what rewards may know of them."""

    prompts: list[Prompt]
    responses: list[str]
    finished: list[bool]  # False for a response that was cut at --max_gen_len
    lengths: list[int]  # in tokens


@dataclass
class RawScores:
    """The scores of B responses, part by part, not yet normalised, clipped or multiplied by weights."""

    parts: dict = field(default_factory=dict)  # {name of the part: scores [B]}
    blocks: dict = field(default_factory=dict)  # {reward model: scores [B] of the answer blocks alone}
    has_block: torch.Tensor | None = None  # [B] bool; where it is False, ``blocks`` has the whole's score
    # Of each response its (character offset or None, score), where the user's function gave steps. The part
    # "function" is their sum. [] without a function.
    steps: list = field(default_factory=list)
    judging_seconds: float = 0.0  # how long the reward models took for them

    def replace(self, rows: list[int], new: "RawScores") -> None:
        """The responses of ``rows`` get what ``new`` says of them."""
        for name, scores in new.parts.items():
            self.parts[name][rows] = scores
        for name, scores in new.blocks.items():
            self.blocks[name][rows] = scores
            self.has_block[rows] = new.has_block
        for row, pairs in zip(rows, new.steps, strict=False):
            self.steps[row] = pairs
        self.judging_seconds += new.judging_seconds


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
    def of(cls, x: torch.Tensor) -> "RunningStats":
        """The statistics of a tensor's numbers, which must be finite."""
        x = x.double()
        return cls(x.numel(), x.mean().item(), (x - x.mean()).square().sum().item())

    def __add__(self, other):
        count = self.count + other.count
        gap = other.mean - self.mean
        share = other.count / max(count, 1)
        squares = self.squares + other.squares + gap * gap * self.count * share
        return RunningStats(count, self.mean + gap * share, squares)

    @property
    def std(self) -> float:
        """The population's standard deviation."""
        return math.sqrt(self.squares / self.count)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """(x - mean) / std for a tensor x -> fp32 of the same shape."""
        return ((x.double() - self.mean) / max(self.std, SMALLEST_STD)).float()


@dataclass(eq=False)
class Reward:
    """All reward parts of a run. Call it with a ``Request``; it returns each part and their sum.

    A call is ``raw_scores`` followed by ``combine``. Training calls the two separately: ``raw_scores`` may
    fail in one process, while ``combine`` exchanges statistics between all of them (``--normalize_reward``).
    ``running``: {part: ``RunningStats``} of the raw scores of all whole responses so far. Checkpoints keep it
    (``state_dict``).
    """

    models: dict = field(default_factory=dict)  # {name of the part: (reward model, weight)}
    function: Callable | None = None  # the user's
    server: RewardServer | None = None
    reasoning: bool = True
    normalize: bool = False
    missing_eos_penalty: float | None = 0.0  # None until it is chosen (collect.py): no response pays it
    repetition_penalty: float = 0.0
    length_reward: float = 0.0
    timeout: float = 0.0  # seconds that the function may take, 0 for no limit
    overlong: tuple | None = None  # (--max_gen_len, --overlong_buffer, --overlong_penalty)
    thinking_reward: float = 0.0
    whole: bool = False  # thoughts are judged too, as always with reasoning
    running: dict = field(default_factory=dict)

    @property
    def normalized(self):
        """The parts that are normalised: the user chooses the scale of every other part."""
        return {*self.models, "server"} if self.normalize else set()

    @property
    def names(self) -> list[str]:
        """The names of all scores that ``combine`` returns."""
        given = {
            "format": self.reasoning,
            "marks": self.reasoning,
            "thinking": self.thinking_reward,
            **dict.fromkeys(self.models, True),
            "function": self.function,
            "server": self.server,
            "repetition": self.repetition_penalty,
            "length_reward": self.length_reward,
            "missing_eos": self.missing_eos_penalty != 0,
            "overlong": self.overlong,
        }
        parts = [name for name, there in given.items() if there]
        raw = [f"{name}_raw" for name in parts if name in self.normalized]
        return [*parts, *(["score"] if parts else []), *raw, *(["score_raw"] if raw else [])]

    def __call__(self, request: Request) -> dict[str, torch.Tensor]:
        return self.combine(self.raw_scores(request))

    def raw_scores(self, request: Request) -> RawScores:
        """Score B responses. Raises InputError if a reward fails: it raises an exception, takes too long, or
        gives a score that is NaN or infinite."""
        responses = request.responses
        raw = RawScores()
        parts = raw.parts
        said = responses if self.whole or self.reasoning else list(map(rules.after_thinking, responses))

        def each(rule, texts, *settings):
            return torch.tensor([rule(text, *settings) for text in texts])

        if self.reasoning:
            parts["format"] = each(rules.format_reward, responses)
            parts["marks"] = each(rules.mark_reward, responses)
        if self.thinking_reward:
            points = each(rules.thinking_reward, responses, self.thinking_reward)
            closed = each(rules.has_closed_thought, [prompt.text for prompt in request.prompts])
            parts["thinking"] = points.masked_fill(closed, 0.0)
        if self.models:
            self._score_with_models(request.prompts, said, raw)
        if self.function:
            scores, raw.steps = call_reward_function(self.function, request, self.timeout)
            parts["function"] = finite("--reward_fn", scores, responses)
        if self.server:
            parts["server"] = finite("--reward_url", self.server(request), responses)
        if self.repetition_penalty:
            parts["repetition"] = -each(rules.repetition_penalty, said, self.repetition_penalty)
        if self.length_reward:
            parts["length_reward"] = each(rules.length_reward, responses, self.length_reward)
        if self.missing_eos_penalty:
            parts["missing_eos"] = -self.missing_eos_penalty * (~torch.tensor(request.finished)).float()
        if self.overlong:
            parts["overlong"] = -each(rules.overlong_penalty, request.lengths, *self.overlong)
        return raw

    def _score_with_models(self, prompts, responses, raw):
        """Score every whole response, and every answer block alone, in one call of each reward model."""
        start = time.perf_counter()
        answers = [rules.answer_text(r) if self.reasoning else None for r in responses]
        raw.has_block = torch.tensor([answer is not None for answer in answers])
        asked = [prompt.prompt for prompt in prompts]
        pairs = list(zip([*asked, *asked], [*responses, *answers], strict=True))
        pairs = [pair for pair in pairs if pair[1] is not None]
        found = {name: model(pairs) for name, (model, _) in self.models.items()}
        for name, scores in found.items():  # all have scored: sharded ones need all processes
            finite("--reward_model", scores, [text for _, text in pairs])
            raw.parts[name] = scores[: len(asked)]
            raw.blocks[name] = raw.parts[name].masked_scatter(raw.has_block, scores[len(asked) :])
        raw.judging_seconds = time.perf_counter() - start

    def combine(self, raw: RawScores, world=None) -> dict[str, torch.Tensor]:
        """``RawScores`` -> {part: [B], "score": [B]}; "score" is the sum of the parts; {} without any.

        With ``--normalize_reward`` the result also has "<part>_raw" of each normalised part, and "score_raw":
        the sum with raw scores times their weights in the place of normalised and clipped ones. Its scale
        stays the same in all steps. Training gives a ``world``: the running
        statistics first take in the raw scores of all its processes, so all processes must call this.
        Evaluation gives none: the statistics then stay as they are.
        """
        if not raw.parts:
            return {}
        raws = {name: scores for name, scores in raw.parts.items() if name in self.normalized}
        if world and self.normalize:
            for theirs in world.gather({name: RunningStats.of(x) for name, x in raws.items()}):
                for name, new in theirs.items():
                    self.running[name] = self.running.get(name, RunningStats()) + new
        parts = {}
        for name, scores in raw.parts.items():
            if name in self.models:
                whole = self._clipped(name, scores)
                block = self._clipped(name, raw.blocks[name])
                mixed = torch.where(raw.has_block, 0.4 * whole + 0.6 * block, whole)
                parts[name] = self._weight(name) * mixed
            else:
                parts[name] = self._clipped(name, scores) if name in raws else scores
        scores = parts | {"score": total(parts)}
        if raws:
            scores |= {f"{name}_raw": x for name, x in raws.items()}
            scores["score_raw"] = total(parts | {name: self._weight(name) * x for name, x in raws.items()})
        return scores

    def _clipped(self, name, scores):
        """Scores clipped to ±3, normalised before if their part is."""
        if name in self.running:
            scores = self.running[name].scale(scores)
        return scores.clamp(-SCORE_LIMIT, SCORE_LIMIT)

    def _weight(self, part):
        return self.models[part][1] if part in self.models else 1.0

    def at_limit(self, raw: RawScores) -> torch.Tensor:
        """[B], True where the score of a whole response by a reward model is at the limit of the clip or
        beyond it (``--normalize_reward``: the normalised score). raw: ``RawScores`` that were combined."""
        clipped = [self._clipped(name, raw.parts[name]) for name in self.models]
        return torch.stack(clipped).abs().ge(SCORE_LIMIT).any(0)

    def metrics(self, raw: RawScores) -> dict[str, float]:
        """{"reward/<part>_mean": …, "reward/<part>_std": …} of all raw scores so far, and how many seconds
        the reward models took for a batch."""
        found = {}
        for part, stats in self.running.items():
            found |= {f"reward/{part}_mean": stats.mean, f"reward/{part}_std": stats.std}
        return found | ({"perf/reward_model_seconds": raw.judging_seconds} if self.models else {})

    def state_dict(self) -> dict:
        """What a checkpoint keeps: {part: {"count": …, "mean": …, "squares": …}}, and the penalty."""
        running = {part: asdict(stats) for part, stats in self.running.items()}
        return {"missing_eos_penalty": self.missing_eos_penalty, **running}

    def load_state_dict(self, state: dict):
        """Take over what ``state_dict`` returned. A penalty that is given stays."""
        running = dict(state)
        kept = running.pop("missing_eos_penalty", 1.0)  # what it was before it was chosen
        self.running = {part: RunningStats(**stats) for part, stats in running.items()}
        if self.missing_eos_penalty is None:
            self.missing_eos_penalty = kept


@dataclass(eq=False)
class Judge(Reward):
    """The evaluation reward of a run; without any model or function it has no scores. Its scores are taken as
    they are, neither clipped nor normalised. Its models see a thought only with ``--reasoning 1``, as those
    that train."""

    reasoning: bool = False

    @property
    def names(self):
        parts = [*self.models, *(["function"] if self.function else [])]
        more = [f"judge_{part}" for part in parts] if len(parts) > 1 else []
        return ["judge", *more] if parts else []

    def raw_scores(self, request):
        with named_as_evaluation():
            return super().raw_scores(request)

    def combine(self, raw, world=None):
        """``RawScores`` -> {name: scores [B]}, "judge" is the sum of the others; {} without a judge."""
        parts = {f"judge_{name}": self._weight(name) * scores for name, scores in raw.parts.items()}
        if not parts:
            return {}
        return {"judge": total(parts)} | (parts if len(parts) > 1 else {})


def total(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """{part: [B]} -> their sum [B]"""
    return torch.stack(list(parts.values())).sum(0)


def finite(flag: str, scores: torch.Tensor, responses: list[str]) -> torch.Tensor:
    """Return the scores [B]. Raises InputError if one is NaN or infinite: it would spoil the whole batch."""
    for score, response in zip(scores.tolist(), responses, strict=True):
        if not math.isfinite(score):
            shown = json.dumps(response, ensure_ascii=False)[:80]
            raise InputError(f"{flag}: the score {score} for the response {shown}; scores must be finite")
    return scores


def load_reward(args, device, dtype, *datasets) -> Reward:
    """Flags -> the ``Reward`` of the run. datasets: those whose records a function may ask for, or None."""
    function = load_reward_function(args.reward_fn, *datasets)  # before the models, which take long
    return Reward(
        models=load_reward_models(args.reward_model, args, device, dtype),
        function=function,
        server=RewardServer(args.reward_url, args.reward_timeout) if args.reward_url else None,
        reasoning=args.reasoning,
        normalize=args.normalize_reward,
        missing_eos_penalty=args.missing_eos_penalty,
        repetition_penalty=args.repetition_penalty,
        length_reward=args.length_reward,
        timeout=args.reward_timeout,
        overlong=(args.max_gen_len, args.overlong_buffer, args.overlong_penalty)
        if args.overlong_buffer and args.overlong_penalty
        else None,
        thinking_reward=args.thinking_reward,
    )


def load_judge(args, device, dtype, held_out) -> Judge:
    """Flags -> the ``Judge`` of the run. held_out: the dataset whose records its function may ask for, or
    None. Raises InputError as ``load_reward`` does, with the names of these flags."""
    with named_as_evaluation():
        function = load_reward_function(args.eval_reward_fn, held_out)
        return Judge(
            models=load_reward_models(args.eval_reward_model, args, device, dtype),
            function=function,
            timeout=args.reward_timeout,
            whole=bool(args.reasoning),
        )


@contextmanager
def named_as_evaluation():
    """In this block, errors on --reward_fn and --reward_model name --eval_reward_fn and
    --eval_reward_model: the code that raises them is the same."""
    try:
        yield
    except InputError as error:
        error.args = (re.sub(r"--reward_(fn|model)\b", r"--eval_reward_\1", str(error)),)
        raise
