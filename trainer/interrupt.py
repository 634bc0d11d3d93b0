"""Ctrl-C and SIGTERM, obeyed where it is safe: after a step, between tokens. A second one goes at once."""

import signal
import sys


class StopRequest:
    """While its ``with`` block runs, the first SIGINT or SIGTERM is remembered instead of obeyed."""

    _signal = 0

    def __enter__(self):
        self._old = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number, frame):
        if self._signal:
            sys.exit(128 + number)
        self._signal = number

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
