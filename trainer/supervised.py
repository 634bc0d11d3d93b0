"""What stages 1 and 2 (train_sft.py, train_reward.py) share: how a step learns, evaluation, saving.

    for each batch of records:                       the same records whatever the number of processes
        for each micro-batch, cut by tokens:         halved if memory runs out
            loss, a sum divided by the number of tokens or pairs of the whole batch
            backward
        sum gradients over processes, clip, step     AdamW; learning rate: warm-up, cosine down to a tenth
        log, evaluate, save                          session.py

A script adds a subclass of ``SupervisedRun`` with its model, its records, its loss and its result.
"""

import math
import time
from abc import abstractmethod
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from atomic_files import check_unused
from dataset.formats import Keys
from dataset.lm_dataset import RecordDataset
from dataset.record_files import open_records
from errors import InputError
from model.loading import load_policy, most_positions
from model.lora import trained
from model.saving import SaveDtype
from model.weights import short_hash, weights_hash
from progress_bar import Start
from trainer.compute.batching import fp64_device, tokens_per_forward
from trainer.compute.memory import each_micro_batch, keep_freed_memory
from trainer.compute.precision import LossScale, set_precision
from trainer.compute.scoring import prepare_training
from trainer.flags import Flags
from trainer.inputs import check_policy, choose_rates, describe_texts, load_trained_tokenizer
from trainer.runs.base import Run, repeats_note
from trainer.runs.displays import StepLog
from trainer.runs.distributed import World
from trainer.runs.metrics import Loss, Metrics
from trainer.runs.optimizer_step import GradientSource, Progress, TrainState, Updater, make_optimizer
from trainer.runs.resume import check_resume
from trainer.session import Session

Means = dict[str, float]  # {metric: its mean}
Items = list[tuple]  # each of lists of ids and one thing more
EVAL_SIZE = 256  # records held out where no flag says otherwise, at most a tenth of all


class SupervisedRun(Run):
    """A run of stage 1 or 2."""

    updater: Updater

    rate: str  # a kind of ``rate_by_size``
    records: type[RecordDataset]  # what it learns from
    data: RecordDataset
    held_out: RecordDataset | None
    hf_dir: Path  # where the result is written for transformers

    @abstractmethod
    def start_from(self, policy: PreTrainedModel) -> PreTrainedModel:
        """The model that trains. It also says where the result will be."""

    @abstractmethod
    def loss(self, items: Items, totals: list[float], kind: str = "train") -> Loss:
        """A micro-batch's share of the batch's loss, and metrics named <kind>/…, train or eval; totals: the
        sums of ``loss_counts``."""

    def __init__(self, args: Flags, world: World, start: Start | None = None):
        """Flags -> the run, with all inputs checked. Raises InputError."""
        self.args = args = args.completed()
        self.world = world
        start = start or Start()
        start.part("checks")
        with world.all_or_none():  # what needs no model
            if args.eval_data_path:
                open_records(args.eval_data_path)
            self.tokenizer = load_trained_tokenizer(args)
            if world.is_main:
                check_resume(self)
            start.part("data")
            self.data, self.held_out = self.split_records()
            self.total_steps = self.count_steps()
            if args.resume and world.is_main:
                check_resume(self, self.text_fingerprints())
        start.part("models")
        self.dtype = set_precision(args.dtype, world.device, args.deterministic)
        loss_scale = LossScale(self.dtype)
        self.states = {"loss_scale": loss_scale}
        policy = self.load_policy()
        source = f"--model {args.model}" if args.model else f"--seed {args.seed}"
        self.save_dtype = SaveDtype(args.save_dtype, source, self.load_policy, policy)
        check_policy(args, policy, self.tokenizer)
        self.model = self.start_from(policy)
        limit = most_positions(self.model.config)
        if args.max_seq_len > limit:
            raise InputError(
                f"--max_seq_len {args.max_seq_len}: {args.model} has {limit} positions; lower it"
            )
        if args.model and Path(args.model).resolve() in (self.hf_dir.resolve(), self.result_path.resolve()):
            raise InputError(
                f"--model {args.model}: this run would write its result there; copy it elsewhere"
            )
        if args.hf_dir and not args.resume:
            check_unused(self.hf_dir)
        keep_freed_memory()
        self.model.to(world.device)  # type: ignore[arg-type]  # transformers' wrapper of ``to``
        prepare_training(self.model.base_model, args.gradient_checkpointing)
        _, self.note = choose_rates(args, {"learning_rate": (self.rate, self.model)})
        args.freeze()
        parameters = trained(self.model)
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": args.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        train_state = TrainState(
            model=self.model,
            optimizer=make_optimizer(
                groups, args.learning_rate, args.moments_dtype, args.seed, betas=(0.9, 0.95)
            ),
            peak=args.learning_rate,
            total_steps=self.total_steps,
            warmup_steps=min(math.ceil(args.warmup_ratio * self.total_steps), self.total_steps - 1),
        )
        self.train_states = {"model": train_state}
        self.progress = Progress(token_budget=tokens_per_forward(world.device))
        self.updater = Updater(world, self.train_states, loss_scale, self.progress, args.grad_clip)

    def load_policy(self, dtype: torch.dtype | str = torch.float32) -> PreTrainedModel:
        """The language model that the run starts from."""
        return load_policy(self.args.model, self.args.trust_remote_code, dtype)

    def load_records(self, path: str) -> RecordDataset:
        """A file of what is learned from."""
        args = self.args
        return self.records(path, self.tokenizer, args.max_seq_len, args.system_prompt, Keys.of(args))

    def split_records(self) -> tuple[RecordDataset, RecordDataset | None]:
        """-> (training records, held-out records or None). These are those of --eval_data_path, or else the
        last --eval_size of --data_path, which are then not trained on. Raises InputError if that leaves none
        to train on."""
        args = self.args
        data = self.load_records(args.data_path)
        if args.eval_data_path:
            return data, self.load_records(args.eval_data_path)
        kept = min(EVAL_SIZE, len(data) // 10) if args.eval_size is None else args.eval_size
        first = len(data) - kept
        if first <= 0:
            raise InputError(
                f"--eval_size {kept}: leaves nothing to train on, there are only {len(data)} records in "
                f"{args.data_path}; lower it"
            )
        return data, data.split(first) if kept else None

    def loss_counts(self, items: Items) -> list[float]:
        """Numbers by which losses are divided, once summed over processes."""
        return [len(items)]

    def tokens(self, item: tuple) -> int:
        """The number of tokens of an item."""
        return sum(len(ids) for ids in item[:-1])

    def fingerprints(self) -> dict[str, str]:
        # The names in older runs.
        return {"model": weights_hash(nn.ModuleList([self.model]))} | self.text_fingerprints()

    def text_fingerprints(self) -> dict[str, str]:
        tokenizer = self.tokenizer
        return {
            "tokenizer": short_hash([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]),
            "data_path": short_hash([self.data.fingerprint, len(self.data)]),
        }

    @abstractmethod
    def summarise(self, means: Means) -> Means:
        """The mean metrics of all held-out records -> those of the evaluation."""

    def about(self) -> str:
        args = self.args
        lines = [
            f"model    {args.model or 'random weights'}: {self.model.num_parameters() / 1e6:.2f}M "
            f"parameters, {self.model.config.model_type}",
            f"data     {args.data_path}: {self.data.describe()}",
        ]
        if self.held_out:
            lines.append(f"held out {self.held_out.describe()}")
        lines += describe_texts(args, (self.data, self.held_out))
        lines.append(repeats_note("a batch", self.batch_records, len(self.data)))
        return "\n".join(filter(None, [*lines, self.note]))

    @torch.no_grad()
    def evaluate(self) -> StepLog:
        """-> the means of the held-out records, if there are any, which the processes share; no rows."""
        if self.held_out is None:
            return {}, {}
        sums = Metrics()
        world = self.world
        with world.all_or_none():
            items = [self.held_out[i] for i in world.share_of(range(len(self.held_out)))]
            lengths = [self.tokens(item) for item in items]

            def measure(rows):
                part = [items[i] for i in rows]
                sums.merge(self.loss(part, self.loss_counts(part), "eval")[1])

            each_micro_batch(lengths, tokens_per_forward(world.device), measure, "evaluation")
        return self.summarise(sums.means(world)), {}


def train(session: Session) -> None:
    """All steps of a run of stage 1 or 2."""
    for step in session.steps():
        with session.nothing_learned():  # a wrong record: the run is saved, then it ends
            items = session.records(step)
        session.conclude(learn(session.run, step, items), {})


def learn(run: SupervisedRun, step: int, items: Items) -> dict[str, float]:
    """One step: gradients of this process' items, sum over processes, optimizer step -> {name: number}."""
    world = run.world
    start = time.perf_counter()
    lengths = [run.tokens(item) for item in items]
    counts = [*run.loss_counts(items), sum(lengths)]
    *totals, tokens = world.sum(
        torch.tensor(counts, dtype=torch.float64, device=fp64_device(world.device))
    ).tolist()

    train_state = run.train_states["model"]
    source = GradientSource(lengths, lambda rows: run.loss([items[i] for i in rows], totals))
    means = run.updater.gradients([source]).means(world)
    taken = run.updater.step("model", means["train/loss"], step)
    run.updater.after_minibatch([taken])
    seconds = time.perf_counter() - start
    return means | {
        "train/grad_norm": taken.norm,
        "train/learning_rate": train_state.learning_rate(step),
        "train/skipped_steps": float(not taken.finite),
        "perf/step_seconds": seconds,
        "perf/samples_per_second": run.args.batch_size * world.size / seconds,
        "perf/tokens_per_second": tokens / seconds,
    }
