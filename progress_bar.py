"""Progress bars of long work, below the bar of the run: what is being done, how much of it, the time left.

    with phase("sampling", 128, "responses") as bar:
        bar.done += 1                                   after each response

The work only counts. A thread draws, every ``TICK`` seconds, the phases that have taken longer than
``DELAY``; a bar goes away when its phase ends. So short phases show nothing, a phase that cannot count shows
its time, and no result depends on any of this. Nothing is shown where stderr is no terminal, and under
torchrun only the process of rank 0 shows anything.
"""

import contextlib
import os
import sys
import threading
import time

from tqdm import tqdm

DELAY = 2.0  # seconds that a phase takes before it gets a bar
TICK = 0.5  # seconds between two drawings

_phases = []  # those that go on, the outermost first
_lock = threading.Lock()  # of that list and of the bars
_drawing = None  # the thread, once there is one


class Phase:
    """Work that goes on: its name, how much there is of it (None: it cannot be counted), how much is done."""

    def __init__(self, what, total, unit):
        self.what, self.total, self.unit, self.done = what, total, unit, 0
        self.begun, self.bar = time.time(), None

    def draw(self):
        """Draw the bar as it is now."""
        if self.bar is None:
            scaled = self.unit == "B"  # bytes, as 1.2M
            unit = self.unit if scaled else f" {self.unit}"
            form = "{desc}: {elapsed}" if self.total is None else None
            self.bar = tqdm(
                total=self.total, desc=self.what, unit=unit, unit_scale=scaled, leave=False, bar_format=form
            )
            self.bar.start_t = self.begun
        self.bar.n = self.done
        self.bar.refresh()


@contextlib.contextmanager
def phase(what, total=None, unit=""):
    """While this block runs, a bar shows its progress -> ``Phase``, whose ``done`` the block raises.

    what: the name of the work; total: how much there is of it, in ``unit``; without a total only the time is
    shown.
    """
    this = Phase(what, total, unit)
    if not _is_shown():
        yield this
        return
    _start_drawing()
    with _lock:
        _phases.append(this)
    try:
        yield this
    finally:
        with _lock:
            _phases.remove(this)
            if this.bar is not None:
                this.bar.close()


def _is_shown():
    """Whether this process shows bars: it is the main one, and stderr is a terminal."""
    return os.environ.get("RANK", "0") == "0" and sys.stderr is not None and sys.stderr.isatty()


def _start_drawing():
    """Start the thread that draws, once in each process: a forked one has none."""
    global _drawing
    if _drawing is None or not _drawing.is_alive():
        _drawing = threading.Thread(target=_draw_for_ever, name="progress bars", daemon=True)
        _drawing.start()


def _draw_for_ever():
    while True:
        time.sleep(TICK)
        with _lock:
            for this in _phases:
                if time.time() - this.begun >= DELAY:
                    this.draw()
