"""The best actor of a run: which evaluation it was, by ``--best_metric`` (higher is better), and its files.

The run folder has its weights, best.pth and the folder best beside it, and best.json, which says what
evaluation these had. The evaluation before training is the value to beat; no weights are written for it. In a
run that is evaluated in another way the best begins anew.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from atomic_files import write_whole, writing
from errors import InputError
from trainer.rewards.reward_function import code_hash

WEIGHTS = "best.pth"  # in the run folder
EVALUATION = "best.json"


class Best(NamedTuple):
    """The best evaluation so far. source: what the values depend on besides the actor, as text: values of
    another source cannot be compared; metric: "eval/…", "" before it is chosen; value: -inf before the first
    evaluation; step: of that evaluation, 0 means that there are no weights."""

    source: str = ""
    metric: str = ""
    value: float = -math.inf
    step: int = 0

    def beaten_by(self, metrics: Mapping[str, float], step: int) -> "Best | None":
        """The evaluation in the metrics of a step, if they have one that is better than all before."""
        name = self.metric or usual_metric(metrics)
        if name not in metrics:
            return None
        value = metrics[name]
        return self._replace(metric=name, value=value, step=step) if value > self.value else None

    def follows(self, earlier: "Best") -> bool:
        """Whether evaluations to come can be compared with an earlier one, or there will be none."""
        return not self.source or (self.source == earlier.source and self.metric in ("", earlier.metric))

    def describe(self, file: str | Path, step: int) -> str:
        """Words on this file, in a run that has come to ``step``; "" without evaluations."""
        if self.step:
            when = ", done before an older checkpoint was resumed" if self.step > step else ""
            value = f"{self.metric} ({self.value:.3f})"
            return f"{file} has those after step {self.step}{when}, the best by {value}"
        if self.value == -math.inf:
            return ""
        return f"there is no {file}, because {self.metric} was never above {self.value:.3f}"


def first_best(run: Any) -> Best:
    """The ``Best`` of a ``PpoRun`` before its first evaluation. Raises InputError for a --best_metric that no
    evaluation of this run has."""
    args = run.args
    names = [*run.reward.names, *run.judge.names, "length", "finished"]
    if run.reward.reasoning:
        names.append("format_rate")
    accuracy = run.held_out.has_accuracy  # whether right answers are known
    if accuracy:
        names.append("accuracy")
    names += [f"{name}_greedy" for name in names]
    if accuracy and args.num_generations > 1:
        names.append(f"pass@{args.num_generations}")
    if run.held_out_pairs:
        names.append("chosen_preferred")
    names = [f"eval/{name}" for name in names]
    metric = args.best_metric and f"eval/{args.best_metric.removeprefix('eval/')}"
    if metric and metric not in names:
        raise InputError(f"--best_metric {metric}: no evaluation has it; choose one of {', '.join(names)}")
    return Best(f"{run.held_out.fingerprint} {code_hash(args.reward_fn)} {run.judged_by}", metric)


def best_so_far(folder: Path, best: Best, logger: Any) -> Best:
    """What was the best when the run of this folder stopped; ``best`` if there was none, or if it cannot be
    compared with evaluations to come, which the logger then says. Raises InputError for a damaged file."""
    path = folder / EVALUATION
    if not path.exists():
        return best
    try:
        found = Best(**json.loads(path.read_bytes()))
    except (ValueError, TypeError):
        raise InputError(f"{path}: is damaged; delete it, then the best begins anew") from None
    if best.follows(found):
        return found
    logger.say("note: the best so far was evaluated otherwise; it begins anew")
    return best


def write_best(folder: Path, best: Best) -> None:
    """Write what ``best_so_far`` reads. Raises InputError where the disk is full."""
    with writing(folder):
        write_whole(folder / EVALUATION, json.dumps(best._asdict()))


def usual_metric(found: Mapping[str, float]) -> str:
    """What decides without --best_metric: the share of the pairs in which the chosen answer is preferred, the
    judge, the user's function, the accuracy if it is above 0, or the score (with --normalize_reward the raw
    score, whose scale does not move); "" without any of them."""
    right = ["accuracy"] if found.get("eval/accuracy") else []
    names = ("chosen_preferred", "judge", "function", *right, "score_raw", "score", "accuracy")
    return next((f"eval/{name}" for name in names if math.isfinite(found.get(f"eval/{name}", math.nan))), "")
