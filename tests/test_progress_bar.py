"""Progress bars: seen in a real terminal while a phase is slow, gone after it; nothing elsewhere; no result
depends on them.

The terminal is a pseudo-terminal. ``Screen`` does with its bytes what a terminal does.
"""

import os
import re
import struct
import subprocess
import time

import pytest
from tiny import LINUX, PYTHON, ROOT, WORDS, run_files, same_run, tiny_llama, train, write_jsonl

import progress_bar
from errors import InputError
from progress_bar import phase
from trainer.compute.memory import each_micro_batch
from trainer.generation.engine import sample
from trainer.generation.sampling import noise_keys

in_a_terminal = pytest.mark.skipif(not LINUX, reason="a pseudo-terminal")


class Screen:
    """The lines that a terminal shows; ``seen``: what it has shown after each piece of output."""

    def __init__(self):
        self.lines, self.row, self.column, self.seen = [""], 0, 0, []

    def write(self, text):
        for piece in re.findall(r"\x1b\[A|[\r\n]|[^\r\n\x1b]+", text):
            if piece == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif piece == "\r":
                self.column = 0
            elif piece == "\x1b[A":
                self.row -= 1
            else:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + piece + line[self.column + len(piece) :]
                self.column += len(piece)
            self.seen.append("\n".join(line.rstrip() for line in self.lines))

    @property
    def text(self):
        return self.seen[-1].strip() if self.seen else ""


def run_in_terminal(code, **environment):
    """Run Python code with a pseudo-terminal as its stderr -> ``Screen``."""
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))  # rows, columns
    command = [PYTHON, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"]
    process = subprocess.Popen(
        command, stderr=theirs, stdout=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    os.close(theirs)
    screen, said = Screen(), b""
    while True:
        try:
            said += (piece := os.read(ours, 1 << 16))
        except OSError:  # the other end is closed
            break
        if not piece:
            break
    os.close(ours)
    assert process.wait(timeout=600) == 0, said
    screen.write(said.decode())
    return screen


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


@in_a_terminal
def test_a_slow_phase_shows_its_bar_and_takes_it_away():
    screen = run_in_terminal(SLOW)
    bar = r"inside: +67%.* 2/3 \[00:0\d<00:0\d, .* things/s\]"
    assert any(re.search(bar, text) for text in screen.seen)
    assert any(re.search(rf"outside: +50%.* 1/2 .*\n.*{bar}", text) for text in screen.seen)
    assert screen.text == ""


@in_a_terminal
def test_only_the_main_process_shows_bars():
    assert run_in_terminal(SLOW, RANK="1").seen == []
    assert run_in_terminal(SLOW, RANK="0").seen


def test_without_a_terminal_nothing_is_printed():
    command = [PYTHON, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SLOW}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == done.stdout == ""


@in_a_terminal
def test_a_short_phase_shows_nothing():
    code = "import time\nfrom progress_bar import phase\nwith phase('short', 1, 'things'): time.sleep(1)"
    assert run_in_terminal(code).seen == []


# ------------------------------------------------------------------------------------- the phases of a run


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


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    held_out = [{"prompt": f"a {word}", "answer": "a"} for word in WORDS]
    return run_files(folder) | {"eval_data_path": write_jsonl(folder / "eval.jsonl", held_out)}


SIZES = {"batch_size": 8, "mini_batch_size": 4, "ppo_epochs": 2, "max_gen_len": 6, "critic_warmup_steps": 0}


def test_a_run_shows_all_its_phases_and_is_the_same_bit_for_bit(files, tmp_path, request, capsys):
    train(**files, **SIZES, max_steps=2, out_dir=tmp_path / "quiet", run_name="r")
    assert capsys.readouterr().err == ""
    ended = request.getfixturevalue("phases")
    train(**files, **SIZES, max_steps=2, out_dir=tmp_path / "shown", run_name="r")
    same_run(tmp_path / "quiet" / "r", tmp_path / "shown" / "r", 2)
    names = [this.desc for this in ended if this.total != 0]  # one asks for the names of the scores
    for name, count, total in (
        (f"tokens of {files['data_path']}", 1, 40),
        ("updates", 2, 4),  # PPO epochs times minibatches
        ("values", 2, 8),
        ("evaluation", 2, 16),  # sampled and greedy
    ):
        assert [this.total for this in ended if this.desc == name] == [total] * count, name
    assert names.count("sampling") == 2 + 2 + 2 * 2  # the first ones check the policy and look for the format
    assert names.count("log-probs") == 2 * 2  # old actor and reference
    assert names.count("reward model") == 6
    for this in ended:
        assert this.n == this.total or this.desc.startswith("lines of"), this.desc
    assert "updates" in capsys.readouterr().err


def test_sampling_counts_responses_as_they_end(files, phases):
    sample(tiny_llama(10, spread=2.0), [[3, 4]] * 40, noise_keys(0, 0, range(40)), [0], 12, 1.0, slots=8)
    (seen,) = (this.counts for this in phases if this.desc == "sampling")
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] == 40
    assert len(set(seen)) > 5


def test_a_phase_that_fails_takes_its_bar_away(files, phases):
    with pytest.raises(InputError), phase("a phase", 3, "things"):
        raise InputError("it fails")
    assert [this.desc for this in phases] == ["a phase"]


def test_a_micro_batch_that_is_halved_is_counted_once(phases):
    def work(rows):
        if len(rows) > 2:
            raise RuntimeError("out of memory")

    each_micro_batch([10] * 16, 1000, work, "scoring")
    assert [(this.desc, this.n, this.total) for this in phases] == [("scoring", 16, 16)]


def test_a_phase_costs_less_than_a_millisecond(phases):
    """A step has about ten of them; a step of the demo takes half a second."""
    count = 400
    seconds = []
    for _ in range(5):  # the least counts: other programs may take the CPU in between
        start = time.process_time()
        for _ in range(count):
            with phase("short", 3, "things") as bar:
                bar.update()
        seconds.append((time.process_time() - start) / count)
    assert min(seconds) < 1e-3
