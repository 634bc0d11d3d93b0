"""Checks of health.py on the policy: its KL, its ratio, the size of its steps, its entropy, its sampler.

Each is a pure function: ``Past`` -> ``Finding``, or None.
"""

import math

from trainer.runs.health_past import JUDGEMENT, LOOK, WRONG, Finding, joined

KL_LIMIT, KL_OF_A_TOKEN = 10.0, 0.1  # nats a response; nats a token, for long responses
HIGH_KL, HIGHEST_KL = 1.0, 3.0  # nats a token, of a single step
BELOW = -1.0  # nats a response
FIRST_RATIO = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}  # how far from 1
LARGEST_RATIO, LEAST_RATIO = 2.0, 0.1
STEP_KL, CLIPPED, CLIPPED_ONCE = 0.05, 0.4, 0.5  # approx_kl, clip fraction of three steps, of one
HUGE_KL, MOST_CLIPPED = 0.5, 0.6  # the same two where the run is broken
STUCK = 0.03  # nats a response that the policy is away from its start after a time
STOPPED = 0.5  # share of early stops
USUAL_STOP = 0.02  # --target_kl: from here on it is not too small, and a larger mean of approx_kl is fast
LOST, FEWEST_IDS = 0.5, 100  # entropy, as a share of the largest; a smaller vocabulary may be a toy
COLLAPSED, RANDOM = 0.1, 2.0  # entropy, against its start
GAP, LARGE_GAP = 0.02, 0.1  # nats a token
WEIGHT, SAMPLE_SIZE = 2.0, 0.3  # importance weights: mean, effective sample size
CUT_GRADIENT = 30  # times --grad_clip


def kl_far(past):
    """The policy has left the reference."""
    length = past.now("rollout/length", 1) or 0.0
    limit = max(KL_LIMIT, KL_OF_A_TOKEN * length)
    since, token = past.lasting("kl/sequence", lambda x: x > limit), past.now("kl/k1", 1) or 0.0
    if since is None and not token > HIGH_KL:
        return None
    sequence = past.now("kl/sequence", 1)
    numbers = f"kl/k1 {token:.2f} nats per token (below 0.1 is usual)"
    if sequence is not None:
        numbers += f", kl/sequence {sequence:.1f} nats per response (6 to 10 is much)"
    return Finding(
        WRONG if token > HIGHEST_KL or past.worsened() else LOOK,
        past.step if since is None else since,
        "the policy is far from its start and may write nonsense: read samples.jsonl",
        numbers,
        ("--learning_rate is too high", "--kl_coef is too small", *past.many_epochs()),
        joined(past.lower_rate(), past.times("kl_coef", 3, 0.05)),
        "Ziegler et al. 2019; Gao et al. 2022, arXiv:2210.10760",
    )


def kl_negative(past):
    """The mean log ratio to the reference is negative, which no policy's own samples give."""
    since = past.lasting("kl/sequence", lambda x: x < BELOW)
    if since is None:
        return None
    return Finding(
        WRONG,
        since,
        "the KL to the reference is negative: the tokens do not come from the policy that is scored",
        f"kl/sequence {past.now('kl/sequence', 1):.2f}",
        ("the sampler computes in another precision", "a fault in the program"),
        past.full_precision(),
        "TRL issue 235",
    )


def first_ratio(past):
    """Before the first update of a batch the actor is the old actor, and their ratio is 1."""
    limit = FIRST_RATIO.get(past.dtype, FIRST_RATIO["bfloat16"])
    if past.flag("update_old_actor_freq", 1) != 1:
        return None
    since = past.lasting("policy/first_ratio", lambda x: abs(x - 1) > limit, 1)
    if since is None:
        return None
    return Finding(
        WRONG,
        since,
        "the ratio of actor and old actor is not 1 before the first update of a batch",
        f"policy/first_ratio {past.now('policy/first_ratio', 1):.4f}",
        ("log-probs of actor and old actor are computed in different ways: a fault in the program",),
        past.full_precision(),
        "Huang et al. 2022, The 37 implementation details of PPO",
    )


def ratio_drastic(past):
    """The mean ratio is far from 1."""
    since = past.lasting("policy/ratio", lambda x: not LEAST_RATIO < x < LARGEST_RATIO, 1)
    if since is None:
        return None
    return Finding(
        WRONG,
        since,
        "the updates of one batch change the policy beyond what PPO can correct",
        f"policy/ratio {past.now('policy/ratio', 1):.3g}",
        ("--learning_rate is too high", *past.many_epochs()),
        past.lower_rate() + past.fewer_epochs(1),
        "TRL's PPO guide",
    )


def steps_too_large(past):
    """One batch changes the policy too much."""
    kl, clipped = past.now("policy/approx_kl", 1) or 0.0, past.now("policy/clip_fraction", 1) or 0.0
    lasting = past.lasting("policy/approx_kl", lambda x: x > STEP_KL)
    often = past.lasting("policy/clip_fraction", lambda x: x > CLIPPED)
    narrow = past.flag("clip_epsilon", 0.2) < 0.05 and kl < STEP_KL  # then few clipped tokens say little
    clipped_much = not narrow and (often is not None or clipped > CLIPPED_ONCE)
    if lasting is None and not clipped_much and not kl > HUGE_KL:
        return None
    since = min((s for s in (lasting, often) if s is not None), default=past.step)
    causes = "--learning_rate is too high", *past.many_epochs()
    copied = past.flag("update_old_actor_freq", 1)  # batches that one old actor samples
    who = "one batch moves" if copied == 1 else f"{copied} batches move"
    stop = "" if 0 < past.flag("target_kl", 0) <= STEP_KL else f" --target_kl {STEP_KL:g}"
    stop += "" if copied == 1 else " --update_old_actor_freq 1"
    return Finding(
        WRONG if kl > HUGE_KL or (clipped > MOST_CLIPPED and not narrow) else LOOK,
        since,
        f"the steps are too large: {who} the policy further than PPO allows for",
        f"policy/approx_kl {kl:.3f} (usual: below 0.05), policy/clip_fraction {clipped:.2f} (below 0.3)",
        causes if copied == 1 else (*causes, "--update_old_actor_freq is too large"),
        past.lower_rate() + past.fewer_epochs(past.flag("ppo_epochs", 1) // 4) + stop,
        "Spinning Up in Deep RL: 0.01 to 0.05",
    )


def policy_is_stuck(past):
    """The policy does not move."""
    since = past.lasting("kl/sequence", lambda x: abs(x) < STUCK, 8)
    if since is None or past.steps < 12 or not past.values("policy/loss", 8) or past.score_rose():
        return None
    if past.most("reward/score_std") == 0:  # scores_alike says why
        return None
    kl_heavy = past.flag("kl_coef", 0) > 0.5 * (past.now("reward/score_std", 1) or 1.0)
    kl_heavy = kl_heavy and not past.flag("kl_target", 0)  # which lowers it by itself
    rate_is, other_rate = past.other_rate()
    causes = (rate_is, "all answers get the same score", "--grad_clip is too small")
    return Finding(
        LOOK,
        since,
        "the policy does not move: it is where it was at the start",
        f"kl/sequence {past.now('kl/sequence', 3) or 0:.4f} nats per response after {past.steps} steps",
        ("--kl_coef is too large", *causes) if kl_heavy else causes,
        f"--kl_coef {min(0.02, past.flag('kl_coef') / 10):.2g}" if kl_heavy else other_rate,
        JUDGEMENT,
    )


def early_stop_starves(past):
    """--target_kl ends the updates of nearly every batch."""
    since = past.lasting("policy/early_stop", lambda x: x >= STOPPED)
    if since is None:
        return None
    target, kl = past.flag("target_kl", 0), past.now("policy/approx_kl") or 0.0
    strict, fast = target < USUAL_STOP, max(target, kl) >= USUAL_STOP
    causes = ("--learning_rate is too high",) * fast + ("--target_kl is too small",) * strict
    return Finding(
        LOOK,
        since,
        "--target_kl ends most updates early: single steps move the policy far"
        if fast
        else "--target_kl ends most updates before they have begun: the actor hardly trains",
        f"policy/early_stop {past.now('policy/early_stop', 1):.2f} (1: at the first minibatch), "
        f"policy/approx_kl {kl:.3f}, --target_kl {target:g}",
        causes if fast else (*causes, "--learning_rate is too high"),
        joined(
            past.lower_rate() if fast else "",
            f"--target_kl {max(USUAL_STOP, min(3 * target, STEP_KL)):.2g}" if strict else "",
        ),
        JUDGEMENT,
    )


def policy_is_lost(past):
    """From the start on the policy is nearly as uncertain as if every token were equally likely."""
    size, start = past.facts.get("vocabulary", 0), past.start("policy/entropy", 1)
    if size < FEWEST_IDS or start is None or not start > LOST * math.log(size):
        return None
    return Finding(
        LOOK,
        past.step,
        "from the start on the policy hardly knows how to go on: the prompts do not look as it knows them",
        f"policy/entropy {start:.2f} nats per token; all tokens equally likely: {math.log(size):.2f}",
        ("a tokenizer of another model", "another prompt template", "a policy that was not trained yet"),
        "--tokenizer and --prompt_template of the policy's training; or stage 1 first (trainer/train_sft.py)",
        JUDGEMENT,
    )


def entropy_collapses(past):
    """The policy has become certain and no better."""
    start, now = past.start("policy/entropy", 1), past.now("policy/entropy")
    if not start or now is None or not now < COLLAPSED * start or past.better() is not False:
        return None
    return Finding(
        LOOK,
        past.step,
        "the policy gives nearly the same tokens always, and it is not better for it",
        f"policy/entropy {now:.3g}, at the start {start:.3g} nats per token",
        ("--learning_rate is too high", "--kl_coef is too small", "the reward pays for one kind of answer"),
        joined(past.lower_rate(), past.times("kl_coef", 3, 0.05)),
        JUDGEMENT,
    )


def entropy_rises(past):
    """The policy becomes random."""
    start, now = past.start("policy/entropy", 1), past.now("policy/entropy")
    if start is None or now is None or not now > max(RANDOM * start, start + 0.3):
        return None
    if past.better() is not False:
        return None
    return Finding(
        LOOK,
        past.step,
        "the responses become random",
        f"policy/entropy {now:.3g}, at the start {start:.3g} nats per token",
        ("--learning_rate is too high", "the reward is noise"),
        joined(past.lower_rate(), past.times("kl_coef", 3, 0.05)),
        JUDGEMENT,
    )


def sampler_apart(past):
    """The sampler draws from another policy than the one that is scored."""
    gap = past.now("rollout/sampler_gap", 1) or 0.0
    weight, size = past.now("rollout/importance_weight", 1), past.now("rollout/importance_ess", 1)
    off = weight is not None and not 1 / WEIGHT < weight < WEIGHT
    if not (gap > GAP or off or (size is not None and size < SAMPLE_SIZE)):
        return None
    numbers = f"rollout/sampler_gap {gap:.3g} nats per token (usual: below 0.001)"
    numbers += f", mean importance weight {weight:.2f}" if weight is not None else ""
    numbers += f", effective sample size {size:.2f}" if size is not None else ""
    return Finding(
        WRONG if gap > LARGE_GAP or off or (size is not None and size < SAMPLE_SIZE) else LOOK,
        past.step,
        "the sampler draws from another policy than the one that is trained",
        numbers,
        ("a low precision that this model does not bear", "a fault in the program"),
        past.full_precision(),
        "verl's page on rollout correction",
    )


def updates_skipped(past):
    """Losses or gradients that are not finite."""
    since = past.lasting("policy/skipped_steps", lambda x: x > 0)
    if since is None:
        return None
    return Finding(
        WRONG,
        since,
        "updates are skipped in one batch after the other, because a loss or a gradient is not finite",
        f"policy/skipped_steps {past.now('policy/skipped_steps', 1):.2f}",
        ("a precision that is too low for this model", "--learning_rate is too high"),
        f"--dtype float32 {past.lower_rate()}",
        "docs/metrics.md",
    )


def gradient_is_cut(past):
    """The gradient is many times longer than --grad_clip lets through."""
    limit = CUT_GRADIENT * past.flag("grad_clip", 1.0)
    since = past.lasting("policy/grad_norm", lambda x: x > limit, 5)
    if since is None:
        return None
    return Finding(
        LOOK,
        since,
        "every gradient of the actor is cut to a small part of its length",
        f"policy/grad_norm {past.now('policy/grad_norm', 1):.3g}, --grad_clip {limit / CUT_GRADIENT:g}",
        ("--grad_clip is too small", "extreme scores"),
        past.raised("grad_clip", max(1.0, limit / CUT_GRADIENT * 10)) or "a reward with a smaller scale",
        JUDGEMENT,
    )


ROWS = (
    kl_far,
    kl_negative,
    first_ratio,
    ratio_drastic,
    steps_too_large,
    sampler_apart,
    updates_skipped,
    policy_is_stuck,
    early_stop_starves,
    policy_is_lost,
    entropy_collapses,
    entropy_rises,
    gradient_is_cut,
)
