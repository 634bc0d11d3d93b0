"""The health of a run: its metrics -> findings, each with symptom, numbers, causes, remedy and source.

A run says each finding when it begins, once, and its summary.md and report.html have all of them, also as it
goes. docs/health.md explains each. What is looked for are the rows of health.toml.
"""

import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

Values = dict[str, Any]  # {name: value} of flags, facts, metrics, conclusions
WRONG = "wrong"  # the levels of a finding
LOOK = "look"
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
# A part of a condition, and a flag of a remedy with its value: health.toml says how both are written
PART = re.compile(r"(\S+)(?: ([<>]) (\S+)( times its start)?( at the start)?(?: in (\d+) steps?)?)?")
MOVE = re.compile(r" ?--(\w+) ([x/]?)(\d[\w.+-]*)")

# ------------------------------------------------------------------ what rules look at: the history of a run

SCORE_START = 4  # steps at the start in which a healthy score has not yet risen much
WINDOW = 10  # steps at the start and at the end of the run so far that are looked at
STANDARD_ERRORS = 2  # of a difference: beyond, it is called a rise or a fall
ENOUGH_RESPONSES = 64  # in fewer, chance decides what a share of them is
UNUSUAL_FACTOR = 20  # a learning rate above or below the one that suits the model by so much
LEAST_SPREAD = 1e-9  # in the place of a spread of 0
FEW_RESPONSES = 8  # of fewer, nothing is said
CHANCE = 1e-3  # what is less probable is not taken for chance
EQUAL_VARIANCE = 1e-8  # the variance of scores that are all equal, up to rounding
NO_REWARD = 0.1  # of a reward of 1: less is taken for nothing
SHARES = ("eval/chosen_preferred", "eval/accuracy")  # of evaluations: of the records, 0 or 1 for each


def spread_of_steps(values: Sequence[float]) -> float:
    """How much a metric varies by chance from step to step, its standard deviation; NaN for fewer than 3.

    Taken from the differences of neighbouring steps: a slow rise or fall is hardly counted. For normally
    distributed x and y with standard deviation s the mean of |x - y| is 2 s / sqrt(pi).
    """
    if len(values) < 3:
        return math.nan
    return fmean(abs(b - a) for a, b in pairwise(values)) * math.sqrt(math.pi) / 2


class History:
    """What a run has logged so far, and its flags. args: its config.json, or {}: flags, and ``facts``
    (run.py)."""

    def __init__(self, args: Values) -> None:
        self.args = args
        self.conclusions: Values = {**args.get("facts", {})}  # the facts and what follows, for health.toml
        rates = self.conclusions.get("suited", {})
        self.usual: dict[str, list[float]] = {  # {flag: [the least and the most that help, a usual value]}
            **TABLE["usual"],
            **TABLE["usual_with"].get(args.get("policy_loss"), {}),
            **{name: [rate / UNUSUAL_FACTOR, rate * UNUSUAL_FACTOR, rate] for name, rate in rates.items()},
        }
        self.step = 0  # of the newest record
        self.since = 0  # the first step that was evaluated as it is now; earlier evaluations are left out
        # {metric: all its values, without those that are not finite}, and their steps
        self.values: defaultdict[str, list[float]] = defaultdict(list)
        self.steps: defaultdict[str, list[int]] = defaultdict(list)
        self.responses = self.get("batch_size") * self.get("processes")  # of a step; 0: not known
        enough = math.ceil(ENOUGH_RESPONSES / (self.responses or ENOUGH_RESPONSES))
        self.enough_steps = min(WINDOW, enough)  # in which there are ``ENOUGH_RESPONSES``
        self.equal_steps = 0  # steps in a row, up to the newest, in which all scores were equal
        self._first_steps: dict[str, int] = {}  # of conclusions that hold for some steps

    def add(self, record: Values) -> None:
        """Take in a line of metrics.jsonl."""
        self.step = record["step"]
        if self.step and self.step == self.get("evaluated_since"):  # on other records, or by another judge
            self.since = self.step
            for name in self.values:
                if name.startswith("eval/"):
                    self.values[name] = []
                    self.steps[name] = []
        for name, x in record.items():
            if x is not None and math.isfinite(x):
                self.values[name].append(x)
                self.steps[name].append(self.step)
        if self.is_new("reward/score_std"):
            equal = self._scores_are_equal() and not self.is_new("reward/unscored")
            self.equal_steps = self.equal_steps + 1 if equal else 0
        self._conclude()

    def is_new(self, name: str) -> bool:
        """Whether the newest step has this metric."""
        return self.steps[name][-1:] == [self.step]

    def newest(self, name: str, default: float) -> float:
        """The newest value of a metric."""
        return (self.values[name] or [default])[-1]

    def least(self, name: str) -> float:
        """The least of the last three values of a metric; 0 without any."""
        return min(self.values[name][-3:], default=0.0)

    def get(self, name: str) -> Any:
        """What was concluded, a fact of the run's start, or a flag; 0 where it is off, or not known."""
        return self.conclusions.get(name) or self.args.get(name) or 0

    def first_mean(self, name: str, count: int) -> float:
        """The mean of a metric in the first ``count`` steps that have it; NaN, for which no comparison holds,
        if there are fewer."""
        values = self.values[name][:count]
        return fmean(values) if len(values) == count else math.nan

    def ends(self, name: str) -> tuple[float, float] | None:
        """The first and the last value of a metric of evaluations; of one of steps the means of the first
        tenth and of the last tenth of them. None without two values."""
        values = self.values[name]
        count = 1 if name.startswith("eval/") else max(1, len(values) // 10)
        return (fmean(values[:count]), fmean(values[-count:])) if len(values) > 1 else None

    def shown_by(self, conditions: Sequence[str]) -> tuple[int, float] | None:
        """For the first of these conditions that holds: the first step of those that show it, and its metric
        at the start of the run, both from the condition's first part."""
        for condition in conditions:
            parts = [self._part_shown_by(part) for part in condition.split(" and ")]
            if all(parts):
                return parts[0]
        return None

    def _part_shown_by(self, part: str) -> tuple[int, float] | None:
        """``shown_by`` for one part of a condition."""
        name, sign, limit, times, at_start, count = PART.fullmatch(part).groups()  # type: ignore[union-attr]
        if not sign:
            return (self._first_steps.get(name, self.step), 0.0) if self.get(name) else None
        start = self.first_mean(name, max(3, self.enough_steps) if at_start else self.enough_steps)
        bound = float(limit) * (start if times else 1)
        first = self.step
        values = [self.get(name)]
        if at_start:
            first = 1
            values = [start]
        elif count:
            values = self.values[name][-int(count) :]
            if len(values) < int(count):
                return None
            first = self.steps[name][-int(count)]
        holds = all(x < bound if sign == "<" else x > bound for x in values)
        return (first, start) if holds else None

    def _conclude(self) -> None:
        """Renew ``conclusions``. Numbers that cannot be told yet are NaN."""
        values = self.values
        in_a_pass = self.get("prompts") * self.args.get("num_generations", 1)  # responses
        odd = {}  # flags far outside the range in which they help; 0 turns the others off
        for name, (least, most, usual) in self.usual.items():
            value = self.args.get(name, usual)
            if (value or name in ("gamma", "lam")) and not least <= value <= most:
                odd[name] = f"--{name} {value:g} (usual: {least:g} to {most:g})"
        # The score that can be compared between steps: with --normalize_reward the raw one.
        score = "reward/score_raw" if values["reward/score_raw"] else "reward/score"
        start = self.first_mean(score, SCORE_START)
        now = fmean(values[score][-WINDOW:]) if self.step >= 2 * WINDOW and values[score] else math.nan
        error = spread_of_steps(values[score][:WINDOW]) * math.sqrt(1 / SCORE_START + 1 / WINDOW)
        rise = (now - start) / max(error, LEAST_SPREAD)
        # What is measured without the reward: with an accuracy whose answers the reward gets, a judge is.
        accuracy = () if self.get("answers_go_to") else ("eval/accuracy",)
        independent = ("eval/chosen_preferred", *accuracy, "eval/judge")
        # The evaluations' metric that tells best whether the run helps. An accuracy that has always been 0
        # does not: its answers may have another form.
        names = (*independent, "eval/accuracy", "eval/score_raw", "eval/score")
        metric = next((name for name in names if any(values[name])), "")
        tested = values[metric] if len(values[metric]) > 1 else [math.nan]
        best = max(tested)
        trend = self.change(metric, tested[0], tested[-1])
        is_score = metric not in (*independent, "eval/accuracy")
        why = self._why_equal(score)
        self._first_steps = {"none_ended": 1, why: self.step - self.equal_steps + 1}
        self.conclusions |= {
            "none_ended": self._none("rollout/finished") and self.step * self.responses >= FEW_RESPONSES,
            **{name: name == why for name in ("all_cut", "all_wrong", "all_solved", "all_same")},
            "not_all_cut": why != "all_cut",
            "scores_differ": not why,
            "same_score": self.newest(score, math.nan)
            + self.get("missing_eos_penalty") * (1 - self.newest("rollout/finished", 1)),
            "odd": ", ".join(odd.values()),
            "odd_usual": " ".join(f"--{name} {self.usual[name][2]:g}" for name in odd),
            "responses": self.responses,
            "times_seen": self.get("total_steps") * self.responses / (in_a_pass or math.inf),
            "exact": self.get("dtype") == "float32",
            "observed_share": self.least("rollout/observation_tokens")
            / (self.get("max_gen_len") or math.inf),
            "calls_a_turn": self.least("rollout/calls") / (self.least("rollout/turns") or math.inf),
            "turns_used": self.least("rollout/turns") / (self.get("max_turns") or math.inf),
            "clips_tokens": self.get("policy_loss") != "gspo",
            "responses_seen": self.step * self.responses,
            "responses_alike": self.equal_steps * self.responses,
            "score": score,
            "score_start": start,
            "score_now": now,
            "score_rise": rise,  # of the last steps' mean above that of the first, in standard errors
            "held_out_metric": metric,
            "held_out_first": tested[0],
            "held_out_best": best,
            "held_out_last": tested[-1],
            "held_out_fall": self.change(metric, tested[-1], best),  # in least differences, as the next
            "held_out_loss": -trend,
            "exploited": " while the score rises: the reward is exploited"
            if metric in independent and rise > STANDARD_ERRORS
            else "",
            "not_risen": not trend > 1,
            "not_judged_better": is_score or not trend > 1,
            "not_better": rise <= STANDARD_ERRORS
            if math.isnan(trend)
            else trend <= 1,  # known not to have helped
        }

    def _scores_are_equal(self) -> bool:
        """Whether all scores of the newest step were equal, but for --missing_eos_penalty, which a share of
        the responses paid: by itself it has the variance penalty^2 * share * (1 - share)."""
        ended = self.newest("rollout/finished", 1)
        paid = self.get("missing_eos_penalty") ** 2 * ended * (1 - ended)
        return abs(self.values["reward/score_std"][-1] ** 2 - paid) < EQUAL_VARIANCE + 1e-5 * paid

    def _why_equal(self, score: str) -> str:
        """Why the responses of the newest steps all have the same ``score``; "" where they do not, or where
        it can be chance. In the whole run none has ended ("all_cut"), none has earned anything and no
        held-out answer was right ("all_wrong"), or the reward gives each the same, whatever it is
        ("all_same"). Or all held-out answers are right, or the score has risen, and 64 responses have the
        best so far ("all_solved")."""
        values = self.values
        count = self.equal_steps * self.responses
        if count < FEW_RESPONSES or self.get("offline_data_path"):
            return ""
        tested = values["eval/accuracy"]
        before = values[score][: -self.equal_steps]
        if before:
            now = values[score][-1]
            risen = (
                now >= max(before) and now > before[0] and self.equal_steps >= 3 and count >= ENOUGH_RESPONSES
            )
            if tested and (not tested[-1] or self.change("eval/accuracy", tested[0], tested[-1]) < -1):
                return ""
            return "all_solved" if risen else ""
        own = ("reward/function", "reward/server", "reward/environment")  # the user's rewards
        written = [x for name in own for x in values[name]]
        if written and self._none("rollout/finished"):
            return "all_cut"
        if count < 2 * FEW_RESPONSES:
            return ""
        if self.get("answers_go_to"):
            if not any(tested) and max(written, default=0.0) < NO_REWARD:
                return "all_wrong"
            right = tested[-1] if tested else 0.0
            if right == 1:
                return "all_solved"
            if right and right**count + (1 - right) ** count > CHANCE:  # all right or all wrong, by chance
                return ""
        return "all_same"

    def _none(self, name: str) -> bool:
        """Whether a metric has always been 0."""
        return bool(self.values[name]) and not any(self.values[name])

    def least_change(self, name: str, one: float, other: float) -> float:
        """The least difference of two evaluations that is called a rise or a fall: two standard errors; NaN
        where nothing is known.

        Taken from how much the records vary: as logged, of a share by itself, or from the means of steps.
        """
        count = self.get("held_out") or 1
        values = self.values
        spreads = values[f"{name}_std"]
        if name.startswith(SHARES):
            spreads = [math.sqrt(x * (1 - x)) for x in (one, other)]
        elif not spreads:
            steps = values[name.replace("eval/", "reward/")] or values[name.replace("eval/", "train/")]
            spreads = [spread_of_steps(steps[:WINDOW]) * math.sqrt(self.responses)]
            if not any(spreads) and one != other:  # no step has shown it, and the evaluations have some
                return math.nan
        return STANDARD_ERRORS * max(spreads) * math.sqrt(2 / count)

    def change(self, name: str, one: float, other: float) -> float:
        """How far the second of two evaluations is above the first, in least differences: beyond 1 and -1 it
        is a rise or a fall."""
        return (other - one) / max(self.least_change(name, one, other), LEAST_SPREAD)


# --------------------------------------------------------------------------------------- findings


class Rule(NamedTuple):
    """A row of health.toml, which says what its fields mean."""

    name: str
    symptom: str
    numbers: list[str]  # what shows it
    causes: list[str]  # the likely ones, the likeliest first
    remedy: str  # flags with values to try, or words
    source: str = "judgement: docs/health.md"  # where the limit comes from: it was found here
    offline: bool = False
    look: Sequence[str] = ()
    wrong: Sequence[str] = ()
    level: str = ""
    step: int = 0


# What is unusual in a run (level "look") or cannot be right ("wrong") since a step: the row, with the run's
# numbers in its texts.
Finding = Rule
RULES = [Rule(name=name, **row) for name, row in TABLE["rules"].items()]


def finding_of(rule: Rule, history: History, level: str, step: int, start: float) -> Finding:
    """A row of which a condition holds -> the finding. step: the first that shows it; start: of the
    condition's metric."""
    newest = {name: values[-1] for name, values in history.values.items() if values}
    known = {**history.args, **newest, **history.conclusions, "start": start}
    known = {name: x for name, x in known.items() if x == x}  # without NaN: what cannot be told
    numbers = []
    for text in rule.numbers:
        with suppress(KeyError, TypeError, ValueError):  # a value that is not known
            numbers.append(text.format_map(known))
    return rule._replace(
        level=level,
        step=step,
        symptom=rule.symptom.format_map(known),
        numbers=numbers,
        remedy=remedy_of(rule.remedy.format_map(known), history),
    )


def remedy_of(text: str, history: History) -> str:
    """The remedy of a row with the values for this run, without those that the run has already."""

    def with_value(move: re.Match[str]) -> str:
        """A flag of the remedy with its value; "" where the run has it already."""
        flag, sign, number = move.groups()
        if sign and flag == "kl_coef" and history.get("kl_target"):  # it moves --kl_coef
            flag = "kl_target"
            sign = "/"
        now = history.get(flag)
        least, _, usual = history.usual.get(flag, [now] * 3)
        value = number
        if sign == "x":
            value = f"{max(now * int(number), usual):g}"
        elif sign:
            value = f"{usual if now < least else min(now / int(number), usual):g}"
        return "" if value == f"{now:g}" else f" --{flag} {value}"

    return MOVE.sub(with_value, text).strip() or "see docs/health.md"


class Health:
    """The findings of a run, step by step. args: config.json as a dict, or {}."""

    def __init__(self, args: Values) -> None:
        self._found: dict[str, Finding] = {}  # by rule: the first one, or the first one that is "wrong"
        self.history = History(args)
        logged = args.get("offline_data_path")
        is_ppo = args.get("script") == "train_ppo.py"  # stages 1 and 2 have none of the metrics
        self._rules = [rule for rule in RULES if is_ppo and (rule.offline or not logged)]

    def add(self, record: Values) -> list[Finding]:
        """Take in a line of metrics.jsonl -> the findings that begin with it, or become "wrong" with it."""
        self.history.add(record)
        begun = []
        for rule in self._rules:
            before = self._found.get(rule.name)
            wrong = self.history.shown_by(rule.wrong)
            level = WRONG if wrong else LOOK
            shown = wrong or self.history.shown_by(rule.look)
            if shown and (not before or before.level not in (level, WRONG)):
                step, start = shown
                finding = finding_of(rule, self.history, level, before.step if before else step, start)
                self._found[rule.name] = finding
                begun.append(rule.name)
        return [finding for finding in self.sorted if finding.name in begun]

    @property
    def sorted(self) -> list[Finding]:
        """All findings: those of before the first step, which may be the cause of others, then the wrong
        ones, then by step."""
        return sorted(self._found.values(), key=lambda f: (f.step > 0, f.level != WRONG, f.step))


def one_line(finding: Finding) -> str:
    """A finding as one line, for the terminal."""
    return (
        f"{finding.level}, since step {finding.step}: {finding.symptom}. {', '.join(finding.numbers)}. "
        f"Try: {finding.remedy} (docs/health.md, {finding.name})"
    )
