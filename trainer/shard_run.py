"""``--shard 1``: which models of a PPO run its processes share, and what does not go with it.

Actor, critic, old actor, reference and reward models that are classifiers are sharded (compute/sharding.py).
The sampler is not: before a rollout every process gathers a whole copy of the old actor, in the dtype of
sampling, and frees it after the rollout.

The main process loads the models and tries them. The others build the same run from outlines, which take no
memory, and receive their rows when the models are sharded.
"""

import pickle

from errors import InputError
from model.lora import trained
from model.shards import outline, sharded_and_whole
from trainer.compute.memory import keep_freed_memory
from trainer.compute.sharding import shard
from trainer.rewards.reward_models import ClassifierRewardModel, scoring_models
from trainer.runs.adamw import make_optimizer

NOT_SHARDED = {  # flag -> why there is none with --shard 1
    "ema_beta": "the average is kept of whole weights",
    "offload_frozen": "frozen models are shared out instead",
}


def shares_models(args, world):
    """Whether a run's processes share its models. A single one has nobody to share with."""
    return bool(args.shard) and world.size > 1


def load_once(args, world, load, *arguments, **options):
    """-> ``load(*arguments, **options)``, a model or an object with models in it. In a sharded run only the
    main process calls it; the others get an outline, until ``shard`` sends them their part of the weights.
    What depends on numbers must be done in ``load``: an outline has none."""
    if not shares_models(args, world):
        return load(*arguments, **options)
    keep_freed_memory(sharded=True)  # before loading, which would leave gaps that nothing else fits into
    loaded = None
    with world.all_or_none():
        if world.is_main:
            loaded = load(*arguments, **options)
    sent = world.from_main(world.is_main and outline(loaded))
    return loaded if world.is_main else pickle.loads(sent)


def check_shard(args, world):
    """Raise InputError for flags that do not go with --shard 1."""
    if not args.shard:
        return
    for name, why in NOT_SHARDED.items():
        if getattr(args, name):
            raise InputError(f"--shard 1: leave out --{name}: {why}")


def shard_models(run):
    """Shard all models of a run, and make their optimizers anew: of what each process keeps."""
    learners = run.learners.values()
    for learner in learners:
        learner.optimizer = None  # it would hold the whole weights
    scorers = [*(learner.scorer for learner in learners), *run.scorers.values()]
    for scorer in dict.fromkeys(scorers):  # the old actor's may be the actor's
        shard(scorer, run.in_step, run.dtype)
        scorer.in_step = run.in_step
    for model in scoring_models(run.reward, run.judge):
        # With --filter_groups each process calls them as often as its own prompts ask for.
        if isinstance(model, ClassifierRewardModel) and not run.args.filter_groups:
            model.shard(run.in_step)
    for learner in learners:
        learner.optimizer = ppo_optimizer(learner.model, learner.peak, run.args)


def ppo_optimizer(model, peak, args):
    """AdamW for what trains of a model, without weight decay. Sharded parameters are their own group."""
    groups = [{"params": part} for part in sharded_and_whole(trained(model)) if part]
    return make_optimizer(groups, peak, args.moments_dtype, args.seed, weight_decay=0.0)
