"""The demo with several seeds: held-out accuracy before and after, and the time it takes.

    python benchmarks/demo.py                        # seeds 0 1 2, about ten minutes on two cores
    python benchmarks/demo.py --seeds 7 8

Each seed is one run of trainer/train_ppo.py with its defaults, as `make train` starts it. Prints a table and
writes benchmarks/results/demo.json with the machine's facts.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("accuracy", "accuracy_greedy", "format_rate", "score", "length")


def machine():
    """What the figures were measured on."""
    import torch
    import transformers

    names = {
        line.split(":")[1].strip() for line in read("/proc/cpuinfo").splitlines() if "model name" in line
    }
    return {
        "cpu": ", ".join(sorted(names)) or platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def read(path):
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""


def run_seed(seed):
    """One demo run in a folder of its own -> {"seed", "seconds", "before", "after"}."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, str(ROOT / "trainer" / "train_ppo.py"), "--seed", str(seed)]
        subprocess.run([*command, "--out_dir", folder], check=True)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    results = [run_seed(seed) for seed in args.seeds]
    print("\n| seed | seconds | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (len(COLUMNS) + 2))
    for result in results:
        cells = [f"{result['before'][name]:.3f} -> {result['after'][name]:.3f}" for name in COLUMNS]
        print(f"| {result['seed']} | {result['seconds']:.0f} | " + " | ".join(cells) + " |")
    path = ROOT / "benchmarks" / "results" / "demo.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "runs": results}, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
