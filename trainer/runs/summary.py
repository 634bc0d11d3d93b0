"""summary.md: whether a run helped, in words and tables, for all three scripts.

A verdict, the findings (health.py), a table of the first and the last evaluation, a table of the training
steps, and which step the saved weights have. It is written when a run ends, also when it was stopped.

How the verdict tells a change from chance: s is how much the metric varies from one training step to the next
(``spread_of_steps``). A mean of k steps then has the standard error s / sqrt(k). An evaluation of n records
has s sqrt(b / n), b being the records of a step; of a share, or where no step has the metric, d / sqrt(n), d
being its standard deviation over the records: eval/<name>_std, the larger one of the first and the last
evaluation, else the most that a share with this mean can have. Where an evaluation says how much the records'
changes since the start vary (``eval/…_change_std``: pairs of offline PPO), the difference is one of equal
records: its standard error is that number / sqrt(n). Twice the standard error of the difference is the least
difference that is called a rise or a fall (``least_difference``). Evaluations share their sampling noise, so
this is cautious there.
"""

import math
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trainer.runs.displays import PARTS, RULES, Display, Records, logged, metric_names, only_critic
from trainer.runs.health import SCRIPT, as_markdown
from trainer.runs.health_past import least_difference, spread_of_steps

SHARES = ("accuracy", "chosen_share", "chosen_preferred", "finished", "format_rate")  # each record: 0 to 1
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: name.endswith(".html.jinja2"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
Table = list[list[str]]  # rows of cells, the titles first; empty where there is nothing to show


class Change(NamedTuple):
    """How a metric changed. least: the least difference that is no chance, NaN if not known; where: what it
    was measured on."""

    before: float
    after: float
    least: float
    where: str

    @property
    def rise(self) -> float:
        """How far it rose; below 0: it fell."""
        return self.after - self.before


def filled(template: str, **content) -> str:
    """A template of this folder, with what it shows."""
    return TEMPLATES.get_template(template).render(content)


def summarise(run, records: Records, saved_step: int, findings=(), state: str = "ended") -> str:
    """The content of summary.md, Markdown.

    records: all lines of metrics.jsonl; saved_step: the step of the newest checkpoint, 0 if there is none;
    findings: what health.py has found in the records; state: see ``Report.write``.
    """
    words = in_words(run, records)
    if "--strict_health" in state:
        words.append(f"The run was {state}.")
    return filled(
        "summary.md.jinja2",
        words=words,
        findings=as_markdown(findings) if run.script == SCRIPT else "",
        tables=tables(run, records),
        saved_step=saved_step,
        run=run,
    )


def in_words(run, records: Records) -> list[str]:
    """What came of a run -> sentences. records: all lines of metrics.jsonl."""
    size = run.args.batch_size * run.world.size
    held_out = len(run.held_out_pairs or run.held_out or ())
    words = verdict(records, run.display, size, held_out, run.best.metric)
    steps = trained(records)
    if steps and steps[-1]["step"] < run.total_steps:
        words.append(f"The run stopped after step {steps[-1]['step']} of {run.total_steps}.")
    if critic := sum(map(only_critic, steps)):
        words.append(f"Steps that trained only the critic (--critic_warmup_steps): {critic} of {len(steps)}.")
    return words


def tables(run, records: Records) -> list[Table]:
    """The tables of a run: evaluations, steps. records: all lines of metrics.jsonl."""
    return [evaluation_table(records), step_table(records, run.display)]


def verdict(records: Records, display: Display, batch_size: int, held_out: int, best_by="") -> list[str]:
    """Did the run help? -> sentences: the evaluations compared, or without two of them the training steps.

    batch_size: records of a step, over all processes; held_out: records of an evaluation; best_by: the metric
    that says which evaluation was the best, where it is not the one that is compared.
    """
    # With --normalize_reward the scale of the score follows the running statistics: only the raw score of one
    # step can be compared with that of another.
    is_raw = any(name.endswith("/score_raw") for name in logged(records))
    short = "score_raw" if is_raw else display.best
    measured = {"display": display, "batch_size": batch_size, "held_out": held_out}
    change = change_of(records, short, **measured)
    if not change:
        if trained(records):
            return [f"Nothing was evaluated that says whether the run helped (eval/{short})."]
        return ["No step was trained."]
    rest = None
    if change.rise > change.least:
        rest = change_of([without_rules(r, short) for r in records], "rest", **measured)
        if rest and rest.rise > min(rest.least, change.rise / 2):
            rest = None
    risen = []
    others = []
    changes = []
    for name in metric_names(PARTS, records):
        part = name.removeprefix("reward/")
        values = values_of(records, f"eval/{part}") or values_of(records, name)
        if part not in RULES:
            others.append(part)
        elif values and values[-1] > values[0]:
            risen.append(part)
        if found := ends(records, f"eval/{part}"):
            changes.append((part, found[1] - found[0]))
    changes.sort(key=lambda change: -abs(change[1]))
    best_by = best_by or f"eval/{short}"
    text = filled(
        "verdict.jinja2",
        display=display,
        held_out=held_out,
        short=short,
        is_raw=is_raw,
        change=change,
        rest=rest,
        risen=risen,
        others=others,
        changes=changes,
        best_by=best_by,
        best=best_of(records, best_by, display.lower_is_better),
        last=values_of(records, best_by)[-1:],
        ends=partial(ends, records),
    )
    return list(filter(None, text.splitlines()))


def change_of(
    records: Records, short: str, display: Display, batch_size: int, held_out: int
) -> Change | None:
    """How a metric changed; None where no step and no two evaluations have it. short: its name without the
    group."""
    steps = values_of(records, f"{display.group}/{short}")
    spread = spread_of_steps(steps)
    if found := ends(records, f"eval/{short}"):
        is_share = short in SHARES
        spreads = ends(records, f"eval/{short}_std") or ()
        if steps and not is_share:  # else steps have none, or one of records that they have learned
            spreads = (spread * math.sqrt(batch_size),)
        least = least_difference(
            count=max(held_out, 1),
            changes=values_of(records, f"eval/{short}_change_std"),
            spreads=spreads,
            shares=found if is_share else (),
        )
        return Change(*found, least, f"on {held_out} held-out {display.tested or display.unit}")
    if not steps:
        return None
    first, last, count = first_and_last(steps)
    where = f"in training ({first} and {last} of {len(steps)})"
    return Change(fmean(steps[:count]), fmean(steps[-count:]), 2 * spread * math.sqrt(2 / count), where)


def without_rules(record: dict, score: str) -> dict:
    """A record with "reward/rest" and "eval/rest": what of this score is not by ``RULES``, if some of it is
    by them."""
    rest = {}
    for group in ("reward", "eval"):
        rules = [record[f"{group}/{rule}"] for rule in RULES if f"{group}/{rule}" in record]
        if rules and f"{group}/{score}" in record:
            rest[f"{group}/rest"] = record[f"{group}/{score}"] - sum(rules)
    return record | rest


def evaluation_table(records: Records) -> Table:
    """The first and the last evaluation; empty if there is only one. Metrics with a greedy twin
    (eval/<name>_greedy) get two more columns."""
    evaluated = [r for r in records if any(name.startswith("eval/") for name in r)]
    if len(evaluated) < 2:
        return []
    before, after = evaluated[0], evaluated[-1]
    table = [["held out", "before", "after"]]
    suffixes = [""]
    if any(name.endswith("_greedy") for name in after):
        table = [["held out", "sampled before", "after", "greedy before", "after"]]
        suffixes.append("_greedy")
    for name in after:
        if name.startswith("eval/") and not name.endswith("_greedy") and name in before:
            cells = [number(r.get(name + suffix)) for suffix in suffixes for r in (before, after)]
            table.append([name.removeprefix("eval/").replace("_", " "), *cells])
    return table


def step_table(records: Records, display: Display) -> Table:
    """The metrics that a display follows: the first and the last steps, and the best one; empty without a
    step."""
    steps = trained(records)
    if not steps:
        return []
    first, last, count = first_and_last(steps)
    table = [["training", first, last, "best step"]]
    followed = {
        name: best for pattern, best in display.followed.items() for name in metric_names(pattern, steps)
    }
    for name in logged(steps):
        if name.startswith("reward/") and name.endswith("_raw"):  # the scale of both moves
            followed |= {name: "", name.removesuffix("_raw"): ""}
    if "reward/score_raw" in followed:
        followed["reward/score_raw"] = "highest"
    for name, best in followed.items():
        if values := values_of(steps, name):
            cells = [number(fmean(values[:count])), number(fmean(values[-count:])), ""]
            if best:
                step, value = best_of(steps, name, best == "lowest")
                cells[2] = f"{number(value)} (step {step})"
            table.append([name, *cells])
    return table


def first_and_last(steps: list) -> tuple[str, str, int]:
    """Of so many steps -> ("first 4 steps", "last 4 steps", 4): how many at the start and at the end are
    averaged, a tenth, at least one."""
    count = max(1, len(steps) // 10)
    some = "step" if count == 1 else f"{count} steps"
    return f"first {some}", f"last {some}", count


def number(x: float | None) -> str:
    """A number with three decimals, or if it is small with two digits; '' for None."""
    if x is None:
        return ""
    return f"{x:.3f}" if not 0 < abs(x) < 0.01 else f"{x:.2g}"


def trained(records: Records) -> Records:
    """Those of training steps: step 0 is an evaluation."""
    return [r for r in records if r["step"]]


def values_of(records: Records, name: str) -> list[float]:
    """The values of a metric, where it was logged and is a number."""
    return [r[name] for r in records if math.isfinite(r.get(name, math.nan))]


def ends(records: Records, name: str) -> tuple[float, float] | None:
    """The first and the last value of a metric; None without two."""
    values = values_of(records, name)
    return (values[0], values[-1]) if len(values) >= 2 else None


def best_of(records: Records, name: str, lower_is_better: bool) -> tuple[int, float] | None:
    """(step, value) of the best value of a metric; None without one."""
    points = [(r["step"], r[name]) for r in records if math.isfinite(r.get(name, math.nan))]
    return (min if lower_is_better else max)(points, key=itemgetter(1), default=None)
