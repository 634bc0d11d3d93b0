"""Ctrl-C and SIGTERM: a run stops after the step, once a checkpoint is saved; a second signal ends it at
once."""

import os
import signal
import time
from contextlib import suppress
from functools import partial

from trainer.runs.distributed import World

# In seconds. Under torchrun, another signal within this time counts as the first one: the terminal sends
# Ctrl-C to all processes, and torchrun then sends them a signal as well.
ECHO = 2.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While its ``with`` block runs, the first SIGINT or SIGTERM is remembered instead of obeyed, and
    ``reply`` is printed: training stops after the step, once a checkpoint is saved. A second one ends the
    process at once. In processes that a reward function or a data loader forks, SIGTERM works as ever, and
    Ctrl-C is left to their parent (``forked``)."""

    def __init__(self, reply: str = "") -> None:
        self._reply = reply
        self._signal = 0
        self._time = 0.0

    def __enter__(self) -> "StopRequest":
        self._old = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def _note(self, number: int, frame: object) -> None:
        echo = ECHO if "WORLD_SIZE" in os.environ else 0.0
        if not self._signal:
            self._signal = number
            self._time = time.monotonic()
            with suppress(OSError):  # stderr may be closed
                os.write(2, self._reply.encode())  # print is not safe in a signal handler
        elif time.monotonic() - self._time > echo:
            os._exit(128 + number)  # not sys.exit, which would wait for threads and other processes

    def agreed(self, world: World) -> int:
        """The number of the signal that any process got, 0 if none did. All processes must call it."""
        return max(world.gather(self._signal))

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
