"""How each script's runs are shown: printed line, progress bar, curves, evaluation line, summary at the end.

This file only names metrics (docs/metrics.md) and formats; run_logger.py prints, plots.py draws, and
summary.py makes the summary.
"""

from collections.abc import Callable
from dataclasses import dataclass

PARTS = "reward/*"  # stands for every part of the reward


@dataclass(frozen=True)
class Display:
    """How the runs of one script are shown. Metrics are given by name."""

    title: str  # title of the progress bar
    folder: str  # without --run_name, run folders are called <folder>_<n>
    unit: str  # what a batch consists of, for the line ``run     20 steps of 32 pairs``
    line: tuple  # the line of a step: (metric, its format), …
    bar: tuple  # the progress bar shows the parts of that line that contain one of these words
    log_interval: int  # steps between printed lines where --log_interval is 0; fewer in a short run
    panels: tuple  # the plots of curves.png: (title, ((metric or PARTS, label), …)), three in a row
    best: str  # the metric that is compared: of the evaluations eval/<best>, of the steps <group>/<best>
    followed: tuple  # the table of the steps: (metric or PARTS, "highest", "lowest" or '': which is best), …
    evaluation: Callable  # metrics of a step -> its evaluation as text, '' if there was none
    group: str = "train"
    lower_is_better: bool = False  # of ``best``
    samples: bool = False  # True if the run writes samples.jsonl
    mark: Callable = lambda metrics: ""  # metrics of a step -> words at the beginning of its line


def metric_names(pattern, records):
    """A metric, or ``PARTS`` -> the names of the metrics in these records (list of dicts) that it stands for.

    ``PARTS`` is without the sum of the parts, the statistics of ``--normalize_reward`` and the share of
    scores at the limit."""
    logged = dict.fromkeys(name for record in records for name in record)
    if pattern != PARTS:
        return [pattern] if pattern in logged else []
    no_part = ("/score", "_raw", "_mean", "_std", "/at_limit")
    return [name for name in logged if name.startswith("reward/") and not name.endswith(no_part)]


def compared_name(metrics, usual):
    """The name, without its group, by which the steps of a run are compared: ``usual``, or "score_raw".

    With ``--normalize_reward`` the scale of the score follows the running statistics, so a score of one step
    cannot be compared with that of another. The raw score's scale stays (``Reward.combine``).
    """
    return "score_raw" if any(name.endswith("/score_raw") for name in metrics) else usual


# ------------------------------------------------------------------------------------------ PPO

PPO_LINE = (  # (metric, its format in the line)
    ("reward/score", "score {:.3f}"),
    ("kl/k1", "kl {:.4f}"),
    ("rollout/length", "len {:.1f}"),
    ("rollout/finished", "ended {:.2f}"),
    ("policy/entropy", "entropy {:.3f}"),
    ("policy/clip_fraction", "clip {:.3f}"),
    ("value/explained_variance", "ev {:.2f}"),
    ("perf/samples_per_second", "{:.1f} samples/s"),
)

PPO_PANELS = (  # title, [(metric, label)]
    (
        "score",
        (
            ("reward/score", "training"),
            ("eval/score", "held out, sampled"),
            ("eval/score_greedy", "held out, greedy"),
            ("eval/judge", "judge, held out"),
        ),
    ),
    ("parts of the reward (training)", ((PARTS, ""),)),
    (
        "shares: right (never rewarded), ended",
        (
            ("eval/accuracy", "right, sampled"),
            ("eval/accuracy_greedy", "right, greedy"),
            ("rollout/finished", "ended (training)"),
        ),
    ),
    ("KL to the reference (nats a token)", (("kl/k1", "k1"), ("kl/k3", "k3"))),
    ("response length (tokens)", (("rollout/length", "training"), ("eval/length", "held out, sampled"))),
    (
        "update",
        (("policy/clip_fraction", "clip fraction"), ("value/explained_variance", "explained variance")),
    ),
)


def only_critic(metrics):
    """True for the metrics of a step of critic warm-up, in which the actor did not train."""
    return "value/loss" in metrics and "policy/loss" not in metrics


def mark_ppo(metrics):
    """Words at the beginning of a step's line."""
    return "only the critic trains" if only_critic(metrics) else ""


def describe_ppo(metrics):
    """An evaluation's metrics -> ``accuracy 0.51 (greedy 0.83) | format …``, '' if there are none."""
    texts = []
    for name in ("accuracy", "judge", "format_rate", "score", "length"):
        if f"eval/{name}" in metrics:
            text = f"{name} {metrics[f'eval/{name}']:.3f}"
            if f"eval/{name}_greedy" in metrics:
                text += f" (greedy {metrics[f'eval/{name}_greedy']:.3f})"
            texts.append(text)
    return " | ".join(texts)


PPO = Display(
    title="ppo",
    folder="run",
    unit="prompts",
    line=PPO_LINE,
    bar=("score", "kl", "len", "samples"),
    log_interval=5,
    panels=PPO_PANELS,
    best="score",
    group="reward",
    followed=(
        ("reward/score", "highest"),
        (PARTS, "highest"),
        ("rollout/length", ""),
        ("rollout/finished", "highest"),
        ("rollout/repetition", ""),
        ("rollout/distinct", ""),
        ("kl/k1", ""),
    ),
    evaluation=describe_ppo,
    samples=True,
    mark=mark_ppo,
)


# ---------------------------------------------------------------------------------- stages 1 and 2


def describe_supervised(metrics):
    """An evaluation's metrics -> ``loss 0.123 | perplexity 1.13``, '' if there are none."""
    found = ((name.removeprefix("eval/"), x) for name, x in metrics.items() if name.startswith("eval/"))
    return " | ".join(f"{name.replace('_', ' ')} {x:.4f}" for name, x in found)


SFT = Display(
    title="sft",
    folder="sft",
    unit="conversations",
    line=(
        ("train/loss", "loss {:.4f}"),
        ("train/learning_rate", "lr {:.1e}"),
        ("train/grad_norm", "norm {:.2f}"),
        ("perf/tokens_per_second", "{:.0f} tokens/s"),
    ),
    bar=("loss", "tokens"),
    log_interval=50,
    panels=(
        ("loss (nats a token)", (("train/loss", "trained on"), ("eval/loss", "held out"))),
        ("gradient norm", (("train/grad_norm", "before clipping"),)),
        ("learning rate", (("train/learning_rate", "rate"),)),
    ),
    best="loss",
    followed=(("train/loss", "lowest"),),
    lower_is_better=True,
    evaluation=describe_supervised,
)


PAIRS = Display(
    title="reward",
    folder="reward_run",
    unit="pairs",
    line=(
        ("train/loss", "loss {:.4f}"),
        ("train/accuracy", "accuracy {:.3f}"),
        ("train/distance", "distance {:.2f}"),
        ("train/grad_norm", "norm {:.2f}"),
        ("perf/samples_per_second", "{:.1f} pairs/s"),
    ),
    bar=("loss", "accuracy", "pairs"),
    log_interval=50,
    panels=(
        ("pair loss (nats)", (("train/loss", "trained on"), ("eval/loss", "held out"))),
        ("chosen above rejected", (("train/accuracy", "trained on"), ("eval/accuracy", "held out"))),
        ("score chosen - rejected", (("train/distance", "trained on"), ("eval/distance", "held out"))),
    ),
    best="accuracy",
    followed=(("train/accuracy", "highest"), ("train/loss", "lowest"), ("train/distance", "")),
    evaluation=describe_supervised,
)


RATINGS = Display(
    title="reward",
    folder="reward_run",
    unit="rated answers",
    line=(
        ("train/loss", "loss {:.4f}"),
        ("train/grad_norm", "norm {:.2f}"),
        ("perf/samples_per_second", "{:.1f} answers/s"),
    ),
    bar=("loss", "answers"),
    log_interval=50,
    panels=(
        ("squared error", (("train/loss", "trained on"), ("eval/loss", "held out"))),
        ("root of the mean squared error", (("eval/rmse", "held out"),)),
        ("correlation with the given scores", (("eval/correlation", "held out"),)),
    ),
    best="loss",
    followed=(("train/loss", "lowest"),),
    lower_is_better=True,
    evaluation=describe_supervised,
)
