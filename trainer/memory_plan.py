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
other machines too. ``check_memory`` compares it with what is free. On a GPU the size of micro-batches follows
from it. A run that cannot fit ends there, in one line with the flags that would help: a GPU would fail in the
middle of a step, and a CPU's system would kill the process without a word. ``check_loading`` looks before a
policy is loaded.
"""

import json
import os
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

GB, MB = 1e9, 1e6
# Numbers that one layer keeps for the backward of one token: so many in fp32 per hidden unit (residuals), in
# mixed precision per hidden unit (norms, queries, outputs), per intermediate unit (gate, up, their product).
KEPT = {"fp32": 2, "hidden": 6, "intermediate": 4}
# Tokens of a micro-batch on a GPU: the first that fits. With deterministic algorithms they never change.
BUDGETS = [1 << 16, 1 << 15, 1 << 14, 1 << 13, 1 << 12]
FEWER_SLOTS = (128, 64, 32, 16)  # sequences that are sampled together where memory is short
USABLE = {"cuda": 0.9, "cpu": 0.95}  # of what is left: the plan is about right, and memory has gaps
# Bytes of code that is loaded or compiled while a run goes on, by oneDNN, gloo and others. Those of a GPU are
# small beside what is not ``USABLE``.
LATER = {"cuda": 0, "cpu": 80e6}
LORA_R = 16  # the rank that is suggested
LOADING = 3 * 4  # bytes a number: fp32, and two copies for the test of sampling
WEIGHTS = ("*.safetensors", "*.bin")  # the files of a model directory, of the first kind that is there


@dataclass
class Sizes:
    """What the arithmetic needs to know of a model: how many numbers are where. ``Sizes.of`` counts them."""

    config: object
    all: int  # numbers of the model
    linear: int  # in linear layers, the head included if it has weights of its own
    table: int  # in the embeddings; a head that is tied has these
    own_head: int  # in a head that is not tied; a critic does not have it
    adapters: int  # what adapters of rank 1 would add; 0 if there can be none
    exact: bool  # whether ``dtype`` holds every weight of these as it is (``keep_exact`` in precision.py)
    bytes: int  # that the model takes now

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype) -> "Sizes":
        """Count a model's numbers. Weights without memory (torch's meta device) count as exact."""
        tables, adapters = [], 0
        with suppress(NotImplementedError):  # a reward model's own code may not name them
            found = [model.get_input_embeddings(), model.get_output_embeddings()]
            tables = [module.weight for module in found if module]
        own_head = [head for head in tables[1:] if head is not tables[0]]
        linear = [m.weight for m in model.base_model.modules() if isinstance(m, nn.Linear)] + own_head
        with suppress(InputError):
            adapters = adapter_size(model.base_model, 1)
        return cls(
            config=model.config.get_text_config(),
            all=_count(model.parameters()),
            linear=_count(linear),
            table=_count(tables[:1]),
            own_head=_count(own_head),
            adapters=adapters,
            exact=all(holds(p, dtype) for p in linear + tables[:1]),
            bytes=sum(p.nbytes for p in model.parameters()),
        )

    def frozen(self, args: Namespace, small: int) -> int:
        """Bytes of a copy that does not train. small: of a number of mixed precision, in which linear layers
        are kept; with adapters only where they are the same numbers then; code from outside is left as it is
        (``prepare_frozen`` in run.py)."""
        halved = 0 if args.lora_r else self.linear
        if self.exact:
            halved = self.linear + self.table
        if args.trust_remote_code:
            halved = 0
        return halved * small + (self.all - halved) * 4


def _count(tensors):
    return sum(x.numel() for x in tensors)


@dataclass
class Plan:
    """Where memory goes."""

    phases: dict  # {phase: {part: bytes}} of all that is there
    cache: int  # bytes of keys and values
    slots: int  # sequences that are sampled together
    token_budget: int  # tokens of a micro-batch
    release_cache: bool  # whether keys and values are freed between rollouts

    @property
    def fullest(self) -> str:
        """The phase that takes the most memory."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> int:
        """The most bytes that are in use at a time."""
        return sum(self.phases[self.fullest].values())


def memory_plan(
    args: Namespace,
    sizes: dict,
    device: torch.device,
    dtype: torch.dtype,
    held_out: int = 0,
    processes: int = 1,
    budget: int | None = None,
    release_cache: bool = False,
    slots: int = SLOTS,
) -> Plan:
    """The memory of a run with these flags.

    sizes: {"actor": ``Sizes``, "rewards": a list} and, with a critic, "critic": of the model that it starts
    from, "demonstration": tokens of the longest one that the actor learns besides, if it does; dtype: of
    mixed precision; held_out: responses of the evaluation, which are sampled like a batch's; processes: that
    train together; budget: tokens of a micro-batch, by default the fixed number of the device; slots:
    sequences that are sampled together at most.
    """
    actor, critic, small = sizes["actor"], sizes.get("critic"), dtype.itemsize
    budget, on_cpu = budget or tokens_per_pass(device), device.type == "cpu"
    parts = processes if args.shard else 1  # into which models are cut
    slots = min(slots, held_out if args.offline_data_path else max(args.batch_size, held_out))
    slots += -slots % ROW_MULTIPLE if on_cpu else 0
    cache = slots * (args.max_seq_len + args.max_gen_len) * bytes_per_token(actor.config, small)
    cache = min(cache, CACHE_BYTES) if on_cpu else cache
    tied = actor.table if on_cpu and not actor.own_head else 0  # laid out a second time, as a head
    sampler = {"sampler": small * (actor.all + tied)} if slots else {}
    trained = {"actor": actor.all} | ({"critic": critic.all - critic.own_head} if critic else {})
    if args.lora_r:
        trained = {name: args.lora_r * sizes[name].adapters for name in trained}
    weights = _weights(args, sizes, trained, small, shared=parts == 1)
    weights["moments"] = 2 * (2 if args.moments_dtype == "bfloat16" else 4) * sum(trained.values())
    # Reward models stay whole.
    standing = {name: size // (1 if name == "reward models" else parts) for name, size in weights.items()}
    rollout = {"logits": 16 * slots * actor.config.vocab_size}  # fp32, and what sampling makes of them
    if parts == 1:
        standing |= sampler
    else:  # it is there in rollouts only, and gets one matrix after the other
        rollout |= sampler | {"gathered": 4 * actor.table}
    if args.ema_beta and on_cpu:  # it is in main memory always
        standing["average"] = 4 * trained["actor"]
    waiting = {}
    if args.offload_frozen:
        names = ["reward models", "reference", "old actor"]
        waiting = {name: standing.pop(name) for name in names if name in standing}
    cached = {"KV cache": cache}
    between = standing | ({} if release_cache else cached)
    updates = [_update(args, sizes, name, trained, budget, device, dtype, parts) for name in trained]
    phases = {
        "update": between | max(updates, key=lambda update: sum(update.values())),
        "rollout": standing | cached | rollout,
        "scoring": between | waiting,
    }
    if parts == 1 or on_cpu:  # a sharded run is built in main memory
        loaded = sum(model.bytes for model in sizes["rewards"])
        phases["building"] = {"actor": 4 * actor.all, "reward models": loaded}
        phases["building"] |= dict.fromkeys(sampler, 4 * actor.all)
    return Plan(phases, cache, slots, budget, release_cache)


def _weights(args, sizes, trained, small, shared):
    """{model: the bytes of its weights} in a step. What is shared counts once. trained: {model: how many of
    its numbers train}; shared: whether models share the frozen weights under adapters."""
    actor, critic, lora = sizes["actor"], sizes.get("critic"), args.lora_r > 0
    weights = {name: 4 * count for name, count in trained.items()}
    if lora:
        weights["actor"] += actor.frozen(args, small)
        if critic and not shared:
            weights["critic"] += critic.frozen(args, small)
    if not lora or not shared:
        weights["reference"] = actor.frozen(args, small)
    if args.update_old_actor_freq > 1:  # it changes: only products are rounded
        weights["old actor"] = weights["actor"] - actor.linear * (4 - small)
    for model in sizes["rewards"]:
        size = model.frozen(args, small)
        size = size if lora and model is critic else min(size, model.bytes)  # the critic's have become fp32
        weights["reward models"] = weights.get("reward models", 0) + size
    return weights


def _update(args, sizes, name, trained, budget, device, dtype, parts):
    """{part: bytes} that an optimizer step of this model has besides what stays."""
    model, small, full, mixed = sizes[name], dtype.itemsize, not args.lora_r, dtype != torch.float32
    longest, demonstration = args.max_seq_len + args.max_gen_len, sizes.get("demonstration", 0)
    needed = -(-args.mini_batch_size * (longest + demonstration) // args.accumulation_steps)
    # A demonstration is never in one pass with a response.
    tokens = min(budget, needed, args.mini_batch_size * max(longest, demonstration))
    kept = tokens * _activations(args, model.config, small)
    if full and parts == 1:  # a gradient of the embeddings before it is added; copies of layers in ``dtype``
        kept += 4 * model.table + small * mixed * model.linear
    if name == "actor":
        vocabulary = model.config.vocab_size
        logits = min(tokens * vocabulary, max(CHUNK[device.type], MIN_CHUNK_TOKENS * vocabulary))
        kept += (4 + small) * logits + small * mixed * model.table  # logits, their gradient; the head
    update = {"gradients": 4 * trained[name] // parts, "micro-batch": kept}
    if parts > 1:  # two layers in ``dtype``, embeddings and head in fp32; gradients are summed in fp32
        layer = (model.all - model.table - model.own_head) // model.config.num_hidden_layers
        root = 4 * (model.table + (model.own_head if name == "actor" else 0))
        update["gathered"] = 2 * small * layer + root
        update["gathered"] += (small + 4) * layer + 2 * root if full else 0
    return update


def _activations(args, config, small):
    """The bytes of activations that a forward keeps of a token for its backward."""
    hidden = config.hidden_size
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    layer = 4 * KEPT["fp32"] * hidden
    layer += small * (KEPT["hidden"] * hidden + KEPT["intermediate"] * intermediate)
    if args.gradient_checkpointing:  # the residual of every layer, and one layer at a time
        return 4 * hidden * config.num_hidden_layers + layer
    return layer * config.num_hidden_layers


def fitted_plan(args, sizes, device, dtype, held_out, room, processes=None) -> tuple[Plan, bool]:
    """-> (the plan with the largest micro-batches that fit into ``room`` bytes, True), or (the one that needs
    the least memory, False). Where nothing fits otherwise, keys and values are freed between rollouts, and
    last fewer sequences are sampled together. processes: by default those of torchrun."""
    budgets = [tokens_per_pass(device)]
    if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        budgets = BUDGETS
    options = [{"budget": budget, "release_cache": free} for free in (False, True) for budget in budgets]
    options += [options[-1] | {"slots": slots} for slots in FEWER_SLOTS]
    processes = processes or _processes()
    plans = [memory_plan(args, sizes, device, dtype, held_out, processes, **option) for option in options]
    least = min(plans, key=lambda plan: plan.peak)
    return next((plan for plan in plans if plan.peak <= room), least), least.peak <= room


def check_memory(
    args, actor, start, reward_models, device, dtype, sampled=None, demonstration=0, in_step=None
) -> tuple[Plan, str]:
    """-> (``Plan``, a note that says where memory goes and how much is free).

    actor: the policy; start: the model that the critic starts from, None without a critic; reward_models:
    with ``start`` among them, if it is one; sampled: (most prompts of a call, longest prompt plus response,
    …) from ``sampling_sizes``; None: what the flags allow; demonstration: tokens of the longest one of
    --ptx_data_path, 0 without any; in_step: of a sharded run, whose processes plan with what the one has that
    has least. Raises InputError where the run cannot fit, and for --offload_frozen without a GPU.
    """
    if args.offload_frozen and device.type == "cpu":
        raise InputError("--offload_frozen 1: there is no GPU whose memory it would spare; leave it out")
    held_out, width, *_ = sampled or (0, args.max_seq_len + args.max_gen_len)
    args = _with(args, max_seq_len=width - args.max_gen_len)  # no prompt is longer
    models = dict.fromkeys(model for model in (actor, start, *reward_models) if model)
    found = {model: Sizes.of(model, dtype) for model in models}
    sizes = {"actor": found[actor], "rewards": [found[model] for model in reward_models]}
    sizes |= {"demonstration": demonstration} | ({"critic": found[start]} if start else {})
    # In a sharded run the others come when they are sharded.
    loaded = sum(found[model].bytes for model in models if not in_step or model.device == device)
    room = USABLE[device.type] * (free_memory(device) + loaded) - LATER[device.type]
    if in_step:  # one plan for all
        room = in_step.least(room)
    given = sizes, device, dtype, held_out
    plan, fits = fitted_plan(args, *given, room)
    text = describe(plan, room, device)
    if fits:
        return plan, f"memory   {text}"
    remedy = remedies(args, *given, room)
    width = args.max_seq_len + args.max_gen_len
    single = memory_plan(args, *given, _processes(), budget=width, release_cache=True, slots=1)
    if device.type == "cpu" or single.peak > room:  # a CPU's memory that runs out is no error to be caught
        other = "shorten the texts (--max_gen_len, --max_seq_len), or take a smaller model"
        flags = f"add {remedy}" if remedy else f"no flags make it fit: {other}"
        raise InputError(f"--model {args.model}: does not fit: {' '.join(text.split())}; {flags}")
    remedy = f"; to avoid that: {remedy}" if remedy else ""
    return plan, f"memory   {text}\n         it will work in smaller pieces{remedy}"


def remedies(args, sizes, device, dtype, held_out, room) -> str:
    """The first flags with which the run fits, as text to type; "" if there are none: the fewest, and those
    first that change the result least. LoRA, which trains other weights, is last."""
    changes = {"gradient_checkpointing": 1, "moments_dtype": "bfloat16"}
    if _processes() > 1 and not args.ema_beta:
        changes = {"shard": 1} | changes
    elif device.type == "cuda":
        changes["offload_frozen"] = 1
    if device.type == "cpu" and args.accumulation_steps < args.mini_batch_size:
        changes["accumulation_steps"] = args.mini_batch_size
    changes = {name: value for name, value in changes.items() if getattr(args, name) != value}
    chosen = [some for count in range(len(changes) + 1) for some in combinations(changes.items(), count)]
    if not args.lora_r and sizes["actor"].adapters:
        chosen += [(*some, ("lora_r", LORA_R)) for some in chosen]
    for some in chosen:
        if fitted_plan(_with(args, **dict(some)), sizes, device, dtype, held_out, room)[1]:
            return " ".join(f"--{name} {value}" for name, value in some)
    return ""


def _processes():
    return int(os.environ.get("WORLD_SIZE", "1"))


def _with(args, **changes):
    return Namespace(**{**vars(args), **changes})


def check_loading(path) -> None:
    """Raise InputError where loading the policy at ``path`` would fill the main memory.

    It is loaded in fp32, and ``check_sampling`` in inputs.py needs two copies for a moment. How many
    numbers it has follows from the size of its files. Hub names, and files that say nothing, pass.
    """
    folder, kind = Path(path), ""
    files = [folder] if folder.is_file() else next(filter(None, map(list, map(folder.glob, WEIGHTS))), [])
    with suppress(OSError, ValueError, AttributeError):  # what is wrong with it is said by who loads it
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = str(settings.get("dtype") or settings.get("torch_dtype"))
    numbers = sum(file.stat().st_size for file in files) // (2 if "16" in kind else 4)
    needs, free = LOADING * numbers, free_memory(torch.device("cpu"))
    if needs > free:
        raise InputError(
            f"--model {path}: loading takes about {shown(needs)} of main memory, and {shown(free)} are free; "
            "close other programs, or take a smaller model"
        )


def describe(plan, room, device) -> str:
    """A plan in lines: what there is, and all parts of the fullest phase."""
    unit, name, digits = (GB, "GB", 1) if plan.peak >= GB else (MB, "MB", 0)
    parts = [f"{part} {size / unit:.{digits}f}" for part, size in plan.phases[plan.fullest].items()]
    rows = [", ".join(parts[start : start + 6]) for start in range(0, len(parts), 6)]
    text = f"about {shown(plan.peak)} of the {shown(room)} that {device} can give"
    if plan.release_cache:
        text += f", with {plan.slots} sequences sampled at a time and the KV cache freed after sampling"
    return f"{text}; in {name}:\n         " + ",\n         ".join(rows)


def shown(size) -> str:
    """Bytes as text: in GB, below one in MB."""
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / MB:.0f} MB"
