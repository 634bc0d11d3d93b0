"""How many GPUs a model needs, and how long a step takes there: on paper. docs/scale.md has the first table.

    python benchmarks/plan.py --table                  the tables; nothing is run
    python benchmarks/plan.py --check ["62M, fp32" …]  the memory plan beside measured runs: plan_check.py

Models have their public sizes and no weights (torch's meta device). Memory is that of trainer/memory_plan.py.
Time follows from ``ASSUMED`` and the makers' figures of each card (``CARDS``): operations of matrix products,
bytes that decoding reads, bytes that go between GPUs. Nobody has measured these times.
"""

import json
import shlex
import sys
from copy import copy
from dataclasses import dataclass
from functools import cache
from math import ceil

import torch
from common import QWEN_VOCABULARY, RESULTS, SIZES, read, table, write_results
from plan_check import CASES, measure, run_case
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from trainer.compute.batching import tokens_per_forward
from trainer.generation.kv_cache import bytes_per_token
from trainer.memory_plan import GB, LOADING, USABLE, ModelSizes, PlannedRun, fitted_plan, memory_plan
from trainer.train_ppo import parse_args

GPU = torch.device("cuda")
TIED = {"vocab_size": QWEN_VOCABULARY, "tie_word_embeddings": True}
SHAPE_3B = {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2}
SHAPE_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
MODELS = {
    "Qwen2.5-0.5B": Qwen2Config(**SIZES["0.5B"], **TIED),
    "Qwen2.5-1.5B": Qwen2Config(**SIZES["1.5B"], **TIED),
    "Qwen2.5-3B": Qwen2Config(**SHAPE_3B, intermediate_size=11008, **TIED),
    "Llama-3.1-8B": LlamaConfig(**SHAPE_8B, intermediate_size=14336, vocab_size=128_256),
}
METHODS = {
    "critic": "",
    "no critic": "--advantage rloo --num_generations 4",
    "critic, LoRA": "--lora_r 16",
    "no critic, LoRA": "--advantage rloo --num_generations 4 --lora_r 16",
}
SIZES_OF_A_STEP = "--batch_size 64 --mini_batch_size 16 --max_seq_len 256 --max_gen_len 512"
SHARDED = [2, 4, 8, 16, 32, 64]  # GPUs
COUNTS = [1, *SHARDED]
MACHINE = 8  # GPUs of one machine


@dataclass
class Card:
    """A GPU: bytes it has, operations and bytes of memory a second as its maker states them, bytes a second
    from GPU to GPU within a machine and between machines, the type of mixed precision."""

    bytes: float
    operations: float
    memory: float
    within: float
    between: float
    dtype: torch.dtype = torch.bfloat16


CARDS = {
    "T4, 16 GB": Card(16e9, 65e12, 0.3e12, 8e9, 2.5e9, torch.float16),
    "RTX 4090, 24 GB": Card(25.7e9, 165e12, 1.0e12, 20e9, 2.5e9),
    "H100, 80 GB": Card(85e9, 989e12, 3.35e12, 300e9, 40e9),
    "H200, 141 GB": Card(150e9, 989e12, 4.8e12, 300e9, 40e9),
}
TIMED = "H100, 80 GB"
ASSUMED = {"training": 0.4, "scoring": 0.4, "decoding": 0.5}  # shares of what the card could do


# ------------------------------------------------------------------------------------------------ memory


@cache
def sizes_of(model):
    """The ``ModelSizes`` of one of MODELS and of its backbone. It takes seconds."""
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(MODELS[model], dtype=torch.float32)
    return ModelSizes(policy, torch.bfloat16), ModelSizes(policy.base_model, torch.bfloat16)


def case_of(model, method, dtype, shard=0, count=1):
    """-> the ``PlannedRun`` of a run without a reward model, on ``count`` GPUs."""
    more = "--data_path x --reward_fn x.py:f --gradient_checkpointing 1"
    args = parse_args(shlex.split(f"--model x {more} {SIZES_OF_A_STEP} {METHODS[method]}"))
    args = args.completed(shard=shard)
    actor, critic = map(copy, sizes_of(model))
    actor.exact = dtype == torch.bfloat16  # it was saved in it
    models = {"actor": actor} | ({"critic": critic} if args.advantage == "gae" else {})
    width = args.max_seq_len + args.max_gen_len
    return PlannedRun(args, GPU, dtype, models, [], args.batch_size, width, processes=count)


def fitting(case, card):
    """The plan of a run on cards of this kind, or None where it does not fit."""
    available = USABLE * card.bytes
    plan = fitted_plan(case, available)
    return plan if plan.peak <= available else None


def fewest():
    """The fewest GPUs that a run needs, and the seconds of a step there: a column a card."""
    rows = []
    for model, method in RUNS:
        row = {"model": model, "trains": method}
        for name, card in CARDS.items():
            row[name] = "more than 64"
            for count in COUNTS:
                case = case_of(model, method, card.dtype, int(count > 1), count)
                if plan := fitting(case, card):
                    seconds = sum(step_seconds(case, card, plan).values())
                    row[name] = f"{count}: {shown(seconds)} s"
                    break
        rows.append(row)
    return rows


def each_gpu():
    """GB that each GPU needs with 64 sequences sampled together and micro-batches of 2,048 tokens. And the GB
    of main memory in which each process of a sharded run loads the models."""
    rows = []
    kinds = [("1", 0, 1), ("2 or more", 0, 2), *((f"{n}, sharded", 1, n) for n in SHARDED)]
    for model, method in RUNS:
        row = {"model": model, "trains": method}
        for name, shard, count in kinds:
            case = case_of(model, method, torch.bfloat16, shard, count)
            row[name] = f"{memory_plan(case).peak / GB:.1f}"
        rows.append(row | {"main memory, sharded": f"{LOADING * case.models['actor'].all / GB:.0f}"})
    return rows


# -------------------------------------------------------------------------------------------------- time


def step_seconds(case, card, plan):
    """{part: seconds} of a step. All prompts and responses have the full length. What goes between GPUs is
    not hidden behind computing. plan: of the memory (``Plan``)."""
    args, actor, small, count = case.args, case.models["actor"], card.dtype.itemsize, case.processes
    answers, width = args.batch_size, args.max_seq_len + args.max_gen_len
    tokens, updates = answers * width, answers // args.mini_batch_size
    product = (
        actor.all - actor.table + actor.config.vocab_size * actor.config.hidden_size
    )  # they multiply every token
    models = len(case.models)
    cache = answers * (args.max_seq_len + args.max_gen_len / 2) * bytes_per_token(actor.config, small)
    decoding = args.max_gen_len * max(
        (small * product + cache) / (ASSUMED["decoding"] * card.memory),
        2 * product * answers / (ASSUMED["scoring"] * card.operations),
    )
    prompts = 2 * product * answers * args.max_seq_len / (ASSUMED["scoring"] * card.operations)
    scoring = 2 * product * tokens * (1 + models) / (ASSUMED["scoring"] * card.operations)
    each = (4 if args.lora_r else 6) + (2 if args.gradient_checkpointing else 0)  # operations a number, token
    training = each * product * tokens * models / (ASSUMED["training"] * card.operations)
    passes = updates * ceil(args.mini_batch_size * width / plan.token_budget)
    traffic = sent(case, small, passes, updates) / link(card, count)
    return {"rollout": decoding + prompts, "score": scoring, "update": training, "between GPUs": traffic}


def sent(case, small, passes, updates):
    """Bytes that each GPU sends in a step. passes: micro-batches of an update of the whole batch."""
    share, actor = (case.processes - 1) / case.processes, case.models["actor"]
    args, models = case.args, len(case.models)
    trained = args.lora_r * actor.adapters if args.lora_r else actor.all
    if not args.shard:  # each optimizer step sums all gradients: a reduce-scatter and a gather
        return models * updates * 2 * share * 4 * trained
    gathered = share * (small * (actor.all - actor.table) + 4 * actor.table)
    scoring = ceil(args.batch_size * (args.max_seq_len + args.max_gen_len) / tokens_per_forward(GPU))
    gathers = 2 * passes * models + scoring * (
        1 + models
    )  # forward and backward; old actor, reference, critic
    sampling = share * 4 * actor.all
    return gathered * gathers + models * passes * share * 4 * trained + sampling


def link(card, count):
    """Bytes a second between GPUs."""
    return card.within if count <= MACHINE else card.between


def seconds():
    """Seconds of a step on one kind of card, with those that go between GPUs; "" where it does not fit."""
    rows, card = [], CARDS[TIMED]
    for model, method in RUNS:
        row = {"model": model, "trains": method}
        for shard, counts in ((0, [1, 8, 64]), (1, [2, 8, 16, 64])):
            for count in counts:
                case, name = (
                    case_of(model, method, card.dtype, shard, count),
                    f"{count}, sharded" if shard else str(count),
                )
                row[name] = ""
                if plan := fitting(case, card):
                    parts = step_seconds(case, card, plan)
                    row[name] = f"{shown(sum(parts.values()))} ({shown(parts['between GPUs'])})"
        rows.append(row)
    return rows


def shown(number):
    """Seconds as text, two digits."""
    return f"{number:.0f}" if number >= 10 else f"{number:.1f}"


# ------------------------------------------------------------------------------------------- what is said

RUNS = [(model, method) for model in MODELS for method in METHODS]


def assumptions():
    """The figures that the times are made from: a row a card."""
    return [
        {
            "card": name,
            "type": str(card.dtype).removeprefix("torch."),
            "TFLOP/s": f"{card.operations / 1e12:.0f}",
            "memory GB/s": f"{card.memory / GB:.0f}",
            "GB/s to the next GPU": f"{card.within / GB:g}",
            "GB/s to the next machine": f"{card.between / GB:g}",
        }
        for name, card in CARDS.items()
    ]


def checked():
    """The measured runs of results/plan.json beside their plans, in MB."""
    runs = json.loads(read(RESULTS / "plan.json"))["runs"]
    names = ("run", "processes", "plan", "measured", "ratio", "fullest")
    return [{name: run[name] for name in names} for run in runs]


TABLES = {"fewest": fewest, "GB": each_gpu, "assumed": assumptions, "seconds": seconds, "checked": checked}


def check(names):
    """Measure these cases, by default all -> results/plan.json."""
    kept = json.loads(read(RESULTS / "plan.json") or "{}").get("runs", [])
    rows = {row["run"]: row for row in kept if row["run"] in CASES}
    for name in names or CASES:
        rows[name] = run_case(name)
        print({key: rows[name][key] for key in ("run", "plan", "measured", "ratio")}, flush=True)
        write_results("plan", {"runs": [rows[name] for name in CASES if name in rows]})


def main(argv):
    if argv[:1] == ["--measure"]:
        return measure(argv[1:])
    if argv[:1] == ["--check"]:
        return check(argv[1:])
    if argv != ["--table"]:
        raise SystemExit(f"error: {' '.join(argv) or 'no flag'}: --table or --check\n\n{__doc__}")
    return print("\n\n".join(table(make()) for make in TABLES.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
