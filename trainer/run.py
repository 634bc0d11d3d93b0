"""What a PPO run keeps: models and learners, options and their states, what it says of itself when it begins,
and the files that it writes. train_ppo.py trains it. Its models, and why the reference never changes:

    actor         --model; it trains, and starts as it was loaded
    reference     a frozen copy of the actor as it starts: no optimizer has it, so it stays that
    old actor     the behaviour policy: its samples are learned from. With --update_old_actor_freq 1 it is the
                  actor, else a frozen copy, which ``learn`` (train_ppo.py) makes equal to it now and then
    critic        only with --advantage gae; it starts from a reward model or from the actor (--critic_init)
    rewards       frozen models, those of the judge too (rewards/reward_models.py)

With --lora_r only adapters train, and all of them share the frozen weights, until --shard 1 cuts them: then
each process keeps a part of every model. No model has dropout: the training forward is the scoring forward.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dataset.chat_template import learned_pieces
from dataset.data_order import local_positions
from dataset.lm_dataset import LoggedPairs, RLAIFDataset
from errors import InputError
from model.critic import CriticModel
from model.loading import embeddings, is_moe, load_policy
from model.lora import add_adapters, frozen_copy, trained
from model.lora import describe as describe_adapters
from model.saving import SaveDtype, save_policy, whole_state
from model.weights import sharded_and_whole, short_hash
from progress_bar import Start
from trainer.compute.memory import HostMemory, free_unused_memory, keep_freed_memory
from trainer.compute.precision import LossScale, keep_exact, round_frozen, set_precision
from trainer.compute.scoring import PolicyScorer, ValueScorer, prepare_training
from trainer.compute.sharding import InStep, shard
from trainer.endings import keep_endings, load_endings
from trainer.flags import Flags, minimind_pth
from trainer.generation.engine import Sampler
from trainer.inputs import (
    Prompts,
    check_files,
    choose_rates,
    choose_warmup,
    describe_texts,
    load_inputs,
    load_trained_tokenizer,
    read_texts,
)
from trainer.memory_plan import Case, Sizes, check_memory
from trainer.options.best import WEIGHTS, Best, best_so_far, first_best, write_best
from trainer.options.ema import Ema
from trainer.options.kl_target import KlTarget
from trainer.options.missing_eos import choose_penalty
from trainer.options.offline import held_out_pairs
from trainer.options.ptx import load_ptx
from trainer.options.replay import Replay
from trainer.rewards.combine import (
    Reward,
    errors_renamed,
    load_models,
    make_judge,
    make_reward,
    modules_of,
    named_as_evaluation,
    scoring_models,
)
from trainer.rewards.reward_function import (
    RewardFunctions,
    check_fields,
    code_hash,
    fields_read,
    load_reward_functions,
    names_of_run,
    try_reward_function,
    values_of_run,
)
from trainer.rewards.reward_models import ClassifierRewardModel, RewardModels, models_hash
from trainer.runs import displays
from trainer.runs.base import Learner, Progress, Run
from trainer.runs.distributed import World
from trainer.runs.optimizer_step import make_optimizer
from trainer.runs.resume import check_resume
from trainer.value_scale import AdvantageScale, ValueScale

AVERAGE = "ema.pth"  # in the run folder, of --ema_beta
CHECK_SAMPLER = 20  # steps between two comparisons of the sampler's log-probs, where nothing else needs them
USUAL_IDS = 0.95  # of a model's embeddings: a few have no id
THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")  # some templates put an empty thought before an answer


class PpoRun(Run):
    """What every phase of PPO needs: the models, how they are trained, and what does not change in a run."""

    script = "train_ppo.py"
    display = displays.PPO
    args: Flags
    held_out: RLAIFDataset | None
    held_out_pairs: LoggedPairs | None
    begin = choose_penalty

    def __init__(self, args: Flags, world: World, start: Start | None = None):
        """Flags -> the run, with all inputs checked. Raises InputError."""
        self.world = world
        self.args = args = args.completed()
        start = start or Start()
        start.part("checks")
        with world.all_or_none():  # what needs no model, before anything that takes long
            functions = self._load_functions()
            check_files(args)
            self.tokenizer = load_trained_tokenizer(args)
            if world.is_main:
                check_resume(self)
            start.part("data")
            texts = read_texts(args, self.tokenizer)
            self.held_out = texts.held_out
            if texts.prompts:
                self._use_data(texts.prompts, *functions)
        start.part("models")
        self.actor, _, data, _, room, notes = load_inputs(args, texts)
        if not texts.prompts:
            self._use_data(data, *functions)
        read = partial(load_policy, args.model, args.trust_remote_code)
        self.save_dtype = SaveDtype(args.save_dtype, f"--model {args.model}", read, self.actor)
        hidden_size = self.actor.config.hidden_size
        self.result_path = minimind_pth(args.out_dir, "ppo_actor", hidden_size, is_moe(self.actor))
        self.outputs = [self.result_path, self.result_path.with_suffix("")]
        if Path(args.model).resolve() == self.result_path.resolve():
            raise InputError(
                f"--model {args.model}: this run would write its result there; copy it elsewhere"
            )
        self.dtype = set_precision(args.dtype, world.device, args.deterministic)  # also of sampling
        # A single process has nobody to share with.
        self.in_step = InStep(world) if args.shard and world.size > 1 else None
        free_unused_memory()  # the copies with which the policy was checked
        # Not with --filter_groups, where processes call reward models unequally often and would wait for each
        # other; nor code from outside: it may use weights otherwise.
        self.shards_rewards = self.in_step is not None and not (args.filter_groups or args.trust_remote_code)
        place = world.device  # of the reward models
        if self.shards_rewards:
            place = torch.device("cpu")  # until they are sharded: a whole one need not fit on a GPU
        load_models(self.judge, args, place, self.dtype)
        self.judged_by = code_hash(args.eval_reward_fn) + models_hash(self.judge.models)
        load_models(self.reward, args, place, self.dtype)
        self.judges = modules_of(self.reward, self.judge)  # all their models, frozen
        self.actor.requires_grad_(not args.lora_r)
        if not self.in_step:  # which gathers and frees layer after layer; an actor need not fit on a GPU
            keep_freed_memory()
            self.actor.to(world.device)  # type: ignore[arg-type]  # transformers' wrapper of ``to``
        learning = {"learning_rate": ("actor", self.actor)}
        critic = None  # what the critic starts from
        weight = 1.0
        if args.advantage == "gae":
            critic, weight = critic_start(
                args.critic_init, self.reward.models, self.actor, self.tokenizer, longest=room[1]
            )
            learning["critic_learning_rate"] = ("critic", critic)
            if critic is not self.actor:
                notes.append(f"critic   starts from {critic.name_or_path} (--critic_init)")
        self.suited, rates = choose_rates(args, learning, args.lora_r > 0)
        args.freeze()
        # Those of this process' rows in the global batch.
        self.positions = local_positions(args.batch_size, world.rank, world.size, args.num_generations)
        self.minibatch_size = args.mini_batch_size * world.size  # sequences, over all processes
        # Optimizer steps of a batch, of each model.
        self.updates_per_batch = args.ppo_epochs * (args.batch_size // args.mini_batch_size)
        self.ptx = load_ptx(args, world, self.tokenizer, self.actor, self.updates_per_batch)  # or None
        self.held_out_pairs = held_out_pairs(args, self.tokenizer, self.actor)
        sizes = {"actor": Sizes(self.actor, self.dtype)}
        if critic:
            sizes["critic"] = Sizes(critic.base_model, self.dtype)  # type: ignore[arg-type]  # a Module
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
        self._build_models(critic, weight)
        keep_endings(self.endings, self.actor)
        self._build_learners()
        self._build_options()

    def _load_functions(self) -> list[RewardFunctions]:
        """-> those of --reward_fn and --eval_reward_fn."""
        functions = load_reward_functions(self.args.reward_fn)
        with named_as_evaluation():
            return [functions, load_reward_functions(self.args.eval_reward_fn)]

    def _use_data(self, data: Prompts, functions: RewardFunctions, judges: RewardFunctions) -> None:
        """Take the data, and do what needs no model besides: count the steps, make rewards without their
        models, call their functions once."""
        args = self.args
        self.data = data
        self.answers = args.num_generations
        self.total_steps = self.count_steps()
        choose_warmup(args, self.total_steps)
        self.names_of_run = of_run = names_of_run(data, self.held_out)  # that functions may ask for
        known = values_of_run(of_run, 0, self.total_steps)
        # The judge only evaluates; PPO learns from the reward. Logged answers come with their scores.
        self.reward = Reward()
        if not args.offline_data_path:
            self.reward = make_reward(args, functions)
            for function, _ in functions.values():
                check_fields(function, of_run, data, self.held_out)
        self.judge = make_judge(args, judges)
        with named_as_evaluation():
            for judge, _ in judges.values():
                check_fields(judge, of_run, self.held_out)
        if self.held_out and not args.offline_data_path:  # pairs of logged answers need the model
            first_best(self)  # checks --best_metric
        if not self.world.is_main:  # a function may cost money at each call
            return
        if args.resume:
            check_resume(self, self.text_fingerprints())
        for name, (function, _) in self.reward.functions.items():
            with errors_renamed("^--reward_fn", self.reward.flag_of(name)):
                try_reward_function(function, data, known, args.reward_timeout)
        with named_as_evaluation():
            for name, (judge, _) in judges.items():
                if self.held_out:
                    with errors_renamed("^--reward_fn", self.judge.flag_of(name)):
                        try_reward_function(judge, self.held_out, known, args.reward_timeout)

    def _build_models(self, start: PreTrainedModel | None, weight: float) -> None:
        """Make the other models from the actor, which gets its adapters with --lora_r. start, weight: of
        ``critic_start``; start None: no critic."""
        args = self.args
        lora = args.lora_r > 0
        shared = self.in_step is not None  # until ``prepare`` shards them, copies share memory
        self.critic: CriticModel = None  # type: ignore[assignment]  # without --advantage gae
        if start:
            lend = shared and start is self.actor
            self.critic = CriticModel.from_model(start, lora, weight, lend=lend).eval()
            prepare_training(self.critic.backbone, args.gradient_checkpointing)
        prepare_training(self.actor.base_model, args.gradient_checkpointing)  # before it is copied
        self.ref = frozen_copy(self.actor, shared)  # before there are adapters, so it has none
        if lora:
            add_adapters(self.actor.base_model, args.lora_r, args.seed)
            if self.critic:
                add_adapters(self.critic.backbone, args.lora_r, args.seed + 1)
        self.old_actor = self.actor
        if args.update_old_actor_freq > 1:
            self.old_actor = frozen_copy(self.actor, shared)

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
        if self.shards_rewards:
            for model in scoring_models(self.reward, self.judge):
                shard(model.root, in_step, self.dtype, model.model)
                model.in_step = in_step
        for learner in self.learners.values():
            learner.optimizer = self._optimizer(learner.model, learner.peak)

    # --------------------------------------------------------------------------- what it says when it begins

    def about(self) -> str:
        """What the run is made of, in a few lines."""
        args = self.args
        data = f"{'answers' if args.offline_data_path else 'prompts'}  {self.data.describe()}"
        if self.held_out:
            data += f"\nheld out {(self.held_out_pairs or self.held_out).describe()} {self.display.tested}"
        adapters = describe_adapters(self.actor)
        sums = ("score", "score_raw", *(["function"] if len(self.reward.functions) > 1 else []))
        parts = [name for name in self.reward.names if name not in sums]
        lines = [
            f"policy   {args.model}: {self.ref.num_parameters() / 1e6:.2f}M parameters, "
            f"{self.actor.config.model_type}",
            f"lora     {adapters}" if adapters else "",
            f"reward   {' + '.join(parts) or 'the scores of the file'}",
            data,
        ]
        if self.ptx:
            texts = self.ptx.data
            lines.append(f"ptx      {texts.path}: {texts.describe()}, weight {self.ptx.coef:g} (--ptx_coef)")
        lines += describe_texts(args, (self.data, self.held_out, self.ptx.data if self.ptx else None))
        if self.critic:
            lines.append(f"lambda   {args.lam:g}, for answers of up to {args.max_gen_len} tokens (--lam)")
        if args.critic_warmup_steps:
            lines.append(
                f"warm-up  at first only the critic trains: --critic_warmup_steps {args.critic_warmup_steps}"
            )
        return "\n".join(filter(None, [*lines, self.repeats_note(), *self.notes]))

    def facts(self) -> dict[str, Any]:
        """What the health rules read of a run's start, as JSON has it."""
        prompts = self.data
        tokenizer = self.tokenizer
        header, ends = turns_of(tokenizer, self.endings.eos)
        rows = embeddings(self.ref)
        ids = len(tokenizer.get_vocab())
        models = self.reward.models.items()
        plain = [name for name, (model, _) in models if not (model.tokenizer.chat_template or model.pairs)]
        return super().facts() | {
            "prompts": len(prompts),
            "dropped_share": prompts.dropped / prompts.read,  # share of the records that are too long
            "missing_header": header,  # text between a prompt and its answer, "" as it should be
            "template_without_eos": not ends,  # it ends an answer with no token that ends a response
            "fewer_ids": [ids, rows] if ids < USUAL_IDS * rows else None,  # than embeddings
            "without_template": ", ".join(plain) if tokenizer.chat_template else "",  # reward models
            "dtype": str(self.dtype).removeprefix("torch."),
            "suited": self.suited,  # {flag: the learning rate that suits the model's size}
            "answers_go_to": self.answers_go_to(),
        }

    def answers_go_to(self) -> str:
        """The parts of the reward that get the records' answers, or other fields of theirs; "" for none. What
        they make of them, nobody knows."""
        reward = self.reward
        answered = not self.args.offline_data_path and self.data.answers
        parts = []
        functions = [function for function, _ in reward.functions.values()]
        if functions and (answered or any(fields_read(f, self.data.columns) for f in functions)):
            parts.append("function")
        if reward.server and answered:
            parts.append("server")
        return f"reward {' and '.join(parts)}" if parts else ""

    def fingerprints(self) -> dict[str, str]:
        """{flag: a hash of what it names}: the weights that the run starts from, its reward models, the texts
        and tokens of its prompts, the code of its reward function; {"data_path <field>": a hash of the field
        of the records, which that function reads}. Call it before frozen weights are rounded."""
        found = {
            "model": short_hash([self.save_dtype.start_hash, self.endings.eos])
        } | self.text_fingerprints()
        if self.ptx:
            found["ptx_data_path"] = self.ptx.data.fingerprint
        if self.reward.models:
            found["reward_model"] = models_hash(self.reward.models)
        return found

    def text_fingerprints(self) -> dict[str, str]:
        found = {
            "tokenizer": short_hash(sorted(self.tokenizer.get_vocab().items())),
            "offline_data_path" if self.args.offline_data_path else "data_path": self.data.fingerprint,
        }
        if self.reward.functions:
            found["reward_fn"] = code_hash(self.args.reward_fn)
            weights = [f"{name}={weight:g}" for name, (_, weight) in self.reward.functions.items()]
            found["reward_fn weights"] = " ".join(weights)
            functions = [function for function, _ in self.reward.functions.values()]
            fields = dict.fromkeys(x for f in functions for x in fields_read(f, self.data.columns))
            found |= {f"data_path {field}": text for field, text in self.data.field_hashes(fields).items()}
        return found

    # --------------------------------------------------------------------------------- what is saved

    def save_result(self, logger: Any) -> None:
        """Write the actor as a ``.pth`` and the folder beside it, and its average into the run folder."""
        self.save_actor(self.result_path, logger)
        if self.ema.batches:
            with self.ema.in_place():
                self.save_actor(self.folder / AVERAGE, logger)

    def save_actor(self, path: Path, logger: Any) -> None:
        """Write the actor as ``path`` and the folder beside it. All processes call it: of a sharded actor
        each has a part."""
        main = self.world.is_main
        state = whole_state(self.actor, keep=main)
        if main:
            dtype = self.save_dtype.choose(path, state, logger.say)
            save_policy(self.actor, self.tokenizer, path, dtype, state)

    def keep_best(self, metrics: dict[str, float], logger: Any) -> None:
        """If a step's evaluation is the best so far, write the actor's weights into the run folder.

        All processes must call it, after the step was logged and before its checkpoint. Raises InputError
        where the disk is full or a weight is not finite in --save_dtype; then a resumed run evaluates this
        step again.
        """
        better = self.best.beaten_by(metrics, self.progress.step)
        if not better:
            return
        # The weights before the first step are those of --model.
        with self.world.all_or_none():
            if better.step:
                self.save_actor(self.folder / WEIGHTS, logger)
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
        note = self.save_dtype.note
        best = self.folder / WEIGHTS
        average = self.folder / AVERAGE
        words = f"model    {self.result_path}\n{note(self.result_path)}"
        if described := self.best.describe(best, self.progress.step):
            words += f"best     {described}\n{note(best)}"
        words += f"average  {average} (--ema_beta)\n{note(average)}" if self.ema.batches else ""
        return f"{words}talk     {self.command('chat.py', '--model', self.result_path)}"


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


def turns_of(tokenizer: PreTrainedTokenizerBase, eos: Iterable[int]) -> tuple[str, bool]:
    """How the chat template goes from a prompt to an answer and on -> (missing header, has it an EOS?).

    eos: the ids that end a response. ("", True) where the template rewrites what stands before the answer, so
    that nothing can be said.
    """
    answer = "Seven."
    try:
        said, _ = learned_pieces(tokenizer, "How many days has a week?", answer)[-1]
    except InputError:
        return "", True
    header, _, end = said.partition(answer)
    ids = tokenizer(end, add_special_tokens=False)["input_ids"]
    return THOUGHT.sub("", header).strip(), not set(eos).isdisjoint(ids)
