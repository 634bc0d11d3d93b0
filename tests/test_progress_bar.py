"""Progress bars: seen in a terminal while a phase is slow, gone after it; no result depends on them."""

import io
import re
import sys

import pytest
from tiny import WORDS, run_files, same_run, tiny_llama, train, write_jsonl

import progress_bar
from progress_bar import phase
from trainer.compute.memory import each_micro_batch
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys


class Terminal(io.StringIO):
    def isatty(self):
        return True


def written(stderr, rank, seconds, monkeypatch):
    """What a phase of three things, each of which takes so long, writes to stderr."""
    clock = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("RANK", rank)
    with phase("inside", 3, "things") as bar:
        for _ in range(3):
            clock[0] += seconds
            bar.update()
    return stderr.getvalue()


def test_only_a_slow_phase_of_the_main_process_in_a_terminal_shows_its_bar_and_takes_it_away(monkeypatch):
    shown = written(Terminal(), "0", 1.5, monkeypatch)
    assert re.search(r"inside: +67%.* 2/3 \[00:03<00:01, +1.50s/ things\]", shown)
    assert "33%" not in shown
    assert re.search(r"\r +\r$", shown)  # blanks over the last one
    for stderr, rank, seconds in ((Terminal(), "0", 0.5), (Terminal(), "1", 1.5), (io.StringIO(), "0", 1.5)):
        assert written(stderr, rank, seconds, monkeypatch) == ""


@pytest.fixture
def phases(monkeypatch):
    """Bars are drawn as if stderr were a terminal, of short phases too -> the phases that have ended."""
    ended = []

    class Watched(progress_bar.tqdm):
        def __init__(self, **more):
            super().__init__(**more | {"disable": False})
            self.counts = [0]

        def update(self, n=1):
            super().update(n)
            self.counts.append(self.n)

        def close(self):
            if not self.disable:  # that is, closed already
                ended.append(self)
            super().close()

    monkeypatch.setattr(progress_bar, "tqdm", Watched)
    monkeypatch.setattr(progress_bar, "DELAY", 0.0)
    return ended


def test_a_run_shows_all_its_phases_and_is_the_same_bit_for_bit(tmp_path, request, capsys):
    held_out = [{"prompt": f"a {word}", "answer": "a"} for word in WORDS]
    files = run_files(tmp_path) | {"eval_data_path": write_jsonl(tmp_path / "eval.jsonl", held_out)}
    sizes = {"batch_size": 8, "mini_batch_size": 4, "ppo_epochs": 2, "max_gen_len": 6, "max_steps": 2}
    sizes |= {"critic_warmup_steps": 0, "run_name": "r", "dtype": "float32"}
    train(**files, **sizes, out_dir=tmp_path / "quiet")
    assert capsys.readouterr().err == ""
    ended = request.getfixturevalue("phases")
    train(**files, **sizes, out_dir=tmp_path / "shown")
    same_run(tmp_path / "quiet" / "r", tmp_path / "shown" / "r", 2)
    for name, count, total in (
        (f"tokens of {files['data_path']}", 1, 40),
        ("updates", 2, 4),  # PPO epochs times minibatches
        ("values", 2, 8),
        ("evaluation", 2, 16),  # sampled and greedy
    ):
        assert [this.total for this in ended if this.desc == name] == [total] * count, name
    names = [this.desc for this in ended if this.total != 0]  # one asks for the names of the scores
    counts = [names.count(name) for name in ("sampling", "log-probs", "reward model")]
    assert counts == [1 + 2 + 2, 1 + 2, 6]  # the first one checks the policy; the reference in both steps
    assert all(this.n == this.total or this.desc.startswith("lines of") for this in ended)


def test_sampling_counts_responses_as_they_end(phases):
    sampler = Sampler(tiny_llama(10, spread=2.0), slots=8)
    sampler.sample([[3, 4]] * 40, noise_keys(0, 0, range(40)), [0], 12, 1.0)
    (seen,) = (this.counts for this in phases if this.desc == "sampling")
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 40)
    assert len(set(seen)) > 5


def test_halved_micro_batches_are_counted_once(phases):
    def work(rows):
        if len(rows) > 2:
            raise RuntimeError("out of memory")

    each_micro_batch([10] * 16, 1000, work, "scoring")
    assert [(this.desc, this.n, this.total) for this in phases] == [("scoring", 16, 16)]
