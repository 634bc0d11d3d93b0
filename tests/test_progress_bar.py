"""Progress bars: seen in a real terminal while a phase is slow, gone after it; nothing elsewhere; no result
depends on them.

The terminal is a pseudo-terminal. ``shown`` does with its bytes what a terminal does.
"""

import os
import re
import struct
import subprocess
from contextlib import suppress

import pytest
from tiny import LINUX, PYTHON, ROOT, WORDS, run_files, same_run, tiny_llama, train, write_jsonl

import progress_bar
from errors import InputError
from progress_bar import phase
from trainer.compute.memory import each_micro_batch
from trainer.generation.engine import sample
from trainer.generation.sampling import noise_keys


def shown(text):
    """What a terminal has shown after each piece of this output."""
    lines, row, column, seen = [""], 0, 0, []
    for piece in re.findall(r"\x1b\[A|[\r\n]|[^\r\n\x1b]+", text):
        if piece == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\r":
            column = 0
        elif piece == "\x1b[A":
            row -= 1
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + piece + line[column + len(piece) :]
            column += len(piece)
        seen.append("\n".join(line.rstrip() for line in lines))
    return seen


def command(code):
    return [PYTHON, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"]


def run_in_terminal(code, **environment):
    """Run Python code with a pseudo-terminal as its stderr -> all that it has shown."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))  # rows, columns
    quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, **environment}}
    process = subprocess.Popen(command(code), stderr=theirs, **quiet)
    os.close(theirs)
    said = b""
    with suppress(OSError):  # the other end is closed
        while piece := os.read(ours, 1 << 16):
            said += piece
    os.close(ours)
    assert process.wait(timeout=600) == 0, said
    return shown(said.decode())


SLOW = """
import time
import progress_bar
from progress_bar import phase
progress_bar.DELAY, progress_bar.TICK = 0.2, 0.05
with phase("outside", 2, "parts") as outer:
    for _ in range(2):
        with phase("inside", 3, "things") as bar:
            for _ in range(3):
                time.sleep(0.15)
                bar.update()
        outer.update()
"""
SHORT = "import time\nfrom progress_bar import phase\nwith phase('short', 1, 'things'): time.sleep(1)"


@pytest.mark.skipif(not LINUX, reason="a pseudo-terminal")
def test_a_slow_phase_of_the_main_process_shows_its_bar_and_takes_it_away():
    seen = run_in_terminal(SLOW, RANK="0")
    bar = r"inside: +67%.* 2/3 \[00:0\d<00:0\d, .* things/s\]"
    assert any(re.search(bar, text) for text in seen)
    assert any(re.search(rf"outside: +50%.* 1/2 .*\n.*{bar}", text) for text in seen)
    assert seen[-1].strip() == ""
    assert run_in_terminal(SLOW, RANK="1") == run_in_terminal(SHORT) == []


def test_without_a_terminal_nothing_is_printed():
    done = subprocess.run(command(SLOW), capture_output=True, text=True, check=True)
    assert done.stderr == done.stdout == ""


@pytest.fixture
def phases(monkeypatch):
    """Bars are drawn as if stderr were a terminal, of short phases too -> the phases that have ended."""
    begun, ended = [], []

    class Watched(progress_bar.tqdm):
        def __init__(self, **more):
            super().__init__(**more | {"disable": False})
            self.counts = [0]
            begun.append(self)

        def update(self, n=1):
            super().update(n)
            self.counts.append(self.n)

        def close(self):
            super().close()
            if self in begun:
                begun.remove(self)
                ended.append(self)

    monkeypatch.setattr(progress_bar, "tqdm", Watched)
    monkeypatch.setattr(progress_bar, "DELAY", 0.0)
    monkeypatch.setattr(progress_bar, "TICK", 0.002)
    yield ended
    assert begun == []  # none is left over, so that no bar stays


def test_a_run_shows_all_its_phases_and_is_the_same_bit_for_bit(tmp_path, request, capsys):
    held_out = [{"prompt": f"a {word}", "answer": "a"} for word in WORDS]
    files = run_files(tmp_path) | {"eval_data_path": write_jsonl(tmp_path / "eval.jsonl", held_out)}
    sizes = {"batch_size": 8, "mini_batch_size": 4, "ppo_epochs": 2, "max_gen_len": 6, "max_steps": 2}
    sizes |= {"critic_warmup_steps": 0, "run_name": "r"}
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
    assert names.count("sampling") == 2 + 2 + 2 * 2  # the first ones check the policy and look for the format
    assert names.count("log-probs") == 2 * 2  # old actor and reference
    assert names.count("reward model") == 6
    assert all(this.n == this.total or this.desc.startswith("lines of") for this in ended)
    assert "updates" in capsys.readouterr().err


def test_sampling_counts_responses_as_they_end(phases):
    sample(tiny_llama(10, spread=2.0), [[3, 4]] * 40, noise_keys(0, 0, range(40)), [0], 12, 1.0, slots=8)
    (seen,) = (this.counts for this in phases if this.desc == "sampling")
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 40)
    assert len(set(seen)) > 5


def test_a_phase_that_fails_takes_its_bar_away_and_halved_micro_batches_are_counted_once(phases):
    def work(rows):
        if len(rows) > 2:
            raise RuntimeError("out of memory")

    with pytest.raises(InputError), phase("a phase", 3, "things"):
        raise InputError("it fails")
    each_micro_batch([10] * 16, 1000, work, "scoring")
    assert [(this.desc, this.n, this.total) for this in phases] == [("a phase", 0, 3), ("scoring", 16, 16)]
