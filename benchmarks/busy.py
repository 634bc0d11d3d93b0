"""How fast the demo trains on a quiet machine and while another program uses one CPU all the time.

    python benchmarks/busy.py                      # three rounds of both, in turns: three minutes on 2 cores
    python benchmarks/busy.py --steps 20

Prints samples per second (the median step of each run, the first two steps left out) as a share of the quiet
speed, for threads that wait as trainer/compute/threads.py makes them, and as OpenMP's own defaults make them
(the program's waiting is switched off by setting GOMP_SPINCOUNT). Writes benchmarks/results/busy.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, read, table, write_results

OPENMP = {"GOMP_SPINCOUNT": "300001"}  # what OpenMP does by itself, but set by the user: ours stays out
CASES = [
    (waiting, busy, settings)
    for waiting, settings in (("this program", {}), ("OpenMP's default", OPENMP))
    for busy in (False, True)
]


def samples_per_second(steps, busy, settings):
    """One demo run of so many steps, beside a program that uses one CPU if ``busy``."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(ROOT / "trainer/train_ppo.py"), "--max_steps", str(steps)]
            command += ["--out_dir", folder, "--run_name", "x"]
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, **settings})
            rows = [json.loads(line) for line in read(Path(folder) / "x/metrics.jsonl").splitlines()]
    finally:
        if other:
            other.kill()
            other.wait()
    speeds = [row["perf/samples_per_second"] for row in rows if "perf/samples_per_second" in row]
    return statistics.median(speeds[2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    speeds = {(waiting, busy): [] for waiting, busy, _ in CASES}
    for _ in range(args.rounds):
        for waiting, busy, settings in CASES:
            speeds[waiting, busy].append(samples_per_second(args.steps, busy, settings))
    medians = {case: statistics.median(values) for case, values in speeds.items()}
    best_quiet = medians["OpenMP's default", False]
    results = [
        {
            "threads wait as in": waiting,
            "machine": "one CPU taken" if busy else "quiet",
            "samples/s": round(medians[waiting, busy], 1),
            "of OpenMP's quiet speed": round(medians[waiting, busy] / best_quiet, 2),
            "runs": [round(x, 1) for x in speeds[waiting, busy]],
        }
        for waiting, busy, _ in CASES
    ]
    print("\n" + table(results))
    write_results("busy", {"results": results})


if __name__ == "__main__":
    main()
