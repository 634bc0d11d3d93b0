"""pytest set-up: one thread per test (the models are too small for two), and the slowest files first."""

import gc
import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the processes that tests start: sums depend on threads

import pictures
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # GPU kernels run in Triton's interpreter, on CPU tensors
torch.set_num_threads(1)

# The slowest files, which run first: a file stays on one worker, and no worker should end with a slow one.
LONGEST = [
    "processes",
    "checkpoints",
    "closed_form",
    "fuzz",
    "export",
    "cpu_kernels",
    "chat",
    "stages",
    "real_data",
    "faults",
    "families",
    "memory_plan",
    "cuda_decode",
    "sharding",
    "trackers",
    "cuda_compiles",
    "offline_runs",
]


def pytest_collection_modifyitems(items):
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(Path(item.fspath).stem, len(order)))


@pytest.fixture(scope="module", autouse=True)
def no_pictures_unless_asked(request):
    """See pictures.py."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "PICTURES", False):
            patch.setenv(pictures.WITHOUT, "1")
            pictures.leave_out(patch.setattr)
        yield


@pytest.fixture(scope="module", autouse=True)
def objects_of_other_files():
    """A run looks for garbage several times (trainer/runs/log_and_save.py). What pytest and the tests of
    other files have made, far more than the run itself, is not looked through each time."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def objects_of_earlier_tests():
    """The same again: the run of an earlier test has taken it back when it ended."""
    gc.freeze()
