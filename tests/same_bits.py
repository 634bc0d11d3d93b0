"""Do two checkouts train the same? Short real runs in both, compared bit for bit.

    git worktree add /tmp/before COMMIT
    python tests/same_bits.py /tmp/before            this checkout against that one
    python tests/same_bits.py /tmp/before demo sft   only the runs with one of these words in their names

It is for changes that must not change any result.
Compared are weights, moments and the rest of the checkpoints, results, and metrics without times. Both sides
run with the same Python, one thread a process, on this machine. Exit code 1 where anything differs.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
PPO = ["trainer/train_ppo.py", "--dtype", "float32", "--max_steps", "4", "--save_interval", "2"]
SMALL = ["--batch_size", "32", "--mini_batch_size", "8", "--max_gen_len", "24", "--eval_interval", "0"]
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
HALF = ["--batch_size", "16", "--mini_batch_size", "4", "--max_gen_len", "24", "--eval_interval", "0"]
LOSS_OPTIONS = (
    "--update_old_actor_freq 2 --ppo_epochs 2 --accumulation_steps 2 --replay_batches 1 --kl_target 0.5 "
    "--entropy_coef 0.01 --entropy_top 0.5 --ptx_data_path dataset/demo/sft.jsonl --ema_beta 0.9 "
    "--overlong_buffer 8 --min_gen_len 3 --clip_epsilon_high 0.3 --dual_clip 3 --critic_warmup_steps 1 "
    "--normalize_reward 1 --repetition_penalty 0.5 --length_reward 0.5 --missing_eos_penalty 1"
)
NO_CRITIC = "--advantage rloo --num_generations 4 --kl_in reward --lora_r 4 --filter_groups 1"
NO_CRITIC += " --stop </answer>"
STAGE = "--max_steps 6 --save_interval 3 --dtype float32 --model model/demo/policy"
# {name: the command lines of a run, one after the other}. REMOVE: the newest checkpoint goes, as a kill.
REMOVE = ["remove"]
RUNS = {
    "demo": [[*PPO, "--eval_interval", "2"]],
    "demo resumed": [[*PPO, *SMALL], REMOVE, [*PPO, *SMALL, "--resume", "auto"]],
    "bf16": [[*PPO, *SMALL, "--dtype", "bfloat16", "--moments_dtype", "bfloat16"]],
    "loss options": [[*PPO, *SMALL, *LOSS_OPTIONS.split()]],
    "no critic": [[*PPO, *SMALL, *NO_CRITIC.split(), "--reasoning", "0"]],
    "offline": [[*PPO, *SMALL, "--offline_data_path", "dataset/demo/preferences_eval.jsonl"]],
    "two processes": [[*TWO, *PPO, *HALF]],
    "two processes, sharded": [[*TWO, *PPO, *HALF, "--shard", "1"]],
    "sft": [["trainer/train_sft.py", *STAGE.split(), "--data_path", "dataset/demo/sft.jsonl"]],
    "reward": [["trainer/train_reward.py", *STAGE.split(), "--data_path", "dataset/demo/preferences.jsonl"]],
}


def train(checkout: Path, lines: list[list[str]], out: Path) -> None:
    """Run the command lines in a checkout. Raises CalledProcessError with what they printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    for line in lines:
        if line is REMOVE:
            newest = max(out.glob("*/checkpoints/step_*"), key=lambda path: int(path.name.split("_")[1]))
            shutil.rmtree(newest)
            continue
        command = [sys.executable, *line, "--out_dir", str(out)]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{checkout}: {' '.join(line)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def contents(out: Path) -> dict[str, str]:
    """{what a run has written: a hash of it}: weights and moments, states, each metric of each step."""
    found = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.suffix == ".safetensors":  # tensor by tensor: the names in its header may differ
            for key, x in load_file(path).items():
                numbers = x.contiguous().view(torch.uint8) if x.dim() else x.view(1).view(torch.uint8)
                found[f"{name} {key}"] = hashlib.sha256(numbers.numpy().tobytes()).hexdigest()
        elif path.suffix == ".pth":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name == "state.json":
            for key, x in json.loads(path.read_text(encoding="utf-8")).items():
                found[f"{name} {key}"] = repr(x)
        elif path.name == "metrics.jsonl":
            for line in path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                values = {key: x for key, x in record.items() if not key.startswith("perf/")}
                found |= {f"{name} step {record['step']} {key}": repr(x) for key, x in values.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("words", nargs="*", help="of the names of runs; default: all runs")
    args = parser.parse_args()
    different = 0
    for run, lines in RUNS.items():
        if args.words and not any(word in run for word in args.words):
            continue
        found = []
        for checkout in (args.other.resolve(), ROOT):
            with tempfile.TemporaryDirectory() as folder:
                train(checkout, lines, Path(folder))
                found.append(contents(Path(folder)))
        before, now = found
        names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        different += bool(names)
        result = f"{len(names)} of {len(before)} differ" if names else f"{len(before)} equal"
        print(f"{run}: {result}", flush=True)
        for name in names[:8]:
            print(f"    {name}: {before.get(name, 'missing')[:20]} -> {now.get(name, 'missing')[:20]}")
    sys.exit(min(different, 1))


if __name__ == "__main__":
    main()
