"""What a PPO run is: its models and options, and what is saved of them.

It is made of what ``load_inputs`` (inputs.py) has loaded, and the loop of train_ppo.py changes the models in
it. runs/resume.py says what every script's run has.
"""

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from atomic_files import writing
from dataset.data_order import local_positions
from errors import InputError
from model.critic import CriticModel
from model.loading import is_moe
from model.lora import add_adapters, frozen_copy, trained
from model.saving import save_policy, state_dict_in
from model.shards import sharded_and_whole
from trainer import ppo
from trainer.about_run import describe_run, fingerprints, start_facts
from trainer.collect import choose_missing_eos_penalty
from trainer.compute.memory import HostMemory, free_unused_memory, keep_freed_memory
from trainer.compute.precision import LossScale, keep_exact, round_frozen, set_precision
from trainer.compute.scoring import PolicyScorer, ValueScorer, prepare_training
from trainer.compute.sharding import InStep, shard
from trainer.endings import keep_endings, load_endings
from trainer.generation.engine import Sampler
from trainer.generation.stops import response_texts
from trainer.inputs import Inputs, choose_rates, count_steps, sampling_sizes
from trainer.memory_plan import check_memory
from trainer.options.best import KEPT, choose_best, keep_best, remove_saved, restore_best
from trainer.options.critic_warmup import CriticWarmup
from trainer.options.ema import Ema, save_ema
from trainer.options.kl_controller import KlController
from trainer.options.offline import held_out_pairs
from trainer.options.ptx import load_ptx
from trainer.options.replay import Replay
from trainer.options.value_scale import AdvantageScale, ValueScale
from trainer.rewards.reward import Request, Reward, load_judge, load_reward
from trainer.rewards.reward_models import critic_start, modules_of, scoring_models
from trainer.runs import displays
from trainer.runs.adamw import make_optimizer
from trainer.runs.base import Learner, Progress, Run
from trainer.runs.commands import command_line
from trainer.runs.distributed import World


class PpoRun(Run):
    """What every phase of PPO needs: the models, how they are trained, and what does not change in a run."""

    script = "train_ppo.py"
    display = displays.PPO
    about = describe_run
    facts = start_facts
    fingerprints = fingerprints  # before frozen weights are rounded
    begin = choose_missing_eos_penalty

    def __init__(self, inputs: Inputs, world: World):
        """The loaded policy -> all models of the run. Actor, old actor, reference and sampler start as the
        policy, the critic as its backbone or as a reward model's (``critic_start``). A critic is built for
        ``--advantage gae`` only. No model has dropout: the training forward is the scoring forward."""
        args = inputs.args
        actor = inputs.actor
        tokenizer = inputs.tokenizer
        prompts = inputs.prompts
        held_out = inputs.held_out
        device = world.device
        self.world = world
        self.tokenizer = tokenizer
        self.data = self.prompts = prompts
        self.held_out = held_out  # prompts of evaluation, or None
        self.actor = actor
        moe = "_moe" if is_moe(actor) else ""
        # Where the trained actor is written, and the actor of the best evaluation.
        self.pth_path = Path(args.out_dir) / f"ppo_actor_{actor.config.hidden_size}{moe}.pth"
        self.result_path = self.result_file = self.pth_path
        self.best_path = self.pth_path.with_name(f"{self.pth_path.stem}_best.pth")
        self.ema_path = self.pth_path.with_name(f"{self.pth_path.stem}_ema.pth")
        written = (self.pth_path, self.best_path, self.ema_path)
        if Path(args.model).resolve() in [path.resolve() for path in written]:
            raise InputError(
                f"--model {args.model}: this run would write its result there; copy it elsewhere"
            )
        self.dtype = set_precision(args.dtype, device, args.deterministic)  # of mixed precision and sampling
        sharded = bool(args.shard) and world.size > 1  # a single process has nobody to share with
        self.in_step = InStep(world) if sharded else None
        free_unused_memory()  # the copies with which the policy was checked
        keep_freed_memory(sharded)

        # The reward, and that of evaluations, which never trains.
        self.reward, self.judge = load_rewards(args, device, self.dtype, prompts, held_out, sharded)
        self.judges = modules_of(self.reward, self.judge)  # all their models, frozen
        actor.eval().requires_grad_(not args.lora_r)
        if not sharded:  # else it need not fit on a GPU
            actor.to(device)
        start = None  # without a critic
        if args.advantage == "gae":
            found = critic_start(args.critic_init, self.reward.models, actor, tokenizer)
            start, weight = found or (actor, 1.0)
        self.minibatches_per_batch = args.batch_size // args.mini_batch_size
        self.minibatch_size = args.mini_batch_size * world.size  # sequences, over all processes
        per_batch = args.ppo_epochs * self.minibatches_per_batch  # optimizer steps
        self.ptx = load_ptx(args, world, tokenizer, actor, per_batch)  # demonstrations, or None
        self.held_out_pairs = held_out_pairs(args, tokenizer, actor)  # of an evaluation of offline PPO
        sizes = sampling_sizes(args, prompts, held_out)
        self.plan, memory = check_memory(
            args,
            actor,
            start,
            self.judges,
            device,
            self.dtype,
            sizes,
            demonstration=self.ptx.data.longest if self.ptx else 0,
            in_step=self.in_step,
        )
        models = {"learning_rate": ("actor", actor)}
        if start:
            models["critic_learning_rate"] = ("critic", start)
        args, self.suited, rates = choose_rates(args, models, args.lora_r > 0)
        # Lines that say what was chosen for the user.
        self.notes = [note for note in (*inputs.notes, rates, memory) if note]

        # It generates with the weights of the old actor, or of the actor to evaluate it.
        self.sampler = None  # where nothing is sampled
        if self.plan.slots:
            room = self.plan.cache if device.type == "cuda" else None  # None: what suits a CPU
            self.sampler = Sampler(actor, self.dtype, self.plan.slots, room, sizes, device)
            if sharded:  # each process soon has a part of each model, and a whole one of none
                self.sampler.copy.unload()
        self.critic = None
        if start:
            lend = sharded and start is actor
            self.critic = CriticModel.from_model(start, args.lora_r > 0, weight, lend).eval()
            prepare_training(self.critic.backbone, args.gradient_checkpointing)
        prepare_training(actor.base_model, args.gradient_checkpointing)
        self.ref = frozen_copy(actor, sharded)  # before there are adapters: the reference has none
        if args.lora_r:  # from here on only the adapters train; their models share the frozen weights
            add_adapters(actor.base_model, args.lora_r, args.seed)
            if self.critic:
                add_adapters(self.critic.backbone, args.lora_r, args.seed + 1)
        # The behaviour policy: the rollouts are its samples. With 1 it is the actor, which samples and scores
        # before it learns. Else it is a copy, with the actor's adapters, which ``learn`` in train_ppo.py
        # makes equal to the actor every so many batches.
        self.old_actor = actor if args.update_old_actor_freq == 1 else frozen_copy(actor, sharded)
        self.endings = load_endings(args, tokenizer, actor)  # what ends a response
        self.eos = self.endings.eos
        keep_endings(self.endings, actor)

        # How models are scored and learn. The critic, if there is one, steps first.
        scorer_of = partial(PolicyScorer, dtype=self.dtype, early_ends=self.endings.early)
        scorer = scorer_of(actor, learn_entropy=args.entropy_coef > 0)
        self.scorers = {
            "old_actor": scorer if self.old_actor is actor else scorer_of(self.old_actor),
            "reference": scorer_of(self.ref),
        }
        self.total_steps, warmup = count_steps(args, len(prompts), world.size)  # batches
        args = args.completed(critic_warmup_steps=warmup)

        def learner(model, scorer, peak):
            return Learner(
                model,
                scorer,
                None if sharded else ppo_optimizer(model, peak, args),  # else ``shard_models`` makes it
                peak,
                total_steps=self.total_steps * per_batch,
                per_batch=per_batch,
                warmup_steps=args.lr_warmup_steps * per_batch,
                schedule=args.lr_schedule,
            )

        self.learners = {}
        if self.critic:
            scorer_of_critic = ValueScorer(self.critic, self.dtype)
            self.learners["critic"] = learner(self.critic, scorer_of_critic, args.critic_learning_rate)
        learning = self.learners["actor"] = learner(actor, scorer, args.learning_rate)
        self.clip = ppo.Clip(args.clip_epsilon, args.clip_epsilon_high or args.clip_epsilon, args.dual_clip)
        self.loss_scale = LossScale(self.dtype)  # of fp16
        self.host = HostMemory(device)  # where frozen models wait with --offload_frozen 1
        self.progress = Progress(token_budget=self.plan.token_budget)
        self.state = None  # of a sharded actor, while it is saved

        self.args = args

        # Options.
        self.best = choose_best(args, held_out, self.reward, self.judge, self.held_out_pairs)
        if args.offline_data_path:
            self.display = displays.offline(self.held_out_pairs, self.best.metric)
        self.value_scale = ValueScale(self.critic) if self.critic else None
        self.advantage_scale = AdvantageScale()
        self.critic_warmup = CriticWarmup(learning, args.critic_warmup_steps, self.total_steps // 4)
        self.kl = KlController(args, learning, args.batch_size * world.size)
        self.ema = Ema(learning, args.ema_beta)
        positions = local_positions(
            args.batch_size, args.mini_batch_size, world.rank, world.size, args.num_generations
        )
        self.replay = Replay(args.replay_batches, positions, world)

    @property
    def modules(self):
        """{file name: what a checkpoint has the weights of}"""
        modules = {name: learner.model for name, learner in self.learners.items()}
        if self.old_actor is not self.actor:
            modules["old_actor"] = self.old_actor
        return modules

    @property
    def optimizers(self):
        """{file name: what a checkpoint has the moments of}"""
        return {f"{name}_optimizer": learner.optimizer for name, learner in self.learners.items()}

    @property
    def states(self):
        """{name: what else a checkpoint keeps}, with ``state_dict`` and ``load_state_dict``"""
        kept = {
            "raw_scores": self.reward,
            "loss_scale": self.loss_scale,
            "best": self.best,
            "kl": self.kl,
            "advantage_scale": self.advantage_scale,
        }
        if self.critic:
            kept["value_scale"] = self.value_scale
            kept["critic_warmup"] = self.critic_warmup
        if self.replay.size:
            kept["replay"] = self.replay
        if self.ema.beta:
            kept["ema"] = self.ema
        return kept

    @property
    def files(self):
        """[name in the run folder]: files that a checkpoint has a copy of"""
        return [KEPT] if self.best.step else []

    @contextmanager
    def sampling_from(self, model):
        """In this block ``respond`` samples from this model's weights."""
        if self.in_step:
            free_unused_memory()  # the gaps that the last update has left
        if self.sampler:
            self.sampler.load(model)
        try:
            yield
        finally:
            if self.in_step and self.sampler:
                self.sampler.release()
                self.sampler.copy.unload()

    def respond(self, prompts, keys, temperature):
        """Prompts -> (rollout, response texts), sampled from the weights of ``sampling_from``."""
        args = self.args
        ids = [p.prompt_ids for p in prompts]
        stops = self.endings.stops
        rollout = self.sampler.sample(
            ids, keys, self.eos, args.max_gen_len, temperature, args.min_gen_len, stops
        )
        if self.plan.release_cache:  # memory is short in the next phases
            self.sampler.release()
        return rollout, response_texts(rollout, self.tokenizer, stops)

    def raw_scores(self, reward, prompts, rollout, texts):
        """What each part of a reward (``Reward`` or ``Judge``) says of the responses, before it is
        normalised, clipped and weighed."""
        with self.host.on_device(*modules_of(reward)):
            return reward.raw_scores(
                Request(prompts, texts, rollout.finished.tolist(), rollout.layout.response_len)
            )

    def save_result(self):
        """Write the actor, and its average if there is one, as a ``.pth`` and the folder beside it. The best
        and the average of an earlier run go."""
        self.save_actor(self.pth_path)
        save_ema(self)
        if not self.best.step:
            remove_saved(self.best_path)

    def keep_best(self, logger: Any, metrics: dict[str, float]) -> None:
        keep_best(self, logger, metrics)

    def restore_best(self, logger: Any) -> None:
        restore_best(self, logger)

    @property
    def best_metric(self) -> str:
        return self.best.metric

    def save_best(self, kept, ready=None):
        """Write the actor as the best so far: as ``kept``, in the run folder, and from there as
        ``best_path``. ready: the ``.pth`` of a checkpoint, which is written instead."""
        self.save_actor(kept, ready)
        self.save_actor(self.best_path, kept)

    @contextmanager
    def gathered(self):
        """In this block the main process has the whole state-dict of a sharded actor, to save it. All
        processes must enter it."""
        if self.in_step:
            self.state = state_dict_in(torch.float16, self.actor, self.pth_path, self.world.is_main)
        try:
            yield
        finally:
            self.state = None

    def save_actor(self, path, ready=None):
        """Write the actor, or the ``.pth`` that is ready, as ``path`` and the folder beside it."""
        with writing(path):
            save_policy(self.actor, self.tokenizer, path, ready=ready, state=self.state)

    def results(self):
        """Lines for the end of a run: where the result and the best are, and how to talk to the result."""
        best = self.best
        words = ""
        if best.value is not None:
            words = f"best     {best.describe(self.best_path)}\n"
        words += f"average  {self.ema_path} (--ema_beta)\n" if self.ema.batches else ""
        own_code = ["--trust_remote_code"] if self.args.trust_remote_code else []
        talk = command_line("chat.py", "--model", self.pth_path, *own_code)
        return f"model    {self.pth_path}\n{words}talk     {talk}"

    def prepare(self):
        """Make the models ready, after fingerprints were taken and before a checkpoint is loaded: round the
        frozen ones; move them to the host's memory, or shard all, where the flags say so."""
        prepare_frozen(self)
        if self.in_step:
            shard_models(self)


def shares_reward_models(args):
    """Whether ``--shard 1`` shares reward models too. With --filter_groups each process calls them as often
    as its own prompts ask for; code from outside may use its weights in other ways."""
    return not (args.filter_groups or args.trust_remote_code)


def load_rewards(args, device, dtype, prompts, held_out, sharded):
    """-> (``Reward`` of the run, its ``Judge``), with their reward models."""
    if sharded and shares_reward_models(args):
        device = torch.device("cpu")  # until they are sharded: a whole one need not fit on a GPU
    judge = load_judge(args, device, dtype, held_out)
    if args.offline_data_path:  # logged answers come with their scores
        return Reward(reasoning=False), judge
    return load_reward(args, device, dtype, prompts, held_out), judge


def prepare_frozen(run):
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


def shard_models(run):
    """``--shard 1``: shard actor, critic, old actor, reference and reward models (compute/sharding.py), and
    make the optimizers anew: of what each process keeps.

    All processes have loaded and built whole models in main memory, as those of an unsharded run do. The
    sampler is not sharded: before a rollout every process gathers a whole copy of the old actor, in the dtype
    of sampling, and frees it after the rollout.
    """
    learners = run.learners.values()
    scorers = [*(learner.scorer for learner in learners), *run.scorers.values()]
    for scorer in dict.fromkeys(scorers):  # the old actor's may be the actor's
        shard(scorer, run.in_step, run.dtype)
        scorer.in_step = run.in_step
    if shares_reward_models(run.args):
        for model in scoring_models(run.reward, run.judge):
            shard(model.root, run.in_step, run.dtype, model.model)
            model.root.in_step = run.in_step
    for learner in learners:
        learner.optimizer = ppo_optimizer(learner.model, learner.peak, run.args)


def ppo_optimizer(model, peak, args):
    """AdamW for what trains of a model, without weight decay. Sharded parameters are their own group."""
    groups = [{"params": part} for part in sharded_and_whole(trained(model)) if part]
    return make_optimizer(groups, peak, args.moments_dtype, args.seed, weight_decay=0.0)
