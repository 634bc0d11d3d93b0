"""Progress bars of long work, below the bar of the run: what is being done, how much of it, the time left.

    with phase("sampling", 128, "responses") as bar:
        bar.update()                                    after each response

A phase that takes longer than ``DELAY`` gets a bar with its next count; the bar goes away when it ends.
So short phases show nothing, and no result depends on any of this. Nothing is shown where stderr is no
terminal, and under torchrun only the process of rank 0 shows anything.
"""

import os

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
