"""The models of a PPO run: actor, reference, old actor, critic, reward models.

They are complete when they are built: rounded, sharded, with their optimizers.

    actor         --model; it trains, and starts as it was loaded
    reference     a frozen copy of the actor as it starts: no optimizer has it, so it stays that
    old actor     the behaviour policy: its samples are learned from. With --update_old_actor_freq 1 it is the
                  actor, else a frozen copy, which ``refresh`` makes equal to the actor now and then
    critic        only with --advantage gae; it starts from a reward model or from the actor (--critic_init)
    rewards       frozen models, the evaluation's too (rewards/reward_models.py)

With --lora_r only adapters train, and all of them share the frozen weights, until --shard 1 cuts them: then
each process keeps a part of every model. No model has dropout: the training forward is the scoring forward.
"""

from argparse import Namespace
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from errors import InputError
from model.critic import CriticModel
from model.loading import embeddings
from model.lora import add_adapters, frozen_copy, trained
from model.weights import sharded_and_whole
from trainer.compute.memory import HostMemory, free_unused_memory
from trainer.compute.precision import halve_exact, round_frozen
from trainer.compute.scoring import PolicyScorer, ValueScorer, prepare_training
from trainer.compute.sharding import ShardGroup, shard
from trainer.generation.stops import Endings
from trainer.rewards.reward_models import ClassifierRewardModel, RewardModel, RewardModels
from trainer.runs.optimizer_step import TrainState, make_optimizer

CHECK_SAMPLER = 20  # steps between two comparisons of the sampler's log-probs, where nothing else needs them


class Models:
    """Actor, old actor, reference and critic of a run, how they are scored, and how they learn."""

    critic: CriticModel | None = None
    value_scorer: ValueScorer | None = None
    reference_scorer: PolicyScorer | None = None  # None: nothing is learned from the reference

    def __init__(
        self,
        args: Namespace,
        device: torch.device,
        dtype: torch.dtype,
        actor: PreTrainedModel,
        critic_start: tuple[PreTrainedModel, float] | None,
        rewards: list[RewardModel],
        endings: Endings,
        total_steps: int,
        shard_group: ShardGroup | None,
        shards_rewards: bool,
    ) -> None:
        """device, dtype: of mixed precision; critic_start: what ``critic_start`` below returns, None without
        a critic; rewards: all reward models; total_steps: of the run; shard_group, shards_rewards: of --shard
        1."""
        self.args = args
        self.device = device
        self.dtype = dtype
        self.actor = actor
        # Optimizer steps of each model.
        self.updates_per_batch = args.ppo_epochs * (args.batch_size // args.mini_batch_size)
        # Whether anything is learned from the reference's log-probs. Else they are not computed.
        self.uses_reference = args.kl_coef > 0 or bool(args.offline_data_path)
        self.host = HostMemory(device)  # where frozen models wait with --offload_frozen 1
        self._copy_actor(critic_start, shared=shard_group is not None)
        self._make_scorers(endings)
        self._settle_frozen([model.model for model in rewards])
        if shard_group:
            self._shard(shard_group, rewards if shards_rewards else [])
        self.train_states: dict[str, TrainState] = {}
        if self.critic:
            self.train_states["critic"] = self._train_state(
                self.critic, args.critic_learning_rate, total_steps
            )
        self.train_states["actor"] = self._train_state(
            actor, args.learning_rate, total_steps, first_batch=args.critic_warmup_steps
        )

    def _copy_actor(self, critic_start: tuple[PreTrainedModel, float] | None, shared: bool) -> None:
        """Make the other models from the actor, which gets its adapters with --lora_r. shared: until they are
        sharded, copies share memory."""
        args = self.args
        actor = self.actor
        if critic_start:
            start, weight = critic_start
            lend = shared and start is actor
            self.critic = CriticModel.from_model(start, args.lora_r > 0, weight, lend=lend).eval()
            prepare_training(self.critic.backbone, args.gradient_checkpointing)
        prepare_training(actor.base_model, args.gradient_checkpointing)  # before it is copied
        self.reference = frozen_copy(actor, shared)  # before there are adapters, so it has none
        if args.lora_r:
            add_adapters(actor.base_model, args.lora_r, args.seed)
            if self.critic:
                add_adapters(self.critic.backbone, args.lora_r, args.seed + 1)
        self.old_actor = actor if args.update_old_actor_freq == 1 else frozen_copy(actor, shared)

    def _make_scorers(self, endings: Endings) -> None:
        scorer_of = partial(PolicyScorer, dtype=self.dtype, forbidden=endings.forbidden)
        self.actor_scorer = scorer_of(self.actor, learn_entropy=self.args.entropy_coef > 0)
        same = self.old_actor is self.actor
        self.old_actor_scorer = self.actor_scorer if same else scorer_of(self.old_actor)
        if self.uses_reference:
            self.reference_scorer = scorer_of(self.reference)
        if self.critic:
            self.value_scorer = ValueScorer(self.critic, self.dtype)

    def _settle_frozen(self, rewards: list[PreTrainedModel]) -> None:
        """Round the frozen models to the dtype in which they compute; free a reference that nothing asks;
        move them to where they wait (--offload_frozen)."""
        args = self.args
        exact: list[nn.Module] = list(rewards)  # they never change
        if self.uses_reference:
            exact.append(self.reference)
        else:
            self.reference.to("meta")  # type: ignore[arg-type]  # transformers' wrapper of ``to``
        frozen = exact if self.old_actor is self.actor else [*exact, self.old_actor]
        training = [self.actor, *([self.critic] if self.critic else [])]
        if not args.trust_remote_code:  # code from outside may use its weights in other ways
            if args.lora_r:  # all share frozen weights of which the result is made: nothing may be lost
                exact = [*training, *frozen]
            else:
                round_frozen(frozen, self.dtype)
            halve_exact(exact, self.dtype)
        free_unused_memory()  # the gaps that weights of other types have left
        if args.offload_frozen:
            self.host.take(frozen, training)

    def _shard(self, shard_group: ShardGroup, rewards: list[RewardModel]) -> None:
        """--shard 1: each process keeps a part of actor, critic, old actor, reference and these reward
        models, which are whole in main memory until now (compute/sharding.py). The sampler has no part: it
        gathers the old actor before a rollout."""
        scorers = [self.actor_scorer, self.old_actor_scorer, self.reference_scorer, self.value_scorer]
        for scorer in dict.fromkeys(filter(None, scorers)):  # the old actor's may be the actor's
            shard(scorer, shard_group, self.dtype)
            scorer.shard_group = shard_group
        for reward in rewards:
            shard(reward.root, shard_group, self.dtype, reward.model)
            reward.shard_group = shard_group

    def _train_state(
        self, model: nn.Module, peak: float, total_steps: int, first_batch: int = 0
    ) -> TrainState:
        """AdamW for what trains of a model, without weight decay. Sharded parameters are their own group.
        total_steps: batches of the run; first_batch: before it, only the other model trains."""
        args = self.args
        groups = [{"params": part} for part in sharded_and_whole(trained(model)) if part]
        optimizer = make_optimizer(groups, peak, args.moments_dtype, args.seed)
        return TrainState(
            model,
            optimizer,
            peak,
            total_steps=total_steps * self.updates_per_batch,
            per_batch=self.updates_per_batch,
            first_batch=first_batch,
            warmup_steps=args.lr_warmup_steps * self.updates_per_batch,
            schedule=args.lr_schedule,
        )

    @property
    def single_update(self) -> bool:
        """Whether the actor learns from each batch in one step, taken as the old actor: then its own forward
        gives the old log-probs."""
        args = self.args
        from_others = args.replay_batches or args.offline_data_path
        return self.updates_per_batch == 1 and self.old_actor is self.actor and not from_others

    def sampler_has_scored(self, step: int) -> bool:
        """Whether the sampler's log-probs serve as the old ones until the update: with a single update, or on
        a CPU in fp32, where they are those of the training forward up to rounding. Now and then these are
        computed all the same, to notice a sampler that is off. Replayed answers are of older actors, and
        --entropy_top needs entropies."""
        args = self.args
        exact = self.device.type == "cpu" and self.dtype == torch.float32
        serves = exact or self.single_update
        return serves and step % CHECK_SAMPLER > 0 and not args.replay_batches and args.entropy_top == 1

    def refresh(self, step: int) -> None:
        """After every --update_old_actor_freq batches the old actor becomes a copy of the actor; with 1 it is
        the actor."""
        if self.old_actor is not self.actor and (step + 1) % self.args.update_old_actor_freq == 0:
            self.old_actor.load_state_dict(self.actor.state_dict())


def critic_start(
    critic_init: str,
    models: RewardModels,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    longest: int = 0,
) -> tuple[PreTrainedModel, float]:
    """-> (the model that the critic starts from, the weight that its scores have in the reward).

    --critic_init "auto" or "reward": of the classifiers that can read what the policy writes the one with the
    largest weight, whatever its sign, and the first of equals; without one, "auto" means the actor, as
    "actor" does, and "reward" raises InputError. models: {name: (reward model, weight)}; longest: tokens of
    a prompt with its response.
    """
    rows = embeddings(policy)  # an id that ends a response may be none of the tokenizer's
    readers = [
        (model.model, weight)
        for model, weight in models.values()
        if isinstance(model, ClassifierRewardModel)
        and model.causal
        and model.max_length >= longest
        and model.tokenizer.get_vocab() == tokenizer.get_vocab()
        and embeddings(model.model) >= rows
    ]
    if critic_init == "reward" and not readers:
        raise InputError(
            "--critic_init reward: needs a --reward_model that is a causal sequence classifier with the "
            f"policy's own tokenizer, at least its {rows} embeddings and {longest} positions; leave it out"
        )
    return max(readers, key=lambda x: abs(x[1])) if readers and critic_init != "actor" else (policy, 1.0)
