"""Python's garbage collector: it leaves alone what a run begins with, and memory does not grow."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from tiny import read_jsonl, run_files, train

from trainer.loop import collecting_new_objects, log_step
from trainer.runs.distributed import World
from trainer.runs.run_logger import NullLogger

UNFREEZES = True  # see conftest.py

LOOKS = """import gc, json, os
import torch

def score(prompts, responses, answers):
    tensors = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
    with open(os.environ["SEEN"], "a") as file:
        file.write(json.dumps(tensors) + "\\n")
    return [0.1 * len(r) for r in responses]
"""


class Circle:
    def __init__(self):
        self.own = self


def test_circles_are_freed_between_steps_and_what_was_there_before_afterwards():
    old = Circle()
    left = weakref.ref(old)
    with pytest.raises(ZeroDivisionError), collecting_new_objects():
        del old
        circle = Circle()
        seen = weakref.ref(circle)
        del circle
        log_step(SimpleNamespace(world=World(0, 1, torch.device("cpu"))), NullLogger(), 1, {}, {})
        assert seen() is None
        assert left() is not None
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert left() is None


def test_a_run_keeps_nothing_from_step_to_step(tmp_path, monkeypatch):
    """The reward function looks: no tensors are left over from step to step. (In the third step the actor
    begins to train, and its optimizer makes its moments.)"""
    files = run_files(tmp_path)
    (tmp_path / "look.py").write_text(LOOKS)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    sizes = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "max_steps": 8, "epochs": 9}
    train(**files | {"reward_fn": f"{tmp_path / 'look.py'}:score"}, **sizes, out_dir=tmp_path / "out")
    tensors = read_jsonl(tmp_path / "seen")
    assert len(tensors) == 8 and tensors[0] > 0
    assert len(set(tensors[4:])) == 1
