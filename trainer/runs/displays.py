"""What is shown of each script's runs, metric by metric: printed lines, progress bar, plots, tables.

displays.toml is the table; docs/metrics.md says what each metric means, and tests/test_docs.py checks that it
has all that are named there. run_logger.py prints, plots.py draws, summary.py makes the verdict and the
tables, and report.py the report.
"""

import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

Records = list[dict[str, float]]  # lines of metrics.jsonl
PARTS = "reward/*"  # stands for every part of the reward
# The parts of PPO's reward that are rules about the form of a response. What the user wants is the rest.
RULES = ("format", "marks", "thinking", "repetition", "length_reward", "missing_eos", "overlong")
UNDEFINED = "value/explained_variance"  # where all returns are equal, which is no fault
EVALUATED = (  # the order in which an evaluation's metrics are printed
    *("loss", "perplexity", "rmse", "correlation", "chosen_share", "kl"),
    *("accuracy", "distance", "judge", "format_rate", "score", "length"),
)


class Panel(NamedTuple):
    """One plot. A metric that a run does not have is left out; in report.html so is a plot without any."""

    title: str
    series: dict[str, str]  # {metric, PARTS, or name in deciles.jsonl: its label, "" for its own name}
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
    line: dict[str, str]  # the line of a step: {metric: its format}
    panels: tuple[Panel, ...]  # the plots of report.html; the first six are in curves.png
    best: str  # the metric that is compared: of the evaluations eval/<best>, of the steps <group>/<best>
    followed: tuple[str, ...]  # the table of the steps: metrics, or PARTS
    group: str = "train"
    log_interval: int = 50  # steps between printed lines where --log_interval is 0; fewer in a short run
    lower_is_better: bool = False  # of ``best``
    samples: tuple[str, ...] = ()  # files of rows that the run writes besides metrics.jsonl (samples.py)
    tested: str = ""  # what an evaluation consists of, where that is not ``unit``
    digits: int = 4  # of an evaluation's numbers

    def step_line(self, metrics: dict) -> str:
        """``score 2.310 | kl 0.0210 | …``; ``ev -`` where it has no value. The NaN of any other metric stays
        to be seen."""
        return " | ".join(
            "ev -" if name == UNDEFINED and math.isnan(metrics[name]) else text.format(metrics[name])
            for name, text in self.line.items()
            if name in metrics
        )

    def evaluation_line(self, metrics: dict) -> str:
        """``accuracy 0.510 (greedy 0.830) | score …``, '' without an evaluation."""
        parts = []
        for name in EVALUATED:
            if f"eval/{name}" in metrics:
                text = f"{name} {metrics[f'eval/{name}']:.{self.digits}f}"
                if f"eval/{name}_greedy" in metrics:
                    text += f" (greedy {metrics[f'eval/{name}_greedy']:.{self.digits}f})"
                parts.append(text)
        return " | ".join(parts)


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


def only_critic(metrics: dict) -> bool:
    """True for the metrics of a step of critic warm-up, in which the actor did not train."""
    return "value/loss" in metrics and "policy/loss" not in metrics


def panels_of(rows: list[dict]) -> tuple[Panel, ...]:
    """Rows of the table -> plots."""
    return tuple(Panel(**row) for row in rows)


def display_of(row: dict) -> Display:
    """An entry of the table -> how a script's runs are shown."""
    return Display(**{**row, "panels": panels_of(row["panels"])})


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PPO = display_of(TABLE["ppo"])
OFFLINE = replace(PPO, **TABLE["offline"])
SFT = display_of(TABLE["sft"])
PAIRS = display_of(TABLE["pairs"])
RATINGS = display_of(TABLE["ratings"])
DISTRIBUTIONS = panels_of(TABLE["distributions"])  # of report.html; a series is a name in deciles.jsonl


def offline(pairs: bool, best: str) -> Display:
    """The display of offline PPO. pairs: whether pairs are held out; best: else this metric is compared,
    "eval/…" or "", which the answers to held-out prompts have."""
    if pairs or not best:
        return OFFLINE
    return replace(OFFLINE, tested="prompts", best=best.removeprefix("eval/"))
