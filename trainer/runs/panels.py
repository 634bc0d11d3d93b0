"""The plots of each script's runs: which metrics are drawn together, and what to look for in them.

plots.py draws them for curves.png, report_plots.py for report.html. A metric that a run does not have is left
out, and in report.html so is a plot without any.
"""

from typing import NamedTuple

PARTS = "reward/*"  # stands for every part of the reward


class Panel(NamedTuple):
    """One plot: its title, its curves as (metric or PARTS, label), …, and what to look for in it."""

    title: str
    series: tuple
    look_for: str


PPO_PANELS = (
    Panel(
        "score",
        (
            ("reward/score", "training"),
            ("eval/score", "held out, sampled"),
            ("eval/score_greedy", "held out, greedy"),
            ("eval/judge", "judge, held out"),
        ),
        "Should rise and then stay. If the training score rises alone, the held-out prompts gain nothing.",
    ),
    Panel(
        "parts of the reward (training)",
        ((PARTS, ""),),
        "Shows which part the policy has learned. A part that falls pays for one that rises.",
    ),
    Panel(
        "shares: right (never rewarded), ended",
        (
            ("eval/accuracy", "right, sampled"),
            ("eval/accuracy_greedy", "right, greedy"),
            ("rollout/finished", "ended (training)"),
        ),
        "Right should rise with the score. Ended should be near 1, or answers are cut at --max_gen_len.",
    ),
    Panel(
        "KL to the reference (nats a token)",
        (("kl/k1", "k1"), ("kl/k3", "k3")),
        "Rises slowly and levels off. Rising without end: the policy leaves the reference.",
    ),
    Panel(
        "response length (tokens)",
        (("rollout/length", "training"), ("eval/length", "held out, sampled")),
        "Longer without more right answers: the policy may earn its score by length.",
    ),
    Panel(
        "update",
        (("policy/clip_fraction", "clip fraction"), ("value/explained_variance", "explained variance")),
        "The clip fraction should stay below 0.2. Explained variance: above 0, better near 1.",
    ),
)

PPO_DETAILS = (
    Panel(
        "entropy (nats a token)",
        (("policy/entropy", "actor"),),
        "Falls while the policy grows certain. Near 0 with a flat score: it has stopped to explore.",
    ),
    Panel(
        "spread of the scores",
        (("reward/score_std", "scores"), ("policy/advantage_std", "advantages")),
        "At 0 all responses are scored alike, and there is nothing to learn.",
    ),
    Panel(
        "shares: repeated, different, at the limit",
        (
            ("rollout/repetition", "repeated trigrams"),
            ("rollout/distinct", "different responses"),
            ("reward/at_limit", "reward model at its limit"),
        ),
        "Repetition and scores at the limit should stay low, different responses near 1.",
    ),
    Panel(
        "score and length",
        (("rollout/score_length_corr", "correlation"),),
        "Far above 0: longer answers are paid better. Far below 0: shorter ones are.",
    ),
    Panel(
        "critic (reward units)",
        (("value/mean", "mean value"), ("value/return", "mean return")),
        "The two should meet. A lasting gap is a bias of the critic.",
    ),
    Panel(
        "gradient norm",
        (("policy/grad_norm", "actor"), ("value/grad_norm", "critic")),
        "Single peaks are usual. A lasting rise: the learning rate may be too high.",
    ),
    Panel(
        "KL of an update (nats a token)",
        (("policy/approx_kl", "old actor to actor"),),
        "Above 0.05 the steps are large, near 0 with a flat score they are too small.",
    ),
    Panel(
        "seconds of a step",
        (
            ("perf/rollout_seconds", "rollout"),
            ("perf/reward_seconds", "reward"),
            ("perf/score_seconds", "log-probs and values"),
            ("perf/update_seconds", "update"),
        ),
        "Where the time goes. A rise often means longer responses.",
    ),
)


# ---------------------------------------------------------------------------------- stages 1 and 2

SFT_PANELS = (
    Panel(
        "loss (nats a token)",
        (("train/loss", "trained on"), ("eval/loss", "held out")),
        "Should fall. If the held-out loss rises again, the run is too long.",
    ),
    Panel(
        "gradient norm",
        (("train/grad_norm", "before clipping"),),
        "Single peaks are usual. A lasting rise: the learning rate may be too high.",
    ),
    Panel(
        "learning rate",
        (("train/learning_rate", "rate"),),
        "A function of the step alone: it rises, then falls.",
    ),
)

PAIRS_PANELS = (
    Panel(
        "pair loss (nats)",
        (("train/loss", "trained on"), ("eval/loss", "held out")),
        "Should fall from 0.69, which is guessing. If the held-out loss rises again, the run is too long.",
    ),
    Panel(
        "chosen above rejected",
        (("train/accuracy", "trained on"), ("eval/accuracy", "held out")),
        "The share of pairs that are ordered as the raters did. 0.5 is guessing.",
    ),
    Panel(
        "score chosen - rejected",
        (("train/distance", "trained on"), ("eval/distance", "held out")),
        "Should rise. Far above 5 with a flat accuracy: the model is too certain.",
    ),
)

RATINGS_PANELS = (
    Panel(
        "squared error",
        (("train/loss", "trained on"), ("eval/loss", "held out")),
        "Should fall. If the held-out error rises again, the run is too long.",
    ),
    Panel(
        "root of the mean squared error",
        (("eval/rmse", "held out"),),
        "The usual distance to the given scores, in their units.",
    ),
    Panel(
        "correlation with the given scores",
        (("eval/correlation", "held out"),),
        "1 would be a perfect order, 0 is guessing.",
    ),
)
