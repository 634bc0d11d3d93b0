"""pytest set-up: one thread per test (the models are too small for two), and the slowest files first."""

import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the processes that tests start: sums depend on threads

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # GPU kernels run in Triton's interpreter, on CPU tensors
torch.set_num_threads(1)

# The slowest files, which run first: a file stays on one worker, and no worker should end with a slow one.
LONGEST = [
    "processes",
    "gradient_sums",
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
