"""The models of a PPO run and what belongs to them: what is saved, compared on resuming, and shown.

``build_run`` makes this object, and the loop of train_ppo.py changes the models in it. runs/resume.py
says what every script's run has.
"""

import argparse
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from atomic_files import writing
from dataset.data_order import local_positions
from dataset.lm_dataset import RLAIFDataset
from dataset.logged_answers import LoggedAnswers, LoggedPairs
from errors import InputError
from model.compatibility import is_moe
from model.lora import learned
from model.saving import save_policy, state_dict_in
from trainer import ppo
from trainer.best import KEPT, Best, remove_saved
from trainer.compute.host_memory import HostMemory
from trainer.compute.loss_scale import LossScale
from trainer.compute.memory import free_unused_memory
from trainer.compute.precision import keep_exact, round_frozen
from trainer.compute.sharding import InStep
from trainer.critic_warmup import CriticWarmup
from trainer.describe_run import describe_run
from trainer.ema import Ema, ema_path, save_ema
from trainer.endings import Endings
from trainer.generation.engine import Sampler
from trainer.generation.results import response_texts
from trainer.kl_controller import KlController
from trainer.memory_plan import Plan
from trainer.ptx import Ptx
from trainer.replay import Replay
from trainer.rewards.judge import Judge
from trainer.rewards.reward import Reward
from trainer.rewards.reward_models import modules_of
from trainer.runs import displays
from trainer.runs.checkpoints import Progress
from trainer.runs.commands import command_line
from trainer.runs.distributed import World
from trainer.shard_run import shard_models
from trainer.start_facts import fingerprints, start_facts
from trainer.value_scale import AdvantageScale, ValueScale


@dataclass
class PpoRun:
    """What every phase of PPO needs: the models, how they are trained, and what does not change in a run."""

    args: argparse.Namespace
    flags: dict  # {name: Flag}: what is known of each flag, see flags.py
    world: World
    dtype: torch.dtype  # of mixed precision and sampling
    tokenizer: object
    prompts: RLAIFDataset | LoggedAnswers
    held_out: RLAIFDataset | None  # prompts of evaluation
    notes: list  # lines that say what was chosen for the user
    reward: Reward
    judge: Judge  # the reward of evaluations, which never trains
    best: Best  # the best evaluation so far
    total_steps: int  # batches
    learners: dict  # {"critic": Learner, "actor": Learner}: what trains; a critic if --advantage has one
    # The behaviour policy: the rollouts are its samples. It is the actor, if --update_old_actor_freq is 1.
    # Else it is a copy, which ``learn`` in train_ppo.py makes equal to the actor every so many batches.
    old_actor: torch.nn.Module
    ref: torch.nn.Module  # the reference: the actor's start, frozen
    sampler: Sampler | None  # generates with the weights of the old actor, or of the actor to evaluate it
    plan: Plan  # of the memory
    endings: Endings  # what ends a response
    scorers: dict  # {"old_actor": PolicyScorer, "reference": PolicyScorer}: how rollouts are scored
    in_step: InStep | None = None  # of a run with --shard
    ptx: Ptx | None = None  # demonstrations that the actor learns besides
    held_out_pairs: LoggedPairs | None = None  # of an evaluation of offline PPO

    script, display = "train_ppo.py", displays.PPO

    def __post_init__(self):
        written = [path.resolve() for path in (self.pth_path, self.best_path, ema_path(self))]
        if Path(self.args.model).resolve() in written:
            raise InputError(
                f"--model {self.args.model}: this run would write its result there; copy it elsewhere"
            )
        args = self.args
        if args.offline_data_path:
            self.display = displays.offline(self.held_out_pairs, self.best.metric)
        self.eos = self.endings.eos
        self.state = None  # of a sharded actor, while it is saved
        self.loss_scale = LossScale(self.dtype)  # of fp16
        self.progress = Progress(token_budget=self.plan.token_budget)
        self.clip = ppo.Clip(args.clip_epsilon, args.clip_epsilon_high or args.clip_epsilon, args.dual_clip)
        self.host = HostMemory(self.world.device)  # where frozen models wait with --offload_frozen 1
        self.value_scale = ValueScale(self.critic) if self.critic else None
        self.advantage_scale = AdvantageScale()
        sizes = args.batch_size, args.mini_batch_size, self.world.rank, self.world.size
        positions = local_positions(*sizes, args.num_generations)
        self.replay = Replay(args.replay_batches, positions, self.world)
        per_batch = args.ppo_epochs * self.minibatches_per_batch
        steps, most = args.critic_warmup_steps, self.total_steps // 4
        self.critic_warmup = CriticWarmup(self.learners["actor"], steps, most, per_batch)
        self.ema = Ema(self.learners["actor"], args.ema_beta, per_batch)
        self.kl = KlController(args, self.learners["actor"], per_batch, args.batch_size * self.world.size)

    @property
    def actor(self):
        """The trained policy."""
        return self.learners["actor"].model

    @property
    def critic(self):
        """The trained value model; None with an --advantage that needs none."""
        return self.learners["critic"].model if "critic" in self.learners else None

    @property
    def judges(self):
        """All reward models, those that only evaluate too: modules, frozen."""
        return modules_of(self.reward, self.judge)

    @property
    def minibatches_per_batch(self):
        """How many minibatches a batch is cut into: the optimizer steps of one PPO epoch."""
        return self.args.batch_size // self.args.mini_batch_size

    @property
    def minibatch_size(self):
        """Sequences of a minibatch, over all processes."""
        return self.args.mini_batch_size * self.world.size

    @property
    def modules(self):
        """{file name: what a checkpoint has the weights of}, with adapters: what has been learned of them"""
        modules = {name: learner.model for name, learner in self.learners.items()}
        if self.old_actor is not self.actor:
            modules["old_actor"] = self.old_actor
        return {name: learned(module) for name, module in modules.items()}

    @property
    def optimizers(self):
        """{file name: what a checkpoint has the moments of}"""
        return {f"{name}_optimizer": learner.optimizer for name, learner in self.learners.items()}

    @property
    def tensors(self):
        """{file name: what else a checkpoint has tensors of}"""
        found = {"replay": self.replay.size and self.replay, "ema": self.ema.beta and self.ema}
        return {name: holder for name, holder in found.items() if holder}

    @property
    def states(self):
        """{name in state.json: what else a checkpoint keeps}"""
        models = {name: model for name, (model, _) in self.reward.models.items()}
        kept = {f"reward_{name}": model for name, model in models.items() if hasattr(model, "state_dict")}
        own = {"kl": self.kl, "advantage_scale": self.advantage_scale}
        if self.critic:
            own |= {"value_scale": self.value_scale, "critic_warmup": self.critic_warmup}
        return {"raw_scores": self.reward, "loss_scale": self.loss_scale, "best": self.best, **own, **kept}

    @property
    def files(self):
        """[name in the run folder]: files that a checkpoint has a copy of"""
        return [KEPT] if self.best.step else []

    @property
    def pth_path(self):
        """Where the trained actor is written."""
        moe = "_moe" if is_moe(self.actor) else ""
        return Path(self.args.out_dir) / f"ppo_actor_{self.actor.config.hidden_size}{moe}.pth"

    result_path = result_file = pth_path

    @property
    def best_path(self):
        """Where the actor of the best evaluation is written."""
        return self.pth_path.with_name(f"{self.pth_path.stem}_best.pth")

    @property
    def best_metric(self):
        """By which evaluations are compared, "eval/…"; "" without evaluations."""
        return self.best.metric

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
        ids = [p.prompt_ids for p in prompts]
        stops, lengths = self.endings.stops, (self.args.max_gen_len, temperature, self.args.min_gen_len)
        rollout = self.sampler.sample(ids, keys, self.eos, *lengths, stops)
        self.free_cache()
        return rollout, response_texts(rollout, self.tokenizer, stops)

    def raw_scores(self, reward, prompts, rollout, texts):
        """What each part of a reward (``Reward`` or ``Judge``) says of the responses, before it is
        normalised, clipped and weighed."""
        with self.host.on_device(*modules_of(reward)):
            return reward.raw_scores(
                prompts=[p.prompt for p in prompts],
                responses=texts,
                answers=[p.answer for p in prompts],
                finished=rollout.finished.tolist(),
                records=[p.record for p in prompts],
                lengths=rollout.on_host()[1],
                texts=[p.text for p in prompts],
            )

    def free_cache(self):
        """Free the sampler's keys and values before the next phases, where memory is short."""
        if self.plan.release_cache:
            self.sampler.release()

    def save_result(self):
        """Write the actor, and its average if there is one, as a ``.pth`` and the folder beside it. The best
        and the average of an earlier run go."""
        self.save_actor(self.pth_path)
        save_ema(self)
        if not self.best.step:
            remove_saved(self.best_path)

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
        best, words = self.best, ""
        if best.step:
            words = f"best     {self.best_path} ({best.metric} {best.value:.3f} at step {best.step})\n"
        elif best.value is not None:
            words = f"best     the start: {best.metric} {best.value:.3f} before training was not beaten\n"
        words += f"average  {ema_path(self)} (--ema_beta)\n" if self.ema.batches else ""
        own_code = ["--trust_remote_code"] if self.args.trust_remote_code else []
        talk = command_line("chat.py", "--model", self.pth_path, *own_code)
        return f"model    {self.pth_path}\n{words}talk     {talk}"

    def about_best(self):
        """Words for summary.md on the file of the best evaluation, to stand behind those on the result."""
        return self.best.describe(self.best_path.name)

    def fingerprints(self):
        """{flag: a hash of what it names}. Call it before frozen weights are rounded."""
        return fingerprints(self)

    def facts(self):
        """What health.py says of the start of the run: {name: value}, for config.json."""
        return start_facts(self)

    def about(self):
        """What the run is made of, in a few lines."""
        return describe_run(self)

    def prepare(self):
        """Make the models ready, after fingerprints were taken and before a checkpoint is loaded: round the
        frozen ones; move them to the host's memory, or shard all, where the flags say so."""
        prepare_frozen(self)
        if self.in_step:
            shard_models(self)


def prepare_frozen(run):
    """Round the frozen models to the dtype in which they compute, and move them where they wait."""
    args = run.args
    frozen, trained = [run.ref, *run.judges], [learner.model for learner in run.learners.values()]
    if run.old_actor is not run.actor:
        frozen.append(run.old_actor)
    agree = [run.world.from_main] if run.in_step else []
    if not args.trust_remote_code:  # code from outside may use its weights in other ways
        if args.lora_r:  # all share frozen weights of which the result is made: nothing may be lost
            keep_exact([*trained, *frozen], run.dtype, *agree)
        else:
            round_frozen(frozen, run.dtype)
            # Not the old actor, which will change.
            keep_exact([run.ref, *run.judges], run.dtype, *agree)
    free_unused_memory()  # the gaps that weights of other types have left
    if args.offload_frozen:
        run.host.take(frozen, trained)
