"""Python's garbage collector, kept out of the steps of a run.

It looks through all objects whenever enough new ones were made: in the middle of a step, while a GPU waits
for the next operations. Here it looks once between two steps, and only at objects that the run has made since
it began to train: models and data stay as long as the run.
"""

import gc
from contextlib import contextmanager


@contextmanager
def collected_between_steps():
    """In this block nothing is collected but by ``collect_garbage``. Afterwards it is as before."""
    before = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if before:
            gc.enable()


def collect_garbage():
    """Free the objects that refer to each other in a circle; all others are freed when they are let go."""
    gc.collect()
