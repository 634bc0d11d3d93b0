"""Runs the user's code for many responses at a time: in threads, with a time limit, async functions too.

All jobs of one environment run in one thread, its ``Worker``: what some libraries open in a thread, sqlite3
for one, cannot be used in another. Jobs start in their order. A job keeps the next one waiting until it has
ended, or waits in the event loop, or has run for ``PATIENCE``: short ones run one after the other, as in a
plain loop, and those that wait for something else (a server, a process) run at the same time. What a job sets
for the whole process, such as the folder, is set back as soon as no job is at work.
"""

import ctypes
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import Generic, TypeVar

from trainer.user_code import as_exception, end_async, process_state, start_async

T = TypeVar("T")
PATIENCE = 0.02  # seconds
LESS_PATIENCE = 0.001  # once a job has run for longer
AT_ONCE = 32  # jobs


class Hung(Exception):
    """A job took longer than its time limit."""


class Stopped(BaseException):
    """Ends all of a job that hangs. Not an Exception: ``except Exception`` in the user's code does not catch
    it."""


class Task(Generic[T]):
    """A job, and what came of it once ``ended`` is set."""

    result: T | Exception

    def __init__(self, job: Callable[[], T]) -> None:
        self.job = job
        self.started: float | None = None  # time.monotonic()
        self.ended = Event()
        self.lets_go = Event()  # the next one may start
        self.future: Future | None = None  # of the event loop

    def run(self) -> None:
        """Do the job, in this thread."""
        self.started = time.monotonic()
        try:
            self.result = self.job()
        except BaseException as error:  # the user's code may raise anything
            self.result = as_exception(error)
        self.ended.set()
        self.lets_go.set()

    def seconds_left(self, seconds: float) -> float | None:
        """Of a time limit, None where there is none. It counts from the start."""
        if not seconds:
            return None
        return seconds if self.started is None else max(self.started + seconds - time.monotonic(), 0.0)

    def is_over(self, seconds: float) -> bool:
        """Whether it has ended or hangs."""
        return self.ended.is_set() or self.seconds_left(seconds) == 0.0


class JobThread(Thread):
    """Runs tasks one after the other, up to None. A daemon: the process may end while it hangs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        self.task: Task | None = None

    def run(self) -> None:
        with suppress(Stopped):
            while self.run_next():
                pass

    def run_next(self) -> bool:
        """Wait for the next task and run it; False for None. No reference to it is kept: it has one to the
        environment, whose ``Worker`` would never end."""
        task = self.task = self.tasks.get()
        if task:
            task.run()
        self.task = None
        return task is not None


class Worker:
    """The thread of one environment. It starts with the first job and ends with this object."""

    def __init__(self) -> None:
        self.thread: JobThread | None = None

    def start(self, task: Task) -> None:
        """Run a task in the thread, behind those that it has already."""
        if self.thread is None:
            self.thread = JobThread()
            self.thread.start()
            weakref.finalize(self, self.thread.tasks.put, None)
        self.thread.tasks.put(task)

    def abandon(self, task: Task) -> None:
        """Leave a thread whose task hangs. It ends if it computes; where it sleeps nothing can end it."""
        if self.thread and self.thread.ident:
            self.thread.tasks.put(None)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self.thread.ident), ctypes.py_object(Stopped)
            )
        if task.future:  # this wakes the thread, which then meets what ends it
            end_async(task.future)
        self.thread = None


def run_all(
    jobs: Sequence[Callable[[], T]], seconds: float, workers: Sequence[Worker] = ()
) -> list[T | Exception]:
    """Run each job -> what each returned or raised, in their order; ``Hung`` for one that took longer than
    ``seconds`` (0: no limit). workers: whose thread each runs in, no two in one; () for new ones. What the
    jobs set for the whole process is set back."""
    tasks = [Task(job) for job in jobs]
    workers = workers or [Worker() for _ in tasks]
    at_work: list[Task] = []
    patience = PATIENCE
    set_back = process_state()
    try:
        for task, worker in zip(tasks, workers, strict=True):
            while len(at_work) >= AT_ONCE:
                at_work[0].ended.wait(PATIENCE)
                at_work = [other for other in at_work if not other.is_over(seconds)]
            worker.start(task)
            if not task.lets_go.wait(patience):
                patience = LESS_PATIENCE
            at_work.append(task)
            if all(other.ended.is_set() for other in at_work):
                set_back()
        for task in tasks:
            while not task.is_over(seconds):
                task.ended.wait(task.seconds_left(seconds))
    finally:
        set_back()
    results: list[T | Exception] = []
    for task, worker in zip(tasks, workers, strict=True):
        if task.ended.is_set():
            results.append(task.result)
        else:
            results.append(Hung(f"no answer after {seconds:g} s"))
            worker.abandon(task)
    return results


def awaited(value: object) -> object:
    """What an async call of the user's ends with; anything else as it is. All that wait are at work at the
    same time."""
    if not isinstance(value, Awaitable):
        return value
    future = start_async(value)
    thread = current_thread()
    if isinstance(thread, JobThread) and thread.task:
        thread.task.future = future
        thread.task.lets_go.set()
    return future.result()
