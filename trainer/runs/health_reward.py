"""Checks of health.py on scores and rewards: what they pay for, and whether they rise.

Each is a pure function: ``Past`` -> ``Finding``, or None.
"""

import math

from trainer.runs.displays import PARTS, RULES, metric_names
from trainer.runs.health_past import (
    BEGIN,
    JUDGEMENT,
    LOOK,
    TOP,
    WINDOW,
    WRONG,
    Finding,
    joined,
    spread_of_steps,
)

BY_LENGTH = 0.6  # correlation of score and length
SAME = 1e-4  # standard deviation of the scores
SCORED = 500  # responses: of fewer, a reward that is seldom earned can be earned by none
AT_LIMIT = 0.2  # share of responses
ALIKE = 0.8  # share of prompts
FLAT = 1.0  # standard errors of a rise
SHARE_OF_FORM = 0.8  # of the score's gain
LESS = {  # rule -> how it weighs less
    **dict.fromkeys(("format", "marks"), "--reasoning 0"),
    "thinking": "a smaller --thinking_reward",
    "repetition": "a smaller --repetition_penalty",
    "length_reward": "a smaller --length_reward",
    "missing_eos": "a smaller --missing_eos_penalty",
    "overlong": "a smaller --overlong_penalty",
}
SMALLEST_PRICE = 2e-4  # of a nat, in standard deviations of the score


def score_follows_length(past):
    """The score of a response is mostly its length, seen before the policy has moved."""
    values = past.starts("rollout/score_length_corr")[:3]
    if past.steps > 4 or len(values) < 3 or not abs(sum(values) / 3) > BY_LENGTH:
        return None
    mean = sum(values) / 3
    return Finding(
        LOOK,
        1,
        f"the reward prefers the {'longer' if mean > 0 else 'shorter'} answers of the untrained policy",
        f"rollout/score_length_corr {mean:.2f}, mean of the first 3 steps",
        ("a reward model that learned length", "a reward function that counts words or characters"),
        joined(past.times("kl_coef", 3, 0.05), "another reward", by=", or "),
        "Singhal et al. 2023, arXiv:2310.03716",
    )


def scores_alike(past):
    """All responses get the same score from the start."""
    since = past.lasting("reward/score_std", lambda x: x < SAME, 3)
    if since is None or past.most("reward/score_std") >= SAME:
        return None
    size = past.flag("batch_size", SCORED) * past.flag("processes", 1)
    return Finding(
        WRONG if past.steps * size >= SCORED else LOOK,  # few answers of a hard task can all be wrong
        past.step - past.steps + 1,
        "all responses get the same score: nothing can be learned from them",
        f"reward/score_std {past.now('reward/score_std', 1):.2g} in {past.steps} steps",
        (
            "a reward function that returns a constant or never finds the answer",
            "no response so far was right: the task is too hard for this policy",
            "a reward model that reads its score at a wrong place: pad token or chat template",
        ),
        "call the reward on two different answers yourself; see docs/rewards.md",
        JUDGEMENT,
    )


def groups_alike(past):
    """Most prompts' answers all score the same, where answers are compared."""
    since = past.lasting("rollout/equal_groups", lambda x: x > ALIKE, 5)
    if since is None or past.flag("advantage", "gae") not in ("rloo", "group"):
        return None
    finer = "a finer reward, or prompts that are neither too easy nor too hard"
    again = past.flag("filter_groups", 0)
    return Finding(
        LOOK,
        since,
        "the answers to most prompts all score the same: there is nothing to compare",
        f"rollout/equal_groups {past.now('rollout/equal_groups', 1):.2f} of the prompts",
        (
            "a reward of few values, as 0 and 1",
            "prompts that are all too easy or all too hard",
            "few answers",
        ),
        finer if again else f"--filter_groups 2, or {finer}",
        "Yu et al. 2025, arXiv:2503.14476",
    )


def scores_at_limit(past):
    """The reward model's scores lie outside the range that counts."""
    since = past.lasting("reward/at_limit", lambda x: x > AT_LIMIT)
    if since is None:
        return None
    normal, remedy = past.flag("normalize_reward", 0), "--normalize_reward 1"
    if past.flag("critic_init", "auto") != "actor":  # else it begins at the raw scale
        remedy += " --critic_init actor"
    return Finding(
        LOOK,
        since,
        f"many {'normalised' if normal else 'raw'} scores lie outside ±3, where they are cut: better answers "
        "get no more",
        f"reward/at_limit {past.now('reward/at_limit', 1):.2f} of the responses",
        ("a reward model with a large scale", "the policy exploits it"),
        joined(past.times("kl_coef", 3, 0.05), "another reward", by=", or ") if normal else remedy,
        "docs/rewards.md",
    )


def held_out_falls(past):
    """The score that trains rises, and what it was to improve falls."""
    name = past.quality
    found = past.evaluations(name) if name else None
    if not found:
        return None
    (_, first), (step, best), (last_step, last) = found
    if not best - last > past.least_difference(name):
        return None
    if not past.independent and first == best and past.score_rose() is None:
        return None
    scores = past.evaluations(past.score.replace("reward/", "eval/"))
    exploited = bool(scores) and past.independent and scores[2][1] > scores[0][1]
    symptom = f"the held-out {name.removeprefix('eval/')} falls"
    causes = ("--learning_rate is too high", "the reward is noise", "--kl_coef is too small")
    if exploited:
        symptom += " while the score rises: the reward is exploited"
        causes = ("the reward pays for something else", "--kl_coef is too small", "the run is too long")
    return Finding(
        WRONG if first - last > 2 * past.least_difference(name) else LOOK,
        last_step,
        symptom,
        f"{name} {best:.3f} at step {step}, {last:.3f} at step {last_step}; at the start {first:.3f}",
        causes,
        joined(past.times("kl_coef", 3, 0.05), past.lower_rate()) + "; the best weights are kept",
        "Gao et al. 2022, arXiv:2210.10760",
    )


def score_below_start(past):
    """The score has been below its start for ``WINDOW`` steps, by more than it varies from step to step."""
    before, now = past.starts(past.score), past.values(past.score)
    if past.steps < 2 * WINDOW or len(before) < WINDOW or len(now) < WINDOW:
        return None
    fall = (sum(before) - sum(now)) / WINDOW
    if not fall > max(2 * spread_of_steps(before), 0.0):
        return None
    return Finding(
        WRONG,
        past.step - WINDOW + 1,
        "training makes the model worse by its own reward",
        f"{past.score}: mean of the last {WINDOW} steps {sum(now) / WINDOW:.3f}, "
        f"of the first {WINDOW} {sum(before) / WINDOW:.3f}",
        ("--learning_rate is too high", "the critic is useless", "a part of the reward works against it"),
        past.lower_rate(),
        JUDGEMENT,
    )


def score_is_flat(past):
    """The policy moves, and neither the score nor the evaluations rise."""
    rise = past.score_rise()
    if rise is None or rise > FLAT or past.improved():
        return None
    moved = past.now("kl/sequence", WINDOW)
    if moved is None or not moved > 0.1:
        return None
    return Finding(
        LOOK,
        past.step,
        "the policy changes, and the score does not rise",
        f"{past.score} {past.now(past.score, WINDOW):.3f}, at the start {past.start(past.score, BEGIN):.3f}, "
        f"which is {rise:.1f} standard errors; kl/sequence {moved:.2f}",
        ("the reward is noise", "nothing better can be reached", "--batch_size is too small"),
        joined(
            "compare a step's best and worst answers in samples.jsonl: if they are alike, mend the reward",
            past.raised("batch_size", 2 * past.flag("batch_size", 64)),
            by="; ",
        ),
        JUDGEMENT,
    )


def form_gains_judge_loses(past):
    """The score rises by rules about the form alone, while the rest of the reward does not rise, or falls."""
    if past.steps < 2 * WINDOW or (past.independent and past.improved()):
        return None
    rules = [name for name in metric_names(PARTS, past.latest) if name.removeprefix("reward/") in RULES]
    begin, end = ([of(name) for name in (past.score, *rules)] for of in (past.starts, past.values))
    if not rules or any(len(values) < WINDOW for values in (*begin, *end)):
        return None
    gain, chance = rise_of(begin[0], end[0])
    rest = [[score - sum(form) for score, *form in zip(*values, strict=True)] for values in (begin, end)]
    own, least = rise_of(*rest)
    if not (gain > chance and own <= min(least, (1 - SHARE_OF_FORM) * gain)):
        return None
    level, does = (WRONG, "falls") if -own > max(0.02, least) else (LOOK, "does not rise")
    gains = {n: rise_of(past.starts(n), past.values(n))[0] for n in metric_names(PARTS, past.latest)}
    largest = max(rules, key=gains.get).removeprefix("reward/")
    models = past.facts.get("reward_models", {})
    heavier = past.reward_models(**{name: 2 * model["weight"] for name, model in models.items()})
    return Finding(
        level,
        past.step,
        f"the score rises by rules about the form alone, and the rest of the reward {does}",
        ", ".join(f"{name.removeprefix('reward/')} {x:+.2f}" for name, x in gains.items()),
        (f"{largest} weighs too much beside the rest of the reward",),
        f"{heavier if models else 'larger scores in the rest of the reward'}, or {LESS[largest]}",
        JUDGEMENT,
    )


def rise_of(begin, end):
    """The values of the first and the last ``WINDOW`` steps -> (the rise of the mean, two standard errors of
    it)."""
    chance = 2 * math.hypot(spread_of_steps(begin), spread_of_steps(end)) / math.sqrt(WINDOW)
    return (sum(end) - sum(begin)) / WINDOW, chance


def kl_weighs_nothing(past):
    """The KL's price is nothing beside the size of the scores."""
    price, spread = past.flag("kl_coef", 0), past.start("reward/score_std", 2)
    if past.flag("kl_target", 0):  # which moves the price
        return None
    if not price or not spread or not price / spread < SMALLEST_PRICE or past.steps > 4:
        return None
    return Finding(
        LOOK,
        1,
        "the scores are so large that the KL to the reference counts for nothing",
        f"--kl_coef {price:g} beside scores with a standard deviation of {spread:.3g}",
        ("a reward with a large scale",),
        joined(
            f"--kl_coef {wanted:.2g}" if (wanted := 0.02 * spread) <= TOP["kl_coef"] else "",
            f"a reward divided by {spread:.3g}",
            by=", or ",
        ),
        JUDGEMENT,
    )


ROWS = (
    scores_alike,
    groups_alike,
    scores_at_limit,
    score_follows_length,
    held_out_falls,
    score_below_start,
    score_is_flat,
    form_gains_judge_loses,
    kl_weighs_nothing,
)
