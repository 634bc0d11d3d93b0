"""Ctrl-C and SIGTERM: finish the step, save, then go. A second one goes at once."""

import signal
import sys


class StopRequest:
    """While its ``with`` block runs, the first SIGINT or SIGTERM is remembered instead of obeyed."""

    def __enter__(self):
        self._signal = 0
        self._old = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number, frame):
        if self._signal:
            sys.exit(128 + number)
        self._signal = number

    def agreed(self, world):
        """The signal that any process got, the same on all of them; 0 when none did."""
        return max(world.gather(self._signal))

    def __exit__(self, *exception):
        for number, handler in self._old.items():
            signal.signal(number, handler)
