"""The loop of all three scripts: batch after batch, in the order of the seed; log, evaluate, save, stop.

A script gives four functions:

    build(args, world) -> its ``Run``
    collect(run, step, batches, positions) -> what the step learns from; positions: of this process' rows in
                                              the global batch. InputError where a record or a reward is
                                              wrong: then the run is saved and ends
    learn(run, step, batch)                -> (metrics, {file: rows to keep})
    evaluate(run, metrics, rows)           -> the same two, and with them what an evaluation finds
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dataset.data_order import local_positions, record_batches, record_loader
from errors import InputError
from trainer.flags import Flags
from trainer.runs.base import Run
from trainer.runs.distributed import World, init_world
from trainer.runs.log_and_save import log_step, run_to_the_end, save
from trainer.runs.resume import start_or_resume
from trainer.runs.signals import StopRequest

StepLog = tuple[dict[str, float], dict[str, list]]  # metrics of a step; {file: rows to keep}


def build_and_train(
    build: Callable[[Flags, World], Any],
    args: Flags,
    argv: Sequence[str] | None,
    collect: Callable[..., Any],
    learn: Callable[..., StepLog],
    evaluate: Callable[..., StepLog],
) -> None:
    """All that a script does. argv: the command line, None for the process' own."""

    train = partial(train_to_the_end, collect=collect, learn=learn, evaluate=evaluate)
    with init_world(args.device, args.ddp) as world:
        with world.all_or_none():
            run = build(args, world)
        logger = start_or_resume(run, run.about(), list(sys.argv[1:] if argv is None else argv))
        run.restore_best(logger)
        run_to_the_end(run, logger, train)


def train_to_the_end(
    run: Run,
    logger: Any,
    collect: Callable[..., Any],
    learn: Callable[..., StepLog],
    evaluate: Callable[..., StepLog],
) -> None:
    """From where the run stands to its end, or until someone asks it to stop or a reward fails."""
    args = run.args
    world = run.world
    progress = run.progress
    steps = range(progress.step, run.total_steps)
    positions = local_positions(args.batch_size, world.rank, world.size, run.answers)
    prompts = world.size * args.batch_size // run.answers
    order = record_batches(len(run.data), args.seed, steps, prompts, positions, run.answers)
    stopping = StopRequest("\nstopping after this step; a second signal stops at once\n")
    with record_loader(run.data, order, args.num_workers) as batches, stopping as stop:
        if progress.step == run.total_steps:  # a run that was killed before its last result was there
            save(run, logger)
        if progress.step == 0:
            run.begin(logger)
            metrics, rows = evaluate(run, {}, {})
            log_step(run, logger, 0, metrics, rows)
            run.keep_best(metrics)
        for step in steps:
            try:
                batch = collect(run, step, batches, positions)
            except InputError:
                save(run, logger)
                raise
            metrics, rows = learn(run, step, batch)
            world.check_identical(**{name: learner.model for name, learner in run.learners.items()})
            done = step + 1
            progress.step = done  # from here on: log, save and the best count it
            last = done == run.total_steps
            signal = stop.agreed(world)
            failed = None
            if last or (args.eval_interval and done % args.eval_interval == 0):
                try:
                    metrics, rows = evaluate(run, metrics, rows)
                except InputError as error:  # a reward failed: first log and save what has been learned
                    failed = error
            log_step(run, logger, done, metrics, rows)
            run.keep_best(metrics)
            if last or signal or failed or done % args.save_interval == 0:
                save(run, logger)
            if failed:
                raise failed
            if signal and not last:
                raise SystemExit(128 + signal)
