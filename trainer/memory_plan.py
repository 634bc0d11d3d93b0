"""How much memory a PPO run takes, part by part, and whether the machine has it: said before the first step.

Models and AdamW's two moments are there all the time. The rest comes and goes with the phases of a step:

update      gradients of one model (critic and actor take turns), the activations of a micro-batch, for the
            actor a chunk of logits
rollout     logits; keys and values, which stay for the other phases unless memory is short
scoring     with --offload_frozen 1: the models that wait in the host's memory otherwise
building    before the first step: the models as they were loaded, and the sampler as a copy in fp32

With --shard 1 each process has its part of what stays: weights, gradients, moments. Whole are activations,
keys and values, the sampler, which is there in rollouts only, and what is gathered to compute with: the layer
that computes and the next one.

``memory_plan`` is the arithmetic. No model is needed, only its ``Sizes``, so it serves for other flags and
other machines too. ``check_memory`` takes the plan with the largest micro-batches that fits. A run that
cannot fit ends there, in one line with the flags that would help: a GPU would fail in the middle of a step,
and a CPU's system would kill the process without a word. ``check_loading`` looks before a policy is loaded.
"""

import os
import re
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from torch import nn

from errors import InputError
from model.lora import adapter_size
from trainer.compute.batching import tokens_per_pass
from trainer.compute.logprobs import CHUNK, MIN_CHUNK_TOKENS
from trainer.compute.memory import free_memory
from trainer.compute.precision import holds
from trainer.generation.engine import CACHE_BYTES, ROW_MULTIPLE, SLOTS
from trainer.generation.kv_cache import bytes_per_token

GB = 1e9
# Tokens of a micro-batch on a GPU: the first that fits. With deterministic algorithms they never change.
BUDGETS = [1 << 16, 1 << 15, 1 << 14, 1 << 13, 1 << 12]
# Where memory is short: tokens of a micro-batch, and sequences that are sampled together.
SMALL_BUDGET = 1 << 10
FEWER_SLOTS = [256, 128, 64, 32, 16]
USABLE = {"cuda": 0.9, "cpu": 0.95}  # of what is left: the plan is about right, and memory has gaps
LATER = 80e6  # bytes of code that is loaded or compiled while a run goes on, by oneDNN, gloo and others
LOADING = 3 * 4  # bytes a number: fp32, and two copies for the test of sampling


class Sizes:
    """What the arithmetic needs to know of a model: how many numbers are where."""

    def __init__(self, model, dtype):
        """dtype: of mixed precision. Weights without memory (torch's meta device) count as exact."""
        tables = []
        with suppress(NotImplementedError):  # a reward model's own code may not name them
            ends = {model.get_input_embeddings(), model.get_output_embeddings()} - {None}
            tables = list({end.weight for end in ends})  # one, if the head is tied to the embeddings
        linear = [module.weight for module in model.base_model.modules() if isinstance(module, nn.Linear)]
        self.config = model.config.get_text_config()
        self.all = sum(p.numel() for p in model.parameters())
        self.linear = sum(p.numel() for p in linear)  # without the head
        self.table = sum(p.numel() for p in tables)  # of embeddings and head
        self.exact = all(holds(p, dtype) for p in linear + tables)  # see ``keep_exact`` in precision.py
        self.bytes = sum(p.nbytes for p in model.parameters())  # that it takes now
        self.adapters = 0  # what adapters of rank 1 would add
        with suppress(InputError):  # there can be none
            self.adapters = adapter_size(model.base_model, 1)

    def frozen(self, args, dtype):
        """Bytes of a copy that does not train: as ``prepare_frozen`` in run.py rounds it."""
        rounded = 0 if args.lora_r else self.linear
        if self.exact:
            rounded = self.linear + self.table
        size = dtype.itemsize * rounded + 4 * (self.all - rounded)
        if args.lora_r and args.advantage == "gae":  # the critic's adapters make what it shares fp32
            return size
        return min(size, self.bytes)


@dataclass
class Plan:
    """Where memory goes."""

    phases: dict  # {phase: {part: bytes}} of all that is there
    fullest: str  # the phase that takes the most
    peak: int  # bytes that it takes
    cache: int  # bytes of keys and values
    slots: int  # sequences that are sampled together
    token_budget: int  # tokens of a micro-batch
    release_cache: bool  # whether keys and values are freed between rollouts


def memory_plan(
    args, sizes, device, dtype, processes=1, budget=None, release_cache=False, slots=SLOTS
) -> Plan:
    """The memory of a run with these flags.

    sizes: {"actor": ``Sizes``, "rewards": a list} and, with a critic, "critic": of the backbone that it
    starts from; "responses": the most that are sampled in a call; "width": tokens of the longest prompt and
    response, "demonstration": of the longest one that the actor learns besides, or 0; dtype: of mixed
    precision; processes: that train together; budget: tokens of a micro-batch, by default the fixed number of
    the device; slots: sequences that are sampled together at most.
    """
    actor = sizes["actor"]
    rewards = sizes["rewards"]
    models = {name: sizes[name] for name in ("actor", "critic") if name in sizes}
    small = dtype.itemsize
    on_cpu = device.type == "cpu"
    parts = processes if args.shard else 1  # into which models are cut

    # Models and moments. With adapters, models share what is frozen, if they are whole.
    trained = {name: args.lora_r * size.adapters or size.all for name, size in models.items()}
    standing = {name: 4 * count // parts for name, count in trained.items()}
    moment = getattr(torch, args.moments_dtype)
    standing["moments"] = 2 * moment.itemsize * sum(trained.values()) // parts
    frozen = {"reward models": sum(size.frozen(args, dtype) for size in rewards) // parts}
    if args.lora_r:
        for name in models if parts > 1 else ["actor"]:
            standing[name] += models[name].frozen(args, dtype) // parts
    if parts > 1 or not args.lora_r:
        frozen["reference"] = actor.frozen(args, dtype) // parts
        if args.update_old_actor_freq > 1:
            frozen["old actor"] = frozen["reference"]
    if args.ema_beta and on_cpu:  # it is in main memory always
        standing["average"] = 4 * trained["actor"]

    # The rollout.
    slots = min(slots, sizes["responses"])
    slots += -slots % ROW_MULTIPLE
    cache = slots * sizes["width"] * bytes_per_token(actor.config, small)
    if on_cpu:
        cache = min(cache, CACHE_BYTES)
    rollout = {"logits": 16 * slots * actor.config.vocab_size}  # fp32, and what sampling makes of them
    copied = bool(slots) * (actor.all + on_cpu * actor.table)  # a CPU lays the head out once more
    sampler = {"sampler": small * copied}
    if parts == 1:
        standing |= sampler
    else:  # it is there in rollouts only, and gets one matrix after the other
        rollout |= sampler | {"gathered": 4 * actor.config.vocab_size * actor.config.hidden_size}

    # An update of the larger model.
    model = max(models.values(), key=lambda size: size.all)
    tokens = args.mini_batch_size * (sizes["width"] + sizes["demonstration"]) // args.accumulation_steps
    budget = budget or tokens_per_pass(device)
    tokens = min(tokens, max(budget, sizes["width"]))
    logits = min(tokens, max(CHUNK[device.type] // actor.config.vocab_size, MIN_CHUNK_TOKENS))
    activations = tokens * bytes_of_activations(model.config, small, args.gradient_checkpointing)
    activations += (4 + small) * logits * actor.config.vocab_size  # and their gradient
    cast = small if small < 4 else 0  # bytes a number of the copies for mixed precision
    activations += cast * actor.table
    if parts == 1 and not args.lora_r:  # a gradient of the embeddings before it is added; copies of layers
        activations += 4 * model.table + cast * model.linear
    update = {"gradients": 4 * max(trained.values()) // parts, "micro-batch": activations}
    if parts > 1:  # two layers in ``dtype``, embeddings and head in fp32; gradients are summed in fp32
        layer = (model.all - model.table) // model.config.num_hidden_layers
        update["gathered"] = 2 * small * layer + 4 * model.table
        if not args.lora_r:
            update["gathered"] += (small + 4) * layer + 8 * model.table

    cached = {"KV cache": cache}
    if not args.offload_frozen:  # else they are there for scoring only
        standing |= frozen
    between = standing if release_cache else standing | cached
    phases = {
        "update": between | update,
        "rollout": standing | cached | rollout,
        "scoring": between | frozen,
    }
    if parts == 1 or on_cpu:  # a sharded run is built in main memory: models as loaded, the sampler in fp32
        loaded = sum(size.bytes for size in rewards)
        phases["building"] = {"actor": 4 * actor.all, "sampler": 4 * copied, "reward models": loaded}
    totals = {phase: sum(part.values()) for phase, part in phases.items()}
    fullest = max(totals, key=totals.get)
    return Plan(phases, fullest, totals[fullest], cache, slots, budget, release_cache)


def bytes_of_activations(config, small, checkpointing):
    """What a forward keeps of a token for its backward. In each layer: two numbers per hidden unit in fp32
    (residuals), and in mixed precision six per hidden unit (norms, queries, outputs) and four per
    intermediate unit (gate, up, their product)."""
    hidden = config.hidden_size
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    layer = 8 * hidden + small * (6 * hidden + 4 * intermediate)
    if checkpointing:  # the residual of every layer, and one layer at a time
        return 4 * hidden * config.num_hidden_layers + layer
    return layer * config.num_hidden_layers


def fitted_plan(args, sizes, device, dtype, room, processes) -> tuple[Plan, bool]:
    """-> (the plan with the largest micro-batches that fit into ``room`` bytes, True), or (the one that needs
    the least memory, False). Where nothing fits otherwise, keys and values are freed between rollouts, and
    last fewer sequences are sampled together."""
    budgets = [tokens_per_pass(device)]
    if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        budgets = BUDGETS
    options = [(budget, free, SLOTS) for free in (False, True) for budget in budgets]
    options += [(budget, True, slots) for budget in (budgets[-1], SMALL_BUDGET) for slots in FEWER_SLOTS]
    for option in options:
        plan = memory_plan(args, sizes, device, dtype, processes, *option)
        if plan.peak <= room:
            return plan, True
    return plan, False


def check_memory(
    args, actor, start, reward_models, device, dtype, sampled, demonstration=0, in_step=None
) -> tuple[Plan, str]:
    """-> (``Plan``, a note that says where memory goes and how much is free).

    actor: the policy; start: the model that the critic starts from, None without a critic; reward_models:
    with ``start`` among them, if it is one; sampled: from ``sampling_sizes``; demonstration: tokens of the
    longest one of --ptx_data_path, 0 without any; in_step: of a sharded run, whose processes plan with what
    the one has that has least. Raises InputError where the run cannot fit, with the fewest flags with which
    it would, those first that change the result least, and for --offload_frozen without a GPU.
    """
    if args.offload_frozen and device.type == "cpu":
        raise InputError("--offload_frozen 1: there is no GPU whose memory it would spare; leave it out")
    found = {model: Sizes(model, dtype) for model in [actor, *reward_models]}
    sizes = {"actor": found[actor], "rewards": [found[model] for model in reward_models]}
    sizes |= {"responses": sampled[0], "width": sampled[1], "demonstration": demonstration}
    if start:
        sizes["critic"] = Sizes(start.base_model, dtype)
    # In a sharded run the others come when they are sharded.
    loaded = sum(size.bytes for model, size in found.items() if not in_step or model.device == device)
    room = USABLE[device.type] * (free_memory(device) + loaded) - LATER
    if in_step:  # one plan for all
        room = in_step.least(room)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    plan, fits = fitted_plan(args, sizes, device, dtype, room, processes)
    text = f"about {shown(plan.peak)} of the {shown(room)} that {device} can give"
    if plan.release_cache:
        text += (
            f", with {plan.token_budget} tokens in a micro-batch, {plan.slots} sequences sampled at a time"
        )
        text += " and the KV cache freed after sampling"
    text += ":\n         "
    text += ", ".join(f"{part} {shown(size)}" for part, size in plan.phases[plan.fullest].items() if size)
    if fits:
        return plan, f"memory   {text}"
    flags = {"gradient_checkpointing": 1, "moments_dtype": "bfloat16"}
    if found[actor].adapters and not args.lora_r:
        flags["lora_r"] = 16
    if processes > 1 and not args.ema_beta:
        flags = {"shard": 1} | flags
    elif device.type == "cuda":
        flags["offload_frozen"] = 1
    choices = [some for count in range(len(flags)) for some in combinations(flags, count + 1)]
    remedy = "no flags make it fit: shorten the texts (--max_gen_len, --max_seq_len), or take a smaller model"
    for some in sorted(choices, key=lambda some: "lora_r" in some):  # it trains other weights
        tried = Namespace(**vars(args) | {name: flags[name] for name in some})
        if fitted_plan(tried, sizes, device, dtype, room, processes)[1]:
            remedy = "add " + " ".join(f"--{name} {flags[name]}" for name in some)
            break
    raise InputError(f"--model {args.model}: does not fit: {text}; {remedy}")


def check_loading(path) -> None:
    """Raise InputError where loading the policy at ``path`` would fill the main memory.

    It is loaded in fp32, and ``check_sampling`` in inputs.py needs two copies for a moment. How many numbers
    it has follows from the size of its files. Hub names, and files that say nothing, pass.
    """
    folder = Path(path)
    files = [folder] if folder.is_file() else folder.glob("*.safetensors")
    settings = folder / "config.json"
    text = settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else ""
    each = 2 if re.search('dtype": "b?float16"', text) else 4  # bytes of a number
    needs = LOADING * sum(file.stat().st_size for file in files) // each
    free = free_memory(torch.device("cpu"))
    if needs > free:
        raise InputError(
            f"--model {path}: loading takes about {shown(needs)} of main memory, and {shown(free)} are free; "
            "close other programs, or take a smaller model"
        )


def shown(size) -> str:
    """Bytes as text: in GB, below one in MB."""
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / 1e6:.0f} MB"
