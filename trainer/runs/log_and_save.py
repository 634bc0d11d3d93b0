"""Logging a step, saving a checkpoint and the result, and the end of a run.

Only the main process writes. If it cannot write, all processes end with its error.
"""

import time

from errors import InputError
from trainer.compute.threads import sleep_when_busy
from trainer.runs import checkpoints


def log_step(run, logger, step, metrics, rows=()):
    """Log a step's metrics and sample rows, and keep in ``run.progress`` which evaluation was the best."""
    score, progress, sign = (
        metrics.get(run.display.best),
        run.progress,
        -1 if run.display.lower_is_better else 1,
    )
    if score is not None and (progress.best_score is None or sign * score > sign * progress.best_score):
        progress.best_score, progress.best_step = score, step
    with run.world.all_or_none():
        logger.log(step, metrics, rows)


def save(run, logger):
    """Save a checkpoint, unless this step already has one, and the result: the files that users load."""
    if not run.progress.step:  # nothing has been learned, and an earlier run's result may be there
        return
    with run.world.all_or_none():
        if run.world.is_main:
            start, folder = time.perf_counter(), logger.folder
            if logger.saved_step != run.progress.step:
                logger.flush()
                checkpoints.save(folder.path, run, folder.config, keep=run.args.keep_checkpoints)
            run.save_result()
            logger.saved_step = run.progress.step
            logger.saving_seconds += time.perf_counter() - start


def run_to_the_end(run, logger, train):
    """Call ``train(run, logger)`` and print the summary. If the run stops early, by bad input or a signal,
    say how to go on. The log files are closed in any case."""
    try:
        with sleep_when_busy(run.world.device):
            train(run, logger)
        logger.summary(run)
    except (InputError, SystemExit):
        logger.stopped()
        raise
    finally:
        logger.finish()
