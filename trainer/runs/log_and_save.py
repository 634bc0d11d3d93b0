"""Logging a step, saving a checkpoint and the result, and the end of a run: after the last step, by a signal,
by an error.

Only the main process writes. If it cannot write, all processes end with its error.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from errors import InputError
from trainer.compute.threads import sleep_when_busy
from trainer.runs import checkpoints
from trainer.runs.base import Run
from trainer.runs.displays import Rows
from trainer.runs.run_logger import NullLogger, RunLogger
from trainer.runs.signals import StopRequest

Logger = RunLogger | NullLogger


def log_step(run: Run, logger: Logger, step: int, metrics: dict[str, float], rows: Rows) -> None:
    """Log a step's metrics and {file: rows to keep}. The loop (loop.py) calls it between two steps."""
    gc.collect()  # see ``collected_between_steps``
    with run.world.all_or_none():
        logger.log(step, metrics, rows)


def save(run: Run, logger: Logger) -> None:
    """Save a checkpoint, unless this step already has one, and the result: the files that users load."""
    step = run.progress.step
    if not step:  # nothing has been learned, and an earlier run's result may be there
        return
    if run.saved_step != step:
        with run.world.all_or_none():
            logger.flush()
        checkpoints.save(run)
    with run.world.all_or_none(), run.gathered():
        if run.world.is_main:
            run.save_result()
    run.saved_step = step


@contextmanager
def collected_between_steps() -> Iterator[None]:
    """In this block Python's garbage collector works between two steps only. Afterwards it is as before.

    By itself it works whenever enough new objects were made: in the middle of a step, while a GPU waits.
    ``log_step`` calls it, and it then looks only at objects that the run has made since it began to train:
    models and data stay as long as the run.
    """
    before = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if before:
            gc.enable()


@contextmanager
def ending(run: Run, logger: Logger) -> Iterator[None]:
    """After this block, in which a run trains, the summary is written. If it stops early, by bad input or a
    signal, say how to go on too. The log files are closed in any case."""
    try:
        with sleep_when_busy(run.world.device.type), collected_between_steps():
            yield
        logger.summary()
    except (InputError, SystemExit):
        with StopRequest():  # torchrun ends the other processes of a run when one has died
            logger.stopped()
        raise
    finally:
        logger.finish()
