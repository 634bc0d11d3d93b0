"""The models of a PPO run and what belongs to them: what is saved, compared on resuming, and shown.

train_ppo.py has the loop: it builds this object (``build_run``) and changes the models in it. runs/resume.py
says what every script's run has.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from atomic_files import writing
from dataset.data_order import local_positions
from dataset.lm_dataset import RLAIFDataset
from errors import InputError
from model.compatibility import eos_ids, is_moe
from model.lora import learned
from model.saving import save_policy
from trainer import ppo
from trainer.best import KEPT, Best, remove_saved
from trainer.compute.host_memory import HostMemory
from trainer.compute.loss_scale import LossScale
from trainer.compute.precision import keep_exact, round_frozen
from trainer.critic_warmup import CriticWarmup
from trainer.describe_run import describe_run
from trainer.generation.engine import Sampler, response_texts
from trainer.memory_plan import Plan
from trainer.replay import Replay
from trainer.response_stats import batch_metrics, repetition
from trainer.rewards.judge import Judge
from trainer.rewards.reward import Reward
from trainer.rewards.reward_models import modules_of
from trainer.runs import displays
from trainer.runs.checkpoints import Progress
from trainer.runs.commands import command_line
from trainer.runs.distributed import World
from trainer.runs.fingerprints import short_hash, weights_hash
from trainer.start_facts import start_facts
from trainer.value_scale import ValueScale


@dataclass
class PpoRun:
    """What every phase of PPO needs: the models, how they are trained, and what does not change in a run."""

    args: argparse.Namespace
    flags: dict  # {name: Flag}: what is known of each flag, see flags.py
    world: World
    dtype: torch.dtype  # of mixed precision and sampling
    tokenizer: object
    prompts: RLAIFDataset
    held_out: RLAIFDataset | None  # prompts of evaluation
    notes: list  # lines that say what was chosen for the user
    reward: Reward
    judge: Judge  # the reward of evaluations, which never trains
    best: Best  # the best evaluation so far
    total_steps: int  # batches
    learners: dict  # {"critic": Learner, "actor": Learner}: the models that train
    # The behaviour policy: the rollouts are its samples. It is the actor, if --update_old_actor_freq is 1.
    # Else it is a copy, which ``learn`` in train_ppo.py makes equal to the actor every so many batches.
    old_actor: torch.nn.Module
    ref: torch.nn.Module  # the reference: the actor's start, frozen
    sampler: Sampler  # generates with the weights of the old actor, or of the actor to evaluate it
    plan: Plan  # of the memory

    script, display = "train_ppo.py", displays.PPO

    def __post_init__(self):
        if Path(self.args.model).resolve() in (self.pth_path.resolve(), self.best_path.resolve()):
            raise InputError(
                f"--model {self.args.model}: this run would write its result there; copy it elsewhere"
            )
        args = self.args
        self.eos = eos_ids(self.tokenizer, self.actor)  # the token ids that end a response
        self.loss_scale = LossScale(self.dtype)  # of fp16
        self.progress = Progress(token_budget=self.plan.token_budget)
        self.clip = ppo.Clip(args.clip_epsilon, args.clip_epsilon_high or args.clip_epsilon, args.dual_clip)
        self.host = HostMemory(self.world.device)  # where frozen models wait with --offload_frozen 1
        self.value_scale = ValueScale(self.critic)
        sizes = args.batch_size, args.mini_batch_size
        positions = local_positions(*sizes, self.world.rank, self.world.size)
        self.replay = Replay(args.replay_batches, positions, self.world)
        per_batch = args.ppo_epochs * self.minibatches_per_batch
        steps, most = args.critic_warmup_steps, self.total_steps // 4
        self.critic_warmup = CriticWarmup(self.learners["actor"], steps, most, per_batch)

    @property
    def actor(self):
        """The trained policy."""
        return self.learners["actor"].model

    @property
    def critic(self):
        """The trained value model."""
        return self.learners["critic"].model

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
        modules = {"actor": self.actor, "critic": self.critic}
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
        return {"replay": self.replay} if self.replay.size else {}

    @property
    def states(self):
        """{name in state.json: what else a checkpoint keeps}"""
        models = {name: model for name, (model, _) in self.reward.models.items()}
        kept = {f"reward_{name}": model for name, model in models.items() if hasattr(model, "state_dict")}
        own = {"value_scale": self.value_scale, "critic_warmup": self.critic_warmup}
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

    result_path = pth_path

    @property
    def best_path(self):
        """Where the actor of the best evaluation is written."""
        return self.pth_path.with_name(f"{self.pth_path.stem}_best.pth")

    @property
    def best_metric(self):
        """By which evaluations are compared, "eval/…"; "" without evaluations."""
        return self.best.metric

    def respond(self, model, prompts, keys, temperature):
        """Prompts -> (rollout, response texts), sampled from this model's weights."""
        ids = [p.prompt_ids for p in prompts]
        rollout = self.sampler.load(model).sample(ids, keys, self.eos, self.args.max_gen_len, temperature)
        self.free_cache()
        return rollout, response_texts(rollout, self.tokenizer)

    def raw_scores(self, reward, prompts, rollout, texts):
        """What each part of a reward (``Reward`` or ``Judge``) says of the responses, before it is
        normalised, clipped and weighed."""
        asked, answers, records = ([getattr(p, x) for p in prompts] for x in ("prompt", "answer", "record"))
        with self.host.on_device(*modules_of(reward)):
            return reward.raw_scores(asked, texts, answers, rollout.finished.tolist(), records)

    def note_rollout(self, step, rollout, returns, metrics):
        """Add what the new rows of a filled rollout show to ``metrics``: KL, the sampler's gap, the values
        beside the Monte-Carlo returns [B, R]; they also say how long critic warm-up goes on. The new rows are
        the last ones: the critic has not learned from them yet."""
        count = len(rollout.tokens)
        first = count - self.args.batch_size
        new = rollout.rows(range(first, count)) if first else rollout
        returns = returns[first:, : new.values.shape[1]]
        self.critic_warmup.note(step, new, returns, self.world.sum)
        for name, (total, count) in ppo.rollout_metrics(new, returns).items():
            metrics.add(name, total, count)
        explained = ppo.explained_variance(returns, new.values, new.mask, self.world.sum)
        metrics.add("value/explained_variance", explained, 1)
        logprobs = new.old_logprobs, new.sampler_logprobs
        metrics.add(
            "rollout/importance_ess", ppo.effective_sample_size(*logprobs, new.mask, self.world.sum), 1
        )
        metrics.add("value/scale", self.critic.scale, 1)
        metrics.add("policy/advantage_std", rollout.advantage_std, 1)

    def note_step(self, name, step, metrics):
        """Add an optimizer step (``Step``) of a learner to ``metrics``."""
        group = {"critic": "value", "actor": "policy"}[name]
        metrics.add("policy/skipped_steps", not step.finite, 1)
        if step.finite:
            metrics.add(f"{group}/grad_norm", step.norm, 1)
        rate = self.learners[name].optimizer.param_groups[0]["lr"]
        metrics.add(f"{group}/learning_rate", rate, 1)

    def step_metrics(self, batch, metrics, clock):
        """All that a step logs -> {name: mean over all processes}.

        batch: ``Batch`` of train_ppo.py; metrics: what scoring and updating have measured (``Metrics``);
        clock: the times before scoring, before updating, and after it.
        """
        args, rollout, count = self.args, batch.rollout, len(batch.prompts)
        metrics.add_all({f"reward/{name}": x.sum() for name, x in batch.scores.items()}, count)
        if self.reward.models:
            metrics.add("reward/at_limit", self.reward.at_limit(batch.raw).sum(), count)
        metrics.add("rollout/length", rollout.response_len.sum(), count)
        metrics.add("rollout/finished", rollout.finished.sum(), count)
        metrics.add("rollout/repetition", repetition(rollout).sum(), count)
        metrics.add_all(batch_metrics(rollout, batch.scores["score"], self.world), 1)
        means = metrics.means(self.world)
        seconds = {**batch.seconds, "score": clock[1] - clock[0], "update": clock[2] - clock[1]}
        means |= {f"perf/{name}_seconds": x for name, x in seconds.items()}
        means |= self.reward.metrics()
        means["perf/samples_per_second"] = args.batch_size * self.world.size / sum(seconds.values())
        return means

    def free_cache(self):
        """Free the sampler's keys and values before the next phases, where memory is short."""
        if self.plan.release_cache:
            self.sampler.release()

    def save_result(self):
        """Write the actor as a ``.pth`` and the folder beside it. The best of an earlier run goes."""
        self.save_actor(self.pth_path)
        if not self.best.step:
            remove_saved(self.best_path)

    def save_best(self, kept, ready=None):
        """Write the actor as the best so far: as ``kept``, in the run folder, and from there as
        ``best_path``. ready: the ``.pth`` of a checkpoint, which is written instead."""
        self.save_actor(kept, ready)
        self.save_actor(self.best_path, kept)

    def save_actor(self, path, ready=None):
        """Write the actor, or the ``.pth`` that is ready, as ``path`` and the folder beside it."""
        with writing(path):
            save_policy(self.actor, self.tokenizer, path, ready=ready)

    def results(self):
        """Lines for the end of a run: where the result and the best are, and how to talk to the result."""
        best, words = self.best, ""
        if best.step:
            words = f"best     {self.best_path} ({best.metric} {best.value:.3f} at step {best.step})\n"
        elif best.value is not None:
            words = f"best     the start: {best.metric} {best.value:.3f} before training was not beaten\n"
        talk = command_line("chat.py", "--model", self.pth_path)
        return f"model    {self.pth_path}\n{words}talk     {talk}"

    def about_best(self):
        """Words for summary.md on the file of the best evaluation, to stand behind those on the result."""
        best = self.best
        if best.step:
            which = f"those after step {best.step}, the best by {best.metric} ({best.value:.3f})"
            since = f", of the evaluations after step {best.since}, since when they are others"
            return f"; {self.best_path.name} has {which}{since if best.since else ''}"
        if best.value is None:
            return ""
        return f"; there is no {self.best_path.name}, because {best.metric} was never above {best.value:.3f}"

    def fingerprints(self):
        """{flag: a hash of what it names}: the weights that the run starts from, its reward models, the texts
        and tokens of its prompts, the code of its reward function. Call it before frozen weights are
        rounded."""
        found = {
            "model": short_hash([weights_hash(self.ref), self.eos]),
            "tokenizer": short_hash(sorted(self.tokenizer.get_vocab().items())),
            "data_path": self.prompts.fingerprint,
        }
        reward_models = []
        for reward_model, weight in self.reward.models.values():
            tokenizer, config = reward_model.tokenizer, reward_model.model.config.to_dict()
            vocabulary = sorted(tokenizer.get_vocab().items())
            read_at = config.get("pad_token_id")  # the score is read at the last token that is not this one
            scale = [weight, config.get("reward_offset", 0.0), read_at]
            weights = weights_hash(reward_model.model)
            reward_models.append([weights, vocabulary, tokenizer.chat_template, *scale])
        if reward_models:
            found["reward_model"] = short_hash(reward_models)
        if self.args.reward_fn:
            path, _, name = self.args.reward_fn.rpartition(":")
            found["reward_fn"] = short_hash([name, Path(path).read_bytes().hex()])
        return found

    def facts(self):
        """What health.py says of the start of the run: {name: value}, for config.json."""
        return start_facts(self)

    def about(self):
        """What the run is made of, in a few lines."""
        return describe_run(self)


def prepare_frozen(run):
    """Make the frozen models ready, after fingerprints were taken and a checkpoint, if any, was loaded."""
    args = run.args
    frozen = [run.ref, *run.judges]
    if run.old_actor is not run.actor:
        frozen.append(run.old_actor)
    if not args.trust_remote_code:  # code from outside may use its weights in other ways
        if args.lora_r:  # all share frozen weights of which the result is made: nothing may be lost
            keep_exact([run.actor, run.critic, *frozen], run.dtype)
        else:
            round_frozen(frozen, run.dtype)
            keep_exact([run.ref, *run.judges], run.dtype)  # not the old actor, which will change
    if args.offload_frozen:
        run.host.take(frozen, [run.actor, run.critic])
