"""The best actor of a run (``--best_metric``, higher is better): which evaluation it was, and its files.

The evaluated actor is written to out/ppo_actor_{hidden_size}{_moe}_best.pth with a folder beside it, and to
best.pth in the run folder, of which every checkpoint has a copy. The evaluation before training is the value
to beat; no file is written for it. In a run that is evaluated in another way the best begins anew.
"""

import math
import shutil
from argparse import Namespace
from collections.abc import Sized
from dataclasses import dataclass
from pathlib import Path

from atomic_files import one_at_a_time, writing
from dataset.lm_dataset import RLAIFDataset
from errors import InputError
from trainer.rewards.combine import Judge, Reward
from trainer.runs.base import Kept

KEPT = "best.pth"  # in the run folder and in checkpoints


@dataclass
class Best(Kept):
    """The best evaluation so far. metric: "eval/…", "" without evaluations; source: what the values depend on
    besides the actor, as text: values of another source cannot be compared; successor: a metric that takes
    the place of ``metric`` from its first value above 0 on, "" for none.

    ``value``: None before the first evaluation. ``step``: of that evaluation; 0 means that there is no file.
    ``since``: evaluations up to this step do not count, because they were of another metric or source.
    """

    metric: str = ""
    source: str = ""
    successor: str = ""
    value: float | None = None
    step: int = 0
    since: int = 0

    kept = ("metric", "source", "successor", "value", "step", "since")
    forgotten = False  # the checkpoint had one of another metric or source

    def beaten_by(self, metrics: dict[str, float]) -> bool:
        """Whether these metrics have an evaluation that is better than all before."""
        name = self.deciding(metrics)
        least = self.value if name == self.metric and self.value is not None else -math.inf
        return metrics.get(name, math.nan) > least

    def take(self, metrics: dict[str, float], step: int) -> None:
        """The evaluation with these metrics is the best from now on."""
        self.metric = self.deciding(metrics)
        self.value = metrics[self.metric]
        self.step = step

    def deciding(self, metrics: dict[str, float]) -> str:
        """The name of the metric by which an evaluation with these metrics is compared with the best."""
        return self.successor if metrics.get(self.successor, 0.0) > 0 else self.metric

    def describe(self, file: str | Path) -> str:
        """Words on this file; "" without evaluations."""
        if self.step:
            since = f", of the evaluations after step {self.since}" if self.since else ""
            best = f"the best by {self.metric} ({self.value:.3f}){since}"
            return f"{file} has those after step {self.step}, {best}"
        if self.value is None:
            return ""
        return f"there is no {file}, because {self.metric} was never above {self.value:.3f}"

    def load_state_dict(self, state: dict) -> None:
        """Take over what ``state_dict`` returned, if it is of the same metric and source, or if nothing is
        evaluated now. {}: a checkpoint from before there was a best. Raises KeyError for anything else."""
        if not state:
            return
        known = state["metric"] in (self.metric, self.successor) and state["source"] == self.source
        self.forgotten = bool(self.metric) and not known and state["value"] is not None
        if known or not self.metric:
            super().load_state_dict(state | {"successor": self.successor})


def choose_best(
    args: Namespace,
    held_out: RLAIFDataset | None,
    reward: Reward,
    judge: Judge,
    pairs: Sized | None = None,
) -> Best:
    """Flags and what is evaluated -> the ``Best`` of a run that has not begun.

    reward, judge: ``Reward`` and ``Judge``; pairs: held-out pairs of offline PPO, or None. Without
    --best_metric it is what the pairs say, else the judge, else the user's function, else the accuracy once
    it was above 0, else the score (with --normalize_reward the raw score, whose scale does not move); without
    any of them nothing is compared. Raises InputError for a metric that cannot say it.
    """
    if held_out is None:
        return Best()
    names = [*reward.names, *judge.names, "length", "finished"]
    if reward.reasoning:
        names.append("format_rate")
    if held_out.has_accuracy:
        names.append("accuracy")
    names += [f"{name}_greedy" for name in names]
    if pairs:
        names += ["chosen_share", "chosen_preferred"]
    if held_out.has_accuracy:
        names += [f"pass@{2**i}" for i in range(1, args.num_generations.bit_length())]
    usual = ("chosen_share", "judge", "function", "score_raw", "score", "accuracy")
    given = args.best_metric.removeprefix("eval/")
    name = given or next((name for name in usual if name in names), "")
    if not name:
        return Best()
    if name not in names:
        raise InputError(
            f"--best_metric {args.best_metric}: no evaluation of this run says by it which actor is best; "
            f"choose one of {', '.join(names)}"
        )
    judged_by = [args.eval_reward_fn, *args.eval_reward_model] if name.startswith("judge") else []
    successor = "eval/accuracy" if "accuracy" in names and not given and name.startswith("score") else ""
    return Best(f"eval/{name}", " ".join([held_out.fingerprint, *judged_by]), successor)


def remove_saved(path: Path) -> None:
    """Remove a ``.pth`` and the folder beside it. Without the ``.pth`` the folder may be of someone else, and
    stays. Raises InputError if that fails."""
    with writing(path):
        if not path.exists():
            return
        if (beside := path.with_suffix("")).is_dir():
            with one_at_a_time(beside):  # another run may write to the same name
                shutil.rmtree(beside)
        path.unlink()
