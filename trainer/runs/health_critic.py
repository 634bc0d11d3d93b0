"""Checks of health.py on the critic and on the advantages.

Each is a pure function: ``Past`` -> ``Finding``, or None.
"""

from trainer.runs.health_past import JUDGEMENT, LOOK, WRONG, Finding, joined

USELESS, LONG = -0.1, 5  # explained variance, steps; a healthy critic can be at 0 where nothing is foreseen
NONSENSE = -2.0  # explained variance of a critic that is broken
BIASED = 0.7  # standard deviations of the scores
VALUE_CLIPPED = 0.2  # share of tokens
GONE = 0.05  # standard deviation of the advantages, against its start


def lam(past):
    """``--lam 1``, with which the advantages trust the critic least; "" where it is 1 already."""
    return "" if past.flag("lam", 0.95) == 1 else "--lam 1"


def critic_useless(past):
    """The critic's values are worse than one number for all."""
    since = past.lasting("value/explained_variance", lambda x: x < USELESS, LONG)
    if since is None:
        return None
    now = past.now("value/explained_variance", LONG)
    warmup = past.flag("critic_warmup_steps", 2)
    warmup = max(5, 2 * warmup) if isinstance(warmup, int) else 5  # it can be "auto"
    return Finding(
        WRONG if past.lasting("value/explained_variance", lambda x: x < NONSENSE, LONG) else LOOK,
        since,
        "the critic makes the advantages noisier than no critic would",
        f"value/explained_variance {now:.2f}, mean of {LONG} steps (0: no use, 1: perfect)",
        ("--critic_learning_rate is too high", "the critic's warm-up was too short", "the reward is noise"),
        joined(past.lower_rate("critic_learning_rate"), lam(past), f"--critic_warmup_steps {warmup}"),
        "VC-PPO, arXiv:2503.01491",
    )


def critic_biased(past):
    """The critic's mean is far from that of the returns, for long."""
    spread = past.now("reward/score_std", LONG)
    if not spread:
        return None
    since = past.lasting("value/bias", lambda x: abs(x) > BIASED * spread, LONG)
    if since is None:
        return None
    bias, (cause, rate) = past.now("value/bias", LONG), past.other_rate("critic_learning_rate")
    clip = ("--cliprange_value is too small",) if past.flag("cliprange_value", 0.5) else ()  # 0: no clip
    return Finding(
        LOOK,
        since,
        f"the critic's values are too {'high' if bias > 0 else 'low'}: it does not follow the policy",
        f"value/bias {bias:.2f}, the scores' standard deviation {spread:.2f}",
        (cause, *clip, "the scores change fast"),
        joined(rate, lam(past)),
        "VC-PPO, arXiv:2503.01491",
    )


def critic_is_held(past):
    """The clip of the values stops the critic."""
    since = past.lasting("value/clip_fraction", lambda x: x > VALUE_CLIPPED)
    if since is None:
        return None
    clip = past.flag("cliprange_value", 0.5)
    return Finding(
        LOOK,
        since,
        "the clip of the values takes the gradient of many tokens from the critic",
        f"value/clip_fraction {past.now('value/clip_fraction', 1):.2f}, --cliprange_value {clip:g}",
        ("--cliprange_value is too small", "--critic_learning_rate is too high"),
        "--cliprange_value 0.5" if clip < 0.2 else past.lower_rate("critic_learning_rate"),
        "Andrychowicz et al. 2020, arXiv:2006.05990",
    )


def critic_learns_nothing(past):
    """The critic's error is as large as that of a single number, and does not fall."""
    since = past.lasting("value/error", lambda x: x > 1.5, LONG)
    if since is None:
        return None
    cause, remedy = past.other_rate("critic_learning_rate")
    return Finding(
        LOOK,
        since,
        "the critic's error does not fall below that of a single number for all",
        f"value/error {past.now('value/error', LONG):.2f} (about 1: knows only the mean)",
        (cause, "extreme scores"),
        remedy,
        JUDGEMENT,
    )


def advantages_gone(past):
    """All responses of a batch are equally good: what is learned from is noise."""
    start, now = past.start("policy/advantage_std", 1), past.now("policy/advantage_std")
    if now is None or not (now == 0 or now < GONE * start):
        return None
    how = "have become nearly equal: nothing is left to learn from but noise"
    return Finding(
        LOOK,
        past.step,
        f"the advantages {how if now else 'are all equal: there is nothing to learn from'}",
        f"policy/advantage_std {now:.3g}, at the start {start:.3g}",
        ("the task is learned: the run can end", "the reward knows few different values"),
        "harder prompts in --data_path, or a finer reward",
        JUDGEMENT,
    )


ROWS = (critic_useless, critic_biased, critic_is_held, critic_learns_nothing, advantages_gone)
