"""summary.md: whether a run helped, in words and tables, for all three scripts.

A verdict, the findings (health.py), a table of the first and the last evaluation, a table of the training
steps, and which step the saved weights have. It is written when a run ends, also when it was stopped.

How the verdict tells a change from chance: s is how much the metric varies from one training step to the next
(``spread_of_steps``). A mean of k steps then has the standard error s / sqrt(k). An evaluation of n records
has d / sqrt(n), d being the standard deviation over records: what the evaluation says of it, of a share
sqrt(p (1 - p)), else s sqrt(b), b being the records of a step. Where an evaluation says how much the records'
changes since the start vary (``eval/…_change_std``: pairs of offline PPO), the difference is one of equal
records: its standard error is that number / sqrt(n). Twice the standard error of the difference is the least
difference that is called a rise or a fall (``least_difference``). Evaluations share their sampling noise, so
this is cautious there.
"""

import math
from functools import partial
from pathlib import Path
from statistics import fmean

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trainer.runs.displays import Display, Records, logged, metric_names
from trainer.runs.health import least_difference, spread_of_steps

SHARES = ("accuracy", "chosen_share", "chosen_preferred", "finished", "format_rate")  # each record: 0 to 1
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: name.endswith(".html.jinja2"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
Table = list[list[str]]  # rows of cells, the titles first


def filled(template: str, **content) -> str:
    """A template of this folder, with what it shows."""
    return TEMPLATES.get_template(template).render(content)


def in_words(run, records: Records, state: str) -> list[str]:
    """What came of a run -> sentences. records: all lines of metrics.jsonl; state: "running", "ended",
    "stopped" or "ended by --strict_health 1: NAME"."""
    size = run.args.batch_size * run.world.size
    held_out = len(run.held_out_pairs or run.held_out or ())
    words = verdict(records, run.display, size, held_out, run.best_metric)
    if state not in ("running", "ended"):
        words.append(f"The run was {state}, after step {run.progress.step} of {run.total_steps}.")
    return words


def verdict(records: Records, display: Display, batch_size: int, held_out: int, best_by="") -> list[str]:
    """Did the run help? -> sentences: the evaluations compared, or without two of them the training steps.

    batch_size: records of a step, over all processes; held_out: records of an evaluation; best_by: the metric
    that says which evaluation was the best, where it is not the one that is compared.
    """
    # With --normalize_reward the scale of the score follows the running statistics: only the raw score of one
    # step can be compared with that of another.
    is_raw = any(name.endswith("/score_raw") for name in logged(records))
    short = "score_raw" if is_raw else display.best
    steps = values_of(records, f"{display.group}/{short}")
    spread = spread_of_steps(steps)
    change = ends(records, f"eval/{short}")
    if change:
        is_share = short in SHARES
        spreads = ends(records, f"eval/{short}_std") or ()
        if steps and not is_share:  # else steps have none, or one of records that they have learned
            spreads = (spread * math.sqrt(batch_size),)
        least = least_difference(
            count=max(held_out, 1),
            changes=values_of(records, f"eval/{short}_change_std"),
            spreads=spreads,
            shares=change if is_share else (),
        )
        where = f"on {held_out} held-out {display.tested or display.unit}"
    elif steps:
        first, last, count = first_and_last(steps)
        change = fmean(steps[:count]), fmean(steps[-count:])
        least = least_difference(count, spreads=[spread])
        where = f"in training ({first} and {last} of {len(steps)})"
    else:
        return [f"Nothing was measured that says whether the run helped (eval/{short})."]
    best_by = best_by or f"eval/{short}"
    text = filled(
        "verdict.jinja2",
        display=display,
        held_out=held_out,
        short=short,
        is_raw=is_raw,
        change=change,
        least=least,
        where=where,
        best_by=best_by,
        evaluations=[(r["step"], r[best_by]) for r in records if best_by in r],
        ends=partial(ends, records),
    )
    return list(filter(None, text.splitlines()))


def tables(run, records: Records) -> list[Table]:
    """The tables of a run: evaluations, steps. records: all lines of metrics.jsonl."""
    evaluated = sorted(n for n in logged(records) if n.startswith("eval/") and ends(records, n))
    steps = [r for r in records if r["step"]]  # step 0 is an evaluation
    followed = [name for pattern in run.display.followed for name in metric_names(pattern, steps)]
    first, last, count = first_and_last(steps)
    return [
        table(["held out", "before", "after"], records, evaluated, 1),
        table(["training", first, last], steps, followed, count),
    ]


def table(title: list[str], records: Records, names: list[str], count: int) -> Table:
    """The means of metrics over the first ``count`` records that have them, and over the last."""
    rows = [title]
    for name in names:
        values = values_of(records, name)
        rows.append([name, f"{fmean(values[:count]):.4g}", f"{fmean(values[-count:]):.4g}"])
    return rows


def first_and_last(steps: list) -> tuple[str, str, int]:
    """Of so many steps -> ("first 4 steps", "last 4 steps", 4): how many at the start and at the end are
    averaged, a tenth, at least one."""
    count = max(1, len(steps) // 10)
    some = "step" if count == 1 else f"{count} steps"
    return f"first {some}", f"last {some}", count


def values_of(records: Records, name: str) -> list[float]:
    """The values of a metric, where it was logged."""
    return [r[name] for r in records if name in r]


def ends(records: Records, name: str) -> tuple[float, float] | None:
    """The first and the last value of a metric; None without two."""
    values = values_of(records, name)
    return (values[0], values[-1]) if len(values) > 1 else None
