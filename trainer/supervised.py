"""What stages 1 and 2 (train_sft.py, train_reward.py) share: how a step learns, evaluation, saving.

    for each batch of records:                       the same records whatever the number of processes
        for each micro-batch, cut by tokens:         halved if memory runs out
            loss, a sum divided by the number of tokens or pairs of the whole batch
            backward
        sum gradients over processes, clip, step     AdamW; learning rate: warm-up, cosine down to a tenth
        log, evaluate, save                          loop.py

A script adds a subclass of ``SupervisedRun`` with its loss, its evaluation and its result.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import Subset

from dataset.data_order import next_batch
from dataset.formats import Keys
from errors import InputError
from model.loading import load_policy, most_positions
from trainer.about_run import describe_texts
from trainer.compute.batching import tokens_per_pass
from trainer.compute.loss_scale import LossScale
from trainer.compute.memory import each_micro_batch, keep_freed_memory
from trainer.compute.precision import check_range, set_precision
from trainer.compute.scoring import BalanceLoss, prepare_training
from trainer.inputs import check_policy, choose_rates, load_trained_tokenizer
from trainer.loop import build_and_train
from trainer.runs.adamw import make_optimizer
from trainer.runs.base import Learner, Progress, Run, Stateful
from trainer.runs.distributed import share_of
from trainer.runs.metrics import Metrics
from trainer.runs.optimizer_step import gradients_that_fit, note_steps, step_if_finite
from trainer.runs.resume import short_hash, weights_hash

EVAL_SIZE = 256  # records held out where no flag says otherwise, at most a tenth of all


class SupervisedRun(Run):
    """A run of stage 1 or 2: what every run has, and what a step below needs.

    data, held_out: Subsets of datasets of items; held_out is None without evaluation. Subclasses have
    ``script``, ``display``, ``rate`` (a kind of ``suited_rate``), ``dataset`` (a class or function) and

        new_model()            -> a policy with random weights, where --model is not given
        start_from(policy)     -> {file name: module}, all that is trained, "model" first
        loss_counts(items)           -> [numbers] by which losses are divided, once summed over processes
        loss(items, totals)    -> (a micro-batch's share of the batch's loss, Metrics named train/…);
                                  totals: the numbers of ``loss_counts``, summed
        measure(items)         -> Metrics named eval/…
        summarise(means)       -> the evaluation's metrics, made of the means of ``measure``
        save_result()          writes the result with every checkpoint
        results()              -> lines of text that name the result
    """

    def __init__(self, args, world):
        """Flags -> the run, with all inputs checked. Raises InputError."""
        args, self.tokenizer = load_trained_tokenizer(args)
        self.args = args
        self.world = world
        self.mini_batch_size = args.batch_size
        if args.model:
            policy = load_policy(args.model, args.trust_remote_code)
        else:
            policy = self.new_model()
        check_policy(args, policy, self.tokenizer)
        self.data, self.held_out = split_records(args, self.dataset, self.tokenizer)
        self.parts = self.start_from(policy)
        self.model = self.parts["model"]
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
        self.trained = (
            torch.nn.ModuleList(self.parts.values()).to(world.device).eval()
        )  # no dropout, as in PPO
        self.balance = BalanceLoss(self.model)
        prepare_training(self.model.base_model, args.gradient_checkpointing)
        parameters = [p for p in self.trained.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": args.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        args, _, self.note = choose_rates(args, {"learning_rate": (self.rate, self.trained)})
        self.args = args
        self.optimizer = make_optimizer(
            groups, args.learning_rate, args.moments_dtype, args.seed, betas=(0.9, 0.95)
        )
        steps = math.ceil(args.epochs * len(self.data) / (args.batch_size * world.size))
        self.total_steps = min(steps, args.max_steps or steps)
        learner = Learner(
            model=self.trained,
            optimizer=self.optimizer,
            peak=args.learning_rate,
            total_steps=self.total_steps,
            warmup_steps=min(math.ceil(args.warmup_ratio * self.total_steps), self.total_steps - 1),
        )
        self.learners = {"model": learner}
        self.loss_scale = LossScale(self.dtype)
        self.progress = Progress(token_budget=tokens_per_pass(world.device))

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        return self.parts

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {"optimizer": self.optimizer}

    @property
    def states(self) -> dict[str, Stateful]:
        return {"loss_scale": self.loss_scale}

    def tokens(self, item):
        """The number of tokens of an item, which is lists of ids and one thing more."""
        return sum(len(ids) for ids in item[:-1])

    def fingerprints(self):
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        return {
            "model": weights_hash(self.trained),
            "tokenizer": short_hash([vocabulary, self.tokenizer.chat_template]),
            "data_path": short_hash([self.data.dataset.fingerprint, len(self.data)]),
        }

    def summarise(self, means):
        return means

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


def split_records(args, dataset: Callable, tokenizer) -> tuple[Subset, Subset | None]:
    """Flags -> (training records, held-out records or None), as Subsets.

    The held-out records are those of --eval_data_path, or else the last --eval_size of --data_path, which are
    then not trained on. Raises InputError if that leaves none to train on.
    """
    sides = [getattr(args, name, "") for name in ("chosen_key", "rejected_key")]

    def load(path):
        keys = Keys(args.prompt_key, args.answer_key, *sides)
        return dataset(path, tokenizer, args.max_seq_len, args.system_prompt, keys)

    data = load(args.data_path)
    if args.eval_data_path:
        held_out = load(args.eval_data_path)
        return Subset(data, range(len(data))), Subset(held_out, range(len(held_out)))
    kept = min(EVAL_SIZE, len(data) // 10) if args.eval_size is None else args.eval_size
    first = len(data) - kept
    if first <= 0:
        raise InputError(
            f"--eval_size {kept}: leaves nothing to train on, there are only {len(data)} records in "
            f"{args.data_path}; lower it"
        )
    data.hold_out(kept)
    return Subset(data, range(first)), Subset(data, range(first, len(data))) if kept else None


def collect(run, step, batches, positions):
    """-> the items of the next batch that this process learns from."""
    with run.world.all_or_none():
        return next_batch(batches)


def learn(run: SupervisedRun, step: int, items: list) -> tuple[dict[str, float], dict]:
    """One step: gradients of this process' items, sum over processes, optimizer step -> {name: number}, and
    no rows to keep."""
    world = run.world
    start = time.perf_counter()
    lengths = [run.tokens(item) for item in items]
    counts = [*run.loss_counts(items), sum(lengths)]
    *totals, tokens = world.sum(torch.tensor(counts, dtype=torch.float64, device=world.device)).tolist()

    learner = run.learners["model"]
    source = (lengths, lambda rows: run.loss([items[i] for i in rows], totals))
    means = gradients_that_fit(run, [source]).means(world)
    for p in run.trained.parameters():
        if p.grad is None:  # of an expert that no token reached
            p.grad = torch.zeros_like(p)
    taken = step_if_finite(run, learner, means["train/loss"], step)
    note_steps(run, [taken])
    seconds = time.perf_counter() - start
    return means | {
        "train/grad_norm": taken.norm,
        "train/learning_rate": learner.learning_rate(step),
        "train/skipped_steps": float(not taken.finite),
        "perf/step_seconds": seconds,
        "perf/samples_per_second": run.args.batch_size * world.size / seconds,
        "perf/tokens_per_second": tokens / seconds,
    }, {}


@torch.no_grad()
def evaluate(run: SupervisedRun, metrics: dict, rows: dict) -> tuple[dict, dict]:
    """Metrics and rows of a step -> these, and with them the means of the held-out records, if there are any,
    which the processes share."""
    if run.held_out is None:
        return metrics, rows
    sums = Metrics()
    world = run.world
    with world.all_or_none():
        items = share_of(run.held_out, world)
        each_micro_batch(
            [run.tokens(item) for item in items],
            tokens_per_pass(world.device),
            lambda rows: sums.merge(run.measure([items[i] for i in rows])),
            "evaluation",
        )
    return metrics | run.summarise(sums.means(world)), rows


def train(build: Callable, args, argv) -> None:
    """All that a script does. build(args, world) -> a ``SupervisedRun``."""
    build_and_train(build, args, argv, collect, learn, evaluate)
