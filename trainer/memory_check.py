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

MB = 1e6

# Tokens of a micro-batch on a GPU: the first that fits. With deterministic algorithms they never change.
BUDGETS = [1 << 16, 1 << 15, 1 << 14, 1 << 13, 1 << 12]
USABLE = {"cuda": 0.9, "cpu": 0.95}  # of what is left: the plan is about right, and memory has gaps
# Bytes of code that is loaded or compiled while a run goes on, by oneDNN, gloo and others. Those of a GPU are
# small beside what is not ``USABLE``.
LATER = {"cuda": 0, "cpu": 80e6}
LORA_R = 16  # the rank that is suggested
LOADING = 3 * 4  # bytes a number: fp32, and two copies for the test of sampling
LEAST_SLOTS = 16  # so many sequences should be sampled together, or rollouts take too long
WEIGHTS = ("*.safetensors", "*.bin")  # the files of a model directory, of the first kind that is there


def check_memory(
    args, actor, start, reward_models, device, dtype, sampled=None, demonstration=0, in_step=None
):
    """-> (``Plan``, a note that says where memory goes and how much is free).

    actor: the policy; start: the model that the critic starts from, None without a critic; reward_models:
    with ``start`` among them, if it is one; sampled: (most prompts of a call, longest prompt plus response,
    …) from ``sampling_sizes``; None: what the flags allow; demonstration: tokens of the longest one of
    --ptx_data_path, 0 without any; in_step: of a sharded run, whose processes plan with what the one has that
    has least. Raises InputError where the run cannot fit, for --offload_frozen without a GPU, or for adapters
    that cannot be made.
    """
    held_out, width, *_ = sampled or (0, args.max_seq_len + args.max_gen_len)
    args = _with(args, max_seq_len=width - args.max_gen_len)  # no prompt is longer
    if args.offload_frozen and device.type == "cpu":
        raise InputError("--offload_frozen 1: there is no GPU whose memory it would spare; leave it out")
    trained = [actor, start] if start else [actor]
    for model in trained if args.lora_r else ():
        adapter_size(model.base_model, args.lora_r)  # raises InputError for a rank that is impossible
    found = {id(model): Sizes.of(model, dtype) for model in (*trained, *reward_models)}
    sizes = {name: found[id(model)] for name, model in zip(("actor", "critic"), trained, strict=False)}
    sizes["demonstration"] = demonstration
    sizes["rewards"] = [found[id(model)] for model in reward_models]
    if args.trust_remote_code:  # such code keeps its weights as they are
        for one in found.values():
            one.rounds = one.exact = False
    models = dict.fromkeys((*trained, *reward_models))
    here = [m for m in models if not in_step or m.device == device]  # others come when they are sharded
    loaded = sum(found[id(model)].bytes for model in here)
    room = USABLE[device.type] * (free_memory(device) + loaded) - LATER[device.type]
    if in_step:  # one plan for all
        room, sizes = in_step.least(room), in_step.world.from_main(sizes)
    plan, fits = fitted_plan(args, sizes, device, dtype, held_out, room)
    if fits:
        return plan, describe(plan, room, device)
    remedy = remedies(args, sizes, device, dtype, held_out, room)
    pieces = in_pieces(args, sizes, device, dtype, room)
    if pieces is None:
        other = "shorten the texts (--max_gen_len, --max_seq_len), or take a smaller model"
        flags = f"add {remedy}" if remedy else f"no flags make it fit: {other}"
        raise InputError(f"--model {args.model}: does not fit: {one_line(plan, room, device)}; {flags}")
    text = f"{describe(plan, room, device)}\n         it will work in smaller pieces"
    return plan, text + (f"; to avoid that: {remedy}" if remedy else "")


def check_loading(path, alone=False):
    """Raise InputError where loading the policy at ``path`` would fill the main memory. alone: no other
    process of the machine loads it too.

    It is loaded in fp32, and ``check_sampling`` in policy_checks.py needs two copies for a moment. How many
    numbers it has follows from the size of its files. Hub names, and files that say nothing, pass.
    """
    folder, kind = Path(path), ""
    files = [folder] if folder.is_file() else next(filter(None, map(list, map(folder.glob, WEIGHTS))), [])
    with suppress(OSError, ValueError, AttributeError):  # what is wrong with it is said by who loads it
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = str(settings.get("dtype") or settings.get("torch_dtype"))
    numbers = sum(file.stat().st_size for file in files) // (2 if "16" in kind else 4)
    needs, free = LOADING * numbers, free_memory(torch.device("cpu"), alone)
    if needs > free:
        raise InputError(
            f"--model {path}: loading takes about {shown(needs)} of main memory, and {shown(free)} are free; "
            "close other programs, or take a smaller model"
        )


def fitted_plan(args, sizes, device, dtype, held_out, room, **more):
    """-> (the plan with the largest micro-batches that fit into ``room`` bytes, True), or (the one that needs
    the least memory, False). Where nothing fits otherwise, keys and values are freed between rollouts, and
    last fewer sequences are sampled together. more: ``processes``, by default those of torchrun."""
    budgets = [tokens_per_pass(device)]
    if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        budgets = BUDGETS
    options = [{"budget": budget, "release_cache": free} for free in (False, True) for budget in budgets]
    options += [options[-1] | {"slots": slots} for slots in (128, 64, 32, LEAST_SLOTS)]
    plans = [_plan(args, sizes, device, dtype, held_out, **more, **option) for option in options]
    fitting = [plan for plan in plans if plan.peak <= room]
    return (fitting[0], True) if fitting else (min(plans, key=lambda plan: plan.peak), False)


def in_pieces(args, sizes, device, dtype, room):
    """The plan of a run with one sequence at a time, or None where not even that fits. A GPU falls back to it
    by itself. On a CPU memory that runs out is not an error that can be caught."""
    least = {"budget": args.max_seq_len + args.max_gen_len, "release_cache": True, "slots": 1}
    plan = _plan(args, sizes, device, dtype, 0, **least)
    return plan if device.type == "cuda" and plan.peak <= room else None


def remedies(args, sizes, device, dtype, held_out, room):
    """The first combination of flags with which the run fits, as text to type; "" if there is none.

    The fewest flags, and those first that change the result least. LoRA, which trains other weights, is last.
    """
    steps = 1 << ceil(log2(args.mini_batch_size))
    changes = [("gradient_checkpointing", 1), ("moments_dtype", "bfloat16")]
    if _processes() > 1 and not args.ema_beta:
        changes.insert(0, ("shard", 1))
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
                if {"shard", "offload_frozen"} <= set(flags):  # these do not go together
                    continue
                if fitted_plan(_with(args, **flags), sizes, device, dtype, held_out, room)[1]:
                    return " ".join(f"--{name} {value}" for name, value in flags.items())
    return ""


def _plan(*given, **more):
    return memory_plan(*given, **{"processes": _processes(), **more})


def _processes():
    return int(os.environ.get("WORLD_SIZE", "1"))


def _with(args, **changes):
    return Namespace(**{**vars(args), **changes})


def describe(plan, room, device):
    """The plan in lines: all parts of the fullest phase."""
    unit, parts = parts_of(plan)
    text = f"memory   about {shown(plan.peak)} of the {shown(room)} that {device} can give"
    if plan.release_cache:
        text += f", with {plan.slots} sequences sampled at a time and the KV cache freed after sampling"
    rows = [", ".join(parts[start : start + 6]) for start in range(0, len(parts), 6)]
    return f"{text}; in {unit}:\n         " + ",\n         ".join(rows)


def one_line(plan, room, device):
    """The same in one line."""
    unit, parts = parts_of(plan)
    return f"about {shown(plan.peak)} (in {unit}: {', '.join(parts)}); {device} can give {shown(room)}"


def parts_of(plan):
    """-> (the unit, [each part of the fullest phase as text, in this unit])"""
    unit, name, digits = (GB, "GB", 1) if plan.peak >= GB else (MB, "MB", 0)
    return name, [f"{part} {size / unit:.{digits}f}" for part, size in plan.parts(plan.fullest).items()]


def shown(size):
    """Bytes as text: in GB, below one in MB."""
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / MB:.0f} MB"
