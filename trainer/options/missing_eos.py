"""Chooses ``--missing_eos_penalty`` where the flag is not given; rewards/combine.py takes it off.

A response without an EOS loses it in ``Reward.score_parts``. --mask_truncated, which leaves such a response
out of the policy loss, acts in ``evaluate_tokens`` in train_ppo.py.

The penalty has to follow the rewards. One that is large beside them teaches the policy to end, and little
else: its gradient points the same way in every response. So the policy answers some prompts before step 1,
and the penalty is the standard deviation of their scores without it. It stays the same for the whole run.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence

from transformers import PreTrainedModel

from dataset.lm_dataset import Prompt, global_batch
from trainer.compute.batch import Batch, RawScores
from trainer.generation.sampling import noise_keys
from trainer.rewards.combine import Reward, RunningStats
from trainer.rollout import RolloutEngine
from trainer.runs.distributed import World

PROBE_STEP = -2  # the step of these samples in the sampling noise: neither training nor evaluation has it
RESPONSES = 64  # at most; never more than a batch, for which there is room
LEAST_SPREAD = 1e-4  # standard deviation of scores that are all alike
UNKNOWN = 0.5  # the penalty then: half of a reward of 1


def choose_penalty(
    args: Namespace,
    world: World,
    data: Sequence[Prompt],
    engine: RolloutEngine,
    actor: PreTrainedModel,
    reward: Reward,
    request_scores: Callable[[Batch], RawScores],
) -> tuple[float, str]:
    """-> (the penalty, the same for any number of processes; a line that says why). The actor answers prompts
    of ``data``; request_scores: of the reward. Raises InputError on all processes where a reward fails."""
    count = min(RESPONSES, args.batch_size * world.size)
    places = global_batch(len(data), args.seed, 0, count)
    own = world.share_of(range(count))
    with world.all_or_none():
        prompts = [data[places[i]] for i in own]
    keys = noise_keys(args.seed, PROBE_STEP, own)
    with world.all_or_none(), engine.weights_of(actor):
        batch = engine.respond(prompts, keys, args.temperature)
    with world.all_or_none():
        raw = request_scores(batch)
    scores = reward.combine(raw, world)["score"]
    reward.running = {}  # the statistics of --normalize_reward begin with the first batch
    statistics = sum(world.gather(RunningStats.of(scores)), RunningStats())
    ended = sum(world.gather(int(batch.finished.sum())))
    penalty = UNKNOWN if statistics.std < LEAST_SPREAD else float(f"{statistics.std:.2g}")
    why = f"the scores of {statistics.count} responses have the standard deviation {statistics.std:.2g}"
    if not statistics.count:
        why = "no response had a score, so half of a reward of 1"
    elif statistics.std < LEAST_SPREAD:
        why = f"all {statistics.count} scored {statistics.mean:z.3g}"
        why += ", without a spread to follow, so half of a reward of 1"
    return penalty, (
        f"penalty  {penalty:g} for a response that does not end (--missing_eos_penalty): {why}; "
        f"{ended or 'none'} of {count} ended"
    )
