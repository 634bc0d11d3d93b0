"""The health of a run: its metrics -> findings, each with symptom, numbers, causes, remedy and source.

    python -m trainer.runs.health out/run_1

says what is unusual in a run folder. Exit code 0; 1 where a finding is "wrong"; 2 if the folder cannot be
read. A run says each finding when it begins, once, and its summary.md has all of them; --strict_health 1 ends
a run on one that is "wrong". docs/health.md explains each. What is looked for are the rows of health.toml.
"""

import json
import math
import re
import sys
import tomllib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from errors import InputError, run_script

SCRIPT = "train_ppo.py"  # stages 1 and 2 have none of the metrics
WRONG = "wrong"  # the levels of a finding
LOOK = "look"
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
Seen = dict[str, Any] | Literal[False]  # what a rule has seen; nothing if all is well

# ------------------------------------------------------------------------- what rules look at: a run so far

BEGIN = 4  # steps at the start in which a healthy score has not yet risen much
WINDOW = 10  # steps at the start and at the end of the run so far that are looked at
CLEAR = 2  # standard errors of a difference: from there on it is called a rise or a fall
ENOUGH = 64  # responses: of fewer, chance decides what a share of them is
FAR = 20  # times the learning rate that suits the model's size, or that part of it
TINY = 1e-9  # in the place of a spread of 0
SHARES = ("eval/chosen_preferred", "eval/accuracy")  # of evaluations: of the records, 0 or 1 for each
JUDGES = (*SHARES, "eval/judge")  # they are never rewarded


def spread_of_steps(values: Sequence[float]) -> float:
    """How much a metric varies by chance from step to step, its standard deviation; NaN for fewer than 3.

    Taken from the differences of neighbouring steps: a slow rise or fall is hardly counted. For normally
    distributed x and y with standard deviation s the mean of |x - y| is 2 s / sqrt(pi).
    """
    if len(values) < 3:
        return math.nan
    return fmean(abs(b - a) for a, b in pairwise(values)) * math.sqrt(math.pi) / 2


def least_difference(count: int, spreads: Sequence[float] = (), shares: Sequence[float] = ()) -> float:
    """The least difference of two evaluations of ``count`` records that is called a rise or a fall: two
    standard errors; NaN where nothing is known.

    Taken from how much the records vary, or else from the two means of what is 0 or 1 for each record.
    """
    spreads = spreads or [math.sqrt(x * (1 - x)) for x in shares]
    return CLEAR * max(spreads, default=math.nan) * math.sqrt(2 / count)


def mean_of(values: Sequence[float], count: int) -> float:
    """Their mean; NaN, for which no comparison holds, if there are not ``count`` of them."""
    return fmean(values) if len(values) == count else math.nan


class Past:
    """A run so far: what it has logged, and its flags. args: its config.json, or {}: flags, and ``facts``
    (about_run.py).

    ``step``: of the newest record; ``steps``: how many were trained; ``values``: {metric: all its values},
    without those that are not finite; ``usual``: {flag: [the least and the most that help, a usual value]}.
    """

    def __init__(self, args: dict[str, Any]) -> None:
        self.args = args
        self.facts: dict[str, Any] = args.get("facts", {})
        self.usual: dict[str, list[float]] = dict(TABLE["usual"])
        for name, rate in self.facts.get("suited", {}).items():
            self.usual[name] = [rate / FAR, rate * FAR, rate]
        self.step = 0
        self.steps = 0
        self.values: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))

    def add(self, record: dict[str, Any]) -> None:
        """Take in a line of metrics.jsonl."""
        self.step = record["step"]
        self.steps += self.step > 0
        for name, x in record.items():
            if isinstance(x, int | float) and math.isfinite(x):
                self.values[name].append(x)

    def known(self, name: str) -> Any:
        """A fact of the run's start, else a flag; 0 where it is off, or not known."""
        return self.facts.get(name) or self.args.get(name) or 0

    @property
    def responses(self) -> int:
        """Of a step, over all processes; 0 where their number is not known."""
        return self.known("batch_size") * self.known("processes")

    @property
    def enough(self) -> int:
        """How many steps it takes to see ``ENOUGH`` responses, at most ``WINDOW``."""
        return min(WINDOW, math.ceil(ENOUGH / (self.responses or ENOUGH)))

    def start(self, name: str, count: int) -> float:
        """The mean of a metric in the first ``count`` steps that have it."""
        return mean_of(self.values[name][:count], count)

    def now(self, name: str, count: int) -> float:
        """The mean of a metric in the last ``count`` steps that have it."""
        return mean_of(self.values[name][-count:], count)

    def holds(self, conditions: Iterable[str]) -> dict[str, Any]:
        """For the first of these that holds (health.toml says how they are written): ``since``, the first
        step of those that show it, and ``start``, the metric at the start of the run; else nothing."""
        for condition in conditions:
            found = [self._lasting(part) for part in condition.split(" and ")]
            if all(found):
                return found[0]
        return {}

    def _lasting(self, condition: str) -> dict[str, Any]:
        """``holds`` for a condition without "and"."""
        if " " not in condition:
            return {"since": 0} if self.known(condition) else {}
        name, sign, number, *words, steps, _ = condition.split()
        start = self.start(name, self.enough)
        limit = float(number) * start if "times" in words else float(number)
        count = int(steps)
        beyond = [x < limit if sign == "<" else x > limit for x in self.values[name][-count:]]
        return {"since": self.step - count + 1, "start": start} if sum(beyond) == count else {}

    @property
    def score(self) -> str:
        """The name of the score that can be compared between steps: with --normalize_reward the raw one."""
        return "reward/score_raw" if self.values["reward/score_raw"] else "reward/score"

    @property
    def score_rise(self) -> float:
        """How far the mean score of the last ``WINDOW`` steps is above that of the first ``BEGIN``, in
        standard errors of this difference; NaN: too few steps."""
        if self.steps < 2 * WINDOW:
            return math.nan
        spread = spread_of_steps(self.values[self.score][:WINDOW])
        rise = self.now(self.score, WINDOW) - self.start(self.score, BEGIN)
        return rise / max(spread * math.sqrt(1 / BEGIN + 1 / WINDOW), TINY)

    @property
    def witness(self) -> str:
        """The evaluations' metric that tells best whether the run helps; "" without one. An accuracy that has
        always been 0 is no witness: its answers may have another form."""
        names = (*JUDGES, "eval/score_raw", "eval/score")
        return next((name for name in names if any(self.values[name])), "")

    def change(self, one: float, other: float) -> float:
        """How far the second of two evaluations is above the first, in least differences: beyond 1 and -1 it
        is a rise or a fall."""
        name = self.witness
        is_share = name in SHARES
        least = least_difference(
            count=self.known("held_out") or 1,
            spreads=() if is_share else self.values[f"{name}_std"] or self.values["reward/score_std"][:1],
            shares=(one, other) if is_share else (),
        )
        return (other - one) / max(least, TINY)

    @property
    def trend(self) -> float:
        """The change from the first evaluation to the last; NaN without two of them."""
        found = self.values[self.witness]
        return self.change(found[0], found[-1]) if len(found) > 1 else math.nan

    @property
    def no_better(self) -> bool:
        """Is it known that the run has not helped, by its evaluations or without two of them by its score?"""
        return self.score_rise <= CLEAR if math.isnan(self.trend) else self.trend <= 1


# ------------------------------------------------------------------------------------------ rules


@dataclass(frozen=True)
class Rule:
    """A row of health.toml, which says what its fields mean."""

    name: str
    symptom: str
    numbers: list[str]
    causes: list[str]
    remedy: str
    source: str = "judgement: docs/health.md"  # a limit that was found here
    offline: bool = False
    no_better: bool = False
    look: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()

    def seen(self, past: Past) -> dict[str, Any]:
        """What a run so far shows of it; nothing if all is well."""
        if self.name in globals():
            return globals()[self.name](past) or {}
        if self.no_better and not past.no_better:
            return {}
        if wrong := past.holds(self.wrong):
            return wrong | {"wrong": True}
        return past.holds(self.look)


RULES = [Rule(name=name, **row) for name, row in TABLE["rules"].items()]

# The functions of rows that have no conditions. They return what they have seen, by the names that the texts
# of their row have for it. Two names mean more: ``since``, the first step that shows it, if that is not the
# newest one; and ``wrong``: is the finding of that level?

DROPPED = 0.2  # share of the records
NEARLY_ALL = 0.9
OFTEN = 30  # times that a prompt is seen
FEW_SAMPLES = 16  # responses a step
CUT = 0.7  # share of responses that end
NONE_ENDS = 0.02
FALLS_FROM = 0.2  # a smaller share at the start cannot fall far
PAID = 0.5  # correlation of score and length
BY_LENGTH = 0.6
SAME = 1e-4  # standard deviation of the scores
SCORED = 500  # responses: of fewer, a reward that is seldom earned can be earned by none
BROKEN = -4.0  # standard errors of a rise of the score
FLAT = 1.0
MOVED = 0.1  # nats a response


def records_dropped(past: Past) -> Seen:
    """Much of the data is not used."""
    share = past.known("dropped_share")
    return share > DROPPED and {"wrong": share > NEARLY_ALL}


def unusual_flags(past: Past) -> Seen:
    """Flags far outside the range in which they help. A flag that is 0 is off."""
    odd = []
    usual = []
    for name, (least, most, better) in past.usual.items():
        value = past.args.get(name)
        if value and not least <= value <= most:
            odd.append(f"--{name} {value:g} (usual: {least:g} to {most:g})")
            usual.append(f"--{name} {better:g}")
    return bool(odd) and {"odd": ", ".join(odd), "usual": " ".join(usual)}


def nothing_holds_the_policy(past: Past) -> Seen:
    """No KL term, and a reward model that can be exploited."""
    return past.args.get("kl_coef") == 0 and past.known("reward_model") and {"since": 0}


def few_prompts(past: Past) -> Seen:
    """The same few prompts come back again and again."""
    times = past.known("total_steps") * past.responses / (past.known("prompts") or math.inf)
    return times > OFTEN and {"times": times}


def small_batch(past: Past) -> Seen:
    """So few responses a step that chance decides about a step."""
    return 0 < past.responses < FEW_SAMPLES and {"count": past.responses}


def first_ratio(past: Past) -> Seen:
    """Before the first update of a batch the actor is the old actor, and their ratio is 1."""
    limit = 1e-3 if past.known("dtype") == "float32" else 0.05
    off = abs(past.now("policy/first_ratio", 1) - 1) > limit
    return off and past.known("update_old_actor_freq") <= 1 and {"wrong": True}


def few_end(past: Past) -> Seen:
    """Many responses are cut from the start on. With --missing_eos_penalty 0 the run says that they may."""
    count = max(3, past.enough)
    ends = past.start("rollout/finished", count)
    cut = past.steps == count and ends < CUT and past.args.get("missing_eos_penalty") != 0
    return cut and {"since": 1, "ends": ends, "wrong": ends < NONE_ENDS}


def forgets_to_stop(past: Past) -> Seen:
    """Responses ended by themselves at the start, and fewer and fewer do."""
    fell = past.holds(["rollout/finished < 0.8 times its start in 3 steps"])
    far = past.holds(["rollout/finished < 0.5 times its start in 3 steps"])
    return fell and fell["start"] > FALLS_FROM and {**fell, "wrong": bool(far)}


def length_is_gamed(past: Past) -> Seen:
    """The length changes much in the direction that is paid for, and nothing independent gets better."""
    paid = past.now("rollout/score_length_corr", 3)
    gets = "> 1.4" if paid > 0 else "< 0.7"
    changed = past.holds([f"rollout/length {gets} times its start in 3 steps"])
    better = past.witness in JUDGES and past.trend > 1
    return abs(paid) >= PAID and not better and changed


def scores_alike(past: Past) -> Seen:
    """All responses get the same score from the start. Few answers of a hard task can all be wrong."""
    first = max(past.values["reward/score_std"][:WINDOW], default=1.0)
    same = first < SAME and past.holds([f"reward/score_std < {SAME} in 3 steps"])
    return same and {"since": 1, "wrong": past.steps * past.responses >= SCORED, "steps": past.steps}


def score_follows_length(past: Past) -> Seen:
    """The score of a response is mostly its length, seen before the policy has moved."""
    mean = past.start("rollout/score_length_corr", 3)
    return past.steps == 3 and abs(mean) > BY_LENGTH and {"since": 1, "mean": mean}


def held_out_falls(past: Past) -> Seen:
    """What was held out gets worse."""
    values = past.values[past.witness]
    if len(values) < 2:
        return False
    best = max(values)
    exploited = past.witness in JUDGES and past.score_rise > CLEAR
    return past.change(best, values[-1]) < -1 and {
        "wrong": past.trend < -2,
        "what": past.witness,
        "exploited": " while the score rises: the reward is exploited" if exploited else "",
        "first": values[0],
        "best": best,
        "last": values[-1],
    }


def score_does_not_rise(past: Past) -> Seen:
    """The policy moves, and neither the score nor the evaluations rise; wrong: the score falls far."""
    rise = past.score_rise
    moved = past.now("kl/sequence", WINDOW) > MOVED
    return (
        moved
        and rise <= FLAT
        and not past.trend > 1
        and {
            "wrong": rise < BROKEN,
            "score": past.score,
            "start": past.start(past.score, BEGIN),
            "now": past.now(past.score, WINDOW),
            "rise": rise,
        }
    )


# --------------------------------------------------------------------------------------- findings

MOVE = re.compile(r" ?--(\w+) ([x/]?)(\d[\w.+-]*)")  # of a remedy


@dataclass(frozen=True)
class Finding:
    """Something that is unusual in a run (level "look") or cannot be right ("wrong").

    step: since when; numbers: what shows it; causes: the likely ones, the likeliest first; remedy: flags with
    values to try, or words; source: where the limit comes from.
    """

    name: str
    level: str
    step: int
    symptom: str
    numbers: str
    causes: list[str]
    remedy: str
    source: str


def finding_of(rule: Rule, seen: dict[str, Any], past: Past) -> Finding:
    """A row and what it has seen in this run -> the finding."""
    newest = {name: values[-1] for name, values in past.values.items() if values}
    known = {**past.facts, **past.args, **newest, **seen}
    numbers = []
    for text in rule.numbers:
        with suppress(KeyError, TypeError, ValueError):  # a value that is not known
            numbers.append(text.format_map(known))
    return Finding(
        name=rule.name,
        level=WRONG if seen.get("wrong") else LOOK,
        step=seen.get("since", past.step),
        symptom=rule.symptom.format_map(known),
        numbers=", ".join(numbers),
        causes=rule.causes,
        remedy=remedy_of(rule.remedy.format_map(known), past),
        source=rule.source,
    )


def remedy_of(text: str, past: Past) -> str:
    """The remedy of a row with the values for this run, without those that the run has already."""
    return MOVE.sub(partial(moved, past), text).strip() or "see docs/health.md"


def moved(past: Past, move: re.Match[str]) -> str:
    """A flag of a remedy with its value for this run; "" where the run has it already."""
    flag, sign, number = move.groups()
    if sign and flag == "kl_coef" and past.known("kl_target"):  # it moves --kl_coef
        flag = "kl_target"
        sign = "/"
    now = past.known(flag)
    least, _, usual = past.usual.get(flag, [now] * 3)
    value = number
    if sign == "x":
        value = f"{max(now * int(number), usual):g}"
    elif sign:
        value = f"{usual if now < least else min(now / int(number), usual):g}"
    return "" if value == f"{now:g}" else f" --{flag} {value}"


class Health:
    """The findings of a run, step by step. args: config.json as a dict, or {}."""

    def __init__(self, args: dict[str, Any]) -> None:
        self._found: dict[str, Finding] = {}  # by rule: the first one, or the first one that is "wrong"
        self._said: list[Finding] = []  # what ``add`` has returned
        self._past = Past(args)
        logged = args.get("offline_data_path")
        checked = args.get("script", SCRIPT) == SCRIPT
        self._rules = [rule for rule in RULES if checked and (rule.offline or not logged)]
        self._look()  # at flags and data: nothing else is known yet

    def add(self, record: dict[str, Any]) -> list[Finding]:
        """Take in a line of metrics.jsonl -> the findings that begin with it, or become "wrong" with it."""
        self._past.add(record)
        self._look()
        begun = [finding for finding in self.sorted if finding not in self._said]
        self._said += begun
        return begun

    def _look(self) -> None:
        """Keep what the rules find."""
        for rule in self._rules:
            known = self._found.get(rule.name)
            seen = rule.seen(self._past)
            if known and seen:
                seen["since"] = known.step
            if seen and (not known or (known.level == LOOK and seen.get("wrong"))):
                self._found[rule.name] = finding_of(rule, seen, self._past)

    @property
    def sorted(self) -> list[Finding]:
        """All findings: those of before the first step, which may be the cause of others, then the wrong
        ones, then by step."""
        return sorted(self._found.values(), key=lambda f: (f.step > 0, f.level != WRONG, f.step))


def findings(records: Iterable[dict[str, Any]], args: dict[str, Any]) -> list[Finding]:
    """Lines of metrics.jsonl and config.json ({}: not known) -> its findings, sorted as ``Health`` has
    them."""
    health = Health(args)
    for record in records:
        health.add(record)
    return health.sorted


def one_line(finding: Finding) -> str:
    """A finding as one line, for the terminal."""
    return (
        f"{finding.level}, since step {finding.step}: {finding.symptom}. {finding.numbers}. "
        f"Try: {finding.remedy} (docs/health.md, {finding.name})"
    )


def as_markdown(found: list[Finding]) -> str:
    """Findings -> the section of summary.md; a sentence if there are none."""
    if not found:
        return "Health: nothing unusual was found."
    lines = ["Health (docs/health.md explains each finding):", ""]
    for f in found:
        lines += [
            f"- **{f.name}** ({f.level}, since step {f.step}): {f.symptom}.",
            f"  - numbers: {f.numbers}",
            f"  - likely causes: {'; '.join(f.causes)}",
            f"  - try: {f.remedy}",
            f"  - source: {f.source}",
        ]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------ the command


def main(argv: list[str]) -> int:
    """Print the findings of the run folder that is named -> the exit code."""
    if len(argv) != 1:
        raise InputError("usage: python -m trainer.runs.health RUN_FOLDER, such as out/run_1")
    records, args = read_run(Path(argv[0]))
    if args.get("script", SCRIPT) != SCRIPT:
        print(f"{argv[0]}: a run of {args['script']}; only runs of {SCRIPT} are checked")
        return 0
    found = findings(records, args)
    print(f"{argv[0]}: step {records[-1]['step'] if records else 0}\n\n{as_markdown(found)}")
    return int(any(f.level == WRONG for f in found))


def read_run(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A run folder -> lines of metrics.jsonl, config.json. An incomplete last line, of a run that was killed,
    is left out."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
        records = [json.loads(line) for line in lines[:-1]]  # then comes nothing, or half a line
        return records, json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder}: cannot be read as a run folder ({error}); name one such as out/run_1"
        ) from None


if __name__ == "__main__":
    run_script(lambda: sys.exit(main(sys.argv[1:])))
