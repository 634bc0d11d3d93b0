"""How much memory a PPO run takes, part by part, and whether the machine has it: said before the first step.

Models and AdamW's two moments are there all the time; the rest comes and goes with the phases of a step
(docs/performance.md, "Memory"). ``memory_plan`` is the arithmetic. It needs no model, only
``Sizes``, so it serves for other flags and machines too. ``check_memory`` takes the plan with the largest
micro-batches that fits. A run that cannot fit ends there in one line: a GPU would fail in the middle of a
step, and a CPU's system would kill the process without a word.
"""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from errors import InputError
from model.lora import adapter_size
from trainer.compute.batching import tokens_per_pass
from trainer.compute.logprobs import CHUNK, MIN_CHUNK_TOKENS
from trainer.compute.memory import free_memory
from trainer.compute.precision import holds
from trainer.compute.sharding import InStep
from trainer.generation.engine import CACHE_BYTES, ROW_MULTIPLE, SLOTS
from trainer.generation.kv_cache import bytes_per_token

GB = 1e9
# Tokens of a micro-batch on a GPU: the first that fits. With deterministic algorithms they never change.
BUDGETS = [65536, 32768, 16384, 8192, 4096]
# Where memory is short: tokens of a micro-batch, and sequences that are sampled together.
SMALL_BUDGET = 1024
FEWER_SLOTS = [256, 128, 64, 32, 16]
USABLE = {
    "cuda": 0.9,
    "cpu": 0.95,
    "mps": 0.9,
}  # of what is left: the plan is about right, and memory has gaps
LATER = 80e6  # bytes of code that is loaded or compiled while a run goes on, by oneDNN, gloo and others
LOADING = 2 * 4  # bytes a number: fp32, and the sampler's copy, which every run makes
REMEDIES = (
    "add --gradient_checkpointing 1, --moments_dtype bfloat16, on a GPU --offload_frozen 1, on several "
    "--shard 1, shorten the texts (--max_gen_len, --max_seq_len), or train less: --lora_r 16, --advantage "
    "reinforce or a smaller model"
)


class Sizes:
    """What the arithmetic needs to know of a model: how many numbers are where."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype):
        """dtype: of mixed precision. Weights without memory (torch's meta device) count as exact."""
        self.config = model.config.get_text_config()
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vocabulary = getattr(self.config, "vocab_size", None)  # code from outside may have none
        self.all = model.num_parameters()
        self.table = sum(p.numel() for p in matrices if len(p) == vocabulary)  # of embeddings and head
        self.exact = all(holds(p, dtype) for p in matrices)  # see ``keep_exact`` in precision.py
        self.bytes = model.get_memory_footprint(return_buffers=False)  # that it takes now
        self.device = model.device
        self.adapters = adapter_size(model.base_model, 1)  # what adapters of rank 1 would add

    def frozen(self, case: "Case") -> int:
        """Bytes of a copy that does not train: as ``PpoRun.prepare`` rounds it."""
        wide = self.all if case.args.lora_r else self.table  # numbers that stay fp32
        if self.exact:
            wide = 0
        size = case.dtype.itemsize * (self.all - wide) + 4 * wide
        if case.args.lora_r and "critic" in case.models:  # whose adapters make what it shares fp32
            return size
        return min(size, self.bytes)


@dataclass
class Case:
    """A run as the arithmetic sees it."""

    args: Namespace
    device: torch.device
    dtype: torch.dtype  # of mixed precision
    models: dict[str, Sizes]  # that train: "actor" and, with a critic, the backbone that "critic" starts from
    rewards: list[Sizes]
    responses: int  # the most that are sampled in a call
    width: int  # tokens of the longest prompt and response
    demonstration: int = 0  # of the longest one that the actor learns besides
    processes: int = 1  # that train together


@dataclass
class Plan:
    """Where memory goes."""

    phases: dict[str, dict[str, int]]  # {phase: {part: bytes}} of all that is there
    fullest: str  # the phase that takes the most
    peak: int  # bytes that it takes
    cache: int  # bytes of keys and values
    slots: int  # sequences that are sampled together
    token_budget: int  # tokens of a micro-batch
    release_cache: bool  # whether keys and values are freed between rollouts


def memory_plan(case: Case, budget: int, release_cache: bool = False, slots: int = SLOTS) -> Plan:
    """The memory of a run with micro-batches of ``budget`` tokens and at most ``slots`` sequences sampled
    together. With --shard 1 each process has its part of what stays. Whole are activations, keys and values,
    and the sampler, which is there in rollouts only."""
    args = case.args
    actor = case.models["actor"]
    model = max(case.models.values(), key=lambda size: size.all)  # whose update takes the most
    small = case.dtype.itemsize
    on_cpu = case.device.type == "cpu"
    parts = case.processes if args.shard else 1  # into which models are cut

    # Models and moments. With adapters, models share what is frozen, if they are whole.
    trained = {name: args.lora_r * size.adapters or size.all for name, size in case.models.items()}
    standing = {name: 4 * count // parts for name, count in trained.items()}
    standing["moments"] = 2 * getattr(torch, args.moments_dtype).itemsize * sum(trained.values()) // parts
    frozen = {"reward models": sum(size.frozen(case) for size in case.rewards) // parts}
    if args.lora_r:
        for name in case.models if parts > 1 else ["actor"]:
            standing[name] += case.models[name].frozen(case) // parts
    if parts > 1 or not args.lora_r:
        size = actor.frozen(case) // parts
        if args.kl_coef or args.offline_data_path:  # else nothing asks it
            frozen["reference"] = size
        if args.update_old_actor_freq > 1:
            frozen["old actor"] = size
    if args.ema_beta and on_cpu:  # it is in main memory always
        standing["average"] = 4 * trained["actor"]
    if not args.offload_frozen:  # else they are there in rollouts only, to score
        standing |= frozen

    # A rollout.
    slots = min(slots, case.responses)
    slots += -slots % ROW_MULTIPLE
    cache = slots * case.width * bytes_per_token(actor.config, small)
    if on_cpu:
        cache = min(cache, CACHE_BYTES)
    vocabulary = actor.config.vocab_size
    rollout = {"KV cache": cache, "logits": 16 * slots * vocabulary}  # fp32, and what sampling makes of them
    if parts > 1:  # the sampler gets one matrix after the other
        rollout["gathered"] = 4 * vocabulary * actor.config.hidden_size
    sampler = rollout if parts > 1 else standing
    if slots:
        sampler["sampler"] = small * (actor.all + on_cpu * actor.table)  # a CPU lays the head out once more

    # An update. What a layer keeps of a token for the backward: two numbers per hidden unit in fp32
    # (residuals), and in mixed precision six per hidden unit and four per intermediate unit.
    tokens = args.mini_batch_size * (case.width + case.demonstration) // args.accumulation_steps
    tokens = min(tokens, max(budget, case.width))
    hidden = model.config.hidden_size
    layers = model.config.num_hidden_layers
    intermediate = getattr(model.config, "intermediate_size", None) or 4 * hidden
    kept = 8 * hidden + small * (6 * hidden + 4 * intermediate)
    if args.gradient_checkpointing:  # the residual of every layer, and one layer at a time
        activations = tokens * (4 * hidden * layers + kept)
    else:
        activations = tokens * kept * layers
    logits = min(tokens * vocabulary, max(CHUNK[case.device.type], MIN_CHUNK_TOKENS * vocabulary))
    # Logits with their gradient, and the embeddings in mixed precision.
    activations += (4 + small) * logits + small % 4 * actor.table
    update = {"gradients": 4 * max(trained.values()) // parts, "micro-batch": activations}
    if parts > 1:  # two layers and the embeddings, gathered, and, where they train, their fp32 gradients
        update["gathered"] = (4 if args.lora_r else 12) * ((model.all - model.table) // layers + model.table)
    elif not args.lora_r:  # a gradient of the embeddings before it is added; layers in mixed precision
        update["micro-batch"] += 4 * model.table + small % 4 * (model.all - model.table)
    if not release_cache:
        update["KV cache"] = cache

    if args.offload_frozen:
        rollout |= frozen
    phases = {"update": standing | update, "rollout": standing | rollout}
    if parts == 1 or on_cpu:  # a sharded run is built in main memory; models as loaded, the sampler in fp32
        phases["building"] = {
            "actor": 4 * actor.all,
            "sampler": 4 * bool(slots) * (actor.all + on_cpu * actor.table),
            "reward models": sum(size.bytes for size in case.rewards),
        }
    peak, fullest = max((sum(sizes.values()), phase) for phase, sizes in phases.items())
    return Plan(phases, fullest, peak, cache, slots, budget, release_cache)


def fitted_plan(case: Case, room: float) -> Plan:
    """The plan with the largest micro-batches that fit into ``room`` bytes. Where nothing fits otherwise,
    keys and values are freed between rollouts, and last fewer sequences are sampled together. If its ``peak``
    is above ``room``, nothing fits: it is the one that needs the least memory."""
    budgets = [tokens_per_pass(case.device)]
    if case.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        budgets = BUDGETS
    options = [(budget, free, SLOTS) for free in (False, True) for budget in budgets]
    options += [(budget, True, slots) for budget in (budgets[-1], SMALL_BUDGET) for slots in FEWER_SLOTS]
    for budget, free, slots in options:
        plan = memory_plan(case, budget, free, slots)
        if plan.peak <= room:
            break
    return plan


def check_memory(case: Case, in_step: InStep | None = None) -> tuple[Plan, str]:
    """-> (``Plan``, a note that says where memory goes and how much is free). InputError where the run cannot
    fit. in_step: of a sharded run, whose processes plan with what the one has that has least."""
    device = case.device
    if case.args.offload_frozen and device.type != "cuda":
        raise InputError(
            "--offload_frozen 1: there is no GPU with a memory of its own, which it would spare; leave it out"
        )
    models = (case.models["actor"], *case.rewards)
    loaded = sum(size.bytes for size in models if size.device == device)  # to be sharded: elsewhere
    room = USABLE[device.type] * (free_memory(device) + loaded) - LATER
    if in_step:  # one plan for all
        room = in_step.least(room)
    plan = fitted_plan(case, room)
    text = (
        f"about {shown(plan.peak)} of the {shown(room)} that {device} can give, with {plan.token_budget} "
        f"tokens in a micro-batch and {plan.slots} sequences sampled at a time:\n         "
    )
    text += ", ".join(f"{part} {shown(size)}" for part, size in plan.phases[plan.fullest].items() if size)
    if plan.peak > room:
        raise InputError(f"--model {case.args.model}: does not fit: {text}; {REMEDIES}")
    return plan, f"memory   {text}"


def check_loading(path: str) -> None:
    """Raise InputError where loading the policy at ``path`` would fill the main memory.

    It is loaded in fp32, and the sampler is a copy of it. How many numbers it has follows from the size of
    its files. Hub names, and files that say nothing, pass.
    """
    folder = Path(path)
    files = [folder] if folder.is_file() else folder.glob("*.safetensors")
    settings = (folder.with_suffix("") if folder.is_file() else folder) / "config.json"
    half = settings.is_file() and b'float16"' in settings.read_bytes()
    needs = LOADING * sum(file.stat().st_size for file in files) // (2 if half else 4)
    free = free_memory(torch.device("cpu"))
    if needs > free:
        raise InputError(
            f"--model {path}: loading takes about {shown(needs)} of main memory, and {shown(free)} are free; "
            "close other programs, or take a smaller model"
        )


def shown(size: float) -> str:
    """Bytes as text: in GB, below one in MB."""
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / 1e6:.0f} MB"
