"""pytest set-up: one thread per test (the models are too small for two), and the slowest files first."""

import gc
import importlib
import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the processes that tests start: sums depend on threads

import forks
import pytest

# The slowest files, which run first: a file stays on one worker, and no worker should end with a slow one.
LONGEST = """
processes resume fuzz families whole_step stages sharding trackers report faults logprobs cli cuda_decode
engine loss_options chat judge reward_server thinking missing_eos closed_form summary export stops
best benchmarks
"""


def pytest_configure(config):
    """Before any test file is imported. The process that only hands out tests to others imports no torch."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    # Whether there is a GPU is asked without CUDA, which a forked process could not use any more.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, at the first product
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # GPU kernels run in Triton's interpreter, on CPU tensors
    torch.set_num_threads(1)


def pytest_collection_finish():
    """Not earlier: where the trainer cannot be imported, each file that imports it says so."""
    if sys.platform == "linux" and "trainer.train_ppo" in sys.modules:
        forks.begin()


def pytest_collection_modifyitems(items):
    order = {f"test_{name}": place for place, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(scope="module", autouse=True)
def no_pictures_unless_asked(request):
    """See forks.py."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "PICTURES", False):
            patch.setenv(forks.WITHOUT, "1")
            patch.setitem(sys.modules, forks.PLOTS, forks.NO_PLOTS)
        yield


@pytest.fixture(scope="module", autouse=True)
def objects_of_earlier_tests(request):
    """A run looks for garbage several times, and at its end takes all objects out of what is frozen
    (trainer/loop.py). What pytest and earlier tests still hold, far more than the run, stays frozen here, so
    that no run looks through it. A file that tests this says so: ``UNFREEZES = True``."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "UNFREEZES", False):
            patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    from tiny import run_files

    return run_files(tmp_path_factory.mktemp("files"))


@pytest.fixture
def benchmark(monkeypatch, pytestconfig):
    """A function: the name of a file in benchmarks/ -> the module."""
    monkeypatch.syspath_prepend(str(pytestconfig.rootpath / "benchmarks"))
    return importlib.import_module
