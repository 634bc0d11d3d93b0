"""--shard 1: a step that forgets each layer after its forward, keeps it, or gathers the next one beforehand.

    python benchmarks/sharding.py                  # about 10 minutes on 2 cores
    python benchmarks/sharding.py --table          # the tables of docs/scale.md; nothing is run

Two processes with one thread each, on this machine, joined by gloo (overlap.py). In every round each way
takes one optimizer step of the same sharded model, in turns, as the network is and with a slower one. Peak
memory is measured in processes of their own. "forgotten": a layer is forgotten after its forward and gathered
again in the backward, as trainer/compute/sharding.py does it; "kept": it stays until its backward;
"prefetched": it is forgotten, and the next one's gather begins before a layer computes, in gloo's thread.
Writes benchmarks/results/sharding.json.
"""

import argparse
import json
import time

from common import RESULTS, policy, show, spread, table, write_results
from overlap import RATES, pair, worker

WAYS = ("forgotten", "kept", "prefetched")
SIZE = {"hidden_size": 768, "num_hidden_layers": 10, "num_attention_heads": 12, "num_key_value_heads": 4}
SIZE |= {"intermediate_size": 2048}  # 73M numbers
CASES = [(4, 1), (4, 2)]  # sequences of a minibatch and process, micro-batches


def choose(model, way):
    """Let a sharded model go through its layers this way."""
    from trainer.compute.sharding import layers_of

    layers = layers_of(model)
    for number, layer in enumerate(layers, 1):
        layer.set_reshard_after_forward(way != "kept")
        layer.set_modules_to_forward_prefetch(layers[number : number + 1] if way == "prefetched" else [])
        layer._set_unshard_async_op(way == "prefetched")


def measure(sequences, pieces, rounds, ways):
    """In each process -> {"seconds": {way: [a step, …]}, "peak": MiB, "numbers": of the model}."""
    import torch
    from update import make_rollout

    from model.shards import is_sharded
    from trainer import ppo
    from trainer.compute.batching import micro_batches
    from trainer.compute.memory import keep_freed_memory, peak_memory
    from trainer.compute.scoring import PolicyScorer, prepare_training
    from trainer.compute.sharding import InStep, shard
    from trainer.runs.distributed import init_world
    from trainer.runs.gradient_sums import GradientSums
    from trainer.runs.optimizer_step import clip_gradients

    keep_freed_memory(sharded=True)
    with init_world("cpu") as world:
        model, rollout = policy(SIZE), make_rollout(sequences, seed=world.rank, response=32)
        numbers = sum(p.numel() for p in model.parameters())
        prepare_training(model.base_model, 0)
        scorer = PolicyScorer(model)
        shard(scorer, InStep(world), torch.float32)
        sums = GradientSums((p for p in model.parameters() if not is_sharded(p)), world)
        groups = [[p for p in model.parameters() if is_sharded(p) == kind] for kind in (True, False)]
        optimizer = torch.optim.AdamW([{"params": x} for x in groups], 1e-6, weight_decay=0.0, fused=True)
        cuts = micro_batches(rollout.lengths.tolist(), -(-int(rollout.lengths.sum()) // pieces))

        def step():
            for cut in cuts[:pieces]:  # two of the uneven sequences may be left over
                mb = rollout.rows(cut)
                logprobs, _, _ = scorer(*mb.sequences, 1.0)
                loss, _ = ppo.policy_loss(logprobs, mb.old_logprobs, mb.advantages, mb.mask, ppo.Clip())
                loss.backward()
            sums.finish()
            clip_gradients(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        seconds = {way: [] for way in ways}
        for number in range(-1, rounds):
            for way in ways:
                choose(model, way)
                world.sum(torch.zeros(1))  # both begin together
                start = time.perf_counter()
                step()
                world.sum(torch.zeros(1))  # the step takes as long as the slower process
                if number >= 0:
                    seconds[way].append(time.perf_counter() - start)
        return {"seconds": seconds, "peak": peak_memory() / 2**20, "numbers": numbers}


def rows_of(results):
    """The results -> the rows of the table in docs/scale.md."""
    rows = [{**row, "peaks": results["peak MiB"][str(row["micro-batches"])]} for row in results["seconds"]]
    for row in rows:
        row["numbers"] = f"{row['numbers'] / 1e6:.0f}M"
        row |= {f"MiB, {way}": peak for way, peak in row.pop("peaks").items()}
    return [{name: show(x) if isinstance(x, dict) else x for name, x in row.items()} for row in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--worker", nargs=2)
    args = parser.parse_args()
    if args.worker:
        return worker(measure, *args.worker)
    if args.table:
        return print(table(rows_of(json.loads((RESULTS / "sharding.json").read_text(encoding="utf-8")))))
    rows, peaks = [], {}
    for case in CASES:
        for rate in RATES:
            found = pair(case, args.rounds, rate, WAYS, __file__)
            if not found:
                raise SystemExit("error: no slower network: it needs Linux, root and tc")
            row = {"numbers": found["numbers"], "network": rate or "as it is", "micro-batches": case[1]}
            row |= {way: spread(seconds, 2) for way, seconds in found["seconds"].items()}
            for way in WAYS[1:]:
                turns = zip(found["seconds"][way], found["seconds"]["forgotten"], strict=True)
                row[f"{way} / forgotten"] = spread([a / b for a, b in turns], 2)
            rows.append(row)
        peaks[str(case[1])] = {way: round(pair(case, 1, "", [way], __file__)["peak"]) for way in WAYS}
    results = {"seconds": rows, "peak MiB": peaks}
    print(table(rows_of(results)))
    return write_results("sharding", results)


if __name__ == "__main__":
    main()
