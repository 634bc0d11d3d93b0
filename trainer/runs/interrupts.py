"""Ctrl-C and SIGTERM: the first signal is remembered, and the program stops at the next safe place.

Training stops after the current step, once a checkpoint is saved; chat.py stops between two tokens of an
answer. A second signal ends the process at once.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress

# In seconds. Under torchrun, another signal within this time counts as the first one: the terminal sends
# Ctrl-C to all processes, and torchrun then sends them a signal as well.
ECHO = 2.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)

_masks = threading.local()


def _hold_signals():
    _masks.old = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _release_signals():
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.old)


def _forget_requests():
    """Undo ``StopRequest`` in a process that was forked, by a reward function or a data loader.

    SIGTERM then ends that process, and it ignores Ctrl-C, which its parent handles. Signals are blocked
    during the fork, because Python loses a signal that arrives in the new process right after it.
    """
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), StopRequest):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _release_signals()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=_hold_signals, after_in_parent=_release_signals, after_in_child=_forget_requests
    )


class StopRequest:
    """While its ``with`` block runs, the first SIGINT or SIGTERM is remembered instead of obeyed.

    reply: the text that is printed when it arrives. A second signal ends the process at once.
    """

    def __init__(self, reply=""):
        self._reply = reply
        self._signal = 0
        self._time = 0.0
        self._echo = ECHO if "WORLD_SIZE" in os.environ else 0.0

    def __enter__(self):
        self._old = {n: signal.signal(n, self._note) for n in SIGNALS}
        return self

    def _note(self, number, frame):
        if not self._signal:
            self._signal = number
            self._time = time.monotonic()
            with suppress(OSError):  # stderr may be closed
                os.write(2, self._reply.encode())  # print is not safe in a signal handler
        elif time.monotonic() - self._time > self._echo:
            os._exit(128 + number)  # not sys.exit, which would wait for threads and other processes

    def agreed(self, world):
        """The number of the signal that any process got, 0 if none did. All processes must call it."""
        return max(world.gather(self._signal))

    def obey(self):
        """Raise what the signal would have raised. Call it where stopping is safe."""
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal:
            sys.exit(128 + self._signal)

    def __exit__(self, *exception):
        for number, handler in self._old.items():
            signal.signal(number, handler)
