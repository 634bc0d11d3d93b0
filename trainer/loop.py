"""The loop of all three scripts: batch after batch, in the order of the seed; log, evaluate, save, stop.

A script gives four functions:

    build(args, world, start) -> its ``Run``
    collect(run, step, batches)  -> what the step learns from. InputError where a record or a reward is wrong:
                                    then the run is saved and ends
    learn(run, step, batch)      -> (metrics, {file: rows to keep})
    evaluate(run)                -> the same two of an evaluation

Only the main process writes. If it cannot write, all processes end with its error.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dataset.data_order import global_batch, record_loader
from errors import InputError
from progress_bar import Start
from trainer.compute.threads import sleep_when_busy
from trainer.flags import Flags
from trainer.runs import checkpoints
from trainer.runs.base import Run
from trainer.runs.displays import Rows, StepLog
from trainer.runs.distributed import World, init_world
from trainer.runs.resume import RunFolder, write_config
from trainer.runs.run_logger import NullLogger, RunLogger
from trainer.runs.signals import StopRequest

Logger = RunLogger | NullLogger


def build_and_train(
    build: Callable[[Flags, World, Start], Run],
    given: Flags,
    collect: Callable,
    learn: Callable[..., StepLog],
    evaluate: Callable[..., StepLog],
) -> None:
    """All that a script does: from where the run stands to its end, or until someone asks it to stop or a
    reward fails. given: the flags."""
    with init_world(given.device, given.ddp) as world, sleep_when_busy(world.device.type):
        with Start() as start:
            with world.all_or_none():
                run = build(given, world, start)
            logger = start_or_resume(run, start)
        args = run.args
        run.restore_best(logger)
        progress = run.progress  # that of the checkpoint, if there is one
        steps = range(progress.step, run.total_steps)
        order = (  # shuffled anew in each epoch; every ``size``-th record of a batch is this process'
            global_batch(len(run.data), args.seed, step, run.batch_records)[world.rank :: world.size]
            for step in steps
        )
        loader = record_loader(run.data, order, args.num_workers)
        stopping = StopRequest("\nstopping after this step; a second signal stops at once\n")
        with ending(run, logger), loader as batches, stopping as stop:
            if progress.step == run.total_steps:  # a run that was killed before its last result was there
                save(run, logger)
            if progress.step == 0:
                run.begin(logger)
                metrics, rows = timed(evaluate, run)
                conclude_step(run, logger, metrics, rows)
            for step in steps:
                try:
                    batch = collect(run, step, batches)
                except InputError:
                    save(run, logger)
                    raise
                metrics, rows = learn(run, step, batch)
                world.check_identical(**{name: learner.model for name, learner in run.learners.items()})
                done = step + 1
                progress.step = done  # from here on: log, save and the best count it
                last = done == run.total_steps
                logger.show(done, metrics, rows)  # at once: an evaluation may take minutes
                signal = stop.agreed(world)
                end: BaseException | None = SystemExit(128 + signal) if signal and not last else None
                if last or (args.eval_interval and done % args.eval_interval == 0):
                    try:
                        found, shown = timed(evaluate, run)
                        metrics |= found
                        rows |= shown
                    except InputError as error:  # a reward failed: first log and save what has been learned
                        end = error
                conclude_step(run, logger, metrics, rows)
                if last or end or done % args.save_interval == 0:
                    save(run, logger)
                if end:
                    raise end


# ---------------------------------------------------------------------------------- begin, log, save, end


def start_or_resume(run: Run, start: Start) -> Logger:
    """Choose and lock the run folder, load its checkpoint into the run if there is one -> the run's logger.
    With it the start is over.

    Raises InputError, having changed nothing, if the folder is in use or holds another run.
    """
    args = run.args
    world = run.world
    folder = None
    start.part("folder")
    with world.all_or_none():
        if world.is_main:
            folder = RunFolder(args.out_dir, args.run_name, args.resume, run.display.folder, run.outputs)
            write_config(run, folder)
    run.folder = world.from_main(folder.path if folder else Path())
    checkpoint = world.from_main(folder and folder.checkpoint)
    about = run.about()
    run.prepare()
    logger: Logger = NullLogger()
    with world.all_or_none():
        if checkpoint:
            checkpoints.load(checkpoint, run)
        line = start.end()
        run.start_seconds = start.total
        if folder:
            checkpoints.tidy(folder.path, run.progress.step)
            logger = RunLogger(folder, run)
    logger.introduce(about)
    logger.say(line)
    return logger


def conclude_step(run: Run, logger: Logger, metrics: dict[str, float], rows: Rows) -> None:
    """Log a step's metrics and {file: rows to keep}, then keep its weights if its evaluation is the best so
    far. It is called between two steps."""
    gc.collect()  # see ``collected_between_steps``
    with run.world.all_or_none():
        logger.log(run.progress.step, metrics, rows)
    run.keep_best(metrics, logger)


def timed(evaluate: Callable[..., StepLog], run: Run) -> StepLog:
    """``evaluate`` of a run, which counts its seconds."""
    start = time.perf_counter()
    try:
        return evaluate(run)
    finally:
        run.evaluation_seconds += time.perf_counter() - start


def save(run: Run, logger: Logger) -> None:
    """Save a checkpoint, unless this step already has one, and the result: the files that users load."""
    step = run.progress.step
    if not step:  # nothing has been learned, and an earlier run's result may be there
        return
    if run.saved_step != step:
        with run.world.all_or_none():
            logger.flush()
        checkpoints.save(run)
    with run.world.all_or_none():
        logger.keep_choice("saved", True)
        run.save_result(logger)
    run.saved_step = step


@contextmanager
def collected_between_steps() -> Iterator[None]:
    """In this block Python's garbage collector works between two steps only.

    By itself it works whenever enough new objects were made: in the middle of a step, while a GPU waits.
    ``conclude_step`` calls it, and it then looks only at objects that the run has made since it began to
    train: models and data stay as long as the run.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


@contextmanager
def ending(run: Run, logger: Logger) -> Iterator[None]:
    """After this block, in which a run trains, the summary is written. If it stops early, by bad input or a
    signal, say how to go on too. The log files are closed in any case."""
    try:
        with collected_between_steps():
            yield
        logger.summary()
    except (InputError, SystemExit):
        with StopRequest():  # torchrun ends the other processes of a run when one has died
            logger.stopped()
        raise
    finally:
        logger.finish()
