"""The models of a PPO run, what each starts from, and why the reference never changes.

    actor         --model; it trains, and starts as it was loaded
    reference     a frozen copy of the actor as it starts: no optimizer has it, so it stays that
    old actor     the behaviour policy: its samples are learned from. With --update_old_actor_freq 1 it is the
                  actor, else a frozen copy, which ``learn`` (train_ppo.py) makes equal to it now and then
    critic        only with --advantage gae; it starts from a reward model or from the actor (--critic_init)
    rewards       frozen models, those of the judge too (rewards/reward_models.py)

With --lora_r only adapters train, and all of them share the frozen weights, until --shard 1 cuts them: then
each process keeps a part of every model. No model has dropout: the training forward is the scoring forward.
"""

from argparse import Namespace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from errors import InputError
from model.critic import CriticModel
from model.loading import embeddings
from model.lora import add_adapters, frozen_copy
from trainer.compute.scoring import prepare_training
from trainer.rewards.reward_models import ClassifierRewardModel, RewardModels


def build_models(
    args: Namespace, actor: PreTrainedModel, start: PreTrainedModel | None, weight: float, sharded: bool
) -> tuple[PreTrainedModel, PreTrainedModel, CriticModel | None]:
    """Make the other models from the actor, which gets its adapters with --lora_r -> (reference, old actor,
    critic).

    start, weight: of ``critic_start``; start None: no critic. sharded: until ``PpoRun.prepare`` shards them,
    copies share memory.
    """
    lora = args.lora_r > 0
    critic = None
    if start:
        critic = CriticModel.from_model(start, lora, weight, lend=sharded and start is actor).eval()
        prepare_training(critic.backbone, args.gradient_checkpointing)
    prepare_training(actor.base_model, args.gradient_checkpointing)  # before it is copied
    ref = frozen_copy(actor, sharded)  # before there are adapters, so it has none
    if lora:
        add_adapters(actor.base_model, args.lora_r, args.seed)
        if critic:
            add_adapters(critic.backbone, args.lora_r, args.seed + 1)
    old_actor = actor if args.update_old_actor_freq == 1 else frozen_copy(actor, sharded)
    return ref, old_actor, critic


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
    rows = embeddings(policy)  # often more than the tokenizer has ids: the policy can sample each of them
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
