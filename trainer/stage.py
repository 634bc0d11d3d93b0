"""What the two stages before PPO share: flags, the loop over steps, logging, evaluation, saving, going on.

    for each batch of records:                       the same whatever the number of processes
        for each micro-batch, cut by tokens:         halved where memory runs out
            loss, summed and divided by what the whole batch has of tokens or pairs
            backward
        sum gradients over processes, clip, step     AdamW, warm-up, cosine down to a tenth
        log, evaluate, save

A script is a ``Stage`` with a loss, a measure for the held-out records and a result.
"""

import math
import time
from pathlib import Path

import torch
from torch.optim import AdamW
from torch.utils.data import Subset

from dataset.order import PromptBatches, next_batch, prompt_loader
from errors import InputError
from trainer import ppo
from trainer.checkpoints import Progress
from trainer.distributed import init_world
from trainer.evaluation import share_of
from trainer.interrupt import StopRequest
from trainer.keeping import begin, record, save
from trainer.memory import each_micro_batch, keep_freed_memory
from trainer.precision import set_precision
from trainer.record import micro_batches, tokens_per_pass
from trainer.run_folder import short_hash, weights_hash
from trainer.scoring import prepare
from trainer.stepping import gradients_that_fit, step_if_finite
from trainer.tracking import Metrics

ROOT = Path(__file__).resolve().parents[1]


def add_flags(p, **defaults):
    """The flags that both stages have, after those of their own."""
    # data
    p.add_argument("--system_prompt", default="", help="system message of every conversation that has none")
    p.add_argument("--prompt_template", default="", help="text with {prompt}, Jinja, or a file of either")
    p.add_argument("--eval_size", type=int, default=256, help="or so many of the last records; 0: none")
    p.add_argument(
        "--max_seq_len", type=int, default=256, help="longest conversation in tokens; longer: dropped"
    )
    p.add_argument("--num_workers", type=int, default=0, help="data loader processes")
    # optimisation
    p.add_argument("--epochs", type=int, default=3, help="passes over the records")
    p.add_argument("--max_steps", type=int, default=0, help="stop after so many batches; 0: by --epochs")
    p.add_argument("--batch_size", type=int, default=32, help="records a step, per process")
    p.add_argument("--learning_rate", type=float, default=1e-3, help="at its highest; cosine down to a tenth")
    p.add_argument("--warmup_ratio", type=float, default=0.05, help="share of the steps that it rises before")
    p.add_argument("--weight_decay", type=float, default=0.1, help="of matrices; gains and biases have none")
    p.add_argument("--grad_clip", type=float, default=1.0, help="largest gradient norm")
    # machine
    p.add_argument("--device", default="", help="cpu, cuda, cuda:1; default: a GPU where there is one")
    p.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="mixed precision")
    p.add_argument("--ddp", action="store_true", help="insist on having been started by torchrun")
    p.add_argument("--gradient_checkpointing", type=int, default=0, choices=[0, 1], help="saves memory")
    p.add_argument("--seed", type=int, default=42, help="of new weights and the order of records")
    # output
    p.add_argument("--out_dir", default=str(ROOT / "out"), help="where everything is written")
    p.add_argument("--hf_dir", default="", help="where the Hugging Face directory is written instead")
    p.add_argument("--run_name", default="", help="folder of this run; default: <stage>_1, <stage>_2, …")
    p.add_argument("--resume", default="", help="auto, or a run or checkpoint folder")
    p.add_argument("--log_interval", type=int, default=50, help="steps between printed lines")
    p.add_argument("--save_interval", type=int, default=200, help="steps between checkpoints")
    p.add_argument("--keep_checkpoints", type=int, default=2, help="newest checkpoints kept")
    p.add_argument("--eval_interval", type=int, default=200, help="steps between evaluations; 0: ends only")
    p.add_argument("--use_wandb", action="store_true", help="log to SwanLab as well")
    p.add_argument("--wandb_project", default="small-lm-ppo", help="SwanLab project")
    p.set_defaults(**defaults)


class Stage:
    """A run of either script: what ``keeping`` asks of one, and what the loop below needs.

    ``modules`` are what is trained, by file name, the ``model`` first. ``data``, ``held_out``: Subsets of
    datasets, the latter None without evaluation. Subclasses have ``script``, ``look`` and

        weigh(items)           -> [numbers] that losses are divided by, summed over processes first
        tokens(item)           -> how many tokens an item costs
        loss(items, totals)    -> a micro-batch's share of the batch's loss, Metrics under train/
        measure(items)         -> Metrics under eval/, and summarise(means) what is shown of them
        save_result(), results(), complete()
    """

    judged_by_name = frozenset()

    def __init__(self, args, world, tokenizer, modules, data, held_out):
        self.args, self.world, self.tokenizer, self.modules = args, world, tokenizer, modules
        self.data, self.held_out, self.model = data, held_out, modules["model"]
        self.dtype = set_precision(args.dtype, world.device)
        keep_freed_memory()
        self.trained = torch.nn.ModuleList(modules.values()).to(world.device).eval()  # no dropout, as in PPO
        self.before = weights_hash(self.trained)
        prepare(self.model.base_model, args.gradient_checkpointing)
        parameters = [p for p in self.trained.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": args.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizers = {"optimizer": AdamW(groups, args.learning_rate, betas=(0.9, 0.95), fused=True)}
        steps = math.ceil(args.epochs * len(data) / (args.batch_size * world.size))
        self.total_steps = min(steps, args.max_steps or steps)
        self.progress = Progress(token_budget=tokens_per_pass(world.device))
        self.evaluated = None  # the held-out items of this process, once they have been made

    def fingerprints(self):
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        return {
            "model": self.before,
            "tokenizer": short_hash([vocabulary, self.tokenizer.chat_template]),
            "data_path": short_hash([self.data.dataset.fingerprint, len(self.data)]),
        }

    def summarise(self, means):
        return means

    def complete(self):
        """Called once after the last step, on all processes."""

    def about(self):
        """What a run is made of, in a few lines."""
        size, kind = sum(p.numel() for p in self.model.parameters()) / 1e6, self.model.config.model_type
        held_out = "" if self.held_out is None else f"{len(self.held_out)} "
        held_out += "of them " if held_out and not self.args.eval_data_path else ""
        return (
            f"model    {self.args.model or 'random weights'}: {size:.2f}M parameters, {kind}\n"
            f"data     {self.args.data_path}: {self.data.dataset.describe()}"
            + (f", {held_out}held out" if held_out else "")
        )


def split(args, load):
    """Flags -> (training records, held-out records or None), as Subsets. load(path) -> a dataset.

    Held out are the records of --eval_data_path, or else the last --eval_size."""
    data, kept = load(args.data_path), 0
    held_out = load(args.eval_data_path) if args.eval_data_path else None
    if held_out is not None:
        held_out = Subset(held_out, range(len(held_out)))
    elif args.eval_size:
        kept = args.eval_size
        if kept >= len(data):
            raise InputError(
                f"--eval_size {kept}: leaves nothing to train on of the {len(data)} records in "
                f"{args.data_path}; lower it"
            )
        data.hold_out(kept)
        held_out = Subset(data, range(len(data) - kept, len(data)))
    return Subset(data, range(len(data) - kept)), held_out


def backward(stage, items, lengths, totals, token_budget):
    """Gradients of this process' part of a batch, micro-batch by micro-batch -> Metrics."""
    sums = Metrics()
    for index in micro_batches(lengths, token_budget):
        loss, metrics = stage.loss([items[i] for i in index], totals)
        loss.backward()
        sums.merge(metrics)
    for p in stage.trained.parameters():  # an expert that no token has reached decays as with two processes
        p.grad = torch.zeros_like(p) if p.grad is None and p.requires_grad else p.grad
    return sums


def learn(stage, step, items):
    """One step -> metrics."""
    args, world, start = stage.args, stage.world, time.perf_counter()
    lengths = [stage.tokens(item) for item in items]
    totals = [*stage.weigh(items), sum(lengths)]
    *totals, tokens = world.sum(torch.tensor(totals, dtype=torch.float64, device=world.device)).tolist()
    sums = gradients_that_fit(stage, lambda budget: backward(stage, items, lengths, totals, budget), lengths)
    means, lr = sums.means(world), learning_rate(stage, step)
    loss, (optimizer,) = means["train/loss"], stage.optimizers.values()
    finite, (norm,) = step_if_finite(stage, loss, [(stage.trained, optimizer, lr)])
    seconds = time.perf_counter() - start
    return means | {
        "train/grad_norm": norm,
        "train/learning_rate": lr,
        "train/skipped_steps": float(not finite),
        "perf/step_seconds": seconds,
        "perf/samples_per_second": args.batch_size * world.size / seconds,
        "perf/tokens_per_second": tokens / seconds,
    }


def learning_rate(stage, step):
    """A pure function of the step: there is no scheduler to save."""
    args, total = stage.args, stage.total_steps
    warmup = min(math.ceil(args.warmup_ratio * total), total - 1)
    return ppo.cosine_lr(args.learning_rate, step, total, warmup)


@torch.no_grad()
def evaluate(stage):
    """The held-out records, shared out over the processes -> {"eval/…": mean}, nothing if there are none."""
    if stage.held_out is None:
        return {}
    sums, world = Metrics(), stage.world
    with world.all_or_none():
        if stage.evaluated is None:
            stage.evaluated = share_of(stage.held_out, world)
        items = stage.evaluated
        each_micro_batch(
            [stage.tokens(item) for item in items],
            tokens_per_pass(world.device),
            lambda rows: sums.merge(stage.measure([items[i] for i in rows])),
        )
    return stage.summarise(sums.means(world))


def train(stage, tracker):
    """The loop, from where the run stands to its end, or until someone asks it to stop."""
    args, world, progress, total = stage.args, stage.world, stage.progress, stage.total_steps
    share = (args.batch_size, args.batch_size, world.rank, world.size)
    order = PromptBatches(len(stage.data), args.seed, progress.step, total, *share)
    batches = iter(prompt_loader(stage.data, order, args.num_workers))
    with StopRequest("\nstopping after this step; once more: at once\n") as stop:
        if progress.step == total:  # a run that was killed before its result was there
            save(stage, tracker)
        if progress.step == 0:
            record(stage, tracker, 0, evaluate(stage))
        for step in range(progress.step, total):
            try:
                with world.all_or_none():
                    items = next_batch(batches)
            except InputError:
                save(stage, tracker)
                raise
            metrics = learn(stage, step, items)
            world.check_identical(model=stage.trained)
            progress.step = done = step + 1
            last, signal = done == total, stop.agreed(world)
            if last or (args.eval_interval and done % args.eval_interval == 0):
                metrics |= evaluate(stage)
            record(stage, tracker, done, metrics)
            if last or signal or done % args.save_interval == 0:
                save(stage, tracker)
            if signal and not last:
                raise SystemExit(128 + signal)
        stage.complete()


def run_stage(build, args, argv):
    """From flags to the last line. build(args, world) -> a Stage."""
    with init_world(args.device, args.ddp) as world:
        with world.all_or_none():
            stage = build(args, world)
        tracker = begin(stage, stage.about(), argv)
        try:
            train(stage, tracker)
            tracker.summary(stage)
        except (InputError, SystemExit):
            tracker.stopped()
            raise
        finally:
            tracker.finish()
