"""Whole runs that must come out alike: in one process or in two, stopped and resumed or not."""

import shutil

import pytest
from test_invariants import ALONE
from tiny import finish, flags, launch_two, load_weights, read_jsonl, same_run

from trainer import train_ppo
from trainer.run import PpoRun

# fp32 on a CPU, rates at which a few steps change the weights; run folder "r"
EXACT = {"device": "cpu", "dtype": "float32", "run_name": "r", "log_interval": 1000, "epochs": 99}
EXACT |= {"learning_rate": 1e-3, "save_interval": 2}
CRITIC = {"critic_learning_rate": 1e-3, "critic_warmup_steps": 1}


def sizes(responses):
    """The flags of a batch of so many responses in a process, in two minibatches."""
    return {"batch_size": responses, "mini_batch_size": responses // 2}


def built(files, **values):
    return PpoRun(train_ppo.parse_args(flags(**{**files, **values})), ALONE)


def run_in_two_processes(argv):
    for process in launch_two([*argv, "--ddp"]):
        finish(process)


def resumed_is_the_same(whole, argv, out_dir, last):
    """AssertionError unless a run without its ``last`` checkpoint, resumed in ``out_dir``, becomes what
    ``whole``, the folder of a run that never stopped, is."""
    run = shutil.copytree(whole, out_dir / "r")
    shutil.rmtree(run / "checkpoints" / f"step_{last}")
    train_ppo.main([*argv, "--resume", "auto"])
    same_run(whole, run, last)


def same_weights(one, two, step, names=("actor",), most=1e-5):
    """AssertionError where a weight of two run folders' checkpoints differs by more than ``most``."""
    for name in names:
        left, right = (load_weights(folder, step, name) for folder in (one, two))
        assert max((left[key] - right[key]).abs().max().item() for key in left) <= most, name


def same_metrics(one, two, names=None, but=("perf/",), **close):
    """AssertionError unless the lines of two run folders have the same metrics, and ``names`` of them, or all
    that do not begin with one of ``but``, are close. close: of pytest.approx."""
    lines = (read_jsonl(folder / "metrics.jsonl") for folder in (one, two))
    for a, b in zip(*lines, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() & names if names else [n for n in a if not n.startswith(but)]:
            close_to = b[name] if b[name] is None else pytest.approx(b[name], **close)
            assert a[name] == close_to, (a["step"], name)
