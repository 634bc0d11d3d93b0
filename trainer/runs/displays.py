"""How each script's runs are shown: printed line, progress bar, curves, evaluation line, table at the end.

This file only names metrics (docs/metrics.md) and formats; run_logger.py prints and plots.py draws.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Display:
    """How the runs of one script are shown. Metrics are given by name."""

    title: str  # title of the progress bar
    folder: str  # without --run_name, run folders are called <folder>_<n>
    unit: str  # what a batch consists of, for the line ``run     20 steps of 32 pairs``
    line: tuple  # the line of a step: (metric, its format), …
    bar: tuple  # the progress bar shows the parts of that line that contain one of these words
    panels: tuple  # the plots of curves.png: (title, ((metric, label), …)), three in a row
    best: str  # the metric by which evaluations are compared
    evaluation: Callable  # metrics of a step -> its evaluation as text, '' if there was none
    table: Callable  # all records -> Markdown table of the first and the last evaluation
    lower_is_better: bool = False  # of ``best``
    samples: bool = False  # True if the run writes samples.jsonl


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
    ("reward (rollouts)", (("reward/score", "score"), ("reward/model", "reward model"))),
    (
        "form (rollouts)",
        (("reward/format", "format"), ("reward/marks", "marks"), ("rollout/finished", "ended")),
    ),
    (
        "held-out problems, never rewarded",
        (("eval/accuracy", "sampled accuracy"), ("eval/accuracy_greedy", "greedy accuracy")),
    ),
    ("KL to the reference (nats a token)", (("kl/k1", "k1"), ("kl/k3", "k3"))),
    ("response length (tokens)", (("rollout/length", "mean length"),)),
    (
        "update",
        (("policy/clip_fraction", "clip fraction"), ("value/explained_variance", "explained variance")),
    ),
)


def describe_ppo(metrics):
    """An evaluation's metrics -> ``accuracy 0.51 (greedy 0.83) | format …``, '' if there are none."""
    texts = []
    for name in ("accuracy", "format_rate", "score", "length"):
        if f"eval/{name}" in metrics:
            text = f"{name} {metrics[f'eval/{name}']:.3f}"
            if f"eval/{name}_greedy" in metrics:
                text += f" (greedy {metrics[f'eval/{name}_greedy']:.3f})"
            texts.append(text)
    return " | ".join(texts)


def ppo_table(records):
    """A Markdown table of the evaluation before training and the last one; '' without two evaluations."""
    records = [r for r in records if "eval/score" in r]
    if len(records) < 2:
        return ""
    before, after = records[0], records[-1]
    rows = ["| held-out | sampled before | after | greedy before | after |", "|---|---|---|---|---|"]
    raw = [name.removeprefix("eval/") for name in after if name.startswith("eval/") and name.endswith("_raw")]
    for name in ("accuracy", "format_rate", "score", *raw, "length", "finished"):
        keys = [f"eval/{name}", f"eval/{name}_greedy"]
        if keys[0] in after:
            cells = " | ".join(f"{before[key]:.3f} | **{after[key]:.3f}**" for key in keys)
            rows.append(f"| {name.replace('_', ' ')} | {cells} |")
    return "\n".join(rows)


PPO = Display(
    title="ppo",
    folder="run",
    unit="prompts",
    line=PPO_LINE,
    bar=("score", "kl", "len", "samples"),
    panels=PPO_PANELS,
    best="eval/score",
    evaluation=describe_ppo,
    table=ppo_table,
    samples=True,
)


# ---------------------------------------------------------------------------------- stages 1 and 2


def describe_supervised(metrics):
    """An evaluation's metrics -> ``loss 0.123 | perplexity 1.13``, '' if there are none."""
    found = ((name.removeprefix("eval/"), x) for name, x in metrics.items() if name.startswith("eval/"))
    return " | ".join(f"{name.replace('_', ' ')} {x:.4f}" for name, x in found)


def supervised_table(records):
    """A Markdown table of the evaluation before training and the last one; '' without two evaluations."""
    records = [r for r in records if any(name.startswith("eval/") for name in r)]
    if len(records) < 2:
        return ""
    before, after = records[0], records[-1]
    rows = ["| held-out | before | after |", "|---|---|---|"]
    for name, x in after.items():
        if name.startswith("eval/"):
            rows.append(
                f"| {name.removeprefix('eval/').replace('_', ' ')} | {before[name]:.4f} | **{x:.4f}** |"
            )
    return "\n".join(rows)


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
    panels=(
        ("loss (nats a token)", (("train/loss", "trained on"), ("eval/loss", "held out"))),
        ("gradient norm", (("train/grad_norm", "before clipping"),)),
        ("learning rate", (("train/learning_rate", "rate"),)),
    ),
    best="eval/loss",
    lower_is_better=True,
    evaluation=describe_supervised,
    table=supervised_table,
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
    panels=(
        ("pair loss (nats)", (("train/loss", "trained on"), ("eval/loss", "held out"))),
        ("chosen above rejected", (("train/accuracy", "trained on"), ("eval/accuracy", "held out"))),
        ("score chosen - rejected", (("train/distance", "trained on"), ("eval/distance", "held out"))),
    ),
    best="eval/accuracy",
    evaluation=describe_supervised,
    table=supervised_table,
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
    panels=(
        ("squared error", (("train/loss", "trained on"), ("eval/loss", "held out"))),
        ("root of the mean squared error", (("eval/rmse", "held out"),)),
        ("correlation with the given scores", (("eval/correlation", "held out"),)),
    ),
    best="eval/rmse",
    lower_is_better=True,
    evaluation=describe_supervised,
    table=supervised_table,
)
