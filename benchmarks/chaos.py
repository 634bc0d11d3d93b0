"""Crash test: a run that is killed again and again must end exactly like a run that is never disturbed.

    python benchmarks/chaos.py --kills 50                     # the demo, about fifteen minutes on two cores
    python benchmarks/chaos.py --kills 5 -- --model … --reward_model … --data_path …

The disturbed run saves after every step, and is resumed until it ends. A "life" is the time from one start to
the next kill. Lives end by kill -9, in turn at a random moment (loading included) and while a checkpoint or
the .pth is being written. Before some lives the newest checkpoint is damaged (a flipped bit, a truncated
file), if there is an older one. Some lives have a full disk. At the end, weights must be equal bit for bit,
and metrics.jsonl and samples.jsonl line for line, except for the times. Prints a table, writes
benchmarks/results/chaos.json, and exits with 1 if anything differs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import ROOT, read, table, write_results
from safetensors.torch import load_file

RESULTS = ("metrics.jsonl", "samples.jsonl", "eval_samples.jsonl")


def command(flags, out, *more):
    script = str(ROOT / "trainer" / "train_ppo.py")
    return [sys.executable, script, *flags, "--out_dir", str(out), "--run_name", "run", *more]


def begin(argv, log, file_limit=None):
    """Start a run -> the process. ``file_limit``: the system lets no file grow beyond this many bytes."""

    def limit():
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    return subprocess.Popen(argv, stdout=log, stderr=log, preexec_fn=limit if file_limit else None)


def being_written(out):
    """Is a file or folder being written under its temporary name?"""
    folders = (out, out / "run" / "checkpoints")
    return any(name.endswith(".tmp") for f in folders if f.is_dir() for name in os.listdir(f))


def kill_at(process, seconds):
    """kill -9 after ``seconds`` -> was the process still running?"""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    return process.wait() == -signal.SIGKILL


def kill_in_a_save(process, out, rng):
    """kill -9 up to 30 ms after the first or second save of this life has begun -> was it still running?"""
    for _ in range(rng.choice((1, 2))):
        while process.poll() is None and not being_written(out):
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.03))
    process.kill()
    return process.wait() == -signal.SIGKILL


def damage(out, rng):
    """Flip a bit of the newest checkpoint, or truncate one of its files -> what was done; '' if nothing."""
    root = out / "run" / "checkpoints"
    saved = sorted(root.glob("step_*"), key=lambda p: int(p.name[5:])) if root.is_dir() else []
    if len(saved) < 2:
        return ""
    path = rng.choice([f for f in sorted(saved[-1].iterdir()) if f.stat().st_size])
    if rng.random() < 0.5:
        os.truncate(path, rng.randrange(path.stat().st_size))
        return "truncated"
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return "bit flipped"


def undisturbed(flags, out, log):
    """Run without disturbance -> seconds until the training loop began, seconds per step, seconds in all."""
    start, metrics = time.perf_counter(), out / "run" / "metrics.jsonl"
    process = begin(command(flags, out), log)
    while not metrics.exists() and process.poll() is None:
        time.sleep(0.01)
    loading = time.perf_counter() - start
    if process.wait():
        raise SystemExit(f"error: the undisturbed run failed; see {log.name}")
    total = time.perf_counter() - start
    return loading, (total - loading) / len(records(metrics)), total


def disturbed(flags, out, kills, window, file_limit, rng, log):
    """The run with all its lives -> {fault: how often}. ``window``: random kills come within these seconds;
    ``file_limit``: the largest file, in bytes, in lives with a full disk."""
    counts = {"killed at random": 0, "killed in a save": 0, "bit flipped": 0, "truncated": 0, "disk full": 0}
    argv = command(flags, out, "--resume", "auto", "--save_interval", "1")
    while sum(counts[name] for name in ("killed at random", "killed in a save")) < kills:
        if rng.random() < 0.2 and (what := damage(out, rng)):
            counts[what] += 1
        if rng.random() < 0.1:
            if begin(argv, log, file_limit).wait() != 2:
                raise SystemExit(f"error: a full disk did not end a life with code 2; see {log.name}")
            counts["disk full"] += 1
            continue
        process = begin(argv, log)
        if counts["killed in a save"] < counts["killed at random"]:
            killed, name = kill_in_a_save(process, out, rng), "killed in a save"
        else:
            killed, name = kill_at(process, rng.uniform(0, window)), "killed at random"
        counts[name] += killed
        print(f"\r{counts}", end="", file=sys.stderr, flush=True)
        if not killed:
            if process.returncode:
                raise SystemExit(
                    f"error: a life ended by itself with code {process.returncode}; see {log.name}"
                )
            raise SystemExit(f"error: the run ended after {counts}; ask for fewer kills or a longer run")
    print(file=sys.stderr)
    if begin(argv, log).wait():
        raise SystemExit(f"error: the last life failed; see {log.name}")
    return counts


def differences(calm, storm):
    """Two run folders -> what differs between them, as a list of texts."""
    found = []
    last = max(int(p.name[5:]) for p in (calm / "checkpoints").glob("step_*"))
    for name in ("actor", "critic", "actor_optimizer", "critic_optimizer"):
        left, right = (
            load_file(r / "checkpoints" / f"step_{last}" / f"{name}.safetensors") for r in (calm, storm)
        )
        if left.keys() != right.keys() or any(not left[k].equal(right[k]) for k in left):
            found.append(f"{name} at step {last}")
    left, right = (
        [torch.load(p, weights_only=True) for p in sorted(run.parent.glob("*.pth"))] for run in (calm, storm)
    )
    if len(left) != len(right) or any(
        not a[k].equal(b[k]) for a, b in zip(left, right, strict=True) for k in a
    ):
        found.append("the .pth")
    for name in RESULTS:
        left, right = (records(run / name) for run in (calm, storm))
        if left != right:
            found.append(name)
    steps = [record["step"] for record in records(storm / "metrics.jsonl")]
    if steps != list(range(last + 1)):
        found.append(f"steps in metrics.jsonl: {steps}")
    leftovers = [str(p) for p in storm.parent.rglob("*.tmp")]
    return found + [f"left behind: {p}" for p in leftovers]


def records(path):
    """The lines of a JSONL file as dicts, without the times (``perf/…``)."""
    lines = map(json.loads, read(path).rstrip("\n").split("\n"))
    return [{name: x for name, x in line.items() if not name.startswith("perf/")} for line in lines]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="folder for both runs, which is kept; default: a temporary one")
    parser.add_argument("flags", nargs="*", help="flags of train_ppo.py, after --; default: the demo")
    args = parser.parse_args()
    folder = Path(args.folder or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with open(folder / "log.txt", "w") as log:
        loading, step, calm_seconds = undisturbed(args.flags, folder / "calm", log)
        window = loading + 2 * step
        largest = max(p.stat().st_size for p in (folder / "calm").rglob("*.safetensors"))
        rng, storm = random.Random(args.seed), folder / "storm"
        counts = disturbed(args.flags, storm, args.kills, window, largest // 2, rng, log)
    found = differences(folder / "calm" / "run", folder / "storm" / "run")
    seconds = {"undisturbed seconds": round(calm_seconds), "all seconds": round(time.perf_counter() - start)}
    result = {**counts, **seconds, "differences": ", ".join(found) or "none"}
    print(table([result]))
    if not args.flags:
        write_results("chaos", {"seed": args.seed, **result})
    if found:
        raise SystemExit(f"error: the runs differ; see {folder}")
    if not args.folder:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
