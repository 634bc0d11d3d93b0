"""Build a PPO run: actor, old actor, reference, critic, reward models, sampler, optimizers.

``main`` of train_ppo.py calls ``build_run`` once, with what ``load_inputs`` (inputs.py) has loaded.
"""

from functools import partial
from operator import call

import torch

from model.critic import CriticModel
from model.lora import add_adapters, frozen_copy
from trainer.best import choose_best
from trainer.compute.memory import free_unused_memory, keep_freed_memory
from trainer.compute.precision import check_range, set_precision
from trainer.compute.scoring import PolicyScorer, ValueScorer, prepare_training
from trainer.compute.sharding import InStep
from trainer.endings import keep_endings, load_endings
from trainer.generation.engine import Sampler
from trainer.inputs import choose_rates, count_steps, sampling_sizes
from trainer.memory_check import check_memory
from trainer.offline import held_out_pairs
from trainer.ppo_models import PpoRun
from trainer.ptx import load_ptx
from trainer.rewards.judge import load_judge
from trainer.rewards.reward import Reward, load_reward
from trainer.rewards.reward_models import critic_start, modules_of
from trainer.runs.optimizer_step import Learner
from trainer.shard_run import load_once, ppo_optimizer, shares_models


def load_rewards(args, world, dtype, prompts, held_out):
    """-> (``Reward`` of the run, its ``Judge``), with their reward models."""
    load = call
    if not (args.trust_remote_code or args.filter_groups):  # else each process has whole ones
        place = torch.device("cpu") if shares_models(args, world) else world.device
        load = partial(load_once, args, world, place=place)
    judge = load_judge(args, world.device, dtype, held_out, load)
    if args.offline_data_path:  # logged answers come with their scores
        return Reward(reasoning=False), judge
    return load_reward(args, world.device, dtype, prompts, held_out, load=load), judge


def build_run(args, flags, world, actor, tokenizer, prompts, held_out=None, notes=()):
    """The loaded policy -> all models of the run. Actor, old actor, reference and sampler start as the
    policy, the critic as its backbone or as a reward model's (``critic_start``). A critic is built for
    ``--advantage gae`` only. No model has dropout: the training forward is the scoring forward. flags: {name:
    ``Flag``}, of ``flag_parser``."""
    device, dtype = world.device, set_precision(args.dtype, world.device, args.deterministic)
    in_step = InStep(world) if shares_models(args, world) else None
    free_unused_memory()  # the copies with which the policy was checked
    keep_freed_memory(sharded=in_step is not None)
    check_range(actor, dtype, f"--model {args.model}: ")
    reward, judge = load_rewards(args, world, dtype, prompts, held_out)
    actor.eval().requires_grad_(not args.lora_r)
    if not in_step:  # else it need not fit on a GPU
        actor.to(device)
    start, weight = None, 1.0  # without a critic
    if args.advantage == "gae":
        start, weight = critic_start(args.critic_init, reward.models, tokenizer) or (actor, 1.0)
    per_batch = args.ppo_epochs * (args.batch_size // args.mini_batch_size)  # optimizer steps
    ptx, pairs = load_ptx(args, world, tokenizer, actor, per_batch), held_out_pairs(args, tokenizer, actor)
    sizes = sampling_sizes(args, prompts, held_out)
    longest = ptx.data.longest if ptx else 0
    judges, more = modules_of(reward, judge), {"demonstration": longest, "in_step": in_step}
    plan, memory = check_memory(args, actor, start, judges, device, dtype, sizes, **more)
    notes = [*notes, choose_rates(args, actor, start), memory]
    room, sampler = plan.cache if device.type == "cuda" else None, None  # None: what suits a CPU
    if plan.slots:  # else nothing is sampled
        sampler = Sampler(actor, dtype, plan.slots, room, sizes, device)
    lend = in_step is not None  # each process soon has a part of each model, and a whole one of none
    if lend and sampler:
        sampler.copy.unload()
    lent = args.lora_r > 0, weight, lend and start is actor
    critic = CriticModel.from_model(start, *lent).eval() if start else None
    for backbone in (actor.base_model, critic.backbone) if critic else (actor.base_model,):
        prepare_training(backbone, args.gradient_checkpointing)
    ref = frozen_copy(actor, lend)  # before there are adapters: the reference has none
    if args.lora_r:  # from here on only the adapters train; their models share the frozen weights
        add_adapters(actor.base_model, args.lora_r, args.seed)
        if critic:
            add_adapters(critic.backbone, args.lora_r, args.seed + 1)
    # With 1 it is the actor, which samples and scores before it learns. A copy has the actor's adapters.
    old_actor = actor if args.update_old_actor_freq == 1 else frozen_copy(actor, lend)
    endings = load_endings(args, tokenizer, actor)
    keep_endings(endings, actor)
    scorer_of = partial(PolicyScorer, dtype=dtype, early_ends=endings.early)
    total_steps = count_steps(args, len(prompts), world.size)
    schedule = {"warmup_steps": args.lr_warmup_steps * per_batch, "schedule": args.lr_schedule}

    def learner(model, scorer, peak):
        optimizer = ppo_optimizer(model, peak, args)
        return Learner(model, scorer, optimizer, peak, total_steps * per_batch, **schedule)

    policy_scorer = scorer_of(actor, learn_entropy=args.entropy_coef > 0)
    learners = {"actor": learner(actor, policy_scorer, args.learning_rate)}
    of_old_actor = policy_scorer if old_actor is actor else scorer_of(old_actor)
    if critic:  # it steps first
        scorer = ValueScorer(critic, dtype)
        learners = {"critic": learner(critic, scorer, args.critic_learning_rate), **learners}
    inputs = args, flags, world, dtype, tokenizer, prompts, held_out
    return PpoRun(
        *inputs,
        notes=[note for note in notes if note],
        reward=reward,
        judge=judge,
        best=choose_best(args, held_out, reward, judge, pairs),
        total_steps=total_steps,
        learners=learners,
        old_actor=old_actor,
        ref=ref,
        sampler=sampler,
        plan=plan,
        endings=endings,
        scorers={"old_actor": of_old_actor, "reference": scorer_of(ref)},
        in_step=in_step,
        ptx=ptx,
        held_out_pairs=pairs,
    )
