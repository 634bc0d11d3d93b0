"""Everything to run where there is a GPU, in this order: its tests, then its benchmarks, in 25 minutes.

    python benchmarks gpu                           # all parts
    python benchmarks gpu tests generation          # only these
    python benchmarks gpu --minutes 9               # as many as fit; what is left is said at the end
    RESULTS=folder python benchmarks gpu            # results go into this folder

Each part is a process of its own with a time limit, and writes its results when it is done, so nothing is
lost where the time runs out. What they print is also in gpu_log.txt beside the results. Needed are torch,
transformers and pytest; TRL and vLLM are compared with where they are installed.
"""

import argparse
import os
import signal
import subprocess
import sys
import time

from common import RESULTS, ROOT, installed, table, write_results

TESTS = ["tests/gpu", *map(str, sorted(ROOT.glob("tests/*/test_cuda_*.py")))]
PYTEST = [sys.executable, "-m", "pytest", *TESTS, "-q", "-p", "no:cacheprovider", "-o", "addopts="]
PYTEST += ["-n", "4", "--dist", "loadfile"] if installed("xdist") else []  # compiling kernels takes CPUs
SECONDS = {  # a part's limit
    "tests": 300,
    "generation": 270,
    "update": 120,
    "phases": 180,
    "cards": 180,
    "end_to_end": 150,
    "memory": 60,
    "kernel_times": 100,
    "demo": 120,
}
LEAST = 40  # a part is not started with fewer seconds left


def command(part):
    return PYTEST if part == "tests" else [sys.executable, str(ROOT / "benchmarks"), part]


def run_part(part, seconds, log):
    """Run it for at most so many seconds -> "ok", "failed" or "out of time". What it prints goes to the log
    as well."""
    process = subprocess.Popen(
        command(part),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    end = time.monotonic() + seconds
    os.set_blocking(process.stdout.fileno(), False)
    while process.poll() is None and time.monotonic() < end:
        copy_output(process.stdout, log)
        time.sleep(0.2)
    done = process.poll() is not None
    if not done:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    copy_output(process.stdout, log)
    return ("ok" if process.returncode == 0 else "failed") if done else "out of time"


def copy_output(source, log):
    text = (source.read() or b"").decode("utf-8", "replace")
    if text:
        print(text, end="", flush=True)
        log.write(text)
        log.flush()


def main(argv):
    parser = argparse.ArgumentParser(prog="python benchmarks gpu", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(SECONDS)}; default: all")
    parser.add_argument("--minutes", type=float, default=25)
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(SECONDS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(SECONDS)}")
    end, results, left = time.monotonic() + 60 * args.minutes, [], []
    RESULTS.mkdir(exist_ok=True, parents=True)
    with open(RESULTS / "gpu_log.txt", "a", encoding="utf-8") as log:
        for part in args.parts or SECONDS:
            start = time.monotonic()
            if end - start < LEAST:
                left.append(part)
                continue
            verdict = run_part(part, min(SECONDS[part], end - start), log)
            seconds = round(time.monotonic() - start)
            results.append({"part": part, "seconds": seconds, "verdict": verdict})
            print(f"\n== {part}: {verdict}, {seconds} s\n", flush=True)
    print(table(results))
    write_results("gpu", {"parts": results})
    if left:
        print(f"not started, for lack of time: python benchmarks gpu {' '.join(left)}")
    if left or any(r["verdict"] != "ok" for r in results):
        raise SystemExit(1)
