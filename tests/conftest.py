"""Every test runs on one thread: the models are so small that a second one only waits for the first."""

import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start: sums depend on the threads

import torch

torch.set_num_threads(1)

# The files that take longest, first: a file stays on one worker, and none should be left alone with one.
LONGEST = [
    "processes",
    "checkpoints",
    "families",
    "closed_form",
    "real_data",
    "faults",
    "fuzz",
    "chaos",
    "chat",
    "stages",
    "export",
]


def pytest_collection_modifyitems(items):
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(Path(item.fspath).stem, len(order)))
