"""The models of a PPO run and what belongs to them: what is saved, compared on resuming, and shown.

train_ppo.py has the loop: it builds this object (``build_run``) and changes the models in it. runs/resume.py
says what every script's run has.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from atomic_files import writing
from dataset.lm_dataset import RLAIFDataset
from errors import InputError
from model.compatibility import is_moe
from model.lora import describe as describe_adapters
from model.lora import learned
from model.saving import save_policy
from trainer import ppo
from trainer.compute.host_memory import HostMemory
from trainer.compute.loss_scale import LossScale
from trainer.compute.precision import keep_exact, round_frozen
from trainer.critic_warmup import CriticWarmup
from trainer.flags import AUTO
from trainer.generation.engine import Sampler
from trainer.memory_plan import Plan
from trainer.rewards.reward import Reward
from trainer.rewards.reward_models import SCORE_LIMIT, parse_spec
from trainer.rewards.rules import LENGTHS
from trainer.runs import displays
from trainer.runs.checkpoints import Progress
from trainer.runs.commands import command_line
from trainer.runs.distributed import World
from trainer.runs.fingerprints import short_hash, weights_hash
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
    eos: list  # token ids that end a response
    reward: Reward
    total_steps: int  # batches
    learners: dict  # {"critic": Learner, "actor": Learner}: the models that train
    # The behaviour policy: the rollouts are its samples. It is the actor, if --update_old_actor_freq is 1.
    # Else it is a copy, which ``learn`` in train_ppo.py makes equal to the actor every so many batches.
    old_actor: torch.nn.Module
    ref: torch.nn.Module  # the reference: the actor's start, frozen
    sampler: Sampler  # generates with the weights of the old actor, or of the actor to evaluate it
    loss_scale: LossScale  # of fp16
    plan: Plan  # of the memory
    progress: Progress

    script, display = "train_ppo.py", displays.PPO

    def __post_init__(self):
        self.host = HostMemory(self.world.device)  # where frozen models wait with --offload_frozen 1
        self.value_scale = ValueScale(self.critic)
        per_batch = self.args.ppo_epochs * self.minibatches_per_batch
        steps, most = self.args.critic_warmup_steps, self.total_steps // 4
        self.critic_warmup = CriticWarmup(self.learners["actor"], steps, most, per_batch)
        if Path(self.args.model).resolve() == self.pth_path.resolve():
            raise InputError(
                f"--model {self.args.model}: this run would write its result there; copy it elsewhere"
            )

    @property
    def actor(self):
        """The trained policy."""
        return self.learners["actor"].model

    @property
    def critic(self):
        """The trained value model."""
        return self.learners["critic"].model

    @property
    def minibatches_per_batch(self):
        """How many minibatches a batch is cut into: the optimizer steps of one PPO epoch."""
        return self.args.batch_size // self.args.mini_batch_size

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
    def states(self):
        """{name in state.json: what else a checkpoint keeps}"""
        models = {name: model for name, (model, _) in self.reward.models.items()}
        kept = {f"reward_{name}": model for name, model in models.items() if hasattr(model, "state_dict")}
        own = {"value_scale": self.value_scale, "critic_warmup": self.critic_warmup}
        return {"raw_scores": self.reward, "loss_scale": self.loss_scale, **own, **kept}

    @property
    def pth_path(self):
        """Where the trained actor is written."""
        moe = "_moe" if is_moe(self.actor) else ""
        return Path(self.args.out_dir) / f"ppo_actor_{self.actor.config.hidden_size}{moe}.pth"

    result_path = pth_path

    def note_rollout(self, rollout, returns, metrics):
        """Add what a filled rollout shows to ``metrics``: KL, the sampler's gap, the values beside the
        Monte-Carlo returns [B, R]."""
        for name, (total, count) in ppo.rollout_metrics(rollout, returns).items():
            metrics.add(name, total, count)
        explained = ppo.explained_variance(returns, rollout.values, rollout.mask, self.world.sum)
        metrics.add("value/explained_variance", explained, 1)
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
        args, count = self.args, len(batch.prompts)
        metrics.add_all({f"reward/{name}": x.sum() for name, x in batch.scores.items()}, count)
        metrics.add("rollout/length", batch.rollout.response_len.sum(), count)
        metrics.add("rollout/finished", batch.rollout.finished.sum(), count)
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
        """Write the actor as a ``.pth`` and the folder beside it."""
        with writing(self.pth_path):
            save_policy(self.actor, self.tokenizer, self.pth_path)

    def results(self):
        """Lines for the end of a run: where the result is, and how to talk to it."""
        return f"model    {self.pth_path}\ntalk     {command_line('chat.py', '--model', self.pth_path)}"

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

    def about(self):
        """What the run is made of, in a few lines."""
        args, prompts, held_out = self.args, self.prompts, self.held_out
        size = sum(p.numel() for p in self.ref.parameters()) / 1e6
        adapters = describe_adapters(self.actor)
        tested = f", {len(held_out)} held out" if held_out else ""
        warmup = args.critic_warmup_steps
        steps = "step 1 trains only" if warmup == 1 else f"steps 1 to {warmup} train only"
        if warmup == AUTO:
            steps = f"as long as its error falls, at most steps 1 to {self.total_steps // 4}, train only"
        return (
            f"policy   {args.model}: {size:.2f}M parameters, {self.actor.config.model_type}\n"
            + (f"lora     {adapters}\n" if adapters else "")
            + f"reward   {describe_reward(args, self.reward)}\n"
            + f"prompts  {prompts.describe()}{tested}"
            + "".join(f"\nnote     {data.note}" for data in (prompts, held_out) if data and data.note)
            + (f"\nwarm-up  {steps} the critic (--critic_warmup_steps {warmup})" if warmup else "")
            + (f"\nsystem   {args.system_prompt}" if args.system_prompt else "")
            + "".join(f"\n{note}" for note in self.notes)
        )


def prepare_frozen(run):
    """Make the frozen models ready, after fingerprints were taken and a checkpoint, if any, was loaded."""
    args = run.args
    reward_models = [reward_model.model for reward_model, _ in run.reward.models.values()]
    frozen = [run.ref, *reward_models]
    if run.old_actor is not run.actor:
        frozen.append(run.old_actor)
    if not args.trust_remote_code:  # code from outside may use its weights in other ways
        if args.lora_r:  # all share frozen weights of which the result is made: nothing may be lost
            keep_exact([run.actor, run.critic, *frozen], run.dtype)
        else:
            round_frozen(frozen, run.dtype)
            keep_exact([run.ref, *reward_models], run.dtype)  # not the old actor, which will change
    if args.offload_frozen:
        run.host.take(frozen, [run.actor, run.critic])


def describe_reward(args, reward):
    """Every part of the score as the metrics call it, its range or weight and its flag, a line each."""
    parts, limit = {}, f"clipped to ±{SCORE_LIMIT:g}"
    if args.normalize_reward:
        limit = f"normalised and {limit} (--normalize_reward)"
    if args.reasoning:
        parts |= {"format": "0 or 0.5 (--reasoning)", "marks": "0 to 1 (--reasoning)"}
    for spec, (name, (_, weight)) in zip(args.reward_model, reward.models.items(), strict=True):
        parts[name] = f"weight {weight:g}, {limit}: {parse_spec(spec)[0]}"
    if args.reward_fn:
        parts["function"] = f"weight 1, as it is: {args.reward_fn}"
    if args.reward_url:
        parts["server"] = f"weight 1, {limit if args.normalize_reward else 'as it is'}: {args.reward_url}"
    if largest := args.repetition_penalty:
        parts["repetition"] = f"0 to -{largest:g} for repeated trigrams (--repetition_penalty)"
    if size := args.length_reward:
        few, many = LENGTHS
        parts["length_reward"] = f"{size:g} for {few} to {many} characters, else -{size:g} (--length_reward)"
    if penalty := args.missing_eos_penalty:
        parts["missing_eos"] = f"-{penalty:g} for a response that does not end (--missing_eos_penalty)"
    width = max(map(len, parts))
    return "\n         ".join(["the sum of:", *(f"{name:<{width}}  {text}" for name, text in parts.items())])
