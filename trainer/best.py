"""The best actor of a PPO run: which evaluation was the best, and files with its weights.

At every evaluation that is better than all before (``--best_metric``, higher is better) the evaluated actor
is written: to out/ppo_actor_{hidden_size}{_moe}_best.pth with a folder beside it, as the result of the run
is, and to best.pth in the run folder. There it stays if a later run replaces the file in out/. Every
checkpoint has a copy of best.pth, so that a resumed run has the best of its checkpoint, whatever has become
of the files since. A run that is resumed without evaluations keeps it. One that is evaluated in another way
begins anew, and keeps the old file in the run folder as best_step_<n>.pth.

The evaluation before training (step 0) is the value to beat, and no file is written for it: its weights are
those of ``--model``. A run that never beats it has no best file. If there is one of an earlier run, it is
removed when the first result is saved, as the result of that run is replaced (``PpoRun.save_result``).
"""

import math
import shutil
import time
from dataclasses import dataclass, field

from atomic_files import one_at_a_time, writing
from errors import InputError

KEPT = "best.pth"  # in the run folder and in checkpoints


@dataclass
class Best:
    """The best evaluation so far. metric: "eval/…", "" without evaluations; source: what the values depend on
    besides the actor, as text: values of another source cannot be compared; successor: a metric that takes
    the place of ``metric`` from its first value above 0 on, "" for none.

    ``value``: None before the first evaluation. ``step``: of that evaluation; 0 means that there is no file.
    ``since``: evaluations up to this step do not count, because they were of another metric or source.
    ``forgotten``: what ``state_dict`` returned before they changed; {} if they have not.
    """

    metric: str = ""
    source: str = ""
    successor: str = ""
    value: float | None = None
    step: int = 0
    since: int = 0
    forgotten: dict = field(default_factory=dict)

    def beaten_by(self, metrics):
        """Whether these metrics, {name: mean}, have an evaluation that is better than all before."""
        name = self.deciding(metrics)
        least = self.value if name == self.metric and self.value is not None else -math.inf
        return metrics.get(name, math.nan) > least

    def take(self, metrics, step):
        """The evaluation with these metrics is the best from now on."""
        self.metric = self.deciding(metrics)
        self.value = metrics[self.metric]
        self.step = step

    def deciding(self, metrics: dict) -> str:
        """The name of the metric by which an evaluation with these metrics is compared with the best."""
        return self.successor if metrics.get(self.successor, 0.0) > 0 else self.metric

    def describe(self, file):
        """Words on the file of this name, to stand behind those on the result; "" without evaluations."""
        if self.step:
            which = f"those after step {self.step}, the best by {self.metric} ({self.value:.3f})"
            since = f", of the evaluations after step {self.since}, since when they are others"
            return f"; {file} has {which}{since if self.since else ''}"
        if self.value is None:
            return ""
        return f"; there is no {file}, because {self.metric} was never above {self.value:.3f}"

    def state_dict(self):
        """What a checkpoint keeps."""
        return {name: x for name, x in vars(self).items() if name != "forgotten"}

    def load_state_dict(self, state):
        """Take over what ``state_dict`` returned, if it is of the same metric and source, or if nothing is
        evaluated now; else it is ``forgotten``. {}: a checkpoint from before there was a best. Raises
        KeyError or TypeError for anything else."""
        if not state:
            return
        known = state["metric"] in (self.metric, self.successor) and state["source"] == self.source
        if not self.metric or known:
            self.metric = state["metric"]
            self.source = state["source"]
            self.value = state["value"]
            self.step = state["step"]
            self.since = state.get("since", 0)
        elif state["value"] is not None:
            self.forgotten = state


def choose_best(args, held_out, reward, judge, pairs=None):
    """Flags and what is evaluated -> the ``Best`` of a run that has not begun.

    reward, judge: ``Reward`` and ``Judge``; pairs: held-out pairs of offline PPO, or None. Without
    --best_metric it is what the pairs say, else the judge, else the user's function, else the accuracy once
    it was above 0, else the score (with --normalize_reward the raw score, whose scale does not move); without
    any of them nothing is compared. Raises InputError for a metric that is not evaluated.
    """
    if held_out is None:
        return Best()
    sampled = []  # what has no greedy twin
    names = []
    if pairs:
        sampled += ["chosen_share", "chosen_preferred"]
    if held_out.has_accuracy:
        sampled += [f"pass@{2**i}" for i in range(1, args.num_generations.bit_length())]
        names.append("accuracy")
    if reward.reasoning:
        names.append("format_rate")
    names += [*reward.names, *judge.names, "length", "finished"]
    usual = ("chosen_share", "judge", "function", "score_raw", "score", "accuracy")
    given = args.best_metric.removeprefix("eval/")
    name = given or next((name for name in usual if name in sampled + names), "")
    if not name:
        return Best()
    if name == "kl":
        raise InputError(
            f"--best_metric {args.best_metric}: higher is better, and a far policy is not; leave it out"
        )
    if name.startswith("ema/"):
        raise InputError(
            f"--best_metric {name}: compares the actor, which the best file holds, and not its average; "
            f"choose {name.removeprefix('ema/')}"
        )
    if name not in sampled and name.removesuffix("_greedy") not in names:
        others = f", or {', '.join(sampled)}" if sampled else ""
        raise InputError(
            f"--best_metric {args.best_metric}: is not evaluated in this run; choose one of "
            f"{', '.join(names)}, or one of them with _greedy behind it{others}"
        )
    judged_by = [args.eval_reward_fn, *args.eval_reward_model] if name.startswith("judge") else []
    successor = "eval/accuracy" if "accuracy" in names and not given and name.startswith("score") else ""
    return Best(f"eval/{name}", " ".join([held_out.fingerprint, *judged_by]), successor)


def keep_best(run, logger, metrics):
    """After a step's evaluation: if it is the best so far, write the actor's weights.

    All processes must call it, after the step was logged and before its checkpoint. Raises InputError where
    the disk is full or a weight is not finite in fp16: then nothing has changed, and a resumed run evaluates
    this step again.
    """
    best = run.best
    step = run.progress.step
    if not best.beaten_by(metrics):
        return
    if step:
        start = time.perf_counter()
        with run.world.all_or_none(), run.gathered():
            if run.world.is_main:
                run.save_best(logger.folder.path / KEPT)
                logger.saving_seconds += time.perf_counter() - start
    best.take(metrics, step)


def restore_best(run, logger):
    """After a checkpoint was loaded: the files of the best actor become what they were then. Later ones are
    of steps that will be done again, or of another run."""
    old = run.best.forgotten
    if old:
        run.best.since = run.progress.step
    set_aside = f"best_step_{old['step']}.pth" if old.get("step") else ""
    with run.world.all_or_none():
        if set_aside:
            logger.say(
                f"note: the best so far ({old['metric']} {old['value']:.3f} at step {old['step']}) was "
                f"evaluated otherwise; it begins anew, and the run folder keeps it as {set_aside}"
            )
        if not run.world.is_main:
            return
        folder = logger.folder.path
        checkpoint = logger.folder.checkpoint
        if set_aside:
            run.save_actor(folder / set_aside, checkpoint / KEPT)
        if run.best.step:
            run.save_best(folder / KEPT, checkpoint / KEPT)
        elif run.args.resume:  # a new run has none, and what has this name is the user's
            remove_saved(folder / KEPT)


def remove_saved(path):
    """Remove a ``.pth`` and the folder beside it. Without the ``.pth`` the folder may be of someone else, and
    stays. Raises InputError if that fails."""
    with writing(path):
        if not path.exists():
            return
        if (beside := path.with_suffix("")).is_dir():
            with one_at_a_time(beside):  # another run may write to the same name
                shutil.rmtree(beside)
        path.unlink()
