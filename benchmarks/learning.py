"""What is learned from how many samples: this trainer beside TRL's PPOTrainer, and what each decision does.

    python benchmarks/learning.py --task a b                 # both trainers; hours for all on two cores
    python benchmarks/learning.py --task c d e --dreams DIR  # the tasks that need a real model
    python benchmarks/learning.py --task b --who ours        # only this trainer
    python benchmarks/learning.py --task b --who grpo rloo our_group our_rloo --peer_python ENV/bin/python
    python benchmarks/learning.py --task a --variants --who ours    # one decision changed at a time
    python benchmarks/learning.py --table                    # tables and pictures of docs/learning.md

The tasks: learning_tasks.py. Each trainer is tried at three learning rates with the first seed. The rate
with the best end then runs with the other seeds. All runs are processes of one thread in fp32
(learning_run.py). Results go into benchmarks/results/learning.json, run by run: a run that is there is not
made again. "trl" is the PPOTrainer of TRL 1.12.0. "grpo" and "rloo" are the trainers of TRL 1.16.0, with
which "our_group" and "our_rloo" are compared: four answers a prompt, no critic, the same samples, sizes and
learning rates to try. How to install TRL: requirements-bench.txt. --peer_python is the Python that has it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import RESULTS, ROOT, machine
from learning_report import best_rates, figure, samples_of, write
from learning_tasks import AT_DEFAULTS, TASKS, prepare

FILE = RESULTS / "learning.json"
# One decision changed at a time: {name: (tasks, flags of train_ppo.py, name of a patch in learning_run.py)}
OURS = {
    "lambda 1 for both": ("abd", {"lam": 1, "critic_lam": 1}, None),
    "lambda 0.95 for both": ("abcd", {"lam": 0.95, "critic_lam": 0.95}, None),
    "KL in the loss": ("acd", {"kl_in": "loss"}, None),
    "KL in the reward": ("b", {"kl_in": "reward"}, None),
    "no replay": ("a", {"replay_batches": 0}, None),
    "replay of 2 batches": ("bcd", {"replay_batches": 2}, None),
    "4 PPO epochs, no replay": ("a", {"replay_batches": 0, "ppo_epochs": 4}, None),
    "no value clip": ("abcd", {"cliprange_value": 0}, None),
    "no critic warm-up": ("abcd", {"critic_warmup_steps": 0}, None),
    "upper clip 0.28": ("abcd", {"clip_epsilon_high": 0.28}, None),
    "dual clip 3": ("abcd", {"dual_clip": 3}, None),
    "no whitening": ("abcd", {}, "no whitening"),
    "minibatches dealt anew": ("abcd", {}, "deal anew"),
    "rate warm-up, 5 batches": ("abcd", {"lr_warmup_steps": 5}, None),
    "constant rate": ("abcd", {"lr_schedule": "constant"}, None),
    "1 PPO epoch": ("cd", {"ppo_epochs": 1}, None),
    "2 PPO epochs": ("b", {"ppo_epochs": 2}, None),
    "4 PPO epochs": ("abcd", {"ppo_epochs": 4}, None),
    "4 answers": ("abcd", {"num_generations": 4}, None),
    "RLOO, 4 answers": ("abcd", {"advantage": "rloo", "num_generations": 4}, None),
    "group, 4 answers": ("abcd", {"advantage": "group", "num_generations": 4, "kl_in": "loss"}, None),
    "REINFORCE": ("abcd", {"advantage": "reinforce"}, None),
    "CISPO": ("ab", {"policy_loss": "cispo"}, None),
    "GSPO": ("ab", {"policy_loss": "gspo"}, None),
    "batch half as large": ("a", {"batch_size": 128}, None),
    "batch 64": ("bd", {"batch_size": 64}, None),
    "bf16": ("abcd", {"dtype": "bfloat16"}, None),
    "bf16, no importance weights": ("abcd", {"dtype": "bfloat16", "importance_cap": 0}, None),
}
RLOO, HALF = {"advantage": "rloo", "num_generations": 4}, {"learning_rate": 2.5e-4}
OURS |= {  # docs/algorithms.md: what was tried without a critic, and other options
    "RLOO, half the rate": ("b", RLOO | HALF, None),
    "RLOO, twice the rate": ("b", RLOO | {"learning_rate": 1e-3}, None),
    "RLOO, 2 answers": ("b", RLOO | {"num_generations": 2}, None),
    "RLOO, 2 answers, half the rate": ("b", RLOO | HALF | {"num_generations": 2}, None),
    "RLOO, 8 answers": ("b", RLOO | {"num_generations": 8}, None),
    "RLOO, twice the KL's weight": ("b", RLOO | {"kl_coef": 0.04}, None),
    "RLOO, half the rate, batches of 64": ("b", RLOO | HALF | {"batch_size": 64}, None),
    "RLOO, half the rate, 2 PPO epochs": ("b", RLOO | HALF | {"ppo_epochs": 2}, None),
    "RLOO, half the rate, 2 PPO epochs, replay": (
        "b",
        RLOO | HALF | {"ppo_epochs": 2, "replay_batches": 1},
        None,
    ),
    "RLOO, half the rate, groups filtered": ("b", RLOO | HALF | {"filter_groups": 2}, None),
    "KL target 0.5": ("b", {"kl_target": 0.5}, None),
    "KL target 0.5, from 0.2": ("b", {"kl_target": 0.5, "kl_coef": 0.2}, None),
    "KL target 0.5, shorter horizon": ("b", {"kl_target": 0.5, "kl_coef": 0.2, "kl_horizon": 256}, None),
    "entropy 0.01": ("b", {"entropy_coef": 0.01}, None),
    "entropy 0.05": ("b", {"entropy_coef": 0.05}, None),
    "entropy top 0.2": ("b", {"entropy_top": 0.2}, None),
    "demonstrations": ("b", {"ptx_data_path": "dataset/demo/sft.jsonl"}, None),
    "average 0.9": ("b", {"ema_beta": 0.9}, None),
}
TRL = {"8 PPO epochs": ("a", {"ppo_epochs": 8}, None), "lambda 1": ("c", {"lam": 1}, None)}
OUR_RLOO = {"KL in the loss": ("abcd", {"kl_in": "loss"}, None)}
OUR_GAE = {name: ("cd", flags, None) for name, (_, flags, _) in OURS.items() if "policy_loss" in flags}
OUR_GROUP = {name: ("abcd", {}, name) for name in ("KL in deviations", "TRL's KL")}
VARIANTS = {"ours": OURS, "trl": TRL, "our_gae": OUR_GAE, "our_rloo": OUR_RLOO, "our_group": OUR_GROUP}
PEER = {"python": sys.executable}  # --peer_python


def load():
    return json.loads(FILE.read_text(encoding="utf-8"))["runs"] if FILE.exists() else []


def identity(run):
    return [run[name] for name in ("task", "who", "variant", "rates", "seed", "samples")]


def keep(run):
    """Add a run to the file, in the place of an older one of the same kind. One line a run."""
    runs = [old for old in load() if identity(old) != identity(run)] + [run]
    runs.sort(key=identity)
    FILE.parent.mkdir(exist_ok=True, parents=True)
    lines = ",\n".join(json.dumps(run) for run in runs)
    text = f'{{"machine": {json.dumps(machine())},\n"runs": [\n{lines}\n]}}\n'
    beside = FILE.with_suffix(".part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, FILE)


def python_of(who):
    """The Python that runs this trainer."""
    return sys.executable if who.startswith("our") else PEER["python"]


def make(folder, dreams, task, who, rates, seed, samples, variant="", flags=None, patch=None):
    """One run, unless the file has it -> the run."""
    rates = list(rates) if isinstance(rates, list | tuple) else [rates]
    run = {"task": task, "who": who, "variant": variant, "rates": rates, "seed": seed, "samples": samples}
    for old in load():
        if identity(old) == identity(run):
            return old
    start = seed if task == "a" else 0
    request = {**run, "folder": str(Path(folder) / task), "flags": flags or {}, "patch": patch}
    request["files"] = prepare(task, folder, start, dreams)
    command = [python_of(who), str(ROOT / "benchmarks" / "learning_run.py"), json.dumps(request)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{task}, {who}, {variant}: {done.stderr[-2000:]}")
    points = json.loads(done.stdout.splitlines()[-1])
    run["flags"] = TASKS[task].get(who, {}) | (AT_DEFAULTS.get(who) or {}) | (flags or {})
    run["curve"] = {name: [point[name] for point in points] for name in points[0]}
    keep(run)
    print(
        f"{task} {who} {variant} rates {rates} seed {seed}, {samples} samples: {figure(run):.4f}, "
        f"KL {run['curve']['kl'][-1]:.3f}, {run['curve']['seconds'][-1]:.0f} s",
        flush=True,
    )
    return run


def compare(folder, dreams, task, who, more, seeds):
    """All runs of one trainer on one task: each rate with the first seed, then the best one with the others.
    With ``more``: each rate with all seeds, with the task's other number of samples."""
    this = TASKS[task]
    for rates in this["rates"][who]:
        for seed in range(min(seeds, this["seeds"])) if more else (0,):
            make(folder, dreams, task, who, rates, seed, this["more"] if more else samples_of(task, who))
    for seed in range(min(seeds, this["seeds"])) if not more else ():
        make(folder, dreams, task, who, best_rates(load(), task, who), seed, samples_of(task, who))


def ablate(folder, dreams, task, who, names, seeds):
    """A trainer at its best rates, or those that the task names, with one decision changed at a time."""
    samples = TASKS[task].get("ablate", TASKS[task]["samples"]) if who == "ours" else samples_of(task, who)
    rates, unchanged = best_rates(load(), task, who), {"": (task, {}, None)}
    if who == "ours":
        rates = TASKS[task].get("ablate_rates", rates)
    for name, (tasks, flags, patch) in (unchanged | VARIANTS.get(who, {})).items():
        if task in tasks and (not name or not names or name in names):
            for seed in range(min(seeds, TASKS[task]["seeds"])):
                make(folder, dreams, task, who, rates, seed, samples, name, flags, patch)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    everyone = ["trl", "ours", *AT_DEFAULTS]
    parser.add_argument("--who", nargs="+", choices=everyone, default=["trl", "ours"])
    parser.add_argument("--peer_python", default=sys.executable, help="the Python that has TRL")
    parser.add_argument("--seeds", type=int, default=9, help="at most so many seeds")
    parser.add_argument("--variants", nargs="*", help="only these changes of ours; without names, all")
    parser.add_argument("--dreams", help="the folder of the model of tasks c, d and e")
    parser.add_argument("--folder", help="keeps the inputs of the tasks; default: a temporary one")
    parser.add_argument("--more", action="store_true", help="with another number of samples")
    parser.add_argument("--table", action="store_true", help="write tables and pictures, run nothing")
    args = parser.parse_args()
    if args.table:
        return write(load())
    PEER["python"] = args.peer_python
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or temporary
        for task in args.task:
            if task in "cde" and not args.dreams:
                print(f"task {task} is left out: it needs --dreams")
                continue
            for who in filter(TASKS[task]["rates"].get, args.who):
                if args.variants is not None:
                    ablate(folder, args.dreams, task, who, args.variants, args.seeds)
                else:
                    compare(folder, args.dreams, task, who, args.more, args.seeds)
    return None


if __name__ == "__main__":
    main()
