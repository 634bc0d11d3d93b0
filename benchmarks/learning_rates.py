"""Learning rates of PPO for three sizes of model: a third of the rule's, the rule's, three times the rule's.

    python benchmarks/learning_rates.py                      # seeds 42 and 1: an hour or two on 2 cores
    python benchmarks/learning_rates.py --seeds 7

The sizes: the demo's policy (0.8M parameters), and two more that stage 1 trains on the demo's data first
(4.9M and 22.5M). Each is then trained on the demo's prompts with its reward model. The critic of the two
larger sizes starts from the actor, as with a reward model that has a tokenizer of its own. The largest makes
24 steps in place of 46. The rule: ``rate_by_size`` in trainer/inputs.py. Prints a table and writes
benchmarks/results/learning_rates.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, read, table, write_results

from trainer.inputs import rate_by_size

# (name, flags of stage 1 or None for the demo's policy, parameters of actor and critic, flags of PPO)
SIZES = [
    ("0.8M", None, (0.80e6, 1.2e6), []),
    (
        "4.9M",
        ["--hidden_size", "256", "--num_hidden_layers", "6", "--learning_rate", "1e-3"],
        (4.9e6, 4.9e6),
        ["--critic_init", "actor"],
    ),
    (
        "22.5M",
        ["--hidden_size", "512", "--num_hidden_layers", "8", "--learning_rate", "5e-4"],
        (22.5e6, 22.5e6),
        ["--critic_init", "actor", "--max_steps", "24"],
    ),
]
TIMES = (1 / 3, 1, 3)
DEMO = ROOT / "model/demo"


def script(name, *flags):
    subprocess.run([sys.executable, str(ROOT / "trainer" / name), *map(str, flags)], check=True)


def start_of(folder, name, stage_1):
    """The policy that PPO starts from -> its path."""
    if stage_1 is None:
        return DEMO / "policy"
    out = Path(folder) / name
    more = ["--tokenizer", DEMO / "policy", "--epochs", 2, "--max_seq_len", 128, "--seed", 0]
    script("train_sft.py", "--data_path", ROOT / "dataset/demo/sft.jsonl", "--out_dir", out, *stage_1, *more)
    return next(out.glob("full_sft_*.pth"))


def ppo(folder, start, rates, seed, more):
    """One run -> the first and the last evaluation, and the mean training score."""
    actor, critic = rates
    files = ["--model", start, "--reward_model", DEMO / "reward", "--reasoning", 1]
    files += [
        "--data_path",
        ROOT / "dataset/demo/ppo.jsonl",
        "--eval_data_path",
        ROOT / "dataset/demo/eval.jsonl",
    ]
    flags = ["--learning_rate", actor, "--critic_learning_rate", critic, "--seed", seed, "--eval_interval", 0]
    with tempfile.TemporaryDirectory(dir=folder) as out:
        script("train_ppo.py", *files, *flags, *more, "--out_dir", out, "--run_name", "r")
        rows = [json.loads(line) for line in read(Path(out) / "r/metrics.jsonl").splitlines()]
    scores = [row["reward/score"] for row in rows if "reward/score" in row]
    names = ("accuracy", "accuracy_greedy", "score")
    return {
        "before": {name: round(rows[0][f"eval/{name}"], 3) for name in names},
        "after": {name: round(rows[-1][f"eval/{name}"], 3) for name in names},
        "mean training score": round(sum(scores) / len(scores), 3),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1])
    args, results = parser.parse_args(), []
    with tempfile.TemporaryDirectory() as folder:
        for name, stage_1, (actor, critic), more in SIZES:
            start = start_of(folder, name, stage_1)
            rule = rate_by_size("actor", actor), rate_by_size("critic", critic)
            for times in TIMES:
                for seed in args.seeds:
                    rates = [float(f"{rate * times:.1e}") for rate in rule]
                    facts = {"size": name, "times": round(times, 2), "rates": rates, "seed": seed}
                    results.append(facts | ppo(folder, start, rates, seed, more))
    shown = [
        {"size": r["size"], "actor, critic": r["rates"], "seed": r["seed"]}
        | {name: f"{r['before'][name]} -> {r['after'][name]}" for name in r["before"]}
        for r in results
    ]
    print("\n" + table(shown))
    write_results("learning_rates", {"runs": results})


if __name__ == "__main__":
    main()
