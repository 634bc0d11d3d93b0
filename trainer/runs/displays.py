"""What is shown of each script's runs, metric by metric: printed lines, progress bar, plots, tables.

docs/metrics.md says what each metric means; tests/test_docs.py checks that it has all that are named here.
run_logger.py prints, plots.py draws, summary.py makes the verdict and the tables, and report.py the report.
"""

import math
from dataclasses import dataclass, replace
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
    series: dict[str, str]  # {metric or PARTS: its label, "" for its own name}
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


# ------------------------------------------------------------------------------------------ PPO

PPO_PANELS = (
    Panel(
        "score",
        {
            "reward/score": "training",
            "eval/score": "held out, sampled",
            "eval/score_greedy": "held out, greedy",
            "eval/judge": "judge, held out",
        },
        "Should rise and then stay. If the training score rises alone, the held-out prompts gain nothing.",
    ),
    Panel(
        "parts of the reward (training)",
        {PARTS: ""},
        "Shows which part the policy has learned. A part that falls pays for one that rises.",
    ),
    Panel(
        "shares: right (never rewarded), ended",
        {
            "eval/accuracy": "right, sampled",
            "eval/accuracy_greedy": "right, greedy",
            "rollout/finished": "ended (training)",
        },
        "Right should rise with the score. Ended should be near 1, or answers are cut at --max_gen_len.",
    ),
    Panel(
        "KL to the reference (nats a token)",
        {"kl/k1": "k1", "kl/k3": "k3"},
        "Rises slowly and levels off. Rising without end: the policy leaves the reference.",
    ),
    Panel(
        "response length (tokens)",
        {"rollout/length": "training", "eval/length": "held out, sampled"},
        "Longer without more right answers: the policy may earn its score by length.",
    ),
    Panel(
        "update",
        {"policy/clip_fraction": "clip fraction", "value/explained_variance": "explained variance"},
        "The clip fraction should stay below 0.2. Explained variance: above 0, better near 1.",
    ),
    Panel(
        "entropy (nats a token)",
        {"policy/entropy": "actor"},
        "Falls while the policy grows certain. Near 0 with a flat score: it has stopped to explore.",
    ),
    Panel(
        "spread of the scores",
        {"reward/score_std": "scores", "policy/advantage_std": "advantages"},
        "At 0 all responses are scored alike, and there is nothing to learn.",
    ),
    Panel(
        "shares: repeated, different, at the limit",
        {
            "rollout/repetition": "repeated trigrams",
            "rollout/distinct": "different responses",
            "reward/at_limit": "reward model at its limit",
        },
        "Repetition and scores at the limit should stay low, different responses near 1.",
    ),
    Panel(
        "score and length",
        {"rollout/score_length_corr": "correlation"},
        "Far above 0: longer answers are paid better. Far below 0: shorter ones are.",
    ),
    Panel(
        "critic (reward units)",
        {"value/mean": "mean value", "value/return": "mean return"},
        "The two should meet. A lasting gap is a bias of the critic.",
    ),
    Panel(
        "gradient norm",
        {"policy/grad_norm": "actor", "value/grad_norm": "critic"},
        "Single peaks are usual. A lasting rise: the learning rate may be too high.",
    ),
    Panel(
        "KL of an update (nats a token)",
        {"policy/approx_kl": "old actor to actor"},
        "Above 0.05 the steps are large, near 0 with a flat score they are too small.",
    ),
    Panel(
        "seconds of a step",
        {
            "perf/rollout_seconds": "rollout",
            "perf/reward_seconds": "reward",
            "perf/score_seconds": "log-probs and values",
            "perf/update_seconds": "update",
        },
        "Where the time goes. A rise often means longer responses.",
    ),
)

DISTRIBUTIONS = (  # of report.html; a series is a name in deciles.jsonl
    Panel(
        "scores",
        {"score": "median"},
        "The bands should move up. A wide band between two narrow ones: the responses are of two kinds.",
    ),
    Panel(
        "length (tokens)",
        {"length": "median"},
        "Bands that pile up at the top: responses grow until they are cut.",
    ),
    Panel(
        "KL of a response (nats)",
        {"kl": "median"},
        "Responses far above the line have left the reference.",
    ),
)

UPDATE_LINE = {
    "policy/entropy": "entropy {:.3f}",
    "policy/clip_fraction": "clip {:.3f}",
    "value/explained_variance": "ev {:.2f}",
    "perf/samples_per_second": "{:.1f} samples/s",
}

PPO = Display(
    title="ppo",
    folder="run",
    unit="responses",
    tested="prompts",
    line={
        "reward/score": "score {:.3f}",
        "kl/k1": "kl {:.4f}",
        "rollout/length": "len {:.1f}",
        "rollout/finished": "ended {:.2f}",
        **UPDATE_LINE,
    },
    log_interval=5,
    panels=PPO_PANELS,
    best="score",
    group="reward",
    followed=(
        "reward/score",
        "reward/score_raw",
        PARTS,
        "rollout/length",
        "rollout/finished",
        "rollout/repetition",
        "rollout/distinct",
        "kl/k1",
    ),
    digits=3,
    samples=("samples.jsonl", "eval_samples.jsonl", "deciles.jsonl"),
)

OFFLINE = replace(
    PPO,
    unit="logged answers",
    line={
        "policy/loss": "loss {:.4f}",
        "policy/approx_kl": "kl {:.4f}",
        "rollout/length": "len {:.1f}",
        **UPDATE_LINE,
    },
    tested="pairs",
    best="chosen_share",
    followed=("policy/approx_kl", "policy/clip_fraction", "policy/ratio"),
)


def offline(pairs: bool, best: str) -> Display:
    """The display of offline PPO. pairs: whether pairs are held out; best: else this metric is compared,
    "eval/…" or "", which the answers to held-out prompts have."""
    if pairs or not best:
        return OFFLINE
    return replace(OFFLINE, tested="prompts", best=best.removeprefix("eval/"))


# ---------------------------------------------------------------------------------- stages 1 and 2

SFT = Display(
    title="sft",
    folder="sft",
    unit="conversations",
    line={
        "train/loss": "loss {:.4f}",
        "train/learning_rate": "lr {:.1e}",
        "train/grad_norm": "norm {:.2f}",
        "perf/tokens_per_second": "{:.0f} tokens/s",
    },
    panels=(
        Panel(
            "loss (nats a token)",
            {"train/loss": "trained on", "eval/loss": "held out"},
            "Should fall. If the held-out loss rises again, the run is too long.",
        ),
        Panel(
            "gradient norm",
            {"train/grad_norm": "before clipping"},
            "Single peaks are usual. A lasting rise: the learning rate may be too high.",
        ),
        Panel(
            "learning rate",
            {"train/learning_rate": "rate"},
            "A function of the step alone: it rises, then falls.",
        ),
    ),
    best="loss",
    followed=("train/loss",),
    lower_is_better=True,
)

PAIRS = Display(
    title="reward",
    folder="reward_run",
    unit="pairs",
    line={
        "train/loss": "loss {:.4f}",
        "train/accuracy": "accuracy {:.3f}",
        "train/distance": "distance {:.2f}",
        "train/grad_norm": "norm {:.2f}",
        "perf/samples_per_second": "{:.1f} pairs/s",
    },
    panels=(
        Panel(
            "pair loss (nats)",
            {"train/loss": "trained on", "eval/loss": "held out"},
            "Should fall from 0.69, which is guessing. "
            "If the held-out loss rises again, the run is too long.",
        ),
        Panel(
            "chosen above rejected",
            {"train/accuracy": "trained on", "eval/accuracy": "held out"},
            "The share of pairs that are ordered as the raters did. 0.5 is guessing.",
        ),
        Panel(
            "score chosen - rejected",
            {"train/distance": "trained on", "eval/distance": "held out"},
            "Should rise. Far above 5 with a flat accuracy: the model is too certain.",
        ),
    ),
    best="accuracy",
    followed=("train/accuracy", "train/loss", "train/distance"),
)

RATINGS = Display(
    title="reward",
    folder="reward_run",
    unit="rated answers",
    line={
        "train/loss": "loss {:.4f}",
        "train/grad_norm": "norm {:.2f}",
        "perf/samples_per_second": "{:.1f} answers/s",
    },
    panels=(
        Panel(
            "squared error",
            {"train/loss": "trained on", "eval/loss": "held out"},
            "Should fall. If the held-out error rises again, the run is too long.",
        ),
        Panel(
            "root of the mean squared error",
            {"eval/rmse": "held out"},
            "The usual distance to the given scores, in their units.",
        ),
        Panel(
            "correlation with the given scores",
            {"eval/correlation": "held out"},
            "1 would be a perfect order, 0 is guessing.",
        ),
    ),
    best="loss",
    followed=("train/loss",),
    lower_is_better=True,
)
