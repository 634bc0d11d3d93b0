"""What surrounds the loop of all three scripts: processes, run folder, log, evaluation, saving, stopping.

    with open_session(build, args) as session:        a new run, or one as its checkpoint left it
        for step in session.steps():                  those that are left
            with session.nothing_learned():           a wrong record or reward: the run is saved, then it ends
                items = session.records(step)         those of this process
            …                                         what the step learns
            session.conclude(metrics, rows)           log; evaluate, save and stop where it is time

Only the main process writes. If it cannot write, all processes end with its error. After Ctrl-C or SIGTERM a
run stops after the step, once a checkpoint is saved (``StopRequest``).
"""

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from dataset.lm_dataset import global_batch
from errors import CollectiveError, InputError
from progress_bar import Start
from trainer.compute.threads import sleep_when_busy
from trainer.flags import Flags
from trainer.runs import checkpoints
from trainer.runs.base import Run
from trainer.runs.displays import Rows, StepLog
from trainer.runs.distributed import World, init_world
from trainer.runs.resume import RunFolder, write_config
from trainer.runs.run_logger import NullLogger, RunLogger

# In seconds. Under torchrun, another signal within this time counts as the first one: the terminal sends
# Ctrl-C to all processes, and torchrun then sends them a signal as well.
ECHO = 2.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)

Logger = RunLogger | NullLogger
AnyRun = TypeVar("AnyRun", bound=Run)


# -------------------------------------------------------------------- Ctrl-C and SIGTERM


class StopRequest:
    """While its ``with`` block runs, the first SIGINT or SIGTERM is remembered instead of obeyed, and
    ``reply`` is printed: training stops after the step, once a checkpoint is saved. A second one ends the
    process at once. In processes that a reward function or a data loader forks, SIGTERM works as ever, and
    Ctrl-C is left to their parent (``forked``)."""

    def __init__(self, reply: str = "") -> None:
        self._reply = reply
        self.number = 0  # of the signal that this process got
        self._time = 0.0

    def __enter__(self) -> "StopRequest":
        self._old = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def _remember(self, number: int, frame: object) -> None:
        echo = ECHO if "WORLD_SIZE" in os.environ else 0.0
        if not self.number:
            self.number = number
            self._time = time.monotonic()
            with suppress(OSError):  # stderr may be closed
                os.write(2, self._reply.encode())  # print is not safe in a signal handler
        elif time.monotonic() - self._time > echo:
            os._exit(128 + number)  # not sys.exit, which would wait for threads and other processes

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


def forked() -> None:
    """What a new process does first. Python's own handler would never run where it hangs in a lock that a
    thread of its parent held: then nothing could end it, and ``Pool.terminate`` would wait for ever."""
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), StopRequest):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    release()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    # Held meanwhile: Python loses a signal that arrives in a new process right after the fork.
    hold = partial(signal.pthread_sigmask, signal.SIG_BLOCK, SIGNALS)
    release = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, SIGNALS)
    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=forked)


# --------------------------------------------------------------------------------------------- the steps


@dataclass
class Session(Generic[AnyRun]):
    """A run while it trains."""

    run: AnyRun
    world: World  # the processes
    logger: Logger
    stopping: StopRequest

    def steps(self) -> Iterator[int]:
        """The steps that are left. A new run is evaluated first."""
        run = self.run
        first = run.progress.step  # that of the checkpoint, if there is one
        if first == run.total_steps:  # a run that was killed before its last result was there
            self._save()
        if first == 0:
            run.begin(self.logger.say, self.logger.keep_choice)
            self._log(*self._evaluate())
        yield from range(first, run.total_steps)

    def records(self, step: int) -> list[Any]:
        """The records of a step that are this process', shuffled anew in each epoch. All processes raise
        InputError where a record of one of them is wrong."""
        run = self.run
        places = global_batch(len(run.data), run.args.seed, step, run.batch_records)
        with self.world.all_or_none():
            return [run.data[place] for place in places[self.world.rank :: self.world.size]]

    @contextmanager
    def nothing_learned(self) -> Iterator[None]:
        """In this block nothing is learned. Where a record or a reward is wrong, which ends all processes,
        the run is saved as the step before has left it."""
        try:
            yield
        except CollectiveError:
            self._save()
            raise

    def conclude(self, metrics: dict[str, float], rows: Rows) -> None:
        """A step has been made: check that all processes have the same weights, log, evaluate, save. Ends the
        run where a signal has asked for it, or where an evaluation fails."""
        run = self.run
        args = run.args
        self.world.check_identical(
            **{name: train_state.model for name, train_state in run.train_states.items()}
        )
        run.progress.step += 1  # from here on: log, save and the best count the step
        done = run.progress.step
        last = done == run.total_steps
        self.logger.show(done, metrics, rows)  # at once: an evaluation may take minutes
        number = max(self.world.gather(self.stopping.number))  # of the signal that any process got; 0: none
        end: BaseException | None = SystemExit(128 + number) if number and not last else None
        if last or (args.eval_interval and done % args.eval_interval == 0):
            try:
                eval_metrics, eval_rows = self._evaluate()
                metrics |= eval_metrics
                rows |= eval_rows
            except InputError as error:  # a reward failed: first log and save what has been learned
                end = error
        self._log(metrics, rows)
        if last or end or done % args.save_interval == 0:
            self._save()
        if end:
            raise end

    def _log(self, metrics: dict[str, float], rows: Rows) -> None:
        """Log a step's metrics and {file: rows to keep}, then keep its weights if its evaluation is the best
        so far. It is called between two steps."""
        gc.collect()  # see ``collected_between_steps``
        with self.world.all_or_none():
            self.logger.log(self.run.progress.step, metrics, rows)
        self.run.keep_best(metrics, self.logger.say)

    def _evaluate(self) -> StepLog:
        """``run.evaluate()``; the run counts its seconds."""
        start = time.perf_counter()
        try:
            return self.run.evaluate()
        finally:
            self.run.evaluation_seconds += time.perf_counter() - start

    def _save(self) -> None:
        """Save a checkpoint, unless this step already has one, and the result: the files that users load."""
        run = self.run
        step = run.progress.step
        if not step:  # nothing has been learned, and an earlier run's result may be there
            return
        if run.saved_step != step:
            with self.world.all_or_none():
                self.logger.flush()
            checkpoints.save(run)
        with self.world.all_or_none():
            self.logger.keep_choice("saved", True)
            run.save_result(self.logger.say)
        run.saved_step = step


# ------------------------------------------------------------------------------------------ begin and end


@contextmanager
def open_session(build: Callable[[Flags, World, Start], AnyRun], args: Flags) -> Iterator[Session[AnyRun]]:
    """Join the processes, build the run, resume it if asked -> the ``Session``, for a ``with`` block.

    build(args, world, start) -> the ``Run``, with all inputs checked; args: the flags. Raises InputError.
    """
    reply = "\nstopping after this step; a second signal stops at once\n"
    with init_world(args.device, args.ddp) as world, sleep_when_busy(world.device.type):
        with Start() as start:
            with world.all_or_none():
                run = build(args, world, start)
            logger = start_or_resume(run, start)
        run.restore_best(logger.say)
        with ending(run, logger), StopRequest(reply) as stopping:
            yield Session(run, world, logger, stopping)


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
    run.folder, checkpoint = world.from_main((folder.path, folder.checkpoint) if folder else (Path(), None))
    logger: Logger = NullLogger()
    with world.all_or_none():
        if checkpoint:
            checkpoints.load(checkpoint, run)
        line = start.end()
        run.start_seconds = start.total
        if folder:
            checkpoints.tidy(folder.path, run.progress.step)
            logger = RunLogger(folder, run)
    logger.introduce(run.about())
    logger.say(line)
    return logger


@contextmanager
def collected_between_steps() -> Iterator[None]:
    """In this block Python's garbage collector works between two steps only.

    By itself it works whenever enough new objects were made: in the middle of a step, while a GPU waits.
    ``Session._log`` calls it, and it then looks only at objects that the run has made since it began to
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
