"""Progress bars of long work, below the bar of the run: what is being done, how much of it, the time left.

    with phase("sampling", 128, "responses") as bar:
        bar.update()                                    after each response

A phase that takes longer than ``DELAY`` gets a bar with its next count; the bar goes away when it ends.
So short phases show nothing, and no result depends on any of this. Nothing is shown where stderr is no
terminal, and under torchrun only the process of rank 0 shows anything.
"""

import os
import time

import psutil
from tqdm import tqdm

DELAY = 2.0  # seconds that a phase takes before it gets a bar


def phase(what: str, total: int, unit: str) -> tqdm:
    """While this block runs, a bar shows its progress, of which the block tells it with ``update(count)``.

    what: the name of the work; total: how much there is of it, in ``unit``.
    """
    return tqdm(
        total=total,
        desc=what,
        unit=f" {unit}",
        leave=False,
        delay=DELAY,
        miniters=0,
        disable=os.environ.get("RANK", "0") != "0" or None,  # None: where stderr is no terminal
    )


def process_seconds() -> float:
    """The seconds since this process began."""
    return max(0.0, time.time() - psutil.Process().create_time())


class Start:
    """The start of a run, part by part: a bar shows which part it is, a line at the end how long each took.

    with Start() as start:
        start.part("data")                              what is done until the next part begins
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name = "imports"
        self._since = psutil.Process().create_time()
        self._bar = phase("start", total=0, unit="parts")
        self._bar.bar_format = "{desc}, {elapsed}"

    def part(self, name: str) -> None:
        """What is done from here on."""
        now = time.time()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        self._name = name
        self._since = now
        self._bar.set_description_str(f"start: {name}", refresh=False)
        self._bar.update(0)

    def end(self) -> str:
        """The start is over -> a line that says how long it took."""
        self.part("")
        self._bar.close()
        parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.seconds.items())
        return f"start    {self.total:.0f} s: {parts}"

    @property
    def total(self) -> float:
        """The seconds from the beginning of the process to the newest part."""
        return sum(self.seconds.values())

    def __enter__(self) -> "Start":
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.close()
