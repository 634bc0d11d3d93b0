"""Is there enough memory for a PPO run? Said before the first rollout, with the flags that would help.

``check_memory`` compares the plan (memory_plan.py) with what is free. On a GPU the size of micro-batches
follows from it. A run that cannot fit ends there, in one line: a GPU would fail in the middle of a step, and
a CPU's system would kill the process without a word. ``check_loading`` looks before a policy is loaded.
"""

import json
import os
from argparse import Namespace
from contextlib import suppress
from itertools import combinations
from math import ceil, log2
from pathlib import Path

import torch

from errors import InputError
from model.lora import adapter_size
from trainer.compute.batching import tokens_per_pass
from trainer.compute.free_memory import free_memory
from trainer.memory_plan import GB, Sizes, memory_plan

# Tokens of a micro-batch on a GPU: the first that fits. With deterministic algorithms they never change.
BUDGETS = [1 << 16, 1 << 15, 1 << 14, 1 << 13, 1 << 12]
USABLE = {"cuda": 0.9, "cpu": 0.95}  # of what is left: the plan is about right, and memory has gaps
LORA_R = 16  # the rank that is suggested
WEIGHTS = ("*.safetensors", "*.bin")  # the files of a model directory, of the first kind that is there


def check_memory(args, actor, start, reward_models, device, dtype, held_out=0):
    """-> (``Plan``, a note that says where memory goes and how much is free).

    actor: the policy; start: the model that the critic starts from; reward_models: with ``start`` among them,
    if it is one; held_out: the number of prompts of the evaluation. Raises InputError where the run cannot
    fit, for --offload_frozen without a GPU, or for adapters that cannot be made.
    """
    if args.offload_frozen and device.type == "cpu":
        raise InputError("--offload_frozen 1: there is no GPU whose memory it would spare; leave it out")
    for model in (actor, start) if args.lora_r else ():
        adapter_size(model.base_model, args.lora_r)  # raises InputError for a rank that is impossible
    found = {id(model): Sizes.of(model, dtype) for model in (actor, start, *reward_models)}
    sizes = {"actor": found[id(actor)], "critic": found[id(start)]}
    sizes["rewards"] = [found[id(model)] for model in reward_models]
    if args.trust_remote_code:  # such code keeps its weights as they are
        for one in found.values():
            one.rounds = one.exact = False
    loaded = sum(one.bytes for one in found.values())
    room = USABLE[device.type] * (free_memory(device) + loaded)
    plan, fits = fitted_plan(args, sizes, device, dtype, held_out, room)
    text = describe(plan, room, device)
    if fits:
        return plan, text
    remedy = remedies(args, sizes, device, dtype, held_out, room)
    if needed(args, sizes, device, dtype, held_out) > room:
        flags = f"add {remedy}" if remedy else "no flags make it fit: take a smaller model"
        raise InputError(f"--model {args.model}: does not fit: {one_line(plan, room, device)}; {flags}")
    text += "\n         it will work in smaller pieces"
    return plan, text + (f"; to avoid that: {remedy}" if remedy else "")


def check_loading(path):
    """Raise InputError where loading the policy at ``path`` would fill the main memory.

    It is loaded in fp32, and ``check_sampling`` in inputs.py needs two copies for a moment. How many numbers
    it has follows from the size of its files. Hub names, and files that say nothing, pass.
    """
    folder, kind = Path(path), ""
    files = [folder] if folder.is_file() else next(filter(None, map(list, map(folder.glob, WEIGHTS))), [])
    with suppress(OSError, ValueError, AttributeError):  # what is wrong with it is said by who loads it
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = str(settings.get("dtype") or settings.get("torch_dtype"))
    numbers = sum(file.stat().st_size for file in files) // (2 if "16" in kind else 4)
    needs, free = 3 * 4 * numbers, free_memory(torch.device("cpu"))
    if needs > free:
        raise InputError(
            f"--model {path}: loading takes about {needs / GB:.1f} GB of main memory, and {free / GB:.1f} GB "
            "are free; close other programs, or take a smaller model"
        )


def fitted_plan(args, sizes, device, dtype, held_out, room):
    """-> (the plan with the largest micro-batches that fit into ``room`` bytes, whether any fit). Keys and
    values are freed between rollouts only where nothing fits otherwise."""
    budgets = [tokens_per_pass(device)]
    if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        budgets = BUDGETS
    for release_cache in (False, True):
        for budget in budgets:
            plan = _plan(args, sizes, device, dtype, held_out, budget=budget, release_cache=release_cache)
            if plan.peak <= room:
                return plan, True
    return plan, False


def needed(args, sizes, device, dtype, held_out):
    """The least bytes with which a run can work: on a GPU with one sequence at a time, which it falls back to
    by itself; on a CPU all, because memory that runs out there is not an error that can be caught."""
    if device.type == "cpu":
        return _plan(args, sizes, device, dtype, held_out, release_cache=True).peak
    width = args.max_seq_len + args.max_gen_len
    return _plan(_with(args, batch_size=1), sizes, device, dtype, 0, budget=width, release_cache=True).peak


def remedies(args, sizes, device, dtype, held_out, room):
    """The first combination of flags with which the run fits, as text to type; "" if there is none.

    The fewest flags, and those first that change the result least. LoRA, which trains other weights, is last.
    """
    steps = 1 << ceil(log2(args.mini_batch_size))
    changes = [("gradient_checkpointing", 1), ("moments_dtype", "bfloat16")]
    if device.type == "cuda":
        changes.append(("offload_frozen", 1))
    elif steps > args.accumulation_steps:
        changes.append(("accumulation_steps", steps))
    changes = [(name, value) for name, value in changes if getattr(args, name) != value]
    last = [[], [("lora_r", LORA_R)]] if not args.lora_r and sizes["actor"].adapters else [[]]
    for lora in last:
        for count in range(len(changes) + 1):
            for chosen in combinations(changes, count):
                flags = dict([*chosen, *lora])
                if fitted_plan(_with(args, **flags), sizes, device, dtype, held_out, room)[1]:
                    return " ".join(f"--{name} {value}" for name, value in flags.items())
    return ""


def _plan(*given, **more):
    return memory_plan(*given, processes=int(os.environ.get("WORLD_SIZE", "1")), **more)


def _with(args, **changes):
    return Namespace(**{**vars(args), **changes})


def describe(plan, room, device):
    """The plan in lines: all parts of the fullest phase."""
    parts = plan.parts(plan.fullest)
    named = [f"{name} {size / GB:.1f}" for name, size in parts.items()]
    lines, kept = [], ", and between rollouts no KV cache" if plan.release_cache else ""
    for start in range(0, len(named), 6):
        lines.append(", ".join(named[start : start + 6]))
    share = f"about {plan.peak / GB:.1f} GB of the {room / GB:.1f} GB that {device} can give{kept}; in GB:"
    return f"memory   {share}\n         " + ",\n         ".join(lines)


def one_line(plan, room, device):
    """The same in one line."""
    parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in plan.parts(plan.fullest).items())
    return f"about {plan.peak / GB:.1f} GB ({parts}); {device} can give {room / GB:.1f} GB"
