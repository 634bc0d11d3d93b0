"""What a PPO run keeps: models and learners, options and their states, and the files that it writes.

It is made of what ``load_inputs`` (inputs.py) has loaded. Which models there are: models.py; train_ppo.py
trains them.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atomic_files import writing
from dataset.data_order import local_positions
from dataset.lm_dataset import LoggedPairs, RLAIFDataset
from errors import InputError
from model.loading import is_moe
from model.saving import save_policy, state_dict_in
from trainer.about_run import describe_run, fingerprints, start_facts
from trainer.collect import Collector
from trainer.compute.memory import HostMemory, free_unused_memory, keep_freed_memory
from trainer.compute.precision import LossScale, set_precision
from trainer.compute.scoring import PolicyScorer, ValueScorer
from trainer.compute.sharding import InStep
from trainer.endings import keep_endings, load_endings
from trainer.flags import Flags
from trainer.generation.engine import Sampler
from trainer.inputs import choose_rates, count_steps, load_inputs, sampling_sizes
from trainer.memory_plan import Case, Sizes, check_memory
from trainer.models import (
    build_models,
    critic_start,
    ppo_optimizer,
    prepare_frozen,
    shard_models,
    shares_reward_models,
)
from trainer.options.best import WEIGHTS, Best, check_metric, read_best, write_best
from trainer.options.ema import Ema
from trainer.options.kl_target import KlTarget
from trainer.options.missing_eos import suited_penalty
from trainer.options.offline import held_out_pairs
from trainer.options.ptx import load_ptx
from trainer.options.replay import Replay
from trainer.options.value_scale import AdvantageScale, ValueScale
from trainer.rewards.combine import Judge, Reward, load_judge, load_reward, modules_of
from trainer.runs import displays
from trainer.runs.base import Learner, Progress, Run
from trainer.runs.distributed import World

AVERAGE = "ema.pth"  # in the run folder, of --ema_beta


class PpoRun(Run):
    """What every phase of PPO needs: the models, how they are trained, and what does not change in a run."""

    script = "train_ppo.py"
    display = displays.PPO
    held_out: RLAIFDataset | None
    held_out_pairs: LoggedPairs | None
    result_path: Path
    folder: Path  # of the run; only the main process has it
    about = describe_run
    facts = start_facts
    fingerprints = fingerprints  # before frozen weights are rounded

    def __init__(self, args: Flags, world: World):
        """Flags -> the run, with all inputs checked. Raises InputError. Which models there are: models.py."""
        inputs = load_inputs(args, world)
        args = inputs.args
        self.world = world
        self.actor = inputs.actor
        self.tokenizer = inputs.tokenizer
        self.data = self.prompts = inputs.prompts
        self.held_out = inputs.held_out
        moe = "_moe" if is_moe(self.actor) else ""
        self.result_path = Path(args.out_dir) / f"ppo_actor_{self.actor.config.hidden_size}{moe}.pth"
        if Path(args.model).resolve() == self.result_path.resolve():
            raise InputError(
                f"--model {args.model}: this run would write its result there; copy it elsewhere"
            )
        self.dtype = set_precision(args.dtype, world.device, args.deterministic)  # also of sampling
        sharded = bool(args.shard) and world.size > 1  # a single process has nobody to share with
        self.in_step = InStep(world) if sharded else None
        free_unused_memory()  # the copies with which the policy was checked
        if not sharded:  # which gathers and frees layer after layer
            keep_freed_memory()
        # The reward that PPO learns from, and the judge, which only evaluates.
        self.reward, self.judge = self._load_rewards(args)
        self.judges = modules_of(self.reward, self.judge)  # all their models, frozen
        self.actor.eval().requires_grad_(not args.lora_r)
        if not sharded:  # else it need not fit on a GPU
            self.actor.to(world.device)  # type: ignore[arg-type]  # transformers' wrapper of ``to``
        trained = {"learning_rate": ("actor", self.actor)}
        start = None  # what the critic starts from
        weight = 1.0
        if args.advantage == "gae":
            start, weight = critic_start(args.critic_init, self.reward.models, self.actor, self.tokenizer)
            trained["critic_learning_rate"] = ("critic", start)
        args, self.suited, rates = choose_rates(args, trained, args.lora_r > 0)
        self.total_steps, warmup = count_steps(args, len(self.prompts), world.size)
        self.args: Flags = args.completed(critic_warmup_steps=warmup)
        args = self.args
        self.mini_batch_size = args.mini_batch_size
        self.answers = args.num_generations
        self.minibatch_size = args.mini_batch_size * world.size  # sequences, over all processes
        # Optimizer steps of a batch, of each model.
        self.updates_per_batch = args.ppo_epochs * (args.batch_size // args.mini_batch_size)
        self.ptx = load_ptx(args, world, self.tokenizer, self.actor, self.updates_per_batch)  # or None
        self.held_out_pairs = held_out_pairs(args, self.tokenizer, self.actor)
        room = sampling_sizes(args, self.prompts, self.held_out)
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
        self.notes = [note for note in (*inputs.notes, rates, memory) if note]  # what was chosen
        self.endings = load_endings(args, self.tokenizer, self.actor)  # what ends a response
        self.host = HostMemory(world.device)  # where frozen models wait with --offload_frozen 1
        self.collector = Collector(
            args=args,
            world=world,
            sampler=self._sampler(room),
            eos=self.endings.eos,
            stops=self.endings.stops,
            tokenizer=self.tokenizer,
            host=self.host,
            release_cache=self.plan.release_cache,
            in_step=self.in_step,
        )
        self.critic, self.ref, self.old_actor = build_models(args, self.actor, start, weight, sharded)
        keep_endings(self.endings, self.actor)
        self._build_learners()
        self._build_options()

    def _load_rewards(self, args: Flags) -> tuple[Reward, Judge]:
        """The ``Reward`` of the run and its ``Judge``, with their reward models."""
        device = self.world.device
        if self.in_step and shares_reward_models(args):
            device = torch.device("cpu")  # until they are sharded: a whole one need not fit on a GPU
        judge = load_judge(args, device, self.dtype, self.held_out)
        if args.offline_data_path:  # logged answers come with their scores
            return Reward(reasoning=False), judge
        return load_reward(args, device, self.dtype, self.prompts, self.held_out), judge

    def _sampler(self, room: tuple[int, int, int]) -> Sampler | None:
        """What samples, with the weights of the old actor, or of the actor to evaluate it; None where nothing
        is sampled. room: ``sampling_sizes``."""
        if not self.plan.slots:
            return None
        device = self.world.device
        cache = self.plan.cache if device.type == "cuda" else None  # None: what suits a CPU
        sampler = Sampler(self.actor, self.dtype, self.plan.slots, cache, room, device)
        if self.in_step:  # each process soon has a part of each model, and a whole one of none
            sampler.copy.unload()
        return sampler

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
            optimizer: Any = None  # ``shard_models`` makes it
            if not self.in_step:
                optimizer = ppo_optimizer(model, peak, args)
            return Learner(
                model=model,
                optimizer=optimizer,
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
        self.state: dict[str, Tensor] | None = None  # of a sharded actor, while it is saved

    def _build_options(self) -> None:
        """The options; ``states`` has those with a state that checkpoints keep."""
        args = self.args
        learner = self.learners["actor"]
        metric = args.best_metric.removeprefix("eval/")
        if metric and self.held_out:
            check_metric(
                f"eval/{metric}",
                self.reward,
                self.judge,
                accuracy=self.held_out.has_accuracy,
                generations=args.num_generations,
                pairs=bool(self.held_out_pairs),
            )
        judge = [args.eval_reward_fn, *args.eval_reward_model]
        self.best = Best(
            source=" ".join([self.held_out.fingerprint, *judge]) if self.held_out else "",
            metric=f"eval/{metric}" if metric else "",
        )
        if args.offline_data_path:
            compared = metric or ("judge" if any(judge) else "accuracy")
            self.display = displays.offline(bool(self.held_out_pairs) or not self.held_out, compared)
        self.advantage_scale = AdvantageScale()
        self.kl = KlTarget(args, learner, args.batch_size * self.world.size)
        self.ema = Ema(learner, args.ema_beta)
        world = self.world
        positions = local_positions(args.batch_size, world.rank, world.size, args.num_generations)
        self.replay = Replay(args.replay_batches, positions, self.world)
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
    def modules(self) -> dict[str, nn.Module]:
        modules = {name: learner.model for name, learner in self.learners.items()}
        if self.old_actor is not self.actor:
            modules["old_actor"] = self.old_actor
        return modules

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {f"{name}_optimizer": learner.optimizer for name, learner in self.learners.items()}

    def prepare(self) -> None:
        """Round the frozen models; move them to the host's memory, or shard all, where the flags say so."""
        prepare_frozen(self)
        shard_models(self)

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
        """Write the actor as a ``.pth`` and the folder beside it, and its average into the run folder."""
        self.save_actor(self.result_path)
        if self.ema.batches:
            with self.ema.in_place():
                self.save_actor(self.folder / AVERAGE)

    def save_actor(self, path: Path) -> None:
        """Write the actor as ``path`` and the folder beside it."""
        with writing(path):
            save_policy(self.actor, self.tokenizer, path, state=self.state)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """In this block the main process has the whole state-dict of a sharded actor, to save it. All
        processes must enter it."""
        if self.in_step:
            self.state = state_dict_in(torch.float16, self.actor, self.result_path, self.world.is_main)
        try:
            yield
        finally:
            self.state = None

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
        with self.world.all_or_none(), self.gathered() if better.step else nullcontext():
            if self.world.is_main:
                if better.step:
                    self.save_actor(self.folder / WEIGHTS)
                write_best(self.folder, better)
        self.best = better

    def restore_best(self, logger: Any) -> None:
        """The best of a resumed run is that of its folder."""
        found = None
        with self.world.all_or_none():
            if self.world.is_main:
                self.folder = logger.folder.path
                found = read_best(self.folder)
        found = self.world.from_main(found)
        if found and self.best.follows(found):
            self.best = found
        elif found:
            logger.say("note: the best so far was evaluated otherwise; it begins anew")

    def best_note(self) -> str:
        return self.best.describe(WEIGHTS)

    def results(self) -> str:
        best = self.best
        words = ""
        if best.value is not None:
            words = f"best     {best.describe(self.folder / WEIGHTS)}\n"
        words += f"average  {self.folder / AVERAGE} (--ema_beta)\n" if self.ema.batches else ""
        talk = self.command("chat.py", "--model", self.result_path)
        return f"model    {self.result_path}\n{words}talk     {talk}"
