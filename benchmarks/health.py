"""Does trainer/runs/health.py tell broken runs from healthy ones? Real runs, many of them broken on purpose.

    python benchmarks/health.py                   # makes the runs that are missing, half a minute each
    python benchmarks/health.py rate noise        # makes those whose names have one of these words, again
    python benchmarks/health.py --table           # makes none: only judges those that are kept

Each run is the bundled demo, 24 steps of 32 prompts or fewer, with the changes of health_broken.py and
health_healthy.py, or a task of learning.py. What the checks read of it is kept in
benchmarks/results/health.json, and the table in health.md beside it. A broken run is "named" if one
of its first two findings is among those that its entry expects. A run "remedy of x" is x with the flags that
its first finding of that entry told. Each run is a forked process: Linux and Mac.
"""

import argparse
import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import ROOT, machine, table
from health_broken import BROKEN, FAULTS, REMEDIES, SHORTER
from health_files import make_files
from health_healthy import HEALTHY, TASKS_RUN, TRAINED, task_flags

from trainer.runs.displays import read_rows
from trainer.runs.health import WRONG, Health

KEPT = ROOT / "benchmarks" / "results" / "health.json"
PAGE = KEPT.with_suffix(".md")
NOT_READ = ("perf/", "train/", "kl/k3", "_greedy", "value/balance", "policy/balance")


def train(flags, folder, log, fault=None):
    """One run of train_ppo.py in a forked process -> (metrics.jsonl, config.json, seconds, exit code).

    fault: a function that puts a fault into the program of that process, or None.
    """

    def child():
        with open(log, "w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        from errors import run_script
        from trainer import train_ppo

        if fault:
            fault()
        words = [
            str(w) for name, x in flags.items() for w in (f"--{name}", *(x if isinstance(x, list) else [x]))
        ]
        run_script(lambda: train_ppo.main([*words, "--out_dir", str(folder)]))

    start = time.perf_counter()
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    run = folder / "run_1"
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    return read_rows(run / "metrics.jsonl"), config, round(time.perf_counter() - start, 1), process.exitcode


def findings(records, args):
    """Lines of metrics.jsonl and config.json -> its findings."""
    health = Health(args)
    for record in records:
        health.add(record)
    return health.sorted


def kept_of(records, args):
    """A run -> what is kept of it: its flags, facts, and a column for each metric that a check may read."""
    names = dict.fromkeys(name for r in records for name in r)
    names = [n for n in names if n != "step" and not any(part in n for part in NOT_READ)]
    columns = {name: [short(r.get(name)) for r in records] for name in names}
    dropped = ("versions", "fingerprints", "resume_command", "run_id", "out_dir", "threads")
    args = {name: x for name, x in args.items() if name not in dropped and x not in ("", None, [])}
    texts = {name: Path(x).name for name, x in args.items() if isinstance(x, str) and "/" in x}
    for name in {"reward_model", "reward_fn", "tools"} & args.keys():
        texts[name] = [Path(x).name for x in args[name]]
    return {"args": args | texts, "step": [r["step"] for r in records], "metrics": columns}


def short(x):
    """A number with four digits; None for one that is not there."""
    return None if x is None or not math.isfinite(x) else float(f"{x:.4g}")


def records_of(run):
    """What ``kept_of`` has kept -> (lines of metrics.jsonl, config.json)."""
    lines = [
        {"step": step, **{name: x[n] for name, x in run["metrics"].items() if x[n] is not None}}
        for n, step in enumerate(run["step"])
    ]
    return lines, run["args"]


def judge(name, run):
    """A kept run -> a row of the table: what is expected, what is found, and whether that is right."""
    found = findings(*records_of(run))
    names = [f.name + ("!" if f.level == WRONG else "") for f in found]
    first = [f.name for f in found[:2]]
    row = {"run": name, "changed": run["about"], "findings (! is wrong)": ", ".join(names) or "none"}
    if run["kind"] == "broken":
        return row | {"named": "yes" if set(first) & set(run["expected"]) else "**no**"}
    return row | {"named": "**wrong**" if any(f.level == WRONG for f in found) else f"{len(found)} look"}


def tables(kept):
    """The kept runs -> Markdown: a table for each kind, with a sentence on its sum."""
    parts = []
    for kind in ("broken", "healthy", "remedied"):
        rows = [judge(name, run) for name, run in kept.items() if run["kind"] == kind]
        if kind == "broken":
            right = sum(row["named"] == "yes" for row in rows)
            parts.append(
                f"**Broken on purpose: {right} of {len(rows)} are named by the first or second finding.**"
            )
        elif rows:
            alarms = sum(row["named"] == "**wrong**" for row in rows)
            looks = sum(
                row["findings (! is wrong)"] != "none" and row["named"] != "**wrong**" for row in rows
            )
            title = {"healthy": "Healthy", "remedied": "Broken runs with the remedy that was told"}[kind]
            parts.append(
                f"**{title}: of {len(rows)}, {alarms} have a finding of level wrong, {looks} of level look.**"
            )
        parts.append(table(rows))
    return "\n\n".join(parts)


def remedy_flags(remedy):
    """``--kl_coef 0.06 --lam 1, or …`` -> {"kl_coef": "0.06", "lam": "1"}: the first choice with flags."""
    choices = [
        dict(re.findall(r"--(\w+) ([-\d.e]+|float32|actor)(?=[ ,;]|$)", choice))
        for choice in re.split(r", or |; ", remedy)
    ]
    return next(filter(None, choices), {})


def specs(kept, files, folder, dreams):
    """-> {name: (kind, what is changed, flags, expected findings)}; remedies as far as they can be told.
    Flags: those beside ``TRAINED``, or a function that gives all. folder, dreams: see ``task_flags``."""
    found = {}
    for name, (about, flags, expected) in BROKEN(files).items():
        steps = next((n for n, names in SHORTER.items() if name in names), TRAINED["max_steps"])
        found[name] = "broken", about, {"max_steps": steps, **flags}, expected
    found |= {n: ("healthy", *spec, ()) for n, spec in HEALTHY(files).items()}
    for name, (task, _, samples, _) in TASKS_RUN.items():
        if task != "c" or dreams:
            about = f"task ({task}) of docs/learning.md, {samples} samples"
            found[name] = "healthy", about, partial(task_flags, name, folder, dreams), ()
    for name in REMEDIES:
        if name not in kept:
            continue
        told = [f for f in findings(*records_of(kept[name])) if f.name in kept[name]["expected"]]
        if told and (flags := remedy_flags(told[0].remedy)):
            words = " ".join(f"--{n} {x}" for n, x in flags.items())
            found[f"remedy of {name}"] = ("remedied", words, {**found[name][2], **flags}, ())
    return found


def make(words, inputs, dreams):
    """Make the runs that are missing, or those whose names have one of these words -> all that are kept.
    inputs: a folder that keeps the files of ``task_flags``, or None."""
    import trainer.train_ppo  # noqa: F401, so that the forked processes have it

    kept = json.loads(KEPT.read_text(encoding="utf-8"))["runs"] if KEPT.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        files = make_files(Path(folder))
        done = set()
        while True:
            known = specs(kept, files, inputs or folder, dreams)
            todo = [
                n for n in known if n not in done and (any(w in n for w in words) if words else n not in kept)
            ]
            if not todo:
                break
            kind = ("broken", "healthy")[len(done) % 2]  # some of both, should it be stopped
            name = next((n for n in todo if known[n][0] == kind), todo[0])
            done.add(name)
            kind, about, flags, expected = known[name]
            out, log = Path(folder) / f"out_{len(done)}", Path(folder) / "log.txt"
            flags = flags() if callable(flags) else {**TRAINED, **files["flags"], **flags}
            try:
                *run, seconds, code = train(flags, out, log, FAULTS.get(name))
            except ValueError as error:
                print(f"{name}: no run: {error}\n{log.read_text(encoding='utf-8')[-2000:]}", flush=True)
                continue
            kept[name] = {
                "kind": kind,
                "about": about,
                "expected": list(expected),
                "seconds": seconds,
                **kept_of(*run),
            }
            KEPT.write_text(as_text({"machine": machine(), "runs": kept}), encoding="utf-8")
            row = judge(name, kept[name])
            print(
                f"{name} ({code}, {seconds:.0f} s): {row['named']}: {row['findings (! is wrong)']}",
                flush=True,
            )
    return kept


def as_text(results):
    """Results as JSON, a line a run."""
    runs = ",\n".join(
        f"{json.dumps(n)}: {json.dumps(r, separators=(',', ':'))}" for n, r in results["runs"].items()
    )
    return f'{{"machine": {json.dumps(results["machine"])},\n"runs": {{\n{runs}\n}}}}\n'


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="make only runs whose names have one of these words, again")
    parser.add_argument("--table", action="store_true", help="make no run")
    parser.add_argument(
        "--dreams", help="the folder of the model of task (c) of learning.py; else it is left out"
    )
    parser.add_argument(
        "--folder", help="keeps the inputs of the tasks of learning.py; default: a temporary one"
    )
    args = parser.parse_args()
    if args.table:
        kept = json.loads(KEPT.read_text(encoding="utf-8"))["runs"]
    else:
        kept = make(args.words, args.folder, args.dreams)
    text = tables(kept)
    print(text)
    PAGE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
