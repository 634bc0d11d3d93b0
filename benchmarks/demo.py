"""Runs the demo with several seeds: held-out accuracy before and after, and the time it takes.

    python benchmarks/demo.py                        # seeds 42 (the default), 0, 1: three minutes on 2 cores
    python benchmarks/demo.py --seeds 7 8

Each seed is one run of trainer/train_ppo.py with its defaults, as `make train` starts it. Prints a table and
writes benchmarks/results/demo.json with the machine's facts.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from common import ROOT, read, table, write_results

NAMES = ("accuracy", "format_rate", "score", "length", "finished")
COLUMNS = tuple(f"{name}{kind}" for name in NAMES for kind in ("", "_greedy"))
SHOWN = ("accuracy", "accuracy_greedy", "format_rate", "score", "length")


def run_seed(seed, flags=()):
    """One demo run in a temporary folder -> {"seed", "seconds", "before", "after"}. flags: further flags."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, str(ROOT / "trainer" / "train_ppo.py"), "--seed", str(seed)]
        subprocess.run([*command, "--out_dir", folder, *flags], check=True)
        seconds = time.perf_counter() - start
        records = [json.loads(line) for line in read(Path(folder) / "run_1" / "metrics.jsonl").splitlines()]
    before, after = records[0], records[-1]
    pick = {name: f"eval/{name}" for name in COLUMNS}
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "before": {name: round(before[key], 4) for name, key in pick.items()},
        "after": {name: round(after[key], 4) for name, key in pick.items()},
    }


def cases(device):
    return [partial(run_seed, 42, ["--device", device])]


def rows(results):
    for r in results:
        cells = {name: f"{r['before'][name]:.3f} -> {r['after'][name]:.3f}" for name in SHOWN}
        yield {"seed": r["seed"], "seconds": f"{r['seconds']:.0f}"} | cells


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 0, 1])
    args = parser.parse_args()
    results = [run_seed(seed) for seed in args.seeds]
    print("\n" + table(list(rows(results))))
    write_results("demo", {"runs": results})


if __name__ == "__main__":
    main()
