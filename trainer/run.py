"""What a PPO run keeps: models and learners, options and their states, and the files that it writes.

It is made of what ``load_inputs`` (inputs.py) has loaded; train_ppo.py trains it. Which models there are and
what they start from: models.py.
"""

from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dataset.data_order import local_positions
from dataset.lm_dataset import LoggedPairs, RLAIFDataset
from errors import InputError
from model.critic import CriticModel
from model.loading import is_moe
from model.lora import trained
from model.saving import save_policy
from model.weights import sharded_and_whole
from trainer.about_run import describe_run, fingerprints, start_facts
from trainer.compute.memory import HostMemory, free_unused_memory, keep_freed_memory
from trainer.compute.precision import LossScale, keep_exact, round_frozen, set_precision
from trainer.compute.scoring import PolicyScorer, ValueScorer
from trainer.compute.sharding import InStep, shard
from trainer.endings import keep_endings, load_endings
from trainer.flags import Flags, minimind_pth
from trainer.generation.engine import Sampler
from trainer.inputs import choose_rates, choose_warmup, load_inputs
from trainer.memory_plan import Case, Sizes, check_memory
from trainer.models import build_models, critic_start
from trainer.options.best import WEIGHTS, Best, best_so_far, first_best, write_best
from trainer.options.ema import Ema
from trainer.options.kl_target import KlTarget
from trainer.options.missing_eos import choose_penalty
from trainer.options.offline import held_out_pairs
from trainer.options.ptx import load_ptx
from trainer.options.replay import Replay
from trainer.rewards.combine import Reward, load_judge, load_reward, modules_of, scoring_models
from trainer.rewards.reward_function import code_hash, names_of_run
from trainer.rewards.reward_models import models_hash
from trainer.runs import displays
from trainer.runs.base import Learner, Progress, Run
from trainer.runs.distributed import World
from trainer.runs.optimizer_step import make_optimizer
from trainer.value_scale import AdvantageScale, ValueScale

AVERAGE = "ema.pth"  # in the run folder, of --ema_beta
CHECK_SAMPLER = 20  # steps between two comparisons of the sampler's log-probs, where nothing else needs them


class PpoRun(Run):
    """What every phase of PPO needs: the models, how they are trained, and what does not change in a run."""

    script = "train_ppo.py"
    display = displays.PPO
    held_out: RLAIFDataset | None
    held_out_pairs: LoggedPairs | None
    about = describe_run
    facts = start_facts
    begin = choose_penalty
    fingerprints = fingerprints  # before frozen weights are rounded

    def __init__(self, args: Flags, world: World):
        """Flags -> the run, with all inputs checked. Raises InputError."""
        self.world = world
        self.args = args = args.completed()
        self.actor, self.tokenizer, self.data, self.held_out, room, notes = load_inputs(args, world)
        hidden_size = self.actor.config.hidden_size
        self.result_path = minimind_pth(args.out_dir, "ppo_actor", hidden_size, is_moe(self.actor))
        if Path(args.model).resolve() == self.result_path.resolve():
            raise InputError(
                f"--model {args.model}: this run would write its result there; copy it elsewhere"
            )
        self.dtype = set_precision(args.dtype, world.device, args.deterministic)  # also of sampling
        # A single process has nobody to share with.
        self.in_step = InStep(world) if args.shard and world.size > 1 else None
        free_unused_memory()  # the copies with which the policy was checked
        place = world.device  # of the reward models
        if self.in_step and shares_reward_models(args):
            place = torch.device("cpu")  # until they are sharded: a whole one need not fit on a GPU
        # The judge only evaluates; PPO learns from the reward. Logged answers come with their scores.
        self.names_of_run = of_run = names_of_run(self.data, self.held_out)  # that functions may ask for
        self.judge = load_judge(args, place, self.dtype, of_run, self.held_out)
        self.judged_by = code_hash(args.eval_reward_fn) + models_hash(self.judge.models)
        self.reward = Reward()
        if not args.offline_data_path:
            self.reward = load_reward(args, place, self.dtype, of_run, self.data, self.held_out)
        self.judges = modules_of(self.reward, self.judge)  # all their models, frozen
        self.actor.requires_grad_(not args.lora_r)
        if not self.in_step:  # which gathers and frees layer after layer; an actor need not fit on a GPU
            keep_freed_memory()
            self.actor.to(world.device)  # type: ignore[arg-type]  # transformers' wrapper of ``to``
        learning = {"learning_rate": ("actor", self.actor)}
        start = None  # what the critic starts from
        weight = 1.0
        if args.advantage == "gae":
            start, weight = critic_start(
                args.critic_init, self.reward.models, self.actor, self.tokenizer, longest=room[1]
            )
            learning["critic_learning_rate"] = ("critic", start)
            if start is not self.actor:
                notes.append(f"critic   starts from {start.name_or_path} (--critic_init)")
        self.suited, rates = choose_rates(args, learning, args.lora_r > 0)
        self.answers = args.num_generations
        self.total_steps = self.count_steps()
        choose_warmup(args, self.total_steps)
        args.freeze()
        # Those of this process' rows in the global batch.
        self.positions = local_positions(args.batch_size, world.rank, world.size, args.num_generations)
        self.minibatch_size = args.mini_batch_size * world.size  # sequences, over all processes
        # Optimizer steps of a batch, of each model.
        self.updates_per_batch = args.ppo_epochs * (args.batch_size // args.mini_batch_size)
        self.ptx = load_ptx(args, world, self.tokenizer, self.actor, self.updates_per_batch)  # or None
        self.held_out_pairs = held_out_pairs(args, self.tokenizer, self.actor)
        sizes = {"actor": Sizes(self.actor, self.dtype)}
        if start:
            sizes["critic"] = Sizes(start.base_model, self.dtype)  # type: ignore[arg-type]  # a Module
        case = Case(
            args=args,
            device=world.device,
            dtype=self.dtype,
            models=sizes,
            rewards=[Sizes(model, self.dtype) for model in self.judges],
            responses=room[0],
            width=room[1],
            demonstration=self.ptx.data.longest if self.ptx else 0,
            processes=world.size,
        )
        self.plan, memory = check_memory(case, self.in_step)
        self.notes = [*notes, rates, memory]  # what was chosen
        self.endings = load_endings(args, self.tokenizer, self.actor)  # what ends a response
        self.host = HostMemory(world.device)  # where frozen models wait with --offload_frozen 1
        self.sampler = None  # where nothing is sampled
        if self.plan.slots:
            self.sampler = Sampler(
                self.actor, self.dtype, self.plan.slots, self.plan.cache, room, world.device
            )
            if self.in_step:  # each process soon has a part of each model, and a whole one of none
                self.sampler.copy.unload()
        self.ref, self.old_actor, critic = build_models(
            args, self.actor, start, weight, sharded=self.in_step is not None
        )
        self.critic: CriticModel = critic  # type: ignore[assignment]  # None without --advantage gae
        keep_endings(self.endings, self.actor)
        self._build_learners()
        self._build_options()

    def _build_learners(self) -> None:
        """How models are scored, and how they learn."""
        args = self.args
        scorer_of = partial(PolicyScorer, dtype=self.dtype, early_ends=self.endings.early)
        training = scorer_of(self.actor, learn_entropy=args.entropy_coef > 0)
        self.scorers = {
            "actor": training,
            "old_actor": training if self.old_actor is self.actor else scorer_of(self.old_actor),
            "reference": scorer_of(self.ref),
        }

        def learner(model: nn.Module, peak: float) -> Learner:
            return Learner(
                model=model,
                optimizer=self._optimizer(model, peak),  # ``prepare`` makes another for shards
                peak=peak,
                total_steps=self.total_steps * self.updates_per_batch,
                per_batch=self.updates_per_batch,
                warmup_steps=args.lr_warmup_steps * self.updates_per_batch,
                schedule=args.lr_schedule,
            )

        self.learners = {}
        if self.critic:
            self.value_scorer = ValueScorer(self.critic, self.dtype)
            self.learners["critic"] = learner(self.critic, args.critic_learning_rate)
        self.learners["actor"] = learner(self.actor, args.learning_rate)
        self.learners["actor"].first_batch = args.critic_warmup_steps  # before it only the critic trains
        self.loss_scale = LossScale(self.dtype)  # of fp16
        self.progress = Progress(token_budget=self.plan.token_budget)

    def _build_options(self) -> None:
        """The options; ``states`` has those with a state that checkpoints keep."""
        args = self.args
        learner = self.learners["actor"]
        self.best = first_best(self) if self.held_out else Best()
        if args.offline_data_path:
            self.display = displays.OFFLINE
            if self.held_out and not self.held_out_pairs:  # answers to its prompts are compared
                best = "judge" if self.judge.names else "accuracy"
                self.display = replace(displays.OFFLINE, tested="prompts", best=best)
        self.advantage_scale = AdvantageScale()
        self.kl = KlTarget(args, learner, args.batch_size * self.world.size)
        self.ema = Ema(learner, args.ema_beta)
        self.replay = Replay(args.replay_batches, self.positions, self.world)
        self.states = {
            "raw_scores": self.reward,  # its name in checkpoints
            "loss_scale": self.loss_scale,
            "kl": self.kl,
            "advantage_scale": self.advantage_scale,
        }
        if self.critic:
            self.value_scale = self.states["value_scale"] = ValueScale(self.critic)
        if args.replay_batches:
            self.states["replay"] = self.replay
        if args.ema_beta:
            self.states["ema"] = self.ema

    @property
    def uses_reference(self) -> bool:
        """Whether anything is learned from the reference's log-probs. Else they are not computed."""
        return self.args.kl_coef > 0 or bool(self.args.offline_data_path)

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
        exact = self.world.device.type == "cpu" and self.dtype == torch.float32
        serves = exact or self.single_update
        return serves and step % CHECK_SAMPLER > 0 and not args.replay_batches and args.entropy_top == 1

    @property
    def modules(self) -> dict[str, nn.Module]:
        modules = super().modules
        if self.old_actor is not self.actor:
            modules["old_actor"] = self.old_actor
        return modules

    def _optimizer(self, model: nn.Module, peak: float) -> torch.optim.Optimizer:
        """AdamW for what trains of a model, without weight decay. Sharded parameters are their own group."""
        groups = [{"params": part} for part in sharded_and_whole(trained(model)) if part]
        return make_optimizer(groups, peak, self.args.moments_dtype, self.args.seed)

    def prepare(self) -> None:
        """Round the frozen models to the dtype in which they compute; free a reference that nothing asks;
        move them where they wait (--offload_frozen), or shard all (--shard 1). Fingerprints are taken before.

        Sharded are actor, critic, old actor, reference and reward models, which are whole in main memory
        until then (compute/sharding.py), but not the sampler: it gathers the old actor before a rollout.
        """
        args = self.args
        exact: list[nn.Module] = list(self.judges)  # they never change
        if self.uses_reference:
            exact.append(self.ref)
        else:
            del self.scorers["reference"]
            self.ref.to("meta")  # type: ignore[arg-type]  # transformers' wrapper of ``to``
        frozen = exact if self.old_actor is self.actor else [*exact, self.old_actor]
        training = [learner.model for learner in self.learners.values()]
        if not args.trust_remote_code:  # code from outside may use its weights in other ways
            if args.lora_r:  # all share frozen weights of which the result is made: nothing may be lost
                exact = [*training, *frozen]
            else:
                round_frozen(frozen, self.dtype)
            keep_exact(exact, self.dtype)
        free_unused_memory()  # the gaps that weights of other types have left
        if args.offload_frozen:
            self.host.take(frozen, training)
        in_step = self.in_step
        if not in_step:
            return
        scorers = [*self.scorers.values(), *([self.value_scorer] if self.critic else [])]
        for scorer in dict.fromkeys(scorers):  # the old actor's may be the actor's
            shard(scorer, in_step, self.dtype)
            scorer.in_step = in_step
        if shares_reward_models(args):
            for model in scoring_models(self.reward, self.judge):
                shard(model.root, in_step, self.dtype, model.model)
                model.in_step = in_step
        for learner in self.learners.values():
            learner.optimizer = self._optimizer(learner.model, learner.peak)

    # --------------------------------------------------------------------------------- what is saved

    def save_result(self) -> None:
        """Write the actor as a ``.pth`` and the folder beside it, and its average into the run folder."""
        self.save_actor(self.result_path)
        if self.ema.batches:
            with self.ema.in_place():
                self.save_actor(self.folder / AVERAGE)

    def save_actor(self, path: Path) -> None:
        """Write the actor as ``path`` and the folder beside it. All processes call it: of a sharded actor
        each has a part."""
        save_policy(self.actor, self.tokenizer, path, write=self.world.is_main)

    def keep_best(self, metrics: dict[str, float]) -> None:
        """If a step's evaluation is the best so far, write the actor's weights into the run folder.

        All processes must call it, after the step was logged and before its checkpoint. Raises InputError
        where the disk is full or a weight is not finite in fp16; then a resumed run evaluates this step
        again.
        """
        better = self.best.beaten_by(metrics, self.progress.step)
        if not better:
            return
        # The weights before the first step are those of --model.
        with self.world.all_or_none():
            if better.step:
                self.save_actor(self.folder / WEIGHTS)
            if self.world.is_main:
                write_best(self.folder, better)
        self.best = better

    def restore_best(self, logger: Any) -> None:
        """The best of a resumed run is that of its folder."""
        with self.world.all_or_none():
            if self.world.is_main:  # another machine's folder may have only the checkpoint
                self.best = best_so_far(self.folder, self.best, logger)
        self.best = self.world.from_main(self.best)

    def best_note(self) -> str:
        return self.best.describe(WEIGHTS, self.progress.step)

    def results(self) -> str:
        words = ""
        if best := self.best.describe(self.folder / WEIGHTS, self.progress.step):
            words = f"best     {best}\n"
        words += f"average  {self.folder / AVERAGE} (--ema_beta)\n" if self.ema.batches else ""
        talk = self.command("chat.py", "--model", self.result_path)
        return f"model    {self.result_path}\n{words}talk     {talk}"


def shares_reward_models(args: Namespace) -> bool:
    """Whether ``--shard 1`` shards reward models too. Not with --filter_groups, where processes call them
    unequally often and would wait for each other; nor code from outside: it may use weights otherwise."""
    return not (args.filter_groups or args.trust_remote_code)
