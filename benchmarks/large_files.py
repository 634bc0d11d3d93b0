"""Large prompt files compared with a small one: time from the command to the first update, and memory.

    python benchmarks/large_files.py                             # 100, 1,000,000 and 10,000,000 lines
    python benchmarks/large_files.py --lines 100 1000000

Each measurement is one run of trainer/train_ppo.py, of a single step, with the demo's policy and reward
model. The sizes alternate. The files are first written to a temporary folder (1.6 GB for ten million lines).
Prints a table and writes benchmarks/results/large_files.json with facts about the machine.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, show, spread, table, write_results


def write_prompts(path, lines):
    """Write questions like the demo's; neighbouring lines differ."""
    with open(path, "w", encoding="utf-8") as file:
        for i in range(lines):
            question = f"What is {i % 97} plus {i % 89} minus {i % 83}?"
            turns = f'{{"role": "user", "content": "{question}"}}, {{"role": "assistant", "content": ""}}'
            file.write(f'{{"conversations": [{turns}], "source": "line {i} of a large file"}}\n')


def first_update(path, out):
    """One run -> (seconds until its first step has ended, largest memory in bytes)."""
    command = [sys.executable, str(ROOT / "trainer" / "train_ppo.py"), "--data_path", str(path)]
    command += ["--max_steps", "1", "--critic_warmup_steps", "0", "--out_dir", str(out)]
    command += ["--model", str(ROOT / "model/demo/policy"), "--reward_model", str(ROOT / "model/demo/reward")]
    start, metrics = time.perf_counter(), out / "run_1" / "metrics.jsonl"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (metrics.exists() and '"step": 1' in metrics.read_text()):
        time.sleep(0.02)
    seconds = time.perf_counter() - start
    _, status, usage = os.wait4(process.pid, 0) if process.returncode is None else (0, 1, None)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return seconds, usage.ru_maxrss * 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, nargs="+", default=[100, 1_000_000, 10_000_000])
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = {lines: folder / f"{lines}.jsonl" for lines in args.lines}
        for lines, path in paths.items():
            write_prompts(path, lines)
        runs = {lines: [] for lines in args.lines}
        for repetition in range(args.repetitions):
            for lines, path in paths.items():
                out = folder / f"out_{lines}_{repetition}"
                out.mkdir()
                runs[lines].append(first_update(path, out))
        results = [
            {
                "lines": lines,
                "file_bytes": paths[lines].stat().st_size,
                "seconds": spread([seconds for seconds, _ in runs[lines]], 2),
                "memory_bytes": spread([memory for _, memory in runs[lines]], 0),
            }
            for lines in args.lines
        ]
    rows = [
        {
            "lines": f"{r['lines']:,}",
            "file": f"{r['file_bytes'] / 1e6:.0f} MB",
            "seconds to the first update": show(r["seconds"]),
            "memory": f"{r['memory_bytes']['median'] / 1e6:.0f} MB",
        }
        for r in results
    ]
    print("\n" + table(rows))
    write_results("large_files", {"runs": results})


if __name__ == "__main__":
    main()
