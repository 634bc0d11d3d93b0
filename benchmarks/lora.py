"""LoRA compared with training all weights: speed, memory, and what the demo learns.

Speed: both take whole PPO steps alternately in one process; the first step of each is warm-up. 512x8, one PPO
epoch, batch 32, responses of 64 tokens, the critic started from a reward model of the same size. Memory: the
peak of two such steps, each kind in a process of its own. Demo: held-out accuracy after `make train` with its
defaults, and with adapters and the learning rates of ``DEMO``.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from common import VOCABULARY, peak_memory, show, spread
from demo import run_seed
from end_to_end import Ours, write_inputs

RANK, SIZE, BATCH, NEW_TOKENS = 16, "512x8", 32, 64
KINDS = {"all weights": 0, f"LoRA, r = {RANK}": RANK}
# The demo ends about the same with learning rates of 1e-3, 2e-3 and 3e-3 for the actor, and worse with 5e-3.
DEMO = ["--lora_r", str(RANK), "--learning_rate", "1e-3", "--critic_learning_rate", "2e-3"]


def trainer(folder, rank, device):
    return Ours(Path(folder), 1, BATCH, NEW_TOKENS, device, lora_r=rank)


def speed(folder, device, steps):
    """-> {kind: [samples per second of each step]}."""
    trainers = {kind: trainer(folder, rank, device) for kind, rank in KINDS.items()}
    rates = {kind: [] for kind in KINDS}
    for number in range(1 + steps):
        for kind, one in trainers.items():
            start = time.perf_counter()
            one.step()  # ends with numbers on the CPU, so a GPU has finished its work
            if number:
                rates[kind].append(BATCH / (time.perf_counter() - start))
    return rates


def memory(folder, device, rank):
    """Peak memory in GiB of two steps, in a process of its own. Two, because AdamW's moments exist from the
    second step on."""
    done = subprocess.run(
        [sys.executable, __file__, folder, str(rank), device], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout.split()[-1])


def cases(device):
    return [partial(run, device)]


def run(device, steps=4, seeds=(0,)):
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), SIZE, None, VOCABULARY)
        peaks = {kind: memory(folder, device, rank) for kind, rank in KINDS.items()}
        rates = speed(folder, device, steps)
    results = []
    for kind, rank in KINDS.items():
        flags = ["--device", device, *(DEMO if rank else [])]
        demos = [run_seed(seed, flags) for seed in seeds]
        results.append(
            {"trained": kind, "peak GiB": peaks[kind], "samples/s": spread(rates[kind], 2), "demo": demos}
        )
    return results


def rows(results):
    for r in results:
        row = {"trained": r["trained"], "peak GiB": r["peak GiB"], "samples/s": show(r["samples/s"])}
        for name in ("accuracy", "accuracy_greedy") if r["demo"] else ():
            before, after = (
                statistics.mean(run[when][name] for run in r["demo"]) for when in ("before", "after")
            )
            row[f"demo {name.replace('_', ', ')}"] = f"{before:.3f} -> {after:.3f}"
        yield row


if __name__ == "__main__":  # started by memory(), in a process of its own
    folder, rank, device = sys.argv[1:]
    one = trainer(folder, int(rank), device)
    one.step()
    one.step()
    print(f"peak {peak_memory(device):.3f}")
