"""Everything to run where there is a GPU, in the order of its worth.

    python benchmarks gpu                           # all parts
    python benchmarks gpu smoke generation          # only these
    python benchmarks gpu --minutes 9               # as many as fit; what is left is said at the end
    RESULTS=folder python benchmarks gpu            # results go into this folder

What to send to us is one page, gpu.md: all tables. Beside it are all numbers, in gpu.json, and all that was
printed, in gpu_log.txt. Each part is a process of its own with a time limit. It writes its results after each
case. Where its time is up it is interrupted, and what it had is kept. Where this program is ended, its part
ends too. Needed are torch and transformers; parts that need more (tests: pytest; demo: matplotlib) are left
out where that is not installed, and so are the peers TRL and vLLM.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time

from common import RESULTS, ROOT, installed, machine, table, write_results

KERNEL_TESTS = ["tests/compute/test_layer_kernels.py", "tests/compute/test_logprobs.py"]
KERNEL_TESTS += ["tests/generation/test_cuda_decode.py", "tests/generation/test_sampling.py"]
TESTS = {"kernel_tests": KERNEL_TESTS, "tests": ["tests/gpu"]}
PYTEST = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", "addopts="]
PYTEST += ["-n", "4", "--dist", "worksteal"] if installed("xdist") else []  # compiling kernels takes CPUs
SECONDS = {  # a part's limit
    "smoke": 150,
    "phases": 150,
    "generation": 240,
    "update": 100,
    "tests": 400,
    "end_to_end": 150,
    "cards": 240,
    "kernel_tests": 150,
    "generation_peers": 300,
    "kernel_times": 100,
    "memory": 60,
    "demo": 120,
}
NEEDS = {"kernel_tests": "pytest", "tests": "pytest", "demo": "matplotlib"}
LEAST = 75  # a part is not started with fewer seconds left: imports, a model and compiling take most of them
KEPT = re.compile(r"## |\||error: |FAILED |ERROR |=+ \d+ (passed|failed)")  # lines of the log: for gpu.md
PATIENCE = 15  # seconds that a part has to end after it was interrupted


def command(part):
    return [*PYTEST, *TESTS[part]] if part in TESTS else [sys.executable, str(ROOT / "benchmarks"), part]


def run_part(part, seconds, log):
    """Run it for at most so many seconds -> "ok", "failed", "ended by signal N", "out of time", or what it
    needs. What it prints goes to the log as well."""
    if part in NEEDS and not installed(NEEDS[part]):
        return f"needs {NEEDS[part]}"
    process = subprocess.Popen(
        command(part),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,  # to be interrupted with all that it starts
        env={**os.environ, "PYTHONUNBUFFERED": "1", "ALL_RESULTS": str(RESULTS / "gpu.json")},
    )
    os.set_blocking(process.stdout.fileno(), False)
    try:
        ended = follow(process, seconds, log)
        if not ended:
            os.killpg(process.pid, signal.SIGINT)
            follow(process, PATIENCE, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not ended:
        return "out of time"
    if process.returncode < 0:
        return f"ended by signal {-process.returncode}"
    return "failed" if process.returncode else "ok"


def follow(process, seconds, log):
    """Copy what it prints, until it has ended or for so many seconds -> whether it has ended."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        copy_output(process.stdout, log)
        time.sleep(0.1)
    copy_output(process.stdout, log)
    return process.poll() is not None


def copy_output(source, log):
    text = (source.read() or b"").decode("utf-8", "replace")
    if text:
        print(text, end="", flush=True)
        log.write(text)
        log.flush()


def write_page(text, log, begun):
    """gpu.md: this text, then the tables and what has failed in the log from ``begun`` on. -> its path"""
    page = [f"# {machine()}", text]
    log.seek(begun)
    for line in log.read().splitlines():
        if KEPT.match(line):
            page.append(line if line.startswith("|") else f"\n{line}\n")
    path = RESULTS / "gpu.md"
    path.write_text("\n".join(page) + "\n", encoding="utf-8")
    return path


def main(argv, begun):
    """begun: when this program has started (``time.monotonic``); importing torch counts."""
    parser = argparse.ArgumentParser(prog="python benchmarks gpu", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(SECONDS)}; default: all")
    parser.add_argument("--minutes", type=float, default=25)
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(SECONDS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(SECONDS)}")
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the part ends as well
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    end, results, left = begun + 60 * args.minutes - PATIENCE, [], []
    RESULTS.mkdir(exist_ok=True, parents=True)
    os.environ["ALL_RESULTS"] = str(RESULTS / "gpu.json")
    with open(RESULTS / "gpu_log.txt", "a+", encoding="utf-8") as log:
        before = log.tell()
        for part in args.parts or SECONDS:
            start = time.monotonic()
            if end - start < LEAST:
                left.append(part)
                continue
            verdict = run_part(part, min(SECONDS[part], end - start), log)
            seconds = round(time.monotonic() - start)
            results.append({"part": part, "seconds": seconds, "verdict": verdict})
            print(f"\n== {part}: {verdict}, {seconds} s\n", flush=True)
            write_results("parts", {"parts": results})
            write_page(table(results), log, before)  # whatever becomes of the next part
        text = table(results)
        if left:
            text += f"\n\nnot started, for lack of time: python benchmarks gpu {' '.join(left)}"
        print(f"{text}\n\nto send: {write_page(text, log, before)}")
    if left or any(r["verdict"] != "ok" for r in results):
        raise SystemExit(1)
