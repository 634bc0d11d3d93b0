"""The best actor of a run: which evaluation it was, by ``--best_metric`` (higher is better), and its files.

The run folder has its weights, best.pth and the folder best beside it, and best.json, which says what
evaluation these had. The evaluation before training is the value to beat; no weights are written for it. In a
run that is evaluated in another way the best begins anew.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from atomic_files import write_whole, writing
from errors import InputError
from trainer.rewards.combine import Judge, Reward

WEIGHTS = "best.pth"  # in the run folder
EVALUATION = "best.json"


@dataclass(frozen=True)
class Best:
    """The best evaluation so far. source: what the values depend on besides the actor, as text: values of
    another source cannot be compared; metric: "eval/…", "" before it is chosen; value: None before the first
    evaluation; step: of that evaluation, 0 means that there are no weights."""

    source: str = ""
    metric: str = ""
    value: float | None = None
    step: int = 0

    def beaten_by(self, metrics: Mapping[str, float], step: int) -> "Best | None":
        """The evaluation in the metrics of a step, if they have one that is better than all before."""
        found = {name: x for name, x in metrics.items() if name.startswith("eval/")}
        name = self.metric or usual_metric(found)
        if name not in found:
            return None
        least = -math.inf if self.value is None else self.value
        return replace(self, metric=name, value=found[name], step=step) if found[name] > least else None

    def follows(self, earlier: "Best") -> bool:
        """Whether evaluations to come can be compared with an earlier one, or there will be none."""
        same = self.source == earlier.source and self.metric in ("", earlier.metric)
        return same or not self.source

    def describe(self, file: str | Path) -> str:
        """Words on this file; "" without evaluations."""
        if self.step:
            return f"{file} has those after step {self.step}, the best by {self.metric} ({self.value:.3f})"
        if self.value is None:
            return ""
        return f"there is no {file}, because {self.metric} was never above {self.value:.3f}"


def check_metric(
    metric: str, reward: Reward, judge: Judge, accuracy: bool, generations: int, pairs: bool
) -> None:
    """Raise InputError for a --best_metric, "eval/…", that no evaluation of a run with these rewards has.
    accuracy: whether right answers are known; generations: answers a prompt; pairs: whether there are
    held-out pairs of offline PPO."""
    names = [*reward.names, *judge.names, "length", "finished"]
    if reward.reasoning:
        names.append("format_rate")
    if accuracy:
        names.append("accuracy")
    names += [f"{name}_greedy" for name in names]
    if accuracy and generations > 1:
        names.append(f"pass@{generations}")
    if pairs:
        names.append("chosen_preferred")
    names = [f"eval/{name}" for name in names]
    if metric not in names:
        raise InputError(f"--best_metric {metric}: no evaluation has it; choose one of {', '.join(names)}")


def read_best(folder: Path) -> Best | None:
    """What was the best when the run of this folder stopped, None if there was none. Raises InputError for a
    damaged file."""
    path = folder / EVALUATION
    if not path.exists():
        return None
    try:
        return Best(**json.loads(path.read_bytes()))
    except (ValueError, TypeError):
        raise InputError(f"{path}: is damaged; delete it, then the best begins anew") from None


def write_best(folder: Path, best: Best) -> None:
    """Write what ``read_best`` returns. Raises InputError where the disk is full."""
    with writing(folder):
        write_whole(folder / EVALUATION, json.dumps(asdict(best)))


def usual_metric(found: Mapping[str, float]) -> str:
    """What decides without --best_metric: the share of the pairs in which the chosen answer is preferred, the
    judge, the user's function, the accuracy if it is above 0, or the score (with --normalize_reward the raw
    score, whose scale does not move); "" without any of them."""
    right = ["accuracy"] if found.get("eval/accuracy") else []
    names = ("chosen_preferred", "judge", "function", *right, "score_raw", "score", "accuracy")
    return next((f"eval/{name}" for name in names if f"eval/{name}" in found), "")
