"""How runs of the two stages before PPO are shown."""

from trainer.tracking import Look


def describe_evaluation(metrics):
    """``loss 0.123 | perplexity 1.13`` of what an evaluation has measured."""
    found = ((name.removeprefix("eval/"), x) for name, x in metrics.items() if name.startswith("eval/"))
    return " | ".join(f"{name.replace('_', ' ')} {x:.4f}" for name, x in found)


def before_after_table(records):
    """The evaluation before any update beside the last one, as a Markdown table; '' without evaluation."""
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


DEMONSTRATIONS = Look(
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
    evaluation=describe_evaluation,
    table=before_after_table,
)


PAIRS = Look(
    title="reward",
    folder="reward",
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
    evaluation=describe_evaluation,
    table=before_after_table,
)


RATINGS = Look(
    title="reward",
    folder="reward",
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
    evaluation=describe_evaluation,
    table=before_after_table,
)
