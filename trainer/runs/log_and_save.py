"""Logging a step, saving a checkpoint and the result, and the end of a run.

Only the main process writes. If it cannot write, all processes end with its error.
"""

import gc
import time
from contextlib import contextmanager

from atomic_files import last_written
from errors import InputError, SaidElsewhere
from trainer.compute.threads import sleep_when_busy
from trainer.runs import checkpoints
from trainer.runs.interrupts import StopRequest

BROKEN = 3  # exit code of a run that --strict_health has ended


def log_step(run, logger, step, metrics, rows):
    """Log a step's metrics and {file: rows to keep}. Every script calls it between two steps."""
    gc.collect()  # see ``collected_between_steps``
    with run.world.all_or_none():
        logger.log(step, metrics, rows)


def save(run, logger):
    """Save a checkpoint, unless this step already has one, and the result: the files that users load."""
    if not run.progress.step:  # nothing has been learned, and an earlier run's result may be there
        return
    start = time.perf_counter()
    main = run.world.is_main
    due = main and logger.saved_step != run.progress.step and logger.folder.path
    if folder := run.world.from_main(due):
        with run.world.all_or_none():
            if main:
                logger.flush()
        checkpoints.save(folder, run, main and logger.folder.config, run.args.keep_checkpoints)
    with run.world.all_or_none(), run.gathered():
        if main:
            if last_written(run.result_file) not in (None, logger.result_time):
                logger.say(
                    f"note: {run.result_file}: another run has written it while this one goes on, and this "
                    "one replaces it; give each run its own --out_dir. The other run writes its own again "
                    "with --resume"
                )
            run.save_result()
            logger.result_time = last_written(run.result_file)
            logger.saved_step = run.progress.step
            logger.saving_seconds += time.perf_counter() - start


def end_if_broken(run, logger):
    """With --strict_health 1, end a run in which a finding of level "wrong" has begun (health.py): save it
    and raise InputError with exit code ``BROKEN`` on all processes. Findings of before a resume do not count.
    """
    finding = getattr(run.args, "strict_health", 0) and run.world.gather(logger.broken)[0]
    if finding:
        save(run, logger)
        error = (InputError if run.world.is_main else SaidElsewhere)(
            f"--strict_health 1: ended by {finding.name}, wrong since step {finding.step}; "
            "its line above and docs/health.md say what to try"
        )
        error.code = BROKEN
        error.agreed = True
        raise error


@contextmanager
def collected_between_steps():
    """In this block Python's garbage collector works between two steps only. Afterwards it is as before.

    By itself it looks through all objects whenever enough new ones were made: in the middle of a step, while
    a GPU waits for the next operations. ``log_step`` calls it, and it then looks only at objects that the run
    has made since it began to train: models and data stay as long as the run.
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


def run_to_the_end(run, logger, train):
    """Call ``train(run, logger)`` and write the summary. If the run stops early, by bad input or a signal,
    say how to go on too. The log files are closed in any case."""
    try:
        with sleep_when_busy(run.world.device), collected_between_steps():
            train(run, logger)
        logger.summary()
    except (InputError, SystemExit):
        with StopRequest():  # torchrun ends the other processes of a run when one has died
            logger.stopped()
        raise
    finally:
        logger.finish()
