"""What is shown of each script's runs, metric by metric: printed lines, progress bar, plots, tables.

displays.toml is the table; docs/metrics.md says what each metric means, and tests/test_docs.py checks that it
has all that are named there. run_logger.py prints, plots.py draws, report.py makes the verdict, the tables
and the page.
"""

import json
import tomllib
from collections.abc import Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

Texts = dict[str, str]  # {metric: its label or its format}
Row = dict[str, Any]  # a line of another JSONL file of the run folder
Rows = dict[str, list[Row]]  # {file: what is written to it}
StepLog = tuple[dict[str, float], Rows]  # what a step or an evaluation has found: metrics, rows to keep
PARTS = "reward/*"  # stands for every part of the reward


class Panel(NamedTuple):
    """One plot. A metric that a run does not have is left out; in report.html so is a plot without any."""

    title: str
    series: Texts  # {metric, or PARTS: its label, "" for its own name}
    look_for: str

    def curves(self, logged: Mapping[str, Sized]) -> Texts:
        """{metric: label} of those that were logged: {metric: its values}."""
        return {
            name: label or name.split("/", 1)[1]
            for pattern, label in self.series.items()
            for name in metric_names(pattern, logged)
        }


@dataclass(frozen=True)
class Display:
    """How the runs of one script are shown. Metrics are given by name."""

    title: str  # title of the progress bar
    folder: str  # without --run_name, run folders are called <folder>_<n>
    unit: str  # what a batch consists of, for the line ``run     20 steps of 32 pairs``
    tested: str  # what an evaluation consists of
    line: Texts  # the line of a step: {metric: its format}
    evaluation: Texts  # the line of an evaluation
    panels: tuple[Panel, ...]  # the plots of report.html; the first six are in curves.png
    best: str  # the metric that is compared: of the evaluations eval/<best>, of the steps <group>/<best>
    followed: tuple[str, ...]  # the table of the steps: metrics, or PARTS
    group: str = "train"
    lower_is_better: bool = False  # of ``best``
    samples: tuple[str, ...] = ()  # files of rows that the run writes besides metrics.jsonl


def as_line(formats: Mapping[str, str], metrics: Mapping[str, float]) -> str:
    """{metric: its format} and metrics -> ``score 2.310 | kl 0.0210 | …``, '' if there are none of them."""
    return " | ".join(text.format(metrics[name]) for name, text in formats.items() if name in metrics)


def metric_names(pattern: str, logged: Mapping[str, Sized]) -> list[str]:
    """A metric, or ``PARTS`` -> the names of the metrics that it stands for. logged: {metric: its values}.

    ``PARTS`` is without what is said of the sum, and the shares at the limit and without a score."""
    no_part = ("/score", "/score_raw", "/score_std", "/at_limit", "/unscored")
    names = [pattern]
    if pattern == PARTS:
        names = [name for name in logged if name.startswith("reward/") and not name.endswith(no_part)]
    return [name for name in names if logged[name]]


def call_text(call: Row) -> str:
    """A call of a tool, as OpenAI has it -> ``add({"a": 1, "b": 2})``."""
    function = call["function"]
    return f"{function['name']}({json.dumps(function['arguments'], ensure_ascii=False)})"


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file of the run folder; none if there is no such file. Half a line, of a run that
    was killed, is left out."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def display_of(row: Row) -> Display:
    """An entry of the table -> how a script's runs are shown."""
    return Display(**row | {"panels": tuple(Panel(**panel) for panel in row["panels"])})


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
UNITS = TABLE["units"]
PPO = display_of(TABLE["ppo"])
OFFLINE = replace(PPO, **TABLE["offline"])
SFT = display_of(TABLE["sft"])
PAIRS = display_of(TABLE["pairs"])
RATINGS = display_of(TABLE["ratings"])
