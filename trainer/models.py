"""Which models a PPO run has, what each starts from, and which of them never change.

    actor         --model; it trains, and starts as it was loaded
    reference     a frozen copy of the actor as it starts: no optimizer has it, so it stays that
    old actor     the behaviour policy: its samples are learned from. With --update_old_actor_freq 1 it is the
                  actor, else a frozen copy, which ``learn`` (train_ppo.py) makes equal to it now and then
    critic        only with --advantage gae; it starts from a reward model or from the actor (--critic_init)
    rewards       frozen models, those of the judge too (rewards/reward_models.py)

With --lora_r only adapters train, and all of them share the frozen weights, until --shard 1 cuts them: then
each process keeps a part of every model. No model has dropout: the training forward is the scoring forward.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from errors import InputError
from model.critic import CriticModel
from model.loading import embeddings
from model.lora import add_adapters, frozen_copy, trained
from model.weights import sharded_and_whole
from trainer.compute.memory import free_unused_memory
from trainer.compute.precision import keep_exact, round_frozen
from trainer.compute.scoring import prepare_training
from trainer.compute.sharding import shard
from trainer.flags import Flags
from trainer.rewards.combine import scoring_models
from trainer.rewards.reward_models import ClassifierRewardModel, RewardModel
from trainer.runs.optimizer_step import make_optimizer

if TYPE_CHECKING:
    from trainer.run import PpoRun


def critic_start(
    critic_init: str,
    models: Mapping[str, tuple[RewardModel, float]],
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[PreTrainedModel, float]:
    """-> (the model that the critic starts from, the weight that its scores have in the reward).

    --critic_init "auto" or "reward": of the classifiers that can read what the policy writes the one with the
    largest weight, whatever its sign, and the first of equals; without one, "auto" means the actor, as
    "actor" does, and "reward" raises InputError. models: {name: (reward model, weight)}.
    """
    rows = embeddings(policy)  # often more than the tokenizer has ids: the policy can sample each of them
    readers = [
        (model.model, weight)
        for model, weight in models.values()
        if isinstance(model, ClassifierRewardModel)
        and model.tokenizer.get_vocab() == tokenizer.get_vocab()
        and embeddings(model.model) >= rows
    ]
    if critic_init == "reward" and not readers:
        raise InputError(
            "--critic_init reward: needs a --reward_model that is a sequence classifier with the policy's "
            f"own tokenizer and at least its {rows} embeddings; leave the flag out"
        )
    return max(readers, key=lambda x: abs(x[1])) if readers and critic_init != "actor" else (policy, 1.0)


def build_models(
    args: Flags, actor: PreTrainedModel, start: PreTrainedModel | None, weight: float, sharded: bool
) -> tuple[CriticModel, PreTrainedModel, PreTrainedModel]:
    """-> (critic, reference, old actor); the actor gets its adapters. start, weight: of ``critic_start``;
    start None: no critic, None is returned for it; sharded: copies share memory until ``shard_models``."""
    critic: CriticModel = None  # type: ignore[assignment]
    if start:
        critic = CriticModel.from_model(start, args.lora_r > 0, weight, sharded and start is actor).eval()
        prepare_training(critic.backbone, args.gradient_checkpointing)
    prepare_training(actor.base_model, args.gradient_checkpointing)  # before it is copied
    reference = frozen_copy(actor, sharded)  # before there are adapters, so it has none
    if args.lora_r:
        add_adapters(actor.base_model, args.lora_r, args.seed)
        if critic:
            add_adapters(critic.backbone, args.lora_r, args.seed + 1)
    old_actor = actor if args.update_old_actor_freq == 1 else frozen_copy(actor, sharded)
    return critic, reference, old_actor


def prepare_frozen(run: "PpoRun") -> None:
    """Round the frozen models to the dtype in which they compute, and move them where they wait
    (--offload_frozen). Fingerprints are taken before this."""
    args = run.args
    exact: list[nn.Module] = [run.ref, *run.judges]  # they never change
    frozen = exact if run.old_actor is run.actor else [*exact, run.old_actor]
    training = [learner.model for learner in run.learners.values()]
    if not args.trust_remote_code:  # code from outside may use its weights in other ways
        if args.lora_r:  # all share frozen weights of which the result is made: nothing may be lost
            exact = [*training, *frozen]
        else:
            round_frozen(frozen, run.dtype)
        keep_exact(exact, run.dtype)
    free_unused_memory()  # the gaps that weights of other types have left
    if args.offload_frozen:
        run.host.take(frozen, training)


def shard_models(run: "PpoRun") -> None:
    """``--shard 1``: shard actor, critic, old actor, reference and reward models (compute/sharding.py), which
    are whole in main memory, and make the optimizers of what each process keeps. The sampler is not sharded:
    before a rollout every process gathers a whole copy of the old actor, in the dtype of sampling."""
    in_step = run.in_step
    if not in_step:
        return
    scorers = [*run.scorers.values(), *([run.value_scorer] if run.critic else [])]
    for scorer in dict.fromkeys(scorers):  # the old actor's may be the actor's
        shard(scorer, in_step, run.dtype)
        scorer.in_step = in_step
    if shares_reward_models(run.args):
        for model in scoring_models(run.reward, run.judge):
            shard(model.root, in_step, run.dtype, model.model)
            model.root.in_step = in_step  # type: ignore[assignment]  # ``each_micro_batch`` asks for it
    for learner in run.learners.values():
        learner.optimizer = ppo_optimizer(learner.model, learner.peak, run.args)


def shares_reward_models(args: Flags) -> bool:
    """Whether ``--shard 1`` shards reward models too. Not with --filter_groups, where processes call them
    unequally often and would wait for each other; nor code from outside: it may use weights otherwise."""
    return not (args.filter_groups or args.trust_remote_code)


def ppo_optimizer(model: nn.Module, peak: float, args: Flags) -> torch.optim.Optimizer:
    """AdamW for what trains of a model, without weight decay. Sharded parameters are their own group."""
    groups = [{"params": part} for part in sharded_and_whole(trained(model)) if part]
    return make_optimizer(groups, peak, args.moments_dtype, args.seed)
