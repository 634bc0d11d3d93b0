"""An optimizer step of two processes whose gradients are summed during the backward, or after it.

    python benchmarks/overlap.py                   # all cases: about a quarter of an hour on 2 cores
    python benchmarks/overlap.py --rounds 3

Two processes with one thread each, on this machine, joined by gloo. In every round each way takes one step,
in turns: without any sum (what computing alone takes), with sums after the backward in buckets of 64 MiB (the
program before), during it, and during it in bf16. Where the machine allows it (Linux, root, tc), the same
again with a slower network: a namespace whose loopback passes so many bits a second, both directions
together. In the case "sleeping" the backward of a layer takes 0.2 s without using a CPU, as if a GPU
computed it. In the others computing and sending share the CPUs. Writes benchmarks/results/overlap.json.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import policy, show, spread, table, write_results

WAYS = ("alone", "after", "during", "during, bf16")
CASES = [  # model, sequences of a minibatch and process, micro-batches
    ("sleeping", 1, 1),
    ("128x4", 32, 1),
    ("512x8", 16, 1),
    ("512x8", 32, 4),
]
RATES = ("", "1gbit")  # of the network; "": as it is
SHAPED = "ip link set lo up && tc qdisc add dev lo root tbf rate {} burst 1mb latency 400ms && exec "


def measure(size, sequences, pieces, rounds, ways):
    """In each process -> {"seconds": {way: [a step, …]}, "peak": MiB, "numbers": of the gradients}."""
    import torch

    from trainer.compute.memory import keep_freed_memory, peak_memory
    from trainer.runs import gradient_sums
    from trainer.runs.distributed import init_world
    from trainer.runs.gradient_sums import GradientSums

    keep_freed_memory()
    with init_world("cpu") as world:
        made = sleeping() if size == "sleeping" else computing(size, sequences, pieces, world.rank)
        model, cuts, loss_of = made
        optimizer = torch.optim.AdamW(model.parameters(), 1e-6, weight_decay=0.0, fused=True)
        bucket, gradient_sums.BUCKET = gradient_sums.BUCKET, 1 << 24
        after = GradientSums(model.parameters(), world)
        after.overlap = lambda pieces: pieces  # all begin in ``finish``
        gradient_sums.BUCKET = bucket
        sums = {
            "alone": GradientSums((), world),
            "after": after,
            "during": GradientSums(model.parameters(), world),
            "during, bf16": GradientSums(model.parameters(), world, torch.bfloat16),
        }

        def step(way):
            for cut in sums[way].overlap(cuts):
                loss_of(cut).backward()
            sums[way].finish()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        seconds = {way: [] for way in ways}
        for number in range(-1, rounds):
            for way in ways:
                world.sum(torch.zeros(1))  # both begin together
                start = time.perf_counter()
                step(way)
                world.sum(torch.zeros(1))  # the step takes as long as the slower process
                if number >= 0:
                    seconds[way].append(time.perf_counter() - start)
        numbers = sum(p.numel() for p in model.parameters())
        return {"seconds": seconds, "peak": peak_memory() / 2**20, "numbers": numbers}


def computing(size, sequences, pieces, rank):
    """-> (a policy, micro-batches, the policy loss of one)"""
    from update import make_rollout

    from trainer import ppo
    from trainer.compute.batching import micro_batches
    from trainer.compute.packing import pack_sequences
    from trainer.compute.scoring import PolicyScorer

    rollout, model = make_rollout(sequences, seed=rank), policy(size, 32)
    pack_sequences(model.base_model)
    scorer = PolicyScorer(model)

    def loss_of(cut):
        mb = rollout.rows(cut)
        logprobs, _, _ = scorer(*mb.sequences, 1.0)
        loss, _ = ppo.policy_loss(logprobs, mb.old_logprobs, mb.advantages, mb.mask, ppo.Clip())
        return loss / len(rollout.tokens)

    return model, micro_batches(rollout.lengths.tolist(), -(-int(rollout.lengths.sum()) // pieces)), loss_of


def sleeping(layers=8, width=1600, seconds=0.2):
    """-> (layers whose backward takes so long and uses no CPU, one micro-batch, its loss)"""
    import torch

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(seconds)
            return grad, torch.ones(width, width)

    model = torch.nn.ParameterList(torch.zeros(width, width) for _ in range(layers))

    def loss_of(x):
        for weight in model:
            x = Sleep.apply(x, weight)
        return x.sum()

    return model, [torch.ones(1, requires_grad=True)], loss_of


def pair(case, rounds, rate="", ways=WAYS, script=__file__):
    """Run ``measure`` of a script in two processes -> what the first one found; None without a slower
    network."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        asked = json.dumps({"case": case, "rounds": rounds, "ways": ways, "result": str(result)})
        start = f'{sys.executable} {script} --worker "$0"'
        both = f"{start} 1 & {start} 0; wait"
        command = ["bash", "-c", both, asked]
        if rate:
            command = ["unshare", "-n", "bash", "-c", SHAPED.format(rate) + f"bash -c '{both}' \"$0\"", asked]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        subprocess.run(command, env=environment, check=False)
        return json.loads(result.read_text()) if result.exists() else None


def worker(measure, asked, rank):
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = rank
    asked = json.loads(asked)
    found = measure(*asked["case"], asked["rounds"], asked["ways"])
    if rank == "0":
        Path(asked["result"]).write_text(json.dumps(found))


def row_of(case, rate, found):
    seconds = found["seconds"]
    size, sequences, pieces = case
    turns = list(zip(seconds["during"], seconds["after"], strict=True))
    row = {"model": size, "MB of gradients": round(4 * found["numbers"] / 1e6), "network": rate or "as it is"}
    row |= {"sequences": sequences, "micro-batches": pieces}
    row |= {way: spread(seconds[way], 2) for way in WAYS}
    return row | {"during / after": spread([a / b for a, b in turns], 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--worker", nargs=2)
    args = parser.parse_args()
    if args.worker:
        return worker(measure, *args.worker)
    rows, memory = [], []
    for case in CASES:
        for rate in RATES:
            found = pair(case, args.rounds, rate)
            if found:
                rows.append(row_of(case, rate, found))
                print(rows[-1], flush=True)
            else:
                print(f"{case} at {rate}: this machine makes no slower network", flush=True)
        peaks = {way: round(pair(case, 2, ways=[way])["peak"]) for way in WAYS[1:]}
        memory.append({"model": case[0], "micro-batches": case[2], **peaks})
    shown = [{k: show(v) if isinstance(v, dict) else v for k, v in row.items()} for row in rows]
    print("\nseconds a step\n\n" + table(shown))
    print("\npeak memory of a process, MiB\n\n" + table(memory))
    return write_results("overlap", {"seconds": rows, "peak MiB": memory})


if __name__ == "__main__":
    main()
