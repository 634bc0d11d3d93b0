"""A PPO run: inputs checked, models built, options and their states, what the run says of itself, its files.

train_ppo.py trains it. The models, and why the reference never changes: models.py.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dataset.chat_template import conversation_text, learned_pieces
from dataset.formats import Tools
from dataset.lm_dataset import LoggedAnswers, LoggedPairs, Prompt, RLAIFDataset, local_positions
from errors import InputError, as_input_error
from model.loading import embeddings, is_moe, load_policy
from model.lora import describe as describe_adapters
from model.saving import SaveDtype, save_policy, whole_state
from model.weights import short_hash
from progress_bar import Start
from trainer.advantages import AdvantageScale, ValueScale
from trainer.compute.batch import Batch, RawScores
from trainer.compute.memory import free_unused_memory, keep_freed_memory
from trainer.compute.precision import LossScale, set_precision
from trainer.compute.sharding import ShardGroup
from trainer.environments.conversation import MultiTurn, close_all, ended_by, record_of, reset_all
from trainer.environments.environment import Environments, Episode, load_environments, needed
from trainer.environments.running import Hung
from trainer.evaluation import Evaluation
from trainer.flags import Flags, minimind_pth
from trainer.generation.engine import Sampler
from trainer.generation.stops import decode, keep_endings, load_endings
from trainer.inputs import (
    Prompts,
    accuracy_note,
    check_files,
    choose_rates,
    choose_reasoning,
    choose_warmup,
    describe_texts,
    load_actor,
    load_trained_tokenizer,
    read_prompts,
    sampler_limits,
)
from trainer.memory_plan import ModelSizes, PlannedRun, check_memory
from trainer.models import Models, critic_start
from trainer.options.best import WEIGHTS, Best, first_best, restored
from trainer.options.ema import Ema
from trainer.options.kl_target import KlTarget
from trainer.options.missing_eos import choose_penalty
from trainer.options.offline import held_out_pairs, load_logged
from trainer.options.option import Option
from trainer.options.ptx import Ptx, load_demonstrations
from trainer.options.replay import Replay
from trainer.rewards.combine import (
    Reward,
    load_models,
    make_eval_reward,
    make_reward,
    modules_of,
    named_as_evaluation,
    scoring_models,
)
from trainer.rewards.reward_function import (
    Request,
    RewardFunctions,
    check_fields,
    code_hash,
    fields_read,
    load_reward_functions,
    run_values,
    try_reward_functions,
)
from trainer.rewards.reward_models import merged_history, models_hash
from trainer.rollout import RolloutEngine, with_sampled_space
from trainer.runs import displays
from trainer.runs.base import Run, Say, repeats_note
from trainer.runs.displays import StepLog
from trainer.runs.distributed import World
from trainer.runs.optimizer_step import Progress, Updater
from trainer.runs.resume import check_resume
from trainer.user_code import Modules

AVERAGE = "ema.pth"  # in the run folder, of --ema_beta
USUAL_IDS = 0.95  # of a model's embeddings: a few have no id
THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")  # some templates put an empty thought before an answer


class PpoRun(Run):
    """What every phase of PPO needs: the models, how they are trained, and what does not change in a run."""

    script = "train_ppo.py"
    display = displays.PPO
    args: Flags
    held_out: RLAIFDataset | None
    held_out_pairs: LoggedPairs | None
    engine: RolloutEngine  # but not where nothing is sampled
    environments: Environments | None = None  # --env, --tools
    value_scale: ValueScale  # with a critic
    _reward_hash = ""

    def __init__(self, args: Flags, world: World, start: Start | None = None):
        """Flags -> the run, with all inputs checked. Raises InputError."""
        self.world = world
        self.args = args.completed()
        start = start or Start()
        start.part("checks")
        with world.all_or_none():  # what needs no model, before anything that takes long
            modules: Modules = {}  # a file that several flags name is imported once
            functions = load_reward_functions(self.args.reward_fn, modules)
            with named_as_evaluation():
                eval_functions = load_reward_functions(self.args.eval_reward_fn, modules)
            if self.args.env or self.args.tools:
                self.environments = load_environments(self.args.env, self.args.tools, modules)
            check_files(self.args)
            self.tokenizer = load_trained_tokenizer(self.args)
            if world.is_main:
                check_resume(self)
            start.part("data")
            prompts, self.held_out = read_prompts(self.args, self.tokenizer, self.tools())
            if prompts:
                self._use_data(prompts, functions, eval_functions)
        start.part("models")
        actor = load_actor(self.args, self.tokenizer)
        if not prompts:  # how logged answers end, the model says
            path = self.args.offline_data_path
            logged = load_logged(LoggedAnswers, path, self.args, self.tokenizer, actor)
            self._use_data(logged, functions, eval_functions)
        self._name_results(actor)
        self._load_rewards_and_place_actor(actor)
        self._build(actor, critic=self._plan_training(actor))
        self._build_options()

    def _name_results(self, actor: PreTrainedModel) -> None:
        """Where the result will be, and in which dtype."""
        args = self.args
        read = partial(load_policy, args.model, args.trust_remote_code)
        self.save_dtype = SaveDtype(args.save_dtype, f"--model {args.model}", read, actor)
        self.result_path = minimind_pth(args.out_dir, "ppo_actor", actor.config.hidden_size, is_moe(actor))
        self.outputs = [self.result_path, self.result_path.with_suffix("")]
        if Path(args.model).resolve() == self.result_path.resolve():
            raise InputError(
                f"--model {args.model}: this run would write its result there; copy it elsewhere"
            )

    def _load_rewards_and_place_actor(self, actor: PreTrainedModel) -> None:
        """Load the reward models, and move the actor to the device."""
        args = self.args
        world = self.world
        self.dtype = set_precision(args.dtype, world.device, args.deterministic)  # also of sampling
        # A single process has nobody to share with.
        self.shard_group = ShardGroup(world) if args.shard and world.size > 1 else None
        free_unused_memory()  # the copies with which the policy was checked
        # Not with --filter_groups, where processes call reward models unequally often and would wait for each
        # other; nor code from outside: it may use weights otherwise.
        self.shards_rewards = self.shard_group is not None and not (
            args.filter_groups or args.trust_remote_code
        )
        # Until they are sharded, reward models are in main memory: a whole one need not fit on a GPU.
        place = torch.device("cpu") if self.shards_rewards else world.device
        load_models(self.eval_reward, args, place, self.dtype)
        self.eval_reward_hash = code_hash(args.eval_reward_fn) + models_hash(self.eval_reward.models)
        load_models(self.reward, args, place, self.dtype)
        if world.is_main and self.reward.models:
            self._reward_hash = models_hash(self.reward.models)  # before the models are rounded
        self._parameters = actor.num_parameters()
        self._embeddings = embeddings(actor)
        actor.requires_grad_(not args.lora_r)
        if not self.shard_group:  # which gathers and frees layer after layer; an actor need not fit on a GPU
            keep_freed_memory()
            actor.to(world.device)  # type: ignore[arg-type]  # transformers' wrapper of ``to``

    def _plan_training(self, actor: PreTrainedModel) -> tuple[PreTrainedModel, float] | None:
        """Choose what the models decide: learning rates, the memory plan -> what the critic starts from and
        its weight in the reward, None without a critic. From here on the flags are frozen."""
        args = self.args
        world = self.world
        limits = sampler_limits(args, actor, self.data, self.held_out)
        learning = {"learning_rate": ("actor", actor)}
        critic = None
        if args.advantage == "gae":
            critic = critic_start(
                args.critic_init, self.reward.models, actor, self.tokenizer, longest=limits.max_seq_len
            )
            learning["critic_learning_rate"] = ("critic", critic[0])
            if critic[0] is not actor:
                self.notes.append(f"critic   starts from {critic[0].name_or_path} (--critic_init)")
        self.suited, rates = choose_rates(args, learning, args.lora_r > 0)
        args.freeze()
        # Those of this process' rows in the global batch.
        self.positions = local_positions(args.batch_size, world.rank, world.size, args.num_generations)
        self.demonstrations = load_demonstrations(args, self.tokenizer, actor, self.tools())
        self.held_out_pairs = held_out_pairs(args, self.tokenizer, actor)
        sizes = {"actor": ModelSizes(actor, self.dtype)}
        if critic:
            sizes["critic"] = ModelSizes(critic[0].base_model, self.dtype)  # type: ignore[arg-type]  # a Module
        planned = PlannedRun(
            args=args,
            device=world.device,
            dtype=self.dtype,
            models=sizes,
            rewards=[ModelSizes(model, self.dtype) for model in modules_of(self.reward, self.eval_reward)],
            responses=limits.max_num_seqs,
            width=limits.max_seq_len,
            demonstration=self.demonstrations.longest if self.demonstrations else 0,
            processes=world.size,
        )
        with world.all_or_none():  # memory may be short in one process only
            self.plan, memory = check_memory(planned)
        self.notes += [rates, memory]
        self.sampler_limits = limits
        return critic

    def _build(self, actor: PreTrainedModel, critic: tuple[PreTrainedModel, float] | None) -> None:
        """The sampler, the models, and what makes their optimizer steps."""
        args = self.args
        world = self.world
        self.endings = load_endings(args, self.tokenizer, actor)  # what ends a response
        if self.plan.slots:  # else nothing is sampled
            cache = self.plan.phases["rollout"]["KV cache"]
            sampler = Sampler(actor, self.dtype, self.plan.slots, cache, self.sampler_limits, world.device)
            self.engine = RolloutEngine(
                sampler=sampler,
                tokenizer=self.tokenizer,
                endings=self.endings,
                args=args,
                sharded=self.shard_group is not None,
                turns=self._turns(),
            )
            if self.shard_group:  # each process soon has a part of each model, and a whole one of none
                sampler.copy.unload()
        self.models = Models(
            args,
            world.device,
            self.dtype,
            actor,
            critic_start=critic,
            rewards=scoring_models(self.reward, self.eval_reward),
            endings=self.endings,
            total_steps=self.total_steps,
            shard_group=self.shard_group,
            shards_rewards=self.shards_rewards,
        )
        keep_endings(self.endings, actor)
        self.progress = Progress(token_budget=self.plan.token_budget)
        self.loss_scale = LossScale(self.dtype)  # of fp16
        self.train_states = self.models.train_states
        self.updater = Updater(
            world, self.train_states, self.loss_scale, self.progress, args.grad_clip, self.shard_group
        )

    def tools(self) -> Tools:
        """The schemas of the tools that are run, with --env or --tools."""
        return self.environments.schemas if self.environments else ()

    def _turns(self) -> MultiTurn | None:
        """What makes several turns of a response, None without --env and --tools. Raises InputError for a
        chat template that cannot go on behind a turn, and for a reward model's that refuses several."""
        if not (self.environments and isinstance(self.data, RLAIFDataset)):
            return None
        turns = MultiTurn(
            self.environments,
            self.tokenizer,
            self.endings,
            thinking=self.data.thinking,
            args=self.args,
            longest_prompt=self.sampler_limits.max_seq_len - self.args.max_gen_len,
        )
        turns.check(self.data[0])
        for model in scoring_models(self.reward, self.eval_reward):
            question, answer = turns.example(self.data[0])
            question = merged_history(question) if self.args.merge_history else question
            with as_input_error(f"reward model {model.model.name_or_path}: it cannot read several turns"):
                conversation_text(model.tokenizer, question, answer, model.form)
        return turns

    def _use_data(self, data: Prompts, functions: RewardFunctions, eval_functions: RewardFunctions) -> None:
        """Take the data, and do what needs no model besides: count the steps, make rewards without their
        models, call their functions once."""
        args = self.args
        self.data = data
        # Lines that say what was chosen.
        self.notes = [choose_reasoning(args, data), accuracy_note(self.held_out)]
        self.responses_per_record = args.num_generations
        self.total_steps = self.count_steps()
        choose_warmup(args, self.total_steps)
        if self.environments:
            self.environments.check_fields(data, self.held_out)
        known = self.run_values(0)
        # The evaluation reward never trains. Logged answers come with their scores.
        self.reward = Reward()
        if not args.offline_data_path:
            scores = self.environments is not None and self.environments.has_reward
            self.reward = make_reward(args, functions, environment=scores)
            check_fields(functions, known, data, self.held_out)
        self.eval_reward = make_eval_reward(args, eval_functions)
        with named_as_evaluation():
            check_fields(eval_functions, known, self.held_out)
        if self.held_out and not args.offline_data_path:  # pairs of logged answers need the model
            self._first_best()  # checks --best_metric
        if not self.world.is_main:  # a function may cost money at each call
            return
        if args.resume:
            check_resume(self, self.text_fingerprints())
        open_ones: list[Episode] = []
        attempt = partial(try_reward_functions, environments=partial(self._begun, open_ones))
        attempt(self.reward.functions, known, args.reward_timeout, data, self.held_out)
        with named_as_evaluation():
            attempt(eval_functions, known, args.reward_timeout, self.held_out)
        close_all(open_ones, args.reward_timeout)

    def _begun(self, open_ones: list[Episode], prompts: Sequence[Prompt]) -> list[Any]:
        """The environments of these prompts, reset, and added to ``open_ones``; None for each with --tools,
        [] without both. Raises InputError where reset fails."""
        if self.environments is None:
            return []
        seeds = [0] * len(prompts)
        begun = reset_all(self.environments, prompts, seeds, self.args.reward_timeout)
        for prompt, (_, text) in zip(prompts, begun, strict=True):
            if isinstance(text, Hung):
                raise ended_by(text, prompt)
        open_ones += [episode for episode, _ in begun]
        return [episode.environment for episode, _ in begun]

    def _build_options(self) -> None:
        """Scales, options and the evaluation; ``states`` has those with a state that checkpoints keep."""
        args = self.args
        world = self.world
        models = self.models
        train_state = self.train_states["actor"]
        self.best = self._first_best() if self.held_out else Best()
        if args.offline_data_path:
            self.display = displays.OFFLINE
            if self.held_out and not self.held_out_pairs:  # answers to its prompts are compared
                best = "judge" if self.eval_reward.names else "accuracy"
                self.display = replace(displays.OFFLINE, tested="prompts", best=best)
        self.advantage_scale = AdvantageScale()
        self.kl = KlTarget(args, train_state, world.size, world.sum)
        self.ema = Ema(train_state, args.ema_beta)
        self.states = {
            "raw_scores": self.reward,  # its name in checkpoints
            "loss_scale": self.loss_scale,
            "kl": self.kl,
            "advantage_scale": self.advantage_scale,
        }
        if models.critic:
            self.value_scale = self.states["value_scale"] = ValueScale(models.critic)
        self.options: list[Option] = []  # in the order in which train_ppo.py calls their hooks
        if self.demonstrations:
            scorer = models.actor_scorer
            self.options.append(Ptx(self.demonstrations, args, scorer, models.updates_per_batch, world))
        if args.replay_batches:
            replay = self.states["replay"] = Replay(args.replay_batches, self.positions, world)
            self.options.append(replay)
        if args.kl_target:
            self.options.append(self.kl)
        if args.ema_beta:
            self.states["ema"] = self.ema
            self.options.append(self.ema)
        self.evaluation = None
        if self.held_out:
            self.evaluation = Evaluation(
                args=args,
                world=world,
                held_out=self.held_out,
                pairs=self.held_out_pairs,
                models=models,
                engine=self.engine,
                rewards=(self.reward, self.eval_reward),
                score_parts=self.request_scores,
                ema=self.ema,
            )

    def _first_best(self) -> Best:
        """The ``Best`` before the first evaluation. Raises InputError for a --best_metric that no evaluation
        has."""
        assert self.held_out
        args = self.args
        names = [*self.reward.names, *self.eval_reward.names, "length", "finished"]
        if self.reward.reasoning:
            names.append("format_rate")
        accuracy = self.held_out.has_accuracy  # whether right answers are known
        if accuracy:
            names.append("accuracy")
        names += [f"{name}_greedy" for name in names]
        if accuracy and args.num_generations > 1:
            names.append(f"pass@{args.num_generations}")
        if self.held_out_pairs:
            names.append("chosen_preferred")
        source = f"{self.held_out.fingerprint} {code_hash(args.reward_fn)} {self.eval_reward_hash}"
        return first_best(args.best_metric, names, source)

    @property
    def modules(self) -> dict[str, nn.Module]:
        modules = super().modules
        if self.models.old_actor is not self.models.actor:
            modules["old_actor"] = self.models.old_actor
        return modules

    # ------------------------------------------------------------------------------- what it is asked for

    def run_values(self, step: int) -> dict[str, object]:
        """What reward functions may ask for besides the fields of the records (``run_values``)."""
        of_turns = ["messages"] if self.environments else []
        of_turns += ["environments"] if self.args.env else []
        return run_values(step, self.total_steps, self.data, self.held_out, of_turns=of_turns)

    def request_scores(self, reward: Reward, batch: Batch) -> RawScores:
        """What each part of a reward (``Reward`` or ``EvalReward``) says of a batch's responses, before it is
        normalised, clipped and weighed. Raises InputError where one fails."""
        ids = batch.responses()
        whole_texts = [decode(self.tokenizer, x) for x in ids] if batch.dialogues else batch.texts
        prompts = batch.prompts
        if reward.server:
            prompts = with_sampled_space(batch, self.tokenizer, whole_texts)
        request = Request(
            prompts,
            batch.texts,
            batch.finished.tolist(),
            lengths=batch.lengths.tolist(),
            ids=ids,
            run_values=self.run_values(self.progress.step),
            dialogues=batch.dialogues,
            whole_texts=whole_texts,
        )
        with self.models.host.on_device(*modules_of(reward)):
            return reward.score_parts(request)

    def begin(self, say: Say, keep_choice: Callable[[str, float], object]) -> None:
        """Choose --missing_eos_penalty where it is not given (options/missing_eos.py)."""
        if self.reward.missing_eos_penalty is not None:
            return
        request_scores = partial(self.request_scores, self.reward)
        penalty, line = choose_penalty(
            self.args, self.world, self.data, self.engine, self.models.old_actor, self.reward, request_scores
        )
        self.reward.missing_eos_penalty = penalty
        with self.world.all_or_none():  # the disk may be full
            keep_choice("missing_eos_penalty", penalty)
        say(line)

    def evaluate(self) -> StepLog:
        return self.evaluation() if self.evaluation else ({}, {})

    # --------------------------------------------------------------------------- what it says when it begins

    def about(self) -> str:
        """What the run is made of, in a few lines."""
        args = self.args
        data = f"{'answers' if args.offline_data_path else 'prompts'}  {self.data.describe()}"
        if self.held_out:
            data += f"\nheld out {(self.held_out_pairs or self.held_out).describe()} {self.display.tested}"
        actor = self.models.actor
        adapters = describe_adapters(actor)
        sums = ("score", "score_raw", *(["function"] if len(self.reward.functions) > 1 else []))
        parts = [name for name in self.reward.names if name not in sums]
        never = sum(behind - first for first, behind in self.endings.forbidden.textless)
        lines = [
            f"policy   {args.model}: {self._parameters / 1e6:.2f}M parameters, {actor.config.model_type}",
            f"note     never sampled: {never} ids that are no token of the tokenizer" if never else "",
            f"lora     {adapters}" if adapters else "",
            f"reward   {' + '.join(parts) or 'the scores of the file'}",
            data,
        ]
        if texts := self.demonstrations:
            lines.append(f"ptx      {texts.path}: {texts.describe()}, weight {args.ptx_coef:g} (--ptx_coef)")
            taken = args.mini_batch_size * self.world.size
            lines.append(repeats_note("a minibatch", taken, len(texts)))
        for model in scoring_models(self.reward, self.eval_reward):
            if model.form:
                lines.append(
                    f"note     {model.tokenizer.name_or_path} reads {model.form!r} (--reward_template)"
                )
        lines += describe_texts(args, (self.data, self.held_out, texts))
        if self.models.critic:
            lines.append(f"lambda   {args.lam:g}, for answers of up to {args.max_gen_len} tokens (--lam)")
        if args.critic_warmup_steps:
            lines.append(
                f"warm-up  at first only the critic trains: --critic_warmup_steps {args.critic_warmup_steps}"
            )
        lines.append(repeats_note("a batch", self.batch_records, len(self.data)))
        return "\n".join(filter(None, [*lines, *self.notes]))

    def facts(self) -> dict[str, Any]:
        """What the health rules read of a run's start, as JSON has it."""
        prompts = self.data
        tokenizer = self.tokenizer
        header, ends = turns_of(tokenizer, self.endings.eos)
        rows = self._embeddings
        ids = len(tokenizer.get_vocab())
        models = self.reward.models.items()
        plain = [name for name, (model, _) in models if not (model.tokenizer.chat_template or model.pairs)]
        if self.args.reward_template:
            plain = []  # it says what they read
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
        they make of them, nobody knows: the class of --env least."""
        reward = self.reward
        answered = not self.args.offline_data_path and self.data.with_answer
        parts = ["environment"] if reward.environment else []
        functions = [function for function, _ in reward.functions.values()]
        if functions and (answered or any(fields_read(f, self.data.columns) for f in functions)):
            parts.append("function")
        if reward.server and answered:
            parts.append("server")
        return f"reward {' and '.join(parts)}" if parts else ""

    def fingerprints(self) -> dict[str, str]:
        """{flag: a hash of what it names}: the weights that the run starts from, its reward models, the texts
        and tokens of its prompts, the code of its reward function; {"data_path <field>": a hash of the field
        of the records, which that function reads}."""
        hashes = {
            "model": short_hash([self.save_dtype.start_hash, self.endings.eos])
        } | self.text_fingerprints()
        if self.demonstrations:
            hashes["ptx_data_path"] = self.demonstrations.fingerprint
        if self.reward.models:
            hashes["reward_model"] = self._reward_hash
        return hashes

    def text_fingerprints(self) -> dict[str, str]:
        hashes = {"tokenizer": short_hash(sorted(self.tokenizer.get_vocab().items()))}
        if self.environments:
            flag = "env" if self.args.env else "tools"
            shown = self.environments.schemas  # in the prompts: before their fingerprint, to be named first
            names = [schema["function"]["name"] for schema in shown]
            hashes[f"{flag} tools"] = " ".join([*names, short_hash(shown)])
            hashes[flag] = self.environments.code_hash
        data_flag = "offline_data_path" if self.args.offline_data_path else "data_path"
        hashes[data_flag] = self.data.fingerprint
        if self.reward.functions:
            hashes["reward_fn"] = code_hash(self.args.reward_fn)
            weights = [f"{name}={weight:g}" for name, (_, weight) in self.reward.functions.items()]
            hashes["reward_fn weights"] = " ".join(weights)
            functions = [function for function, _ in self.reward.functions.values()]
            fields = dict.fromkeys(x for f in functions for x in fields_read(f, self.data.columns))
            hashes |= {f"data_path {field}": text for field, text in self.data.field_hashes(fields).items()}
        return hashes

    # --------------------------------------------------------------------------------- what is saved

    def save_result(self, say: Say) -> None:
        """Write the actor as a ``.pth`` and the folder beside it, and its average into the run folder."""
        self.save_actor(self.result_path, say)
        if self.ema.batches:
            with self.ema.in_place():
                self.save_actor(self.folder / AVERAGE, say)

    def save_actor(self, path: Path, say: Say) -> None:
        """Write the actor as ``path`` and the folder beside it. All processes call it: of a sharded actor
        each has a part."""
        main = self.world.is_main
        state = whole_state(self.models.actor, keep=main)
        if main:
            dtype = self.save_dtype.choose(path, state, say)
            save_policy(self.models.actor, self.tokenizer, path, dtype, state)

    def keep_best(self, metrics: dict[str, float], say: Say) -> None:
        self.best = self.best.updated(metrics, self, partial(self.save_actor, say=say))

    def restore_best(self, say: Say) -> None:
        self.best = restored(self.best, self, say)

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
        return f"{words}talk     {self.command('chat.py', '--model', self.result_path, *self._turn_flags())}"

    def _turn_flags(self) -> list[str]:
        """What chat.py needs to play as the run has."""
        args = self.args
        if self.environments is None:
            return []
        flags = ["--env", os.path.abspath(args.env)] if args.env else []
        flags += ["--tools", *map(os.path.abspath, args.tools)] if args.tools else []
        flags += ["--max_turns", str(args.max_turns)]
        asked = needed(self.environments.reset_takes)
        first = self.data[0]
        if "answer" in asked and "answer" not in first.record:
            flags += ["--record", json.dumps(record_of(first), default=str)]
        elif asked:
            data = args.data_path
            flags += ["--record", os.path.abspath(data) if os.path.exists(data) else data]
        return flags


def turns_of(tokenizer: PreTrainedTokenizerBase, eos: Iterable[int]) -> tuple[str, bool]:
    """How the chat template goes from a prompt to an answer and on -> (missing header, has it an EOS?).

    eos: the ids that end a response. ("", True) where the template rewrites what stands before the answer, so
    that nothing can be said.
    """
    answer = "Seven."
    try:
        reply, _ = learned_pieces(tokenizer, "How many days has a week?", answer)[-1]
    except InputError:
        return "", True
    header, _, end = reply.partition(answer)
    ids = tokenizer(end, add_special_tokens=False)["input_ids"]
    return THOUGHT.sub("", header).strip(), not set(eos).isdisjoint(ids)
