"""``--missing_eos_penalty``: what a response without an EOS loses, where it is not given.

The penalty has to follow the rewards. One that is large beside them teaches the policy to end, and little
else: its gradient points the same way in every response. So the policy answers some prompts before step 1,
and the penalty is the standard deviation of their scores without it. It stays the same for the whole run.
"""

from typing import Any

from dataset.data_order import global_batch
from trainer.collect import raw_scores, respond, sampling_from
from trainer.generation.sampling import noise_keys
from trainer.rewards.combine import RunningStats

PROBE_STEP = -2  # the step of these samples in the sampling noise: neither training nor evaluation has it
RESPONSES = 64  # at most; never more than a batch, for which there is room
LEAST_SPREAD = 1e-4  # standard deviation of scores that are all alike
UNKNOWN = 0.5  # the penalty then: half of a reward of 1


def choose_penalty(run: Any, logger: Any) -> None:
    """``PpoRun.begin``: choose the penalty where it is not given, the same for any number of processes.
    Raises InputError on all of them where a reward fails."""
    args = run.args
    world = run.world
    reward = run.reward
    if reward.missing_eos_penalty is not None:
        return
    count = min(RESPONSES, args.batch_size * world.size)
    places = global_batch(len(run.data), args.seed, 0, count)
    mine = world.share_of(range(count))
    with world.all_or_none():
        prompts = [run.data[places[i]] for i in mine]
    keys = noise_keys(args.seed, PROBE_STEP, mine)
    with world.all_or_none(), sampling_from(run, run.old_actor):
        batch = respond(run, prompts, keys, args.temperature)
    with world.all_or_none():
        raw = raw_scores(run, reward, batch)
    scores = reward.combine(raw, world)["score"]
    reward.running = {}  # the statistics of --normalize_reward begin with the first batch
    found = sum(world.gather(RunningStats.of(scores)), RunningStats())
    ended = sum(world.gather(int(batch.rollout.finished.sum())))
    penalty = UNKNOWN if found.std < LEAST_SPREAD else float(f"{found.std:.2g}")
    reward.missing_eos_penalty = penalty
    with world.all_or_none():  # the disk may be full
        logger.keep_choice("missing_eos_penalty", penalty)
    why = f"the scores of {found.count} responses have the standard deviation {found.std:.2g}"
    if not found.count:
        why = "no response had a score, so half of a reward of 1"
    elif found.std < LEAST_SPREAD:
        why = f"all {found.count} scored {found.mean:z.3g}"
        why += ", without a spread to follow, so half of a reward of 1"
    logger.say(
        f"penalty  {penalty:g} for a response that does not end (--missing_eos_penalty): {why}; "
        f"{ended or 'none'} of {count} ended"
    )
