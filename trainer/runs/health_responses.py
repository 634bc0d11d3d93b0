"""Checks of health.py on the responses: their ends, their length, their repetitions.

Each is a pure function: ``Past`` -> ``Finding``, or None.
"""

from trainer.runs.health_past import JUDGEMENT, LOOK, WRONG, Finding, joined

NONE_ENDS, FEW_END, FALL = 0.02, 0.7, 0.2  # shares of responses
FEWEST = 64  # responses: of fewer, chance decides how many end
FORMATTED = 0.01  # of reward/format: a share of 2 %
FINISHED_LEAST = 0.2  # a smaller share at the start cannot fall far
EMPTY = 1.5  # tokens, of which one is the EOS
PAID = 0.5  # correlation of score and length, where there is no accuracy and no judge
LONGER = 1.4  # times the length at the start
REPEATED, MOST = 0.2, 0.6  # share of trigrams
ALIKE, CLEARLY = 0.5, 0.2  # distinct responses: share of those at the start; below the start by so much


def cuts_are_free(past):
    """Does the run say that answers may be cut?"""
    return past.flag("missing_eos_penalty", 1) == 0


def never_ends(past):
    """No response ends by itself from the start on."""
    count = max(2, past.steps_of(FEWEST))
    now = past.now("rollout/finished", count)
    if now is None or now >= NONE_ENDS or past.start("rollout/finished", count) >= NONE_ENDS:
        return None
    eos = past.facts.get("template_has_eos", True)
    causes = ("the EOS token is not the one that the policy ends with", "--max_gen_len is too small")
    return Finding(
        LOOK if cuts_are_free(past) else WRONG,
        past.latest[-count]["step"],
        "hardly any response ends by itself" if now else "no response ends by itself",
        f"rollout/finished {now:.3f}, --max_gen_len {past.flag('max_gen_len')}",
        ("the chat template ends answers without the EOS token", *causes)
        if not eos
        else (*causes, "the prompt template is not the one of the policy's training"),
        f"{longer}; or check eos_token in tokenizer_config.json"
        if (longer := past.larger("max_gen_len", 4, 64))
        else "check eos_token in tokenizer_config.json and --prompt_template; the model has no positions for "
        "longer answers",
        "TRL's PPO guide (the EOS trick)",
    )


def format_unknown(past):
    """The policy never writes the format that is rewarded."""
    if past.steps != 2 or not past.flag("reasoning"):
        return None
    start = past.start("reward/format", 2)
    if start is None or start >= FORMATTED:
        return None
    return Finding(
        LOOK,
        1,
        "no response has the think / answer format that is rewarded, so there is nothing to learn it from",
        f"reward/format {start:.3f}, mean of the first 2 steps (0.5: each response)",
        (
            "a policy that was not trained on this format",
            "a tokenizer or a template of another model",
            "--max_gen_len is too small",
        ),
        "--reasoning 0, or stage 1 on answers with the format; and check --tokenizer and --prompt_template",
        JUDGEMENT,
    )


def few_end(past):
    """Many responses are cut at --max_gen_len, from the start or more and more."""
    count = past.steps_of(FEWEST)
    start, now = past.start("rollout/finished", count), past.now("rollout/finished", max(3, count))
    if start is None or now is None or start < NONE_ENDS:
        return None
    count = max(3, count)
    forgets = start >= FINISHED_LEAST and past.lasting("rollout/finished", lambda x: x < start / 2, count)
    enough = 0.0 if cuts_are_free(past) else FEW_END
    since = past.lasting("rollout/finished", lambda x: x < enough or x < start - FALL, count)
    if since is None:
        return None
    penalty = past.times("missing_eos_penalty", 2, 1)
    short = "shorter prompts: the model has no positions for longer answers"
    full = joined(penalty, short, by=", or ")
    fell = now < start - FALL
    causes = ("the reward pays for long answers", "--learning_rate is too high")
    return Finding(
        WRONG if forgets else LOOK,
        since,
        "the model forgets to stop" if fell else "many responses are cut at --max_gen_len",
        f"rollout/finished {now:.2f}, at the start {start:.2f}",
        causes if fell else ("--max_gen_len is too small", *causes),
        joined(penalty, past.lower_rate()) if fell else past.larger("max_gen_len", 2, 64) or full,
        "TRL's PPO guide (the EOS trick)",
    )


def empty_answers(past):
    """The model has learned to end at once. A response's only token is then its EOS."""
    start, now = past.start("rollout/length", 1), past.now("rollout/length", 1)
    if start is None or now is None or not (now < EMPTY and start > 2 * EMPTY):
        return None
    penalty, dear = past.flag("missing_eos_penalty", 1), ("--missing_eos_penalty is too large",)
    return Finding(
        WRONG,
        past.step,
        "most answers are empty: to end at once pays more than to answer",
        f"rollout/length {now:.1f} tokens, at the start {start:.1f}",
        (*(dear if penalty else ()), "the reward of an empty answer is too high"),
        joined(
            f"--missing_eos_penalty {0.3 * penalty:.2g}" if penalty else "", past.times("kl_coef", 3, 0.05)
        )
        or "a reward that gives less to an empty answer",
        "docs/rewards.md",
    )


def length_is_gamed(past):
    """The length changes much while nothing independent gets better."""
    start, now = past.start("rollout/length", 2), past.now("rollout/length")
    if start is None or now is None or not (now > LONGER * start or now < start / LONGER):
        return None
    paid = (past.now("rollout/score_length_corr") or 0.0) * (1 if now > start else -1)
    if past.improved() is not False if past.independent else paid < PAID:
        return None
    return Finding(
        LOOK,
        past.step,
        f"the answers get {'longer' if now > start else 'shorter'}, and not clearly better",
        f"rollout/length {now:.1f}, at the start {start:.1f}",
        ("the reward pays for length, not for content", "--kl_coef is too small"),
        joined(past.times("kl_coef", 3, 0.05), "another reward", by=", or "),
        "Singhal et al. 2023, arXiv:2310.03716",
    )


def repetition(past):
    """Responses repeat themselves."""
    since = past.lasting("rollout/repetition", lambda x: x > REPEATED)
    start, now = past.start("rollout/repetition", 1), past.now("rollout/repetition")
    penalty = past.flag("repetition_penalty", 0)
    if since is None or not now > start + 0.1:
        return None
    return Finding(
        WRONG if now > MOST else LOOK,
        since,
        "the responses repeat themselves",
        f"rollout/repetition {now:.2f}, at the start {start:.2f} of a response's trigrams",
        ("the reward pays for it", "--kl_coef is too small", "--learning_rate is too high"),
        joined(past.raised("repetition_penalty", max(0.5, 2.0 * penalty)), past.times("kl_coef", 3, 0.05))
        or past.lower_rate(),
        JUDGEMENT,
    )


def answers_alike(past):
    """Different prompts get the same response."""
    start, now = past.start("rollout/distinct", 1), past.now("rollout/distinct")
    if start is None or now is None or past.improved():
        return None
    prompts = past.facts.get("distinct_prompts", 1.0) / (past.flag("num_generations", 1) or 1)
    least = ALIKE * min(start, prompts)  # equal prompts may get equal responses
    if not now < min(least, start - CLEARLY):
        return None
    not_better = ", and the evaluations do not rise" if past.improved() is False else ""
    return Finding(
        WRONG if past.worsened() else LOOK,
        past.step,
        "many prompts get the same response" + not_better,
        f"rollout/distinct {now:.2f}, at the start {start:.2f}",
        ("the reward pays for one answer whatever the prompt is", "--learning_rate is too high"),
        joined(past.lower_rate(), past.times("kl_coef", 3, 0.05)),
        JUDGEMENT,
    )


ROWS = (never_ends, format_unknown, few_end, empty_answers, length_is_gamed, repetition, answers_alike)
