"""How each script's runs are shown: printed line, progress bar, curves, evaluation line, summary at the end.

This file only names metrics (docs/metrics.md) and formats. The curves are in panels.py; run_logger.py prints,
plots.py draws, summary.py makes the summary, and report.py the report.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from trainer.runs.panels import PAIRS_PANELS, PARTS, PPO_DETAILS, PPO_PANELS, RATINGS_PANELS, SFT_PANELS


@dataclass(frozen=True)
class Display:
    """How the runs of one script are shown. Metrics are given by name."""

    title: str  # title of the progress bar
    folder: str  # without --run_name, run folders are called <folder>_<n>
    unit: str  # what a batch consists of, for the line ``run     20 steps of 32 pairs``
    line: tuple  # the line of a step: (metric, its format), …
    bar: tuple  # the progress bar shows the parts of that line that contain one of these words
    log_interval: int  # steps between printed lines where --log_interval is 0; fewer in a short run
    panels: tuple  # the plots of curves.png, three in a row, and the first ones of report.html
    best: str  # the metric that is compared: of the evaluations eval/<best>, of the steps <group>/<best>
    followed: tuple  # the table of the steps: (metric or PARTS, "highest", "lowest" or '': which is best), …
    evaluation: Callable  # metrics of a step -> its evaluation as text, '' if there was none
    details: tuple = ()  # more plots of report.html
    group: str = "train"
    lower_is_better: bool = False  # of ``best``
    samples: tuple = ()  # names of the files of rows that the run writes besides metrics.jsonl (samples.py)
    tested: str = ""  # what an evaluation consists of, where that is not ``unit``
    mark: Callable = lambda metrics: ""  # metrics of a step -> words at the beginning of its line


# The parts of PPO's reward that are rules about the form of a response. What the user wants is the rest.
RULES = ("format", "marks", "thinking", "repetition", "length_reward", "missing_eos", "overlong")


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


UNDEFINED = "value/explained_variance"  # where all returns are equal, which is no fault


def shown(name, text, x):
    """A metric's part of the line of a step, such as "ev 0.31"; "ev -" where it has no value. The NaN of any
    other metric stays to be seen."""
    return text.partition("{")[0] + "-" if name == UNDEFINED and math.isnan(x) else text.format(x)


def only_critic(metrics):
    """True for the metrics of a step of critic warm-up, in which the actor did not train."""
    return "value/loss" in metrics and "policy/loss" not in metrics


def mark_ppo(metrics):
    """Words at the beginning of a step's line."""
    return "only the critic trains" if only_critic(metrics) else ""


def describe_ppo(metrics):
    """An evaluation's metrics -> ``accuracy 0.51 (greedy 0.83) | format …``, '' if there are none."""
    texts = []
    for name in ("chosen_share", "kl", "accuracy", "judge", "format_rate", "score", "length"):
        if f"eval/{name}" in metrics:
            text = f"{name} {metrics[f'eval/{name}']:.3f}"
            if f"eval/{name}_greedy" in metrics:
                text += f" (greedy {metrics[f'eval/{name}_greedy']:.3f})"
            texts.append(text)
    return " | ".join(texts)


PPO = Display(
    title="ppo",
    folder="run",
    unit="responses",
    tested="prompts",
    line=PPO_LINE,
    bar=("score", "kl", "len", "samples"),
    log_interval=5,
    panels=PPO_PANELS,
    details=PPO_DETAILS,
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
    samples=("samples.jsonl", "eval_samples.jsonl", "histograms.jsonl"),
    mark=mark_ppo,
)

OFFLINE = replace(
    PPO,
    unit="logged answers",
    line=(
        ("policy/loss", "loss {:.4f}"),
        ("policy/approx_kl", "kl {:.4f}"),
        ("rollout/length", "len {:.1f}"),
        *PPO_LINE[4:],
    ),
    bar=("loss", "kl", "len", "samples"),
    tested="pairs",
    best="chosen_share",
    followed=(("policy/approx_kl", ""), ("policy/clip_fraction", ""), ("policy/ratio", "")),
)


def offline(pairs, best):
    """The display of offline PPO. pairs: whether pairs are held out; best: else this metric is compared,
    "eval/…" or "", which the answers to held-out prompts have."""
    if pairs or not best:
        return OFFLINE
    return replace(OFFLINE, tested="prompts", best=best.removeprefix("eval/"))


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
    panels=SFT_PANELS,
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
    panels=PAIRS_PANELS,
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
    panels=RATINGS_PANELS,
    best="loss",
    followed=(("train/loss", "lowest"),),
    lower_is_better=True,
    evaluation=describe_supervised,
)
