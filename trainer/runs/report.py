"""What came of a run of any script: summary.md in words, curves.png, and report.html, all of it on one page.

The texts are in Jinja2's templates beside this file, which has what they show. The page needs no network and
runs no script: it forbids itself to load anything, and texts of models and data are escaped. All three are
written again and again as the run goes. docs/metrics.md says how the verdict tells a change from chance.
"""

import math
import time
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from atomic_files import write_whole, writing
from trainer.runs.base import Run
from trainer.runs.displays import UNITS, Display, Row, call_text, metric_names, read_rows
from trainer.runs.health import STANDARD_ERRORS, Health, History, spread_of_steps

DRAWN = 6  # panels of curves.png; report.html has all
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=select_autoescape(["html.jinja2"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def write_report(run: Run, health: Health, state: str) -> str:
    """Write summary.md, report.html and curves.png -> the text of the first.

    state: "running", "ended" or "stopped". Raises InputError if the disk cannot be written.
    """
    from trainer.runs.plots import draw_png, draw_svgs  # here, because matplotlib takes long to load

    folder = run.folder
    history = health.history
    findings = health.sorted
    panels = run.display.panels
    shown = {
        "run": run,
        "state": state,
        "words": in_words(run, history, state),
        "findings": findings,
        "table": table(run.display, history),
    }
    answers = map(with_whole, read_rows(folder / "eval_samples.jsonl"))
    text = TEMPLATES.get_template("summary.md.jinja2").render(shown)
    page = TEMPLATES.get_template("report.html.jinja2").render(
        shown,
        written=time.strftime("%Y-%m-%d %H:%M %Z"),
        history=history,
        svgs=draw_svgs(history, panels, findings),
        answers=[row for row in answers if row["step"] >= history.since],
        samples=[*map(with_whole, read_rows(folder / "samples.jsonl"))],
        call_text=call_text,
    )
    with writing(folder):
        write_whole(folder / "summary.md", text)
        write_whole(folder / "report.html", page)
        draw_png(history, panels[:DRAWN], folder / "curves.png")
    return text


def with_whole(row: Row) -> Row:
    """A row of answers with "whole", the text or the turns of each: answers are alike where it is."""
    greedy = {"greedy": with_whole(row["greedy"])} if "greedy" in row else {}
    return {**row, **greedy, "whole": str(row.get("messages", row["response"]))}


def in_words(run: Run, history: History, state: str) -> list[str]:
    """Did the run help? -> sentences: the evaluations compared, or without two of them the training steps.

    state: see ``write_report``.
    """
    display = run.display
    # With --normalize_reward only the raw score of one step can be compared with that of another.
    short = "score_raw" if history.values["reward/score_raw"] else display.best
    steps = history.values[f"{display.group}/{short}"]
    name = f"eval/{short}"
    if change := history.ends(name):
        where = f"on {history.get('held_out')} held-out {display.tested}"
        where += f" since step {history.since}" if history.since else ""
        least = history.least_change(name, *change)
    else:
        where = f"in training (first and last tenth of {len(steps)} steps)"
        change = history.ends(f"{display.group}/{short}")
        least = STANDARD_ERRORS * spread_of_steps(steps) * math.sqrt(2 / max(1, len(steps) // 10))
    text = TEMPLATES.get_template("verdict.jinja2").render(
        run=run,
        state=state,
        history=history,
        short=short,
        change=change,
        least=least,
        where=where,
    )
    return list(filter(None, text.splitlines()))


def table(display: Display, history: History) -> list[list[str]]:
    """The rows of a table, its titles first: where the metrics of a run began and where they ended."""
    rows = [["", "first", "last"]]
    evaluated = sorted(name for name in history.values if name.startswith("eval/"))
    for pattern in (*evaluated, *display.followed):
        for name in metric_names(pattern, history.values):
            if change := history.ends(name):
                unit = UNITS.get(name.split("/")[1].removesuffix("_greedy"), "")
                rows.append([f"{name} {unit}".strip(), f"{change[0]:.4g}", f"{change[1]:.4g}"])
    return rows
