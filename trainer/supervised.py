"""What stages 1 and 2 (train_sft.py, train_reward.py) share: training loop, evaluation, saving.

    for each batch of records:                       the same records whatever the number of processes
        for each micro-batch, cut by tokens:         halved if memory runs out
            loss, a sum divided by the number of tokens or pairs of the whole batch
            backward
        sum gradients over processes, clip, step     AdamW; learning rate: warm-up, cosine down to a tenth
        log, evaluate, save

A script adds a subclass of ``SupervisedRun`` with its loss, its evaluation and its result.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import Subset

from dataset.data_order import RecordBatches, next_batch, record_loader
from dataset.formats import Keys
from errors import InputError
from model.loading import most_positions
from progress_bar import phase
from trainer.about_run import describe_texts
from trainer.compute.batching import micro_batches, tokens_per_pass
from trainer.compute.loss_scale import LossScale
from trainer.compute.memory import each_micro_batch, keep_freed_memory
from trainer.compute.precision import check_range, set_precision
from trainer.compute.scoring import BalanceLoss, prepare_training
from trainer.inputs import choose_rates
from trainer.runs.adamw import make_optimizer
from trainer.runs.checkpoints import Progress
from trainer.runs.distributed import init_world, share_of
from trainer.runs.interrupts import StopRequest
from trainer.runs.log_and_save import log_step, run_to_the_end, save
from trainer.runs.metrics import Metrics
from trainer.runs.optimizer_step import Learner, gradients_that_fit, note_steps, step_if_finite
from trainer.runs.resume import short_hash, start_or_resume, weights_hash

EVAL_SIZE = 256  # records held out where no flag says otherwise, at most a tenth of all


class SupervisedRun:
    """A run of stage 1 or 2: what every run has (runs/resume.py), and what the loop below needs.

    modules: {file name: module}, all that is trained, "model" first. data, held_out: Subsets of datasets of
    items; held_out is None without evaluation. Subclasses have ``script``, ``display``, ``rate`` (a kind of
    ``suited_rate``) and

        tokens(item)           -> the number of tokens of an item
        loss_counts(items)           -> [numbers] by which losses are divided, once summed over processes
        loss(items, totals)    -> (a micro-batch's share of the batch's loss, Metrics named train/…);
                                  totals: the numbers of ``loss_counts``, summed
        measure(items)         -> Metrics named eval/…
        summarise(means)       -> the evaluation's metrics, made of the means of ``measure``
        save_result()          writes the result with every checkpoint
        results()              -> lines of text that name the result
        complete()             called once after the last step, on all processes
    """

    files = ()
    best_metric = ""  # the weights of the best evaluation are not kept
    held_out_pairs = None
    in_step = None  # nothing is sharded

    def __init__(self, args, world, tokenizer, modules, data, held_out):
        self.args = args
        self.flags = args.declared
        self.world = world
        self.tokenizer = tokenizer
        self.modules = modules
        self.model = modules["model"]
        self.data = data
        self.held_out = held_out
        limit = most_positions(self.model.config)
        if args.max_seq_len > limit:
            raise InputError(
                f"--max_seq_len {args.max_seq_len}: {args.model} has {limit} positions; lower it"
            )
        if args.model and Path(args.model).resolve() in (self.hf_dir.resolve(), self.result_file.resolve()):
            raise InputError(
                f"--model {args.model}: this run would write its result there; copy it elsewhere"
            )
        self.dtype = set_precision(args.dtype, world.device, args.deterministic)
        keep_freed_memory()
        check_range(self.model, self.dtype, f"--model {args.model}: ")
        self.trained = torch.nn.ModuleList(modules.values()).to(world.device).eval()  # no dropout, as in PPO
        self.balance = BalanceLoss(self.model)
        prepare_training(self.model.base_model, args.gradient_checkpointing)
        self.parameters = [p for p in self.trained.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2], "weight_decay": args.weight_decay},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        _, self.note = choose_rates(args, {"learning_rate": (self.rate, self.trained)})
        optimizer = make_optimizer(
            groups, args.learning_rate, args.moments_dtype, args.seed, betas=(0.9, 0.95)
        )
        self.optimizers = {"optimizer": optimizer}
        steps = math.ceil(args.epochs * len(data) / (args.batch_size * world.size))
        self.total_steps = min(steps, args.max_steps or steps)
        self.learner = Learner(
            model=self.trained,
            scorer=None,
            optimizer=optimizer,
            peak=args.learning_rate,
            total_steps=self.total_steps,
            warmup_steps=min(math.ceil(args.warmup_ratio * self.total_steps), self.total_steps - 1),
        )
        self.loss_scale = LossScale(self.dtype)
        self.states = {"loss_scale": self.loss_scale}
        self.progress = Progress(token_budget=tokens_per_pass(world.device))
        self.evaluated = None  # the held-out items of this process, made by the first evaluation

    def fingerprints(self):
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        return {
            "model": weights_hash(self.trained),
            "tokenizer": short_hash([vocabulary, self.tokenizer.chat_template]),
            "data_path": short_hash([self.data.dataset.fingerprint, len(self.data)]),
        }

    def facts(self):
        return {}

    def summarise(self, means):
        return means

    def about_best(self):
        return ""

    def gathered(self):
        """The weights are whole in every process, so nothing has to be gathered before they are saved."""
        return contextlib.nullcontext()

    def prepare(self):
        """Nothing is left to do before a checkpoint is loaded."""

    def complete(self):
        """Called once after the last step, on all processes."""

    def about(self):
        """Lines that describe the run: its model and its data."""
        args = self.args
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        kind = self.model.config.model_type
        lines = [
            f"model    {args.model or 'random weights'}: {size:.2f}M parameters, {kind}",
            f"data     {args.data_path}: {self.data.dataset.describe()}",
        ]
        if self.held_out:
            of_them = "" if args.eval_data_path else "of them "
            lines[-1] += f", {len(self.held_out)} {of_them}held out"
        datasets = dict.fromkeys(part.dataset for part in (self.data, self.held_out) if part)
        lines += describe_texts(args, datasets)
        return "\n".join(filter(None, [*lines, self.note]))


def split_records(args, kind: Callable, tokenizer, keys: Keys) -> tuple[Subset, Subset | None]:
    """Flags -> (training records, held-out records or None), as Subsets. kind: of dataset.

    The held-out records are those of --eval_data_path, or else the last --eval_size of --data_path, which are
    then not trained on. Raises InputError if that leaves none to train on.
    """

    def load(path):
        return kind(path, tokenizer, args.max_seq_len, args.system_prompt, keys)

    data = load(args.data_path)
    if args.eval_data_path:
        held_out = load(args.eval_data_path)
        return Subset(data, range(len(data))), Subset(held_out, range(len(held_out)))
    kept = min(EVAL_SIZE, len(data) // 10) if args.eval_size is None else args.eval_size
    if not kept:
        return Subset(data, range(len(data))), None
    first = len(data) - kept
    if first <= 0:
        raise InputError(
            f"--eval_size {kept}: leaves nothing to train on, there are only {len(data)} records in "
            f"{args.data_path}; lower it"
        )
    data.hold_out(kept)
    return Subset(data, range(first)), Subset(data, range(first, len(data)))


def backward(run, items, lengths, totals, token_budget):
    """Compute the gradients of this process' part of a batch, micro-batch by micro-batch -> Metrics."""
    sums = Metrics()
    with phase("gradients", len(lengths), "sequences") as bar:
        for index in micro_batches(lengths, token_budget):
            loss, metrics = run.loss([items[i] for i in index], totals)
            run.loss_scale.scaled(loss).backward()
            sums.merge(metrics)
            bar.done += len(index)
    for p in run.parameters:
        if p.grad is None:  # of an expert that no token reached
            p.grad = torch.zeros_like(p)
    return sums


def learn(run: SupervisedRun, step: int, items: list) -> dict[str, float]:
    """One step: gradients of this process' items, sum over processes, optimizer step -> {name: number}."""
    args = run.args
    world = run.world
    start = time.perf_counter()
    lengths = [run.tokens(item) for item in items]
    totals = [*run.loss_counts(items), sum(lengths)]
    *totals, tokens = world.sum(torch.tensor(totals, dtype=torch.float64, device=world.device)).tolist()
    sums = gradients_that_fit(run, lambda budget: backward(run, items, lengths, totals, budget), lengths)
    means = sums.means(world)
    taken = step_if_finite(run, run.learner, means["train/loss"], step)
    note_steps(run, [taken])
    seconds = time.perf_counter() - start
    return means | {
        "train/grad_norm": taken.norm,
        "train/learning_rate": run.learner.learning_rate(step),
        "train/skipped_steps": float(not taken.finite),
        "perf/step_seconds": seconds,
        "perf/samples_per_second": args.batch_size * world.size / seconds,
        "perf/tokens_per_second": tokens / seconds,
    }


@torch.no_grad()
def evaluate(run: SupervisedRun) -> dict[str, float]:
    """Evaluate on the held-out records, shared between the processes -> {"eval/…": mean}, {} without any."""
    if run.held_out is None:
        return {}
    sums = Metrics()
    world = run.world
    with world.all_or_none():
        run.evaluated = items = run.evaluated or share_of(run.held_out, world)
        each_micro_batch(
            [run.tokens(item) for item in items],
            tokens_per_pass(world.device),
            lambda rows: sums.merge(run.measure([items[i] for i in rows])),
            "evaluation",
        )
    return run.summarise(sums.means(world))


def train(run: SupervisedRun, logger) -> None:
    """The training loop, from the step after ``run.progress.step`` to the end, or until Ctrl-C or SIGTERM."""
    args = run.args
    world = run.world
    progress = run.progress
    total = run.total_steps
    size = args.batch_size
    order = RecordBatches(len(run.data), args.seed, progress.step, total, size, size, world.rank, world.size)
    stopping = StopRequest("\nstopping after this step; a second signal stops at once\n")
    with record_loader(run.data, order, args.num_workers) as batches, stopping as stop:
        if progress.step == total:  # killed between the last checkpoint and the result
            save(run, logger)
        if progress.step == 0:
            log_step(run, logger, 0, evaluate(run))
        for step in range(progress.step, total):
            try:
                with world.all_or_none():
                    items = next_batch(batches)
            except InputError:
                save(run, logger)
                raise
            metrics = learn(run, step, items)
            world.check_identical(model=run.trained)
            progress.step = done = step + 1
            last = done == total
            signal = stop.agreed(world)
            if last or (args.eval_interval and done % args.eval_interval == 0):
                metrics |= evaluate(run)
            log_step(run, logger, done, metrics)
            if last or signal or done % args.save_interval == 0:
                save(run, logger)
            if signal and not last:
                raise SystemExit(128 + signal)
        run.complete()


def run_stage(build, args, argv):
    """Build, train and log a run: all that a script does. build(args, world) -> a SupervisedRun; argv: its
    command line, None: the process' own."""
    with init_world(args.device, args.ddp) as world:
        with world.all_or_none():
            run = build(args, world)
        logger = start_or_resume(run, run.about(), sys.argv[1:] if argv is None else argv)
        run_to_the_end(run, logger, train)
