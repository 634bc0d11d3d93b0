"""Windows and macOS: the scripts without what only Linux or Unix has, and paths with all kinds of letters."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiny import ROOT, WORDS, flags, read_jsonl, run_files, same_run, write_jsonl

import atomic_files
from trainer import train_ppo
from trainer.compute.cpu import kernels

HIDDEN = Path(__file__).parent / "without_unix"
SIZES = {"max_steps": 3, "batch_size": 4, "device": "cpu", "eval_interval": 0, "dtype": "float32"}
PPO = {"mini_batch_size": 4, "max_gen_len": 4, "critic_warmup_steps": 0, "run_name": "r"}

# The first argument is the repository; then the arguments of one script after another, each after its name.
DRIVER = """
import sys
root, *words = sys.argv[1:]
sys.path.insert(0, root)
import os, signal, importlib
assert not hasattr(os, "fork") and not hasattr(signal, "SIGALRM")
try:
    import fcntl
    sys.exit("fcntl is there")
except ImportError:
    pass
from errors import run_script
starts = [i for i, word in enumerate(words) if word.startswith("script=")]
for i, j in zip(starts, [*starts[1:], len(words)]):
    script = importlib.import_module(words[i].removeprefix("script="))
    run_script(lambda: script.main(words[i + 1 : j]))
from trainer.compute.cpu import kernels
assert kernels.library() is None
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the code, and the files of a run, in a folder whose name is not ASCII."""
    folder = tmp_path_factory.mktemp("platforms") / "mein Ördner 模型"
    skip = shutil.ignore_patterns(".*", "__pycache__", "demo", "out", "tests", "docs", "benchmarks", "shared")
    return shutil.copytree(ROOT, folder, ignore=skip)


def run(folder, argv, code=0, **environment):
    """Run Python without what is Unix's, its output in a code page without Chinese -> (stdout, stderr)."""
    environment |= {"PYTHONPATH": str(HIDDEN), "PYTHONIOENCODING": "cp1252"}
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, *argv], cwd=folder, env=env, capture_output=True, timeout=600)
    out, err = (text.decode("cp1252") for text in (done.stdout, done.stderr))
    assert done.returncode == code, f"{out}\n{err}"
    assert "Traceback" not in err
    return out, err


@pytest.mark.slow
def test_every_script_runs_without_what_only_unix_has(folder):
    files, out = run_files(folder), folder / "out dir"
    said = [{"prompt": " ".join(WORDS[n % 8 :]) or "a", "answer": WORDS[-n % 8]} for n in range(16)]
    pairs = [{**r, "chosen": r["answer"], "rejected": "a a b"} for r in said]
    stage = {**SIZES, "model": files["model"], "out_dir": out, "eval_size": 4}
    sft = flags(**stage, data_path=write_jsonl(folder / "sft.jsonl", said))
    reward = flags(**stage, data_path=write_jsonl(folder / "pairs.jsonl", pairs))
    made = {"model": out / "full_sft_32.pth", "reward_model": out / "reward_32", "reward_timeout": 30}
    ppo = flags(**{**SIZES, **PPO, **files, **made, "out_dir": out})
    chat = flags(model=out / "ppo_actor_32.pth", prompt="a b", max_gen_len=4, device="cpu")
    scripts = {"train_sft": sft, "train_reward": reward, "train_ppo": ppo}
    words = [w for name, argv in scripts.items() for w in (f"script=trainer.{name}", *argv)]
    run(folder, ["-c", DRIVER, str(folder), *words, "script=chat", *chat])
    assert [m["step"] for m in read_jsonl(out / "r" / "metrics.jsonl")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_run_is_saved_resumed_and_the_same_as_on_linux(folder, tmp_path, monkeypatch):
    """On the real command line; what stands in for Unix changes no number."""
    files = {**SIZES, **PPO, **run_files(folder)}
    argv = ["trainer/train_ppo.py", *flags(**files, out_dir=folder / "out")]
    fault = {"FAULT": "raise ValueError('no')", "FAULT_AT": "3"}
    out, err = run(folder, argv, code=2, **fault)
    assert "ValueError: no at " in err
    assert "saved: " in out and "rdner" in out  # the letters that cp1252 lacks are question marks
    run(folder, [*argv, "--resume", "auto"])
    monkeypatch.setattr(kernels, "library", lambda: None)
    train_ppo.main(flags(**files, out_dir=tmp_path))
    same_run(folder / "out" / "r", tmp_path / "r", step=3)


# Python code for another process: it locks, says so, and waits to be killed.
HOLD = """import atomic_files, pathlib, sys, time
with atomic_files.one_at_a_time(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_lock_ends_with_its_process(tmp_path):
    """Of a run that another process holds: test_resume.py."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def enter():
        with atomic_files.one_at_a_time(tmp_path):
            pass

    waiter = threading.Thread(target=enter)
    try:
        assert process.stdout.readline() == "locked\n"
        waiter.start()
        waiter.join(0.3)
        assert waiter.is_alive()
    finally:
        process.kill()
        process.communicate()
    waiter.join(60)
    assert not waiter.is_alive()
    assert not (tmp_path.parent / f".{tmp_path.name}.lock").exists()  # nothing is left beside a result


def test_where_folders_cannot_be_flushed_files_are(tmp_path, monkeypatch):
    """Windows opens no folder, and flushes only what is open for writing."""
    opened = []
    synced = []
    real = os.open

    def noted(path, flags):
        opened.append((path, flags))
        return real(path, flags)

    monkeypatch.delattr(os, "O_DIRECTORY", raising=False)
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(os, "open", noted)
    atomic_files.write_whole(tmp_path / "a", "text")
    assert opened == [(tmp_path / ".a.tmp", os.O_RDWR)]
    assert len(synced) == 1
    assert (tmp_path / "a").read_text() == "text"
