"""Progress bars of long work, below the bar of the run: what is being done, how much of it, the time left.

    with phase("sampling", 128, "responses") as bar:
        bar.done += 1                                   after each response

A phase that takes longer than ``DELAY`` gets a bar with its next count; the bar goes away when it ends.
So short phases show nothing, and no result depends on any of this. Work that cannot count shows its time,
which a thread draws. Nothing is shown where stderr is no terminal, and under torchrun only the process of
rank 0 shows anything.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

from tqdm import tqdm

DELAY = 2.0  # seconds that a phase takes before it gets a bar
TICK = 0.5  # seconds between two drawings


class Phase(tqdm):
    """Work that goes on; ``done``: how much of it is done."""

    @property
    def done(self) -> int:
        return self.n

    @done.setter
    def done(self, count: int) -> None:
        self.update(count - self.n)


@contextlib.contextmanager
def phase(what: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
    """While this block runs, a bar shows its progress -> ``Phase``, whose ``done`` the block raises.

    what: the name of the work; total: how much there is of it, in ``unit``; without a total only the time is
    shown.
    """
    with Phase(
        total=total,
        desc=what,
        unit=f" {unit}",
        bar_format="{desc}: {elapsed}" if total is None else None,
        leave=False,
        delay=DELAY,
        mininterval=TICK,
        miniters=0,
        disable=not is_shown(),
    ) as bar:
        if total is None:
            threading.Thread(target=_tick, args=[bar], daemon=True).start()
        yield bar


def is_shown() -> bool:
    """Whether this process shows bars: it is the main one, and stderr is a terminal."""
    return os.environ.get("RANK", "0") == "0" and sys.stderr is not None and sys.stderr.isatty()


def _tick(bar: Phase) -> None:
    """Draw a bar again and again, until it is closed."""
    while not bar.disable:
        time.sleep(TICK)
        bar.update(0)
