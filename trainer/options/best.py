"""The best model of a run: the actor with the best evaluation by ``--best_metric`` (higher is better).

``Best.updated`` decides and writes, into the run folder: the weights, best.pth and the folder best beside it,
and best.json, which says what evaluation these had. The evaluation before training is the value to beat; no
weights are written for it. Values of another evaluation cannot be compared: then the best begins anew.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from atomic_files import write_whole, writing
from errors import InputError
from trainer.runs.base import Run, Say

WEIGHTS = "best.pth"  # in the run folder
EVALUATION = "best.json"


class Best(NamedTuple):
    """The best evaluation so far. source: a fingerprint of what the values depend on besides the actor, ""
    where nothing is evaluated; metric: "eval/…", "" before it is chosen; value: -inf before the first
    evaluation; step: of that evaluation, 0 means that there are no weights."""

    source: str = ""
    metric: str = ""
    value: float = -math.inf
    step: int = 0

    def updated(
        self, metrics: Mapping[str, float], run: Run, save_weights: Callable[[Path], object]
    ) -> "Best":
        """The best so far after a step that was logged. If the step's evaluation is better than all before,
        write the weights and best.json into the run folder.

        All processes must call it, before the step's checkpoint. save_weights(path): writes the actor. Raises
        InputError where that fails or the disk is full; then a resumed run evaluates this step again.
        """
        better = self.beaten_by(metrics, run.progress.step)
        if not better:
            return self
        with run.world.all_or_none():
            if better.step:  # the weights before the first step are those of --model
                save_weights(run.folder / WEIGHTS)
            if run.world.is_main:
                with writing(run.folder):
                    write_whole(run.folder / EVALUATION, json.dumps(better._asdict()))
        return better

    def beaten_by(self, metrics: Mapping[str, float], step: int) -> "Best | None":
        """The evaluation in the metrics of a step, if they have one that is better than all before."""
        name = self.metric or usual_metric(metrics)
        if name not in metrics:
            return None
        value = metrics[name]
        return self._replace(metric=name, value=value, step=step) if value > self.value else None

    def follows(self, earlier: "Best") -> bool:
        """Whether evaluations to come can be compared with an earlier one: the same source and metric. Where
        nothing will be evaluated, the earlier one stays the best."""
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


def first_best(metric: str, names: Sequence[str], source: str) -> Best:
    """The ``Best`` of a run before its first evaluation. metric: --best_metric; names: of what an evaluation
    finds; source: of ``Best``. Raises InputError for a metric that no evaluation of the run has."""
    found = [f"eval/{name}" for name in names]
    metric = metric and f"eval/{metric.removeprefix('eval/')}"
    if metric and metric not in found:
        raise InputError(f"--best_metric {metric}: no evaluation has it; choose one of {', '.join(found)}")
    return Best(source, metric)


def restored(best: Best, run: Run, say: Say) -> Best:
    """What was the best when a run stopped that goes on; ``best`` if there was none, or if it cannot be
    compared with evaluations to come, which a line then says. Raises InputError for a damaged file."""
    path = run.folder / EVALUATION
    with run.world.all_or_none():
        if run.world.is_main and path.exists():  # another machine's folder may have only the checkpoint
            try:
                earlier = Best(**json.loads(path.read_bytes()))
            except (ValueError, TypeError):
                raise InputError(f"{path}: is damaged; delete it, then the best begins anew") from None
            if best.follows(earlier):
                best = earlier
            else:
                say("note: the best so far was evaluated otherwise; it begins anew")
    return run.world.from_main(best)


def usual_metric(found: Mapping[str, float]) -> str:
    """What decides without --best_metric: the share of the pairs in which the chosen answer is preferred, the
    judge, the user's environment or function, the accuracy if it is above 0, or the score (with
    --normalize_reward the raw score, whose scale does not move); "" without any of them."""
    right = ["accuracy"] if found.get("eval/accuracy") else []
    names = ("chosen_preferred", "judge", "environment", "function", *right, "score_raw", "score", "accuracy")
    return next((f"eval/{name}" for name in names if math.isfinite(found.get(f"eval/{name}", math.nan))), "")
