"""What came of a run of any script: summary.md in words, curves.png, and report.html, all of it on one page.

The texts are in Jinja2's templates beside this file, which has what they show. The page needs no network and
runs no script: it forbids itself to load anything, and texts of models and data are escaped. All three are
written again and again as the run goes. docs/metrics.md says how the verdict tells a change from chance.
"""

import json
import math
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from atomic_files import write_whole, writing
from trainer.runs.base import Run
from trainer.runs.displays import Display, Records, Row, logged, metric_names
from trainer.runs.health import SHARES, Finding, as_markdown, least_difference, spread_of_steps

DRAWN = 6  # panels of curves.png; report.html has all
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=select_autoescape(["html.jinja2"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def filled(template: str, **content: object) -> str:
    """A template of this folder, with what it shows."""
    return TEMPLATES.get_template(template).render(content)


def write_report(run: Run, folder: Path, findings: list[Finding], state: str, saved_step: int) -> str:
    """Write summary.md, report.html and curves.png -> the text of the first.

    state: "running", "ended" or "stopped"; saved_step: which step the saved weights have. Raises InputError
    if the disk cannot be written.
    """
    from trainer.runs.plots import draw_png, draw_svgs  # here, because matplotlib takes long to load

    records = read_metrics(folder)
    panels = run.display.panels
    shown = {"run": run, "state": state, "words": in_words(run, records, state), "findings": findings}
    shown["table"] = table(run.display, records)
    text = filled("summary.md.jinja2", **shown, health=as_markdown(findings), saved_step=saved_step)
    with writing(folder):
        write_whole(folder / "summary.md", text)
    page = filled(
        "report.html.jinja2",
        **shown,
        folder=folder,
        config=json.loads((folder / "config.json").read_bytes()),
        written=time.strftime("%Y-%m-%d %H:%M %Z"),
        records=records,
        svgs=draw_svgs(records, panels, findings),
        answers=read_rows(folder / "eval_samples.jsonl"),
        samples=read_rows(folder / "samples.jsonl"),
    )
    with writing(folder):
        write_whole(folder / "report.html", page.encode(errors="replace"))  # JSON may hold half a character
        draw_png(records, panels[:DRAWN], folder / "curves.png")
    return text


def in_words(run: Run, records: Records, state: str) -> list[str]:
    """Did the run help? -> sentences: the evaluations compared, or without two of them the training steps.

    records: all lines of metrics.jsonl; state: see ``write_report``.
    """
    display = run.display
    held_out = len(run.held_out_pairs or run.held_out or ())
    # With --normalize_reward only the raw score of one step can be compared with that of another.
    short = "score_raw" if values_of(records, "reward/score_raw") else display.best
    steps = values_of(records, f"{display.group}/{short}")
    spread = spread_of_steps(steps)
    change = ends(records, f"eval/{short}")
    if change:
        where = f"on {held_out} held-out {display.tested}"
        spreads = values_of(records, f"eval/{short}_std")
        if not spreads and f"eval/{short}" not in SHARES:
            spreads = [spread * math.sqrt(run.args.batch_size * run.world.size)]
        least = least_difference(
            count=held_out or 1,
            spreads=spreads,
            shares=change,
        )
    else:
        where = f"in training (first and last tenth of {len(steps)} steps)"
        change = ends(records, f"{display.group}/{short}")
        least = least_difference(max(1, len(steps) // 10), spreads=[spread])
    text = filled(
        "verdict.jinja2",
        run=run,
        state=state,
        held_out=held_out,
        short=short,
        change=change,
        least=least,
        where=where,
        ends=partial(ends, records),
    )
    return list(filter(None, text.splitlines()))


def table(display: Display, records: Records) -> list[list[str]]:
    """The rows of a table, its titles first: where the metrics of a run began and where they ended."""
    rows = [["", "first", "last"]]
    evaluated = sorted(name for name in logged(records) if name.startswith("eval/"))
    for pattern in (*evaluated, *display.followed):
        for name in metric_names(pattern, records):
            change = ends(records, name)
            if change:
                rows.append([name, f"{change[0]:.4g}", f"{change[1]:.4g}"])
    return rows


def ends(records: Records, name: str) -> tuple[float, float] | None:
    """The first and the last value of a metric of evaluations; of one of steps the means of the first tenth
    and of the last tenth of them. None without two values."""
    values = values_of(records, name)
    count = 1 if name.startswith("eval/") else max(1, len(values) // 10)
    return (fmean(values[:count]), fmean(values[-count:])) if len(values) > 1 else None


def values_of(records: Records, name: str) -> list[float]:
    """The values of a metric, where it was logged."""
    return [r[name] for r in records if name in r]


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file of the run folder; none if there is no such file. Half a line, of a run that
    was killed, is left out."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def read_metrics(folder: Path) -> Records:
    """The run's metrics.jsonl, without the numbers that were not finite."""
    rows = read_rows(folder / "metrics.jsonl")
    return [{name: x for name, x in row.items() if x is not None} for row in rows]
