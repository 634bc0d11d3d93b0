"""What a PPO run is: its models, its options, and what is saved of them.

It is made of what ``load_inputs`` (inputs.py) has loaded; train_ppo.py changes the models in it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from atomic_files import writing
from dataset.data_order import local_positions
from dataset.lm_dataset import LoggedPairs, RLAIFDataset
from errors import InputError
from model.critic import CriticModel
from model.loading import is_moe
from model.lora import add_adapters, frozen_copy, trained
from model.saving import save_policy, state_dict_in
from model.weights import sharded_and_whole
from trainer import ppo
from trainer.about_run import describe_run, fingerprints, start_facts
from trainer.collect import Collector
from trainer.compute.memory import HostMemory, free_unused_memory, keep_freed_memory
from trainer.compute.precision import LossScale, keep_exact, round_frozen, set_precision
from trainer.compute.scoring import PolicyScorer, ValueScorer, prepare_training
from trainer.compute.sharding import InStep, shard
from trainer.endings import keep_endings, load_endings
from trainer.flags import Flags
from trainer.generation.engine import Sampler
from trainer.inputs import Inputs, choose_rates, count_steps, sampling_sizes
from trainer.memory_plan import check_memory
from trainer.options.best import KEPT, choose_best, remove_saved
from trainer.options.ema import Ema
from trainer.options.kl_target import KlTarget
from trainer.options.missing_eos import suited_penalty
from trainer.options.offline import held_out_pairs
from trainer.options.ptx import load_ptx
from trainer.options.replay import Replay
from trainer.options.value_scale import AdvantageScale, ValueScale
from trainer.rewards.combine import Judge, Reward, load_judge, load_reward, modules_of, scoring_models
from trainer.rewards.reward_models import critic_start
from trainer.runs import displays
from trainer.runs.base import Learner, Progress, Run, Stateful, command_line
from trainer.runs.distributed import World
from trainer.runs.optimizer_step import make_optimizer


@dataclass(frozen=True)
class BatchSizes:
    """What follows from the flags' sizes."""

    minibatch: int  # sequences of a minibatch, over all processes
    steps: int  # optimizer steps of a batch, of each model


class PpoRun(Run):
    """What every phase of PPO needs: the models, how they are trained, and what does not change in a run."""

    script = "train_ppo.py"
    display = displays.PPO
    held_out: RLAIFDataset | None
    held_out_pairs: LoggedPairs | None
    about = describe_run
    facts = start_facts
    fingerprints = fingerprints  # before frozen weights are rounded

    def __init__(self, inputs: Inputs, world: World):
        """All models of the run. Actor, old actor, reference and sampler start as the policy, the critic as
        its backbone or as a reward model's (``critic_start``); there is one for ``--advantage gae`` only. No
        model has dropout: the training forward is the scoring forward."""
        args = inputs.args
        self.world = world
        self.actor = inputs.actor
        self.tokenizer = inputs.tokenizer
        self.data = self.prompts = inputs.prompts
        self.held_out = inputs.held_out
        self._name_files(args)
        self.dtype = set_precision(args.dtype, world.device, args.deterministic)  # also of sampling
        sharded = bool(args.shard) and world.size > 1  # a single process has nobody to share with
        self.in_step = InStep(world) if sharded else None
        free_unused_memory()  # the copies with which the policy was checked
        keep_freed_memory(sharded)
        # The reward that PPO learns from, and the judge, which only evaluates.
        self.reward, self.judge = self._load_rewards(args)
        self.judges = modules_of(self.reward, self.judge)  # all their models, frozen
        self.actor.eval().requires_grad_(not args.lora_r)
        if not sharded:  # else it need not fit on a GPU
            self.actor.to(world.device)  # type: ignore[arg-type]  # transformers' wrapper of ``to``
        start = None  # what the critic starts as
        weight = 1.0
        if args.advantage == "gae":
            found = critic_start(args.critic_init, self.reward.models, self.actor, self.tokenizer)
            start, weight = found or (self.actor, 1.0)

        models = {"learning_rate": ("actor", self.actor)}
        if start:
            models["critic_learning_rate"] = ("critic", start)
        args, self.suited, rates = choose_rates(args, models, args.lora_r > 0)
        self.total_steps, warmup = count_steps(args, len(self.prompts), world.size)
        self.args: Flags = args.completed(critic_warmup_steps=warmup)
        args = self.args
        self.mini_batch_size = args.mini_batch_size
        self.answers = args.num_generations
        self.sizes = BatchSizes(
            minibatch=args.mini_batch_size * world.size,
            steps=args.ppo_epochs * (args.batch_size // args.mini_batch_size),
        )
        self.ptx = load_ptx(args, world, self.tokenizer, self.actor, self.sizes.steps)  # or None
        self.held_out_pairs = held_out_pairs(args, self.tokenizer, self.actor)
        room = sampling_sizes(args, self.prompts, self.held_out)
        self.plan, memory = check_memory(
            args,
            self.actor,
            start,
            self.judges,
            world.device,
            self.dtype,
            room,
            demonstration=self.ptx.data.longest if self.ptx else 0,
            in_step=self.in_step,
        )
        self.notes = [note for note in (*inputs.notes, rates, memory) if note]  # what was chosen
        self.endings = load_endings(args, self.tokenizer, self.actor)  # what ends a response
        self._build_models(start, weight, room)
        self._build_learners()
        self._build_options()

    def _name_files(self, args: Flags) -> None:
        """Where the trained actor is written, the actor of the best evaluation, and the averaged one."""
        moe = "_moe" if is_moe(self.actor) else ""
        name = f"ppo_actor_{self.actor.config.hidden_size}{moe}"
        self.result_path = self.pth_path = Path(args.out_dir) / f"{name}.pth"
        self.best_path = self.pth_path.with_name(f"{name}_best.pth")
        self.ema_path = self.pth_path.with_name(f"{name}_ema.pth")
        written = (self.pth_path, self.best_path, self.ema_path)
        if Path(args.model).resolve() in [path.resolve() for path in written]:
            raise InputError(
                f"--model {args.model}: this run would write its result there; copy it elsewhere"
            )

    def _load_rewards(self, args: Flags) -> tuple[Reward, Judge]:
        """The ``Reward`` of the run and its ``Judge``, with their reward models."""
        device = self.world.device
        if self.in_step and shares_reward_models(args):
            device = torch.device("cpu")  # until they are sharded: a whole one need not fit on a GPU
        judge = load_judge(args, device, self.dtype, self.held_out)
        if args.offline_data_path:  # logged answers come with their scores
            return Reward(reasoning=False), judge
        return load_reward(args, device, self.dtype, self.prompts, self.held_out), judge

    def _build_models(self, start: PreTrainedModel | None, weight: float, room: tuple[int, int, int]) -> None:
        """Sampler, critic, reference and old actor. start, weight: of the critic (``critic_start``); room: of
        the sampler (``sampling_sizes``)."""
        args = self.args
        actor = self.actor
        sharded = self.in_step is not None
        sampler = None  # where nothing is sampled
        if self.plan.slots:  # with the weights of the old actor, or of the actor to evaluate it
            cache = self.plan.cache if self.world.device.type == "cuda" else None  # None: what suits a CPU
            sampler = Sampler(actor, self.dtype, self.plan.slots, cache, room, self.world.device)
            if sharded:  # each process soon has a part of each model, and a whole one of none
                sampler.copy.unload()
        self.critic: CriticModel = None  # type: ignore[assignment]  # None without one
        if start:
            lend = sharded and start is actor
            self.critic = CriticModel.from_model(start, args.lora_r > 0, weight, lend).eval()
            prepare_training(self.critic.backbone, args.gradient_checkpointing)
        prepare_training(actor.base_model, args.gradient_checkpointing)  # before it is copied
        # The reference: no optimizer has it. Copied before there are adapters, so it has none.
        self.ref = frozen_copy(actor, sharded)
        if args.lora_r:  # from here on only the adapters train; their models share the frozen weights
            add_adapters(actor.base_model, args.lora_r, args.seed)
            if self.critic:
                add_adapters(self.critic.backbone, args.lora_r, args.seed + 1)
        # The behaviour policy: the rollouts are its samples. With 1 it is the actor, which samples and scores
        # before it learns. Else it is a copy, which ``learn`` makes equal to the actor every so many batches.
        self.old_actor = actor if args.update_old_actor_freq == 1 else frozen_copy(actor, sharded)
        keep_endings(self.endings, actor)
        self.host = HostMemory(self.world.device)  # where frozen models wait with --offload_frozen 1
        self.collector = Collector(
            args=args,
            world=self.world,
            sampler=sampler,
            eos=self.endings.eos,
            stops=self.endings.stops,
            tokenizer=self.tokenizer,
            host=self.host,
            release_cache=self.plan.release_cache,
            in_step=self.in_step,
        )

    def _build_learners(self) -> None:
        """How models are scored, and how they learn."""
        args = self.args
        scorer_of = partial(PolicyScorer, dtype=self.dtype, early_ends=self.endings.early)
        actor = scorer_of(self.actor, learn_entropy=args.entropy_coef > 0)
        self.scorers = {
            "actor": actor,
            "old_actor": actor if self.old_actor is self.actor else scorer_of(self.old_actor),
            "reference": scorer_of(self.ref),
        }

        def learner(model: nn.Module, peak: float) -> Learner:
            optimizer: Any = None  # ``shard_models`` makes it
            if not self.in_step:
                optimizer = ppo_optimizer(model, peak, args)
            return Learner(
                model=model,
                optimizer=optimizer,
                peak=peak,
                total_steps=self.total_steps * self.sizes.steps,
                per_batch=self.sizes.steps,
                warmup_steps=args.lr_warmup_steps * self.sizes.steps,
                schedule=args.lr_schedule,
            )

        self.learners = {}
        if self.critic:
            self.value_scorer = ValueScorer(self.critic, self.dtype)
            self.learners["critic"] = learner(self.critic, args.critic_learning_rate)
        self.learners["actor"] = learner(self.actor, args.learning_rate)
        self.learners["actor"].first_batch = args.critic_warmup_steps  # before it only the critic trains
        self.clip = ppo.Clip(args.clip_epsilon, args.clip_epsilon_high or args.clip_epsilon, args.dual_clip)
        self.loss_scale = LossScale(self.dtype)  # of fp16
        self.progress = Progress(token_budget=self.plan.token_budget)
        self.state: dict[str, Tensor] | None = None  # of a sharded actor, while it is saved

    def _build_options(self) -> None:
        """``options``: {name: what has a state that checkpoints keep}"""
        args = self.args
        actor = self.learners["actor"]
        self.best = choose_best(args, self.held_out, self.reward, self.judge, self.held_out_pairs)
        if args.offline_data_path:
            self.display = displays.offline(bool(self.held_out_pairs), self.best.metric)
        self.advantage_scale = AdvantageScale()
        self.kl = KlTarget(args, actor, args.batch_size * self.world.size)
        self.ema = Ema(actor, args.ema_beta)
        world = self.world
        positions = local_positions(args.batch_size, world.rank, world.size, args.num_generations)
        self.replay = Replay(args.replay_batches, positions, self.world)
        self.options: dict[str, Stateful] = {
            "raw_scores": self.reward,  # its name in checkpoints
            "loss_scale": self.loss_scale,
            "best": self.best,
            "kl": self.kl,
            "advantage_scale": self.advantage_scale,
        }
        if self.critic:
            self.value_scale = self.options["value_scale"] = ValueScale(self.critic)
        if args.replay_batches:
            self.options["replay"] = self.replay
        if args.ema_beta:
            self.options["ema"] = self.ema

    @property
    def modules(self) -> dict[str, nn.Module]:
        modules = {name: learner.model for name, learner in self.learners.items()}
        if self.old_actor is not self.actor:
            modules["old_actor"] = self.old_actor
        return modules

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {f"{name}_optimizer": learner.optimizer for name, learner in self.learners.items()}

    @property
    def states(self) -> dict[str, Stateful]:
        return self.options

    @property
    def files(self) -> list[str]:
        return [KEPT] if self.best.step else []

    def prepare(self) -> None:
        """Round the frozen models; move them to the host's memory, or shard all, where the flags say so."""
        prepare_frozen(self)
        if self.in_step:
            shard_models(self, self.in_step)

    def begin(self, logger: Any) -> None:
        """Choose --missing_eos_penalty where it is not given."""
        if self.reward.missing_eos_penalty is None:
            penalty, line = suited_penalty(self.collector, self.old_actor, self.reward, self.prompts)
            self.reward.missing_eos_penalty = penalty
            with self.world.all_or_none():  # the disk may be full
                logger.keep_choice("missing_eos_penalty", penalty)
            logger.say(line)

    # --------------------------------------------------------------------------------- what is saved

    def save_result(self) -> None:
        """Write the actor, and its average if there is one, as a ``.pth`` and the folder beside it. The best
        and the average of an earlier run go."""
        self.save_actor(self.pth_path)
        if self.ema.batches:
            with self.ema.in_place():
                self.save_actor(self.ema_path)
        else:
            remove_saved(self.ema_path)
        if not self.best.step:
            remove_saved(self.best_path)

    def save_best(self, kept: Path, ready: Path | None = None) -> None:
        """Write the actor as the best so far: as ``kept``, in the run folder, and from there as
        ``best_path``. ready: the ``.pth`` of a checkpoint, which is written instead."""
        self.save_actor(kept, ready)
        self.save_actor(self.best_path, kept)

    def save_actor(self, path: Path, ready: Path | None = None) -> None:
        """Write the actor, or the ``.pth`` that is ready, as ``path`` and the folder beside it."""
        with writing(path):
            state = torch.load(ready, weights_only=True) if ready else self.state
            save_policy(self.actor, self.tokenizer, path, state=state)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """In this block the main process has the whole state-dict of a sharded actor, to save it. All
        processes must enter it."""
        if self.in_step:
            self.state = state_dict_in(torch.float16, self.actor, self.pth_path, self.world.is_main)
        try:
            yield
        finally:
            self.state = None

    def keep_best(self, logger: Any, metrics: dict[str, float]) -> None:
        """If a step's evaluation is the best so far, write the actor's weights.

        All processes must call it, after the step was logged and before its checkpoint. Raises InputError
        where the disk is full or a weight is not finite in fp16; then a resumed run evaluates this step
        again.
        """
        if not self.best.beaten_by(metrics):
            return
        if self.progress.step:  # the weights before are those of --model
            start = time.perf_counter()
            with self.world.all_or_none(), self.gathered():
                if self.world.is_main:
                    self.save_best(logger.folder.path / KEPT)
                    logger.saving_seconds += time.perf_counter() - start
        self.best.take(metrics, self.progress.step)

    def restore_best(self, logger: Any) -> None:
        """The files of the best actor become what they were at the checkpoint. Later ones are of steps that
        will be done again, or of another run."""
        best = self.best
        if best.forgotten:
            best.since = self.progress.step
            logger.say(
                "note: the best so far was evaluated otherwise; it begins anew, and best.pth of this run "
                "stays until then"
            )
        with self.world.all_or_none():
            if not self.world.is_main:
                return
            kept = logger.folder.path / KEPT
            if best.step:
                self.save_best(kept, logger.folder.checkpoint / KEPT)
            # A new run has none, and what is there is the user's. An earlier best stays until there is a new
            # one.
            elif self.args.resume and not (best.forgotten or best.since):
                remove_saved(kept)

    def best_note(self) -> str:
        return self.best.describe(self.best_path.name)

    def results(self) -> str:
        best = self.best
        words = ""
        if best.value is not None:
            words = f"best     {best.describe(self.best_path)}\n"
        words += f"average  {self.ema_path} (--ema_beta)\n" if self.ema.batches else ""
        own_code = ["--trust_remote_code"] if self.args.trust_remote_code else []
        talk = command_line("chat.py", "--model", self.pth_path, *own_code)
        return f"model    {self.pth_path}\n{words}talk     {talk}"


def shares_reward_models(args: Flags) -> bool:
    """Whether ``--shard 1`` shares reward models too. With --filter_groups each process calls them as often
    as its own prompts ask for; code from outside may use its weights in other ways."""
    return not (args.filter_groups or args.trust_remote_code)


def prepare_frozen(run: PpoRun) -> None:
    """Round the frozen models to the dtype in which they compute, and move them where they wait."""
    args = run.args
    frozen = [run.ref, *run.judges]
    training = [learner.model for learner in run.learners.values()]
    if run.old_actor is not run.actor:
        frozen.append(run.old_actor)
    if not args.trust_remote_code:  # code from outside may use its weights in other ways
        if args.lora_r:  # all share frozen weights of which the result is made: nothing may be lost
            keep_exact([*training, *frozen], run.dtype)
        else:
            round_frozen(frozen, run.dtype)
            # Not the old actor, which will change.
            keep_exact([run.ref, *run.judges], run.dtype)
    free_unused_memory()  # the gaps that weights of other types have left
    if args.offload_frozen:
        run.host.take(frozen, training)


def shard_models(run: PpoRun, in_step: InStep) -> None:
    """``--shard 1``: shard actor, critic, old actor, reference and reward models (compute/sharding.py), which
    are whole in main memory, and make the optimizers of what each process keeps. The sampler is not sharded:
    before a rollout every process gathers a whole copy of the old actor, in the dtype of sampling."""
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


def ppo_optimizer(model: nn.Module, peak: float, args: Flags) -> torch.optim.Optimizer:
    """AdamW for what trains of a model, without weight decay. Sharded parameters are their own group."""
    groups = [{"params": part} for part in sharded_and_whole(trained(model)) if part]
    return make_optimizer(groups, peak, args.moments_dtype, args.seed)
