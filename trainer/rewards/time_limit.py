"""The time limit of a reward (``--reward_timeout``): for the user's function and for a server's reply."""

import ctypes
import signal
import threading
import time
from contextlib import contextmanager


class TimeUp(BaseException):
    """The time is up. Not an Exception, so that ``except Exception`` in the user's code does not catch it."""


@contextmanager
def time_limit(seconds):
    """Raise TimeUp in this block after ``seconds``, and again every second after that; 0 means no limit.

    It uses SIGALRM, so it works in the main thread only. Windows has no SIGALRM. There TimeUp cannot end a
    call that waits outside Python (``time.sleep``, a socket): it is raised once that call returns.
    """
    start = time.monotonic()
    alarm = _signals if hasattr(signal, "SIGALRM") else _asynchronous_exceptions
    with alarm(seconds):
        yield
    if 0 < seconds < time.monotonic() - start:  # also if the block caught TimeUp or turned the alarm off
        raise TimeUp


@contextmanager
def _signals(seconds):
    on = [True]

    def end(number, frame):
        if on:
            raise TimeUp

    old = signal.signal(signal.SIGALRM, end)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # a very short time is up before the next line
        yield
    finally:
        on.clear()  # first, and in one instruction: the time may be up in each of the following lines
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@contextmanager
def _asynchronous_exceptions(seconds):
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    this_thread = ctypes.c_ulong(threading.get_ident())
    on = [True]
    over = threading.Event()

    def watch():
        wait = seconds
        while not over.wait(wait) and on:
            raise_in(this_thread, ctypes.py_object(TimeUp))
            wait = 1.0

    watcher = threading.Thread(target=watch, daemon=True)
    if seconds:
        watcher.start()
    try:
        yield
    finally:
        on.clear()  # first, and in one instruction: TimeUp may be raised in each of the following lines
        over.set()
        if seconds:
            watcher.join()
        raise_in(this_thread, None)  # takes back a TimeUp that was not raised yet
