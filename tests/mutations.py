"""Mutations: wrong lines, each of which must make a fast test fail.

    python tests/mutations.py                    all of them, as many at a time as there are cores
    python tests/mutations.py gamma accuracy     those whose names or descriptions have one of these words

A mutation replaces one piece of a file in a copy of the repository. Then the test files that are named for it
run there, up to the first failure. If none fails, nobody would notice this fault, and the exit code is 1. It
is also 1 if these tests fail without any mutation, which is tried first, and 2 if the list does not fit the
code: each piece must occur exactly once.

The list is in wrong_lines.py. Each mutation runs in a forked process, so torch is imported once. Linux only.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from wrong_lines import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = shutil.ignore_patterns(".git", ".venv", "out", "docs", "results", ".*_cache")
CPU_SECONDS = 300  # a mutation that never ends is noticed as well
NOTICED, UNNOTICED, BROKEN = "noticed", "NOT NOTICED", "no test ran"


def misfits(mutations):
    """-> a line for each mutation whose piece of code is not found exactly once, or that changes nothing."""
    lines = []
    for m in mutations:
        count = (ROOT / m.file).read_text(encoding="utf-8").count(m.old)
        if count != 1 or m.old == m.new:
            lines.append(f"{m.file}: found {count} times instead of once: {m.old.strip()!r} ({m.fault})")
        files = [test.split("::")[0] for test in m.tests]
        lines += [f"{path}: no such test file ({m.fault})" for path in files if not (ROOT / path).is_file()]
    return lines


def start(mutation, folder):
    """Fork a process that runs this mutation's tests in ``folder``, a copy of the repository -> its pid."""
    if pid := os.fork():
        return pid
    code = 3
    try:
        import resource  # Unix only, as fork is

        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        os.chdir(folder)
        with open("log.txt", "w", encoding="utf-8") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        path = Path(mutation.file)
        text = path.read_text(encoding="utf-8").replace(mutation.old, mutation.new)
        path.write_text(text, encoding="utf-8")
        import pytest

        code = int(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *mutation.tests]))
    finally:
        os._exit(code)


def result_of(status, folder):
    """The exit status of a mutation's process -> (word, the first test that failed, or "")."""
    if os.WIFSIGNALED(status):
        return NOTICED, "it never ends, or crashes"
    lines = (folder / "log.txt").read_text(encoding="utf-8").splitlines()
    failed = [line.split("::")[-1].split(" - ")[0] for line in lines if line.startswith("FAILED")]
    word = {0: UNNOTICED, 1: NOTICED}.get(os.waitstatus_to_exitcode(status), BROKEN)
    return word, failed[0] if failed else ""


def run(mutations, jobs, report):
    """Run all of them, ``jobs`` at a time. Calls report(mutation, word, test, seconds) after each."""
    waiting, running = list(mutations), {}
    with tempfile.TemporaryDirectory() as parent:
        whole, *free = (Path(parent) / str(n) for n in range(1 + min(jobs, len(waiting))))
        shutil.copytree(ROOT, whole, ignore=SKIPPED)  # once: the repository may change meanwhile
        for folder in free:
            shutil.copytree(whole, folder)
        while waiting or running:
            while waiting and free:
                mutation, folder = waiting.pop(0), free.pop()
                running[start(mutation, folder)] = mutation, folder, time.perf_counter()
            pid, status = os.wait()
            mutation, folder, begun = running.pop(pid)
            report(mutation, *result_of(status, folder), time.perf_counter() - begun)
            shutil.copyfile(whole / mutation.file, folder / mutation.file)
            free.append(folder)


def check_unchanged(mutations):
    """Run all tests of these mutations on the code as it is. SystemExit where they fail: then they prove
    nothing."""
    tests, found = tuple(dict.fromkeys(test for m in mutations for test in m.tests)), []
    nothing = Mutation(mutations[0].file, "", "", "nothing", tests)
    run([nothing], 1, lambda mutation, *result: found.extend(result))
    word, test, seconds = found
    if word != UNNOTICED:
        raise SystemExit(f"error: without any mutation the tests fail, or do not run: {test}")
    print(f"without any mutation these tests pass, in {seconds:.0f} s", flush=True)


def warm_up():
    """Import what every test needs and no mutation changes, and write no bytecode of changed files."""
    sys.dont_write_bytecode = True
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked process must have one thread
    os.environ["TRITON_INTERPRET"] = "1"  # as tests/conftest.py does, before anything imports Triton
    import tokenizers
    import torch
    import transformers

    torch.set_num_threads(1)
    names = "LlamaForCausalLM LlamaForSequenceClassification PreTrainedTokenizerFast Qwen3Model"
    return tokenizers, [getattr(transformers, name) for name in names.split()]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("words", nargs="*", help="run only mutations with one of these words")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutations at a time")
    args = parser.parse_args(argv)
    if lines := misfits(MUTATIONS):
        print(*lines, sep="\n", file=sys.stderr)
        raise SystemExit(2)
    chosen = [m for m in MUTATIONS if not args.words or any(w in f"{m.file} {m.fault}" for w in args.words)]
    if not chosen:
        raise SystemExit("error: no mutation has one of these words")
    begun, missed = time.perf_counter(), []
    warm_up()

    def report(mutation, word, test, seconds):
        if word != NOTICED:
            missed.append(mutation)
        where = mutation.file.removeprefix("trainer/")
        print(f"{word:12} {seconds:5.1f} s  {where}: {mutation.fault}  [{test}]", flush=True)

    check_unchanged(chosen)
    run(chosen, max(1, args.jobs), report)
    seconds = time.perf_counter() - begun
    print(f"\n{len(chosen)} mutations, {len(missed)} not noticed, {seconds:.0f} s with {args.jobs} at a time")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
