"""Ctrl-C and SIGTERM, obeyed where it is safe: after a step, between tokens. A second one ends at once. And a
limit to the time that someone else's code may take."""

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress

ECHO = 2.0  # seconds in which, under torchrun, another signal is the same request: it passes on what all got
SIGNALS = (signal.SIGINT, signal.SIGTERM)

_masks = threading.local()


def _hold_signals():
    _masks.old = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _release_signals():
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.old)


def _forget_requests():
    """A process that a reward function or a data loader has forked shall end when it is told to, and leave
    Ctrl-C to its parent. Signals are held back meanwhile: Python loses what comes in right after a fork."""
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), StopRequest):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _release_signals()


os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_forget_requests)


class StopRequest:
    """While its ``with`` block runs, the first SIGINT or SIGTERM is remembered instead of obeyed.

    ``reply``: what whoever pressed Ctrl-C is told.
    """

    def __init__(self, reply=""):
        self._reply, self._signal, self._time = reply, 0, 0.0
        self._echo = ECHO if "WORLD_SIZE" in os.environ else 0.0

    def __enter__(self):
        self._old = {n: signal.signal(n, self._note) for n in SIGNALS}
        return self

    def _note(self, number, frame):
        if not self._signal:
            self._signal, self._time = number, time.monotonic()
            with suppress(OSError):  # nobody listens any more
                os.write(2, self._reply.encode())  # print is not safe in a signal handler
        elif time.monotonic() - self._time > self._echo:
            os._exit(128 + number)  # not sys.exit, which would wait for threads and other processes

    def agreed(self, world):
        """The signal that any process got, the same on all of them; 0 when none did."""
        return max(world.gather(self._signal))

    def obey(self):
        """Raise what the signal would have raised, at a place where it is safe."""
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal:
            sys.exit(128 + self._signal)

    def __exit__(self, *exception):
        for number, handler in self._old.items():
            signal.signal(number, handler)


class TimeUp(BaseException):
    """Not an Exception: code with a limit to its time shall not catch it by accident."""


@contextmanager
def time_limit(seconds):
    """Raise TimeUp in this block once it has taken so long, and every second from then on; 0: never. For the
    main thread only."""

    def end(number, frame):
        raise TimeUp

    old, start = signal.signal(signal.SIGALRM, end), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    if 0 < seconds < time.monotonic() - start:  # whatever the block did with the alarm
        raise TimeUp
