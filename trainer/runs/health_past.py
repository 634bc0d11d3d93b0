"""What the rules of health.py look at: the first and the latest steps of a run, its evaluations, its flags.

``Past`` keeps a fixed number of values, whatever the length of the run. summary.py tells a change from chance
in the same way.
"""

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

BEGIN = 4  # steps at the start in which a healthy score has not yet risen much
WINDOW = 10  # steps at the start and at the end of the run so far that are looked at
CLEAR = 2  # standard errors of a difference: from there on it is called a rise or a fall
ENOUGH = 64  # responses: of fewer, chance decides what a share of them is
HELD_OUT = 250  # records of an evaluation, where the run does not say
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


def least_difference(
    count: int, changes: Sequence[float] = (), spreads: Sequence[float] = (), shares: Sequence[float] = ()
) -> float:
    """The least difference of two evaluations of ``count`` records that is called a rise or a fall: two
    standard errors; NaN where nothing is known.

    Taken from the first of these that is given: how much the records' changes since the start vary, the
    latest one last; how much the records vary; the two means of what is 0 or 1 for each record.
    """
    if changes:
        return CLEAR * changes[-1] / math.sqrt(count)
    spreads = spreads or [math.sqrt(x * (1 - x)) for x in shares]
    return CLEAR * max(spreads, default=math.nan) * math.sqrt(2 / count)


class Evaluation(NamedTuple):
    """A metric of one evaluation."""

    step: int
    value: float


class Past:
    """A run so far, in a few numbers. args: its config.json, or {}: flags, and ``facts`` (about_run.py).

    ``step``: of the newest record; ``steps``: how many were trained; ``latest``: the last ``WINDOW`` of them,
    each {metric: number}. Numbers that are not finite are left out of all. A mean of steps that do not have
    the metric is NaN, for which no comparison holds.
    """

    def __init__(self, args: dict):
        self.args = args
        self.facts = args.get("facts") or {}
        self.step = 0
        self.steps = 0
        self.latest = deque(maxlen=WINDOW)
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
            self.steps += 1
            self.latest.append(numbers)

    def known(self, name: str):
        """A fact of the run's start, else a flag; 0 where it is off, or not known."""
        return self.facts.get(name) or self.args.get(name) or 0

    @property
    def responses(self) -> int:
        """Of a step, over all processes; 0 where their number is not known."""
        return self.known("batch_size") * (self.known("processes") or 1)

    @property
    def enough(self) -> int:
        """How many steps it takes to see ``ENOUGH`` responses, at most ``WINDOW``."""
        return min(WINDOW, math.ceil(ENOUGH / (self.responses or ENOUGH)))

    # ----------------------------------------------------------------------------------------- steps

    def values(self, name: str, count: int = WINDOW) -> list:
        """The values of a metric in the last ``count`` steps."""
        return [r[name] for r in list(self.latest)[-count:] if name in r]

    def start(self, name: str, count: int) -> float:
        """The mean of a metric in the first ``count`` steps that have it."""
        return mean_of(self._begin.get(name, [])[:count], count)

    def now(self, name: str, count: int = 1) -> float:
        """The mean of a metric in the last ``count`` steps, if all of them have it."""
        return mean_of(self.values(name, count), count)

    def holds(self, *conditions: str) -> dict:
        """For the first of these that holds (health.toml says how they are written): ``since``, the first
        step of those that show it, and ``start``, the metric at the start of the run; else nothing."""
        for condition in conditions:
            found = [self._lasting(part) for part in condition.split(" and ")]
            if all(found):
                return found[0]
        return {}

    def _lasting(self, condition: str) -> dict:
        """``holds`` for a condition without "and"."""
        name, sign, limit, *words, count, _ = condition.split()
        limit = float(limit)
        start = self.start(name, self.enough)
        if "times" in words:
            limit *= start
        values = self.values(name, int(count))
        beyond = [x < limit if sign == "<" else x > limit for x in values]
        if len(beyond) < int(count) or not all(beyond):
            return {}
        return {"since": self.latest[-len(beyond)]["step"], "start": start}

    @property
    def score(self) -> str:
        """The name of the score that can be compared between steps: with --normalize_reward the raw one."""
        return "reward/score_raw" if "reward/score_raw" in self._begin else "reward/score"

    @property
    def score_rise(self) -> float:
        """How far the mean score of the last ``WINDOW`` steps is above that of the first ``BEGIN``, in
        standard errors of this difference; NaN: too few steps."""
        if self.steps < 2 * WINDOW:
            return math.nan
        spread = spread_of_steps(self._begin.get(self.score, []))
        rise = self.now(self.score, WINDOW) - self.start(self.score, BEGIN)
        return rise / max(spread * math.sqrt(1 / BEGIN + 1 / WINDOW), 1e-9)

    # ----------------------------------------------------------------------------------- evaluations

    @property
    def witness(self) -> str:
        """What tells best whether the run helps: "eval/accuracy", else "eval/judge", else what held-out pairs
        say, else the score; "" without evaluations. An accuracy that has always been 0 is no witness: its
        answers may have another form."""
        for name in (*WITNESSES, "eval/score_raw", "eval/score"):
            if any(self._evaluated_values(name)):
                return name
        return ""

    @property
    def independent(self) -> bool:
        """Is the best witness one that is never rewarded?"""
        return self.witness in WITNESSES

    def evaluations(self, name: str) -> tuple[Evaluation, ...]:
        """The first, the best and the last evaluation of a metric; () if there are no two."""
        found = self._evaluated.get(name, ())
        return found if found and found[0].step != found[2].step else ()

    def _evaluated_values(self, name: str) -> list:
        return [evaluation.value for evaluation in self._evaluated.get(name, ())]

    def least_difference(self, one: Evaluation, other: Evaluation) -> float:
        """The least difference of two evaluations of the witness that is called a rise or a fall."""
        name = self.witness
        spreads = self._evaluated_values(f"{name}_std")
        shares = [one.value, other.value] if name == "eval/accuracy" else []
        return least_difference(
            count=self.known("held_out_pairs" if name == "eval/chosen_share" else "held_out") or HELD_OUT,
            changes=self._evaluated_values(f"{name}_change_std"),
            spreads=spreads or ([] if shares else self._begin.get("reward/score_std", [])[:1]),
            shares=shares,
        )

    @property
    def trend(self) -> int | None:
        """1 where the last evaluation is clearly better than the first one, -1 where it is clearly worse, 0
        where neither; None without two of them."""
        found = self.evaluations(self.witness)
        if not found:
            return None
        first, _, last = found
        rise = last.value - first.value
        least = self.least_difference(first, last)
        return (rise > least) - (rise < -least)

    @property
    def no_better(self) -> bool:
        """Is it known that the run has not helped, by its evaluations or without two of them by its score?"""
        return self.score_rise <= CLEAR if self.trend is None else self.trend < 1


def mean_of(values: Sequence[float], count: int) -> float:
    """Their mean; NaN if there are not ``count`` of them."""
    return sum(values) / count if len(values) == count else math.nan
