"""Python's garbage collector: it works between steps only, and memory does not grow."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from tiny import read_jsonl, run_files, train

from trainer.runs.distributed import World
from trainer.runs.optimizer_step import Progress
from trainer.runs.run_logger import NullLogger
from trainer.session import Session, StopRequest, collected_between_steps

UNFREEZES = True  # see conftest.py

LOOKS = """import gc, json, os
import torch

def score(prompts, responses, answers):
    if "The answer is 7." in responses:  # it is tried before the run begins
        return [0.0, 0.0]
    tensors = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
    with open(os.environ["SEEN"], "a") as file:
        file.write(json.dumps([gc.isenabled(), tensors]) + "\\n")
    return [0.1 * len(r) for r in responses]
"""


class Circle:
    def __init__(self):
        self.own = self


def test_circles_are_freed_between_steps_and_not_before():
    run = SimpleNamespace(
        world=World(0, 1, torch.device("cpu")), progress=Progress(0), keep_best=lambda *given: None
    )
    with collected_between_steps():
        assert not gc.isenabled()
        circle = Circle()
        seen = weakref.ref(circle)
        del circle
        garbage = [[] for _ in range(10_000)]  # would make Python look for garbage
        assert seen() is not None
        Session(run, run.world, NullLogger(), StopRequest())._log({}, {})
        assert seen() is None
    assert garbage
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)
    with pytest.raises(ZeroDivisionError), collected_between_steps():
        raise ZeroDivisionError
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


def test_a_run_collects_nothing_in_a_step_and_keeps_nothing(tmp_path, monkeypatch):
    """The reward function looks: the collector is off, and no tensors are left over from step to step. (In
    the third step the actor begins to train, and its optimizer makes its moments.)"""
    files = run_files(tmp_path)
    (tmp_path / "look.py").write_text(LOOKS)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    sizes = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "max_steps": 6, "epochs": 9}
    train(**files | {"reward_fn": f"{tmp_path / 'look.py'}:score"}, **sizes, out_dir=tmp_path / "out")
    enabled, tensors = zip(*read_jsonl(tmp_path / "seen"), strict=True)
    assert enabled == (False,) * 6
    assert tensors[0] > 0
    assert len(set(tensors[4:])) == 1
    assert gc.isenabled()
