"""What the checks of health.py look at: the first and the latest steps of a run, its evaluations, its flags.

``Past`` keeps a fixed number of records, whatever the length of the run. ``Finding`` is what a check gives.
"""

import math
import re
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

BEGIN = 4  # steps at the start in which a healthy score has not yet risen much
WINDOW = 10  # steps at the start and at the end of the run so far that are compared
WRONG, LOOK = "wrong", "look"  # the levels of a finding
JUDGEMENT = "judgement: docs/health.md"  # the source of a limit that was found here
WEIGHT = re.compile(r"=[^=/\\]*$")  # behind a path in --reward_model
WORTH = 1.25  # times a size: a smaller rise would hardly change anything
HELD_OUT = 250  # records of an evaluation, where the run does not say
REPORT = "report it on the project's issue page"
# Flags, and the range outside which they rarely help. Learning rates: by what suits the model's size.
USUAL = {
    "clip_epsilon": (0.02, 0.9),
    "cliprange_value": (0.02, 1e6),
    "grad_clip": (0.01, 1e6),
    "temperature": (0.5, 1.5),
    "ppo_epochs": (1, 10),
    "kl_coef": (0.0, 2.0),
    "target_kl": (1e-3, 1.0),
    "gamma": (0.9, 1.0),
    "lam": (0.8, 1.0),
}
MANY, LARGE = 2**20, 1e6  # the most that a flag of a count and one of a number take
# The most that a remedy raises a flag to.
TOP = {
    **{name: most for name, (_, most) in USUAL.items()},
    **dict.fromkeys(("max_gen_len", "max_seq_len", "batch_size"), MANY),
    **dict.fromkeys(("missing_eos_penalty", "repetition_penalty"), LARGE),
    **dict.fromkeys(("learning_rate", "critic_learning_rate"), 1.0),
}


@dataclass(frozen=True)
class Finding:
    """Something that is unusual in a run (level "look") or cannot be right ("wrong").

    step: since when; numbers: what shows it; causes: the likely ones, the likeliest first; remedy: flags with
    values to try, or words; source: where the limit comes from; blamed: causes, as ``too`` says them. Where a
    finding that is wrong has one of them, this one is wrong too.
    """

    level: str
    step: int
    symptom: str
    numbers: str
    causes: tuple
    remedy: str
    source: str
    blamed: tuple = ()
    name: str = ""  # of the check; ``Health`` fills it in


def counted(count, word):
    """A count with its word: "1 step", "2 steps"."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def too(name: str, much: bool) -> str:
    """The cause that a flag's value is too large, or too small."""
    words = ("low", "high") if name.endswith("learning_rate") else ("small", "large")
    return f"--{name} is too {words[much]}"


def joined(*parts, by=" "):
    """The parts of a remedy as one text, without those that are empty."""
    return by.join(part for part in parts if part)


def spread_of_steps(values):
    """How much a metric varies by chance from step to step, its standard deviation; NaN for fewer than 3.

    Taken from the differences of neighbouring steps: a slow rise or fall is hardly counted. For normally
    distributed x and y with standard deviation s the mean of |x - y| is 2 s / sqrt(pi).
    """
    if len(values) < 3:
        return math.nan
    jumps = [abs(b - a) for a, b in pairwise(values)]
    return sum(jumps) / len(jumps) * math.sqrt(math.pi) / 2


class Past:
    """A run so far, in a few numbers. args: its config.json, or {}: flags, and ``facts`` (start_facts.py).

    ``step``: of the newest record; ``steps``: how many were trained; ``latest``: the last ``WINDOW`` of them,
    each {metric: number}. Numbers that are not finite are left out of all.
    """

    def __init__(self, args):
        self.args, self.facts = args, args.get("facts") or {}
        self.step, self.steps, self.latest = 0, 0, deque(maxlen=WINDOW)
        self._begin = {}  # {metric: its first WINDOW values}
        self._most = {}  # {metric: its largest value in all steps}
        self._first, self._best, self._last = {}, {}, {}  # {metric of evaluations: (step, value)}

    def add(self, record):
        """Take in a line of metrics.jsonl. Raises KeyError for one without a step."""
        numbers = {n: x for n, x in record.items() if isinstance(x, int | float) and math.isfinite(x)}
        self.step = numbers["step"]
        for name, x in numbers.items():
            if name.startswith("eval/"):
                self._first.setdefault(name, (self.step, x))
                self._last[name] = self.step, x
                if x >= self._best.get(name, (0, -math.inf))[1]:
                    self._best[name] = self.step, x
            elif self.step and len(begun := self._begin.setdefault(name, [])) < WINDOW:
                begun.append(x)
        if self.step:
            self._most |= {n: x for n, x in numbers.items() if x > self._most.get(n, -math.inf)}
            self.steps += 1
            self.latest.append(numbers)

    def start(self, name, count=3):
        """The mean of a metric in the first ``count`` steps that have it; None: so many do not."""
        values = self._begin.get(name, ())[:count]
        return sum(values) / count if len(values) == count else None

    def starts(self, name):
        """The first values of a metric, at most ``WINDOW``."""
        return self._begin.get(name, [])

    def most(self, name):
        """The largest value of a metric in all steps so far; None if there is none."""
        return self._most.get(name)

    def now(self, name, count=3):
        """The mean of a metric in the last ``count`` steps; None where one of them does not have it."""
        values = self.values(name, count)
        return sum(values) / count if len(values) == count else None

    def values(self, name, count=WINDOW):
        """The values of a metric in the last ``count`` steps, where they have it."""
        return [r[name] for r in list(self.latest)[-count:] if name in r]

    def steps_of(self, responses):
        """How many steps it takes to see so many responses, at most ``WINDOW``; 1 where their number is not
        known."""
        size = self.flag("batch_size", responses) * self.flag("processes", 1)
        return min(WINDOW, max(1, math.ceil(responses / max(size, 1))))

    def lasting(self, name, test, count=3):
        """The first of the last ``count`` steps if ``test(value)`` holds in all of them, else None."""
        steps = list(self.latest)[-count:]
        if len(steps) == count and all(name in r and test(r[name]) for r in steps):
            return steps[0]["step"]
        return None

    @property
    def score(self):
        """The name of the score that can be compared between steps: see ``compared_name`` in displays.py."""
        return "reward/score_raw" if "reward/score_raw" in self._begin else "reward/score"

    @property
    def quality(self):
        """The best witness of the evaluations: "eval/accuracy", else "eval/judge", else what held-out pairs
        say, else the score; "" without evaluations. An accuracy that has always been 0 is no witness: its
        answers may have another form."""
        names = ("eval/accuracy", "eval/judge", "eval/chosen_share", "eval/score_raw", "eval/score")
        seen = (name for name in names if name in self._first)
        return next((name for name in seen if name != "eval/accuracy" or self._best[name][1]), "")

    @property
    def independent(self):
        """Is the best witness one that is never rewarded?"""
        return self.quality in ("eval/accuracy", "eval/judge", "eval/chosen_share")

    def evaluations(self, name):
        """(first, best, last) evaluations of a metric, each (step, value); None if there are no two."""
        if name not in self._first or self._last[name][0] == self._first[name][0]:
            return None
        return self._first[name], self._best[name], self._last[name]

    def least_difference(self, name):
        """The least difference of two evaluations of a metric that is called a rise or a fall: two standard
        errors of a difference. Of a judge without a known spread: a seventh of its value. Where it is known
        how much the changes of the records vary: by the largest such spread so far."""
        pairs = "_pairs" if name == "eval/chosen_share" else ""
        count = self.facts.get(f"held_out{pairs}") or HELD_OUT
        best = self._best[name][1]
        if (changes := f"{name}_change_std") in self._best:
            return 2 * self._best[changes][1] / math.sqrt(count)
        if name == "eval/accuracy":
            spread = math.sqrt(max(best * (1 - best), 0.01))
        elif (std := f"{name}_std") in self._first:
            spread = max(self._first[std][1], self._last[std][1])
        elif name == "eval/judge":
            return max(abs(best), abs(self._first[name][1])) / 7
        else:
            spread = self.start("reward/score_std", 1) or abs(best)
        return 2 * math.sqrt(2) * spread / math.sqrt(count)

    def improved(self):
        """Is the last evaluation clearly better than the first one? None without two of them."""
        found = self.evaluations(self.quality)
        return found and found[2][1] - found[0][1] > self.least_difference(self.quality)

    def worsened(self):
        """Is the last evaluation clearly worse than the first one? None without two of them."""
        found = self.evaluations(self.quality)
        return found and found[0][1] - found[2][1] > self.least_difference(self.quality)

    def score_rise(self):
        """How far the mean score of the last ``WINDOW`` steps is above that of the first ``BEGIN``, in
        standard errors of this difference; None: too few steps."""
        begin, end = self.starts(self.score), self.values(self.score)
        if len(begin) < WINDOW or len(end) < WINDOW or self.steps < 2 * WINDOW:
            return None
        error = spread_of_steps(begin) * math.sqrt(1 / BEGIN + 1 / WINDOW)
        rise = sum(end) / WINDOW - sum(begin[:BEGIN]) / BEGIN
        return rise / max(error, 1e-9)

    def score_rose(self):
        """Is the score clearly above its start? None: too few steps."""
        rise = self.score_rise()
        return None if rise is None else rise > 2

    def better(self):
        """Has the run helped, by its evaluations, or without two of them by its score?"""
        improved = self.improved()
        return self.score_rose() if improved is None else improved

    # ------------------------------------------------------------------------------------- remedies

    def flag(self, name, default=None):
        """The value of a flag of the run; ``default`` where it is not known."""
        value = self.args.get(name)
        return default if value is None else value

    @property
    def dtype(self):
        """Of mixed precision and sampling; of a run that did not keep it, the flag."""
        return self.facts.get("dtype") or self.flag("dtype")

    def raised(self, name, wanted):
        """``--name`` with this larger value, at most its ``TOP``; "" where that is hardly more than the run
        has. A whole number stays one."""
        value = min(wanted, TOP[name])
        if value < WORTH * self.flag(name, 0):
            return ""
        return f"--{name} {value}" if isinstance(value, int) else f"--{name} {value:.2g}"

    def times(self, name, factor, default):
        """As ``raised``, to the run's value times ``factor``; ``default`` where it is 0 or not known. Where
        --kl_target moves --kl_coef, the target divided by ``factor`` instead."""
        if name == "kl_coef" and (target := self.flag("kl_target", 0)):
            return f"--kl_target {target / factor:.2g}"
        value = self.flag(name, 0)
        return self.raised(name, float(value * factor if value else default))

    def larger(self, name, factor, default):
        """``--max_gen_len`` or ``--max_seq_len`` times ``factor``, or what the model's positions leave;
        "" where they leave hardly more than the run has. default: the flag where it is not known."""
        value, positions = self.flag(name, default), self.facts.get("positions")
        wanted = min(value * factor, TOP[name])
        if positions:
            other = self.facts["longest"] if name == "max_gen_len" else self.flag("max_gen_len", 0)
            wanted = min(wanted, positions - other)
        return f"--{name} {wanted}" if wanted >= WORTH * value else ""

    def lower_rate(self, name="learning_rate"):
        """``--learning_rate`` at a third, or at what suits the model's size if that is less."""
        rate, suited = self.flag(name), self.facts.get("suited", {}).get(name)
        if not rate:
            return f"--{name} at a third"
        return f"--{name} {min(rate / 3, suited or rate / 3):.2g}"

    def other_rate(self, name="learning_rate"):
        """Where too little is learned -> what is wrong with the rate, and the flag with another one.

        Three times the rate, or what suits the model's size if that is more. A rate that is twice what suits
        the size, or the highest that there is, is not raised but lowered.
        """
        rate, suited = self.flag(name), self.facts.get("suited", {}).get(name)
        if not rate:
            return f"--{name} is too low", f"--{name} three times as high"
        if rate >= TOP[name] or rate > 2 * (suited or rate):
            return f"--{name} is too high", self.lower_rate(name)
        return f"--{name} is too low", f"--{name} {min(TOP[name], max(rate * 3, suited or 0)):.2g}"

    def many_epochs(self):
        """The cause that there are too many --ppo_epochs, in a tuple, unless the run has only one."""
        return (too("ppo_epochs", True),) if self.flag("ppo_epochs", 2) > 1 else ()

    def fewer_epochs(self, count):
        """`` --ppo_epochs`` with this count, if the run has more; else nothing."""
        return f" --ppo_epochs {max(1, count)}" if self.flag("ppo_epochs", 1) > max(1, count) else ""

    def full_precision(self):
        """``--dtype float32``, if the run does not have it yet; then it is for us to mend."""
        return REPORT if self.dtype == "float32" else f"--dtype float32; if it stays, {REPORT}"

    def reward_models(self, **weights):
        """``--reward_model`` with all that the run has, and other weights for those of these names, which are
        the parts of the reward."""
        names, given = list(self.facts.get("reward_models", {})), self.flag("reward_model", [])
        if len(given) != len(names):
            given = ["PATH"] * len(names)
        words = [
            f"{WEIGHT.sub('', path)}={weights[name]:g}" if name in weights else path
            for name, path in zip(names, given, strict=True)
        ]
        return " ".join(["--reward_model", *words])
