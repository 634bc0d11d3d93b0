"""What is shown of each script's runs, metric by metric: printed lines, progress bar, plots, tables.

displays.toml is the table; docs/metrics.md says what each metric means, and tests/test_docs.py checks that it
has all that are named there. run_logger.py prints, plots.py draws, report.py makes the verdict, the tables
and the page.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

Records = list[dict[str, float]]  # lines of metrics.jsonl
Row = dict[str, Any]  # a line of another JSONL file of the run folder
Rows = dict[str, list[Row]]  # {file: what is written to it}
PARTS = "reward/*"  # stands for every part of the reward


class Panel(NamedTuple):
    """One plot. A metric that a run does not have is left out; in report.html so is a plot without any."""

    title: str
    series: dict[str, str]  # {metric, or PARTS: its label, "" for its own name}
    look_for: str

    def curves(self, records: Records) -> dict[str, str]:
        """{metric: label} of those that these records have."""
        return {
            name: label or name.split("/", 1)[1]
            for pattern, label in self.series.items()
            for name in metric_names(pattern, records)
        }


@dataclass(frozen=True)
class Display:
    """How the runs of one script are shown. Metrics are given by name."""

    title: str  # title of the progress bar
    folder: str  # without --run_name, run folders are called <folder>_<n>
    unit: str  # what a batch consists of, for the line ``run     20 steps of 32 pairs``
    tested: str  # what an evaluation consists of
    line: dict[str, str]  # the line of a step: {metric: its format}
    evaluation: dict[str, str]  # the line of an evaluation
    panels: tuple[Panel, ...]  # the plots of report.html; the first six are in curves.png
    best: str  # the metric that is compared: of the evaluations eval/<best>, of the steps <group>/<best>
    followed: tuple[str, ...]  # the table of the steps: metrics, or PARTS
    group: str = "train"
    lower_is_better: bool = False  # of ``best``
    samples: tuple[str, ...] = ()  # files of rows that the run writes besides metrics.jsonl


def as_line(formats: Mapping[str, str], metrics: Mapping[str, float]) -> str:
    """{metric: its format} and metrics -> ``score 2.310 | kl 0.0210 | …``, '' if there are none of them."""
    return " | ".join(text.format(metrics[name]) for name, text in formats.items() if name in metrics)


def logged(records: Records) -> list[str]:
    """The names of the metrics that these records have, in the order in which they come."""
    return list(dict.fromkeys(name for record in records for name in record))


def metric_names(pattern: str, records: Records) -> list[str]:
    """A metric, or ``PARTS`` -> the names of the metrics in these records that it stands for.

    ``PARTS`` is without the sum of the parts, the statistics of ``--normalize_reward`` and the share of
    scores at the limit."""
    if pattern != PARTS:
        return [pattern] if any(pattern in record for record in records) else []
    no_part = ("/score", "_raw", "_mean", "_std", "/at_limit")
    return [name for name in logged(records) if name.startswith("reward/") and not name.endswith(no_part)]


def display_of(row: Row) -> Display:
    """An entry of the table -> how a script's runs are shown."""
    return Display(**row | {"panels": tuple(Panel(**panel) for panel in row["panels"])})


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PPO = display_of(TABLE["ppo"])
OFFLINE = replace(PPO, **TABLE["offline"])
SFT = display_of(TABLE["sft"])
PAIRS = display_of(TABLE["pairs"])
RATINGS = display_of(TABLE["ratings"])


def offline(pairs: bool, best: str) -> Display:
    """The display of offline PPO. pairs: whether some are held out; without any, ``best`` is compared,
    "eval/…" or "", which the answers to held-out prompts have."""
    if pairs or not best:
        return OFFLINE
    return replace(OFFLINE, tested="prompts", best=best.removeprefix("eval/"))
