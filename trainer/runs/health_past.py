"""What the rules of health.py look at: the first and the latest steps of a run, its evaluations, its flags.

``Past`` keeps a fixed number of values, whatever the length of the run.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

BEGIN = 4  # steps at the start in which a healthy score has not yet risen much
WINDOW = 10  # steps at the start and at the end of the run so far that are compared
CLEAR = 2  # standard errors of a difference: from there on it is called a rise or a fall
HELD_OUT = 250  # records of an evaluation, where the run does not say
LEAST_VARIANCE = 0.01  # of an accuracy near 0 or 1
SEVENTH = 7  # of a judge's value is its least difference, where its spread is not known
WITNESSES = ("eval/accuracy", "eval/judge", "eval/chosen_share")  # of evaluations: they are never rewarded


def spread_of_steps(values: Sequence[float]) -> float:
    """How much a metric varies by chance from step to step, its standard deviation; NaN for fewer than 3.

    Taken from the differences of neighbouring steps: a slow rise or fall is hardly counted. For normally
    distributed x and y with standard deviation s the mean of |x - y| is 2 s / sqrt(pi).
    """
    if len(values) < 3:
        return math.nan
    jumps = [abs(b - a) for a, b in pairwise(values)]
    return sum(jumps) / len(jumps) * math.sqrt(math.pi) / 2


def rise_of(begin: Sequence[float], end: Sequence[float]) -> tuple[float, float]:
    """The values of the first and the last ``WINDOW`` steps -> (the rise of the mean, two standard errors of
    it)."""
    chance = CLEAR * math.hypot(spread_of_steps(begin), spread_of_steps(end)) / math.sqrt(WINDOW)
    return (sum(end) - sum(begin)) / WINDOW, chance


class Evaluation(NamedTuple):
    """A metric of one evaluation."""

    step: int
    value: float


class Past:
    """A run so far, in a few numbers. args: its config.json, or {}: flags, and ``facts`` (about_run.py).

    ``step``: of the newest record; ``steps``: how many were trained; ``latest``: the last ``WINDOW`` of them,
    each {metric: number}; ``widest``: the largest spread of the scores of a step. Numbers that are not finite
    are left out of all. A mean of steps that do not have the metric is NaN, for which no comparison holds.
    """

    def __init__(self, args: dict):
        self.args = args
        self.facts = args.get("facts") or {}
        self.step = 0
        self.steps = 0
        self.latest = deque(maxlen=WINDOW)
        self.widest = 0.0
        self._begin = {}  # {metric: its first WINDOW values}
        self._evaluated = {}  # {metric of evaluations: its first, best and last ``Evaluation``}

    def add(self, record: dict):
        """Take in a line of metrics.jsonl."""
        numbers = {n: x for n, x in record.items() if isinstance(x, int | float) and math.isfinite(x)}
        self.step = numbers["step"]
        for name, x in numbers.items():
            if name.startswith("eval/"):
                last = Evaluation(self.step, x)
                first, best, _ = self._evaluated.get(name, (last, last, last))
                self._evaluated[name] = first, best if best.value > x else last, last
            elif self.step:
                begun = self._begin.setdefault(name, [])
                if len(begun) < WINDOW:
                    begun.append(x)
        if self.step:
            self.widest = max(self.widest, numbers.get("reward/score_std", 0.0))
            self.steps += 1
            self.latest.append(numbers)

    def known(self, name: str):
        """A fact of the run's start, else a flag; 0 where it is off, or not known."""
        return self.facts.get(name) or self.args.get(name) or 0

    @property
    def suited(self) -> dict:
        """{flag: the learning rate that suits the model's size}, as far as it is known."""
        return self.known("suited") or {}

    @property
    def reward_models(self) -> dict:
        """{name: facts} of the reward models."""
        return self.known("reward_models") or {}

    @property
    def responses(self) -> int:
        """Of a step, over all processes; 0 where their number is not known."""
        return self.known("batch_size") * (self.known("processes") or 1)

    def steps_of(self, responses: int) -> int:
        """How many steps it takes to see so many responses, at most ``WINDOW``; 1 where their number is not
        known."""
        return min(WINDOW, max(1, math.ceil(responses / (self.responses or responses))))

    # ----------------------------------------------------------------------------------------- steps

    def starts(self, name: str) -> list:
        """The first values of a metric, at most ``WINDOW``."""
        return self._begin.get(name, [])

    def values(self, name: str, count: int = WINDOW) -> list:
        """The values of a metric in the last ``count`` steps, where they have it."""
        return [r[name] for r in list(self.latest)[-count:] if name in r]

    def start(self, name: str, count: int = 1) -> float:
        """The mean of a metric in the first ``count`` steps that have it."""
        values = self.starts(name)[:count]
        return sum(values) / count if len(values) == count else math.nan

    def now(self, name: str, count: int = 1) -> float:
        """The mean of a metric in the last ``count`` steps, if all of them have it."""
        values = self.values(name, count)
        return sum(values) / count if len(values) == count else math.nan

    def lasting(self, name: str, test: Callable[[float], bool], count: int = 3) -> dict:
        """``since``, the first of the last ``count`` steps, their ``mean`` and ``count``, if ``test(value)``
        holds in all of them; else nothing."""
        values = self.values(name, count)
        if len(values) < count or not all(map(test, values)):
            return {}
        return {"since": self.latest[-count]["step"], "mean": sum(values) / count, "count": count}

    def changed(self, name: str, test: Callable[[float, float], bool], first: int = 1, last: int = 3) -> dict:
        """``start`` and ``now``, the means of the first and the last so many steps, if ``test(start, now)``
        holds; else nothing."""
        start = self.start(name, first)
        now = self.now(name, last)
        return {"start": start, "now": now} if test(start, now) else {}

    @property
    def score(self) -> str:
        """The name of the score that can be compared between steps: see ``compared_name`` in displays.py."""
        return "reward/score_raw" if "reward/score_raw" in self._begin else "reward/score"

    @property
    def score_rise(self) -> float:
        """How far the mean score of the last ``WINDOW`` steps is above that of the first ``BEGIN``, in
        standard errors of this difference; NaN: too few steps."""
        begin = self.starts(self.score)
        end = self.values(self.score)
        if len(begin) < WINDOW or len(end) < WINDOW or self.steps < 2 * WINDOW:
            return math.nan
        error = spread_of_steps(begin) * math.sqrt(1 / BEGIN + 1 / WINDOW)
        rise = sum(end) / WINDOW - sum(begin[:BEGIN]) / BEGIN
        return rise / max(error, 1e-9)

    # ----------------------------------------------------------------------------------- evaluations

    @property
    def quality(self) -> str:
        """The best witness of the evaluations: "eval/accuracy", else "eval/judge", else what held-out pairs
        say, else the score; "" without evaluations. An accuracy that has always been 0 is no witness: its
        answers may have another form."""
        for name in (*WITNESSES, "eval/score_raw", "eval/score"):
            if name in self._evaluated and (name != "eval/accuracy" or self._evaluated[name][1].value):
                return name
        return ""

    @property
    def independent(self) -> bool:
        """Is the best witness one that is never rewarded?"""
        return self.quality in WITNESSES

    def evaluations(self, name: str) -> tuple[Evaluation, ...]:
        """The first, the best and the last evaluation of a metric; () if there are no two."""
        found = self._evaluated.get(name, ())
        return found if found and found[0].step != found[2].step else ()

    def least_difference(self, name: str) -> float:
        """The least difference of two evaluations of a metric that is called a rise or a fall: two standard
        errors of a difference. Of a judge without a known spread: a seventh of its value. Where it is known
        how much the changes of the records vary: by the largest such spread so far."""
        count = self.known("held_out_pairs" if name == "eval/chosen_share" else "held_out") or HELD_OUT
        first, best, _ = self._evaluated[name]
        changes = self._evaluated.get(f"{name}_change_std")
        spreads = self._evaluated.get(f"{name}_std")
        if changes:
            return CLEAR * changes[1].value / math.sqrt(count)
        if name == "eval/accuracy":
            spread = math.sqrt(max(best.value * (1 - best.value), LEAST_VARIANCE))
        elif spreads:
            spread = max(spreads[0].value, spreads[2].value)
        elif name == "eval/judge":
            return max(abs(best.value), abs(first.value)) / SEVENTH
        else:
            spread = next(iter(self.starts("reward/score_std")), 0) or abs(best.value)
        return CLEAR * math.sqrt(2) * spread / math.sqrt(count)

    @property
    def trend(self) -> int | None:
        """1 where the last evaluation is clearly better than the first one, -1 where it is clearly worse, 0
        where neither; None without two of them."""
        found = self.evaluations(self.quality)
        if not found:
            return None
        rise = found[2].value - found[0].value
        least = self.least_difference(self.quality)
        return (rise > least) - (rise < -least)

    @property
    def no_better(self) -> bool:
        """Is it known that the run has not helped, by its evaluations or without two of them by its score?"""
        return self.score_rise <= CLEAR if self.trend is None else self.trend < 1
