"""How much memory a PPO run takes, part by part, and whether the machine has it: said before the first step.

Models and AdamW's two moments are there all the time; the rest comes and goes with the phases of a step
(docs/performance.md, "Memory"). ``memory_plan`` is the arithmetic. It needs no model, only ``ModelSizes``, so
it serves for other flags and machines too. ``check_memory`` chooses how many sequences are sampled together.
A run that cannot fit ends there in one line: a GPU would fail in the middle of a step, and a CPU's system
would kill the process without a word. It chooses the first size of micro-batches too. Where memory runs out
all the same they are halved (``Updater.gradients`` in runs/optimizer_step.py).
"""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from errors import InputError
from model.lora import adapter_size
from trainer.compute.batching import tokens_per_forward
from trainer.compute.logprobs import LOGITS_PER_CHUNK, MIN_CHUNK_TOKENS
from trainer.compute.memory import free_memory
from trainer.compute.precision import is_exact
from trainer.generation.engine import CACHE_BYTES, ROW_MULTIPLE, SLOTS
from trainer.generation.kv_cache import bytes_per_token

GB = 1e9
LEAST_TOKENS = 2048  # of a micro-batch, for which there must be memory
USABLE = 0.9  # of what is free: the plan is about right, memory has gaps, and more code is loaded later
LOADING = 2 * 4  # bytes a number: fp32, and the sampler's copy, which every run makes
REMEDIES = (
    "add --gradient_checkpointing 1, --moments_dtype bfloat16, on a GPU --offload_frozen 1, on several "
    "--shard 1, shorten the texts (--max_gen_len, --max_seq_len), or train less: --lora_r 16, --advantage "
    "reinforce or a smaller model"
)


class ModelSizes:
    """What the arithmetic needs to know of a model: how many numbers are where."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype):
        """dtype: of mixed precision"""
        self.config = model.config.get_text_config()
        vocabulary = getattr(self.config, "vocab_size", None)  # code from outside may have none
        self.all = model.num_parameters()
        matrices = [p for p in model.parameters() if p.dim() > 1]
        self.table = sum(p.numel() for p in matrices if len(p) == vocabulary)  # of embeddings and head
        self.exact = all(is_exact(p, dtype) for p in matrices)
        self.bytes = model.get_memory_footprint(return_buffers=False)  # that it takes now
        self.device = model.device
        self.adapters = adapter_size(model.base_model, 1)  # what adapters of rank 1 would add


@dataclass
class PlannedRun:
    """A run as the arithmetic sees it."""

    args: Namespace
    device: torch.device
    dtype: torch.dtype  # of mixed precision
    models: dict[str, ModelSizes]  # that train: "actor" and, with a critic, the backbone that it starts from
    rewards: list[ModelSizes]
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
    slots: int  # sequences that are sampled together
    token_budget: int  # tokens of a micro-batch


def memory_plan(run: PlannedRun, slots: int = SLOTS, token_budget: int = LEAST_TOKENS) -> Plan:
    """The memory of a run with at most ``slots`` sequences sampled together and micro-batches of
    ``token_budget`` tokens. With --shard 1 each process has its part of what stays. Activations, keys and
    values are whole, and so is the sampler, which is there in rollouts only."""
    args = run.args
    actor = run.models["actor"]
    model = max(run.models.values(), key=lambda size: size.all)  # whose update takes the most
    small = run.dtype.itemsize
    on_cpu = run.device.type == "cpu"
    parts = run.processes if args.shard else 1  # into which models are cut

    # Models and moments. With adapters, models share what is frozen, if they are whole; nothing of it is
    # rounded then.
    frozen_bytes = 4 if args.lora_r and not actor.exact else small  # of a number
    trained = {name: args.lora_r * size.adapters or size.all for name, size in run.models.items()}
    standing = {name: 4 * count // parts for name, count in trained.items()}
    standing["moments"] = 2 * getattr(torch, args.moments_dtype).itemsize * sum(trained.values()) // parts
    # A critic with adapters shares the weights of the reward model that it starts from, in fp32.
    in_fp32 = args.lora_r and "critic" in run.models
    rewards = sum(4 * size.all if in_fp32 else size.bytes for size in run.rewards)
    frozen = {"reward models": rewards // parts}
    if args.lora_r:
        for name in run.models if parts > 1 else ["actor"]:
            standing[name] += frozen_bytes * run.models[name].all // parts
    if parts > 1 or not args.lora_r:
        size = frozen_bytes * actor.all // parts
        if args.kl_coef or args.offline_data_path:  # else nothing asks it
            frozen["reference"] = size
        if args.update_old_actor_freq > 1:
            frozen["old actor"] = size
    if args.ema_beta and on_cpu:  # it is in main memory always
        standing["average"] = 4 * trained["actor"]

    # A rollout.
    slots = min(slots, run.responses)
    slots += -slots % ROW_MULTIPLE
    cache = slots * run.width * bytes_per_token(actor.config, small)
    standing["KV cache"] = min(cache, CACHE_BYTES) if on_cpu else cache
    vocabulary = actor.config.vocab_size
    rollout = {"logits": 16 * slots * vocabulary}  # fp32, and what sampling makes of them
    if parts > 1:  # the sampler gets one matrix after the other
        rollout["gathered"] = 4 * vocabulary * actor.config.hidden_size
    sampler = bool(slots) * (actor.all + on_cpu * actor.table)  # numbers; a CPU lays the head out once more
    (rollout if parts > 1 else standing)["sampler"] = small * sampler
    (rollout if args.offload_frozen else standing).update(frozen)  # with the flag they are there to score

    # An update. What a layer keeps of a token for the backward: two numbers per hidden unit in fp32
    # (residuals), and in mixed precision six per hidden unit and four per intermediate unit.
    tokens = args.mini_batch_size * (run.width + run.demonstration) // args.accumulation_steps
    tokens = min(tokens, max(token_budget, run.width))
    hidden = model.config.hidden_size
    layers = model.config.num_hidden_layers
    intermediate = getattr(model.config, "intermediate_size", None) or 4 * hidden
    per_layer = 8 * hidden + small * (6 * hidden + 4 * intermediate)
    if args.gradient_checkpointing:  # the residual of every layer, and one layer at a time
        activations = tokens * (4 * hidden * layers + per_layer)
    else:
        activations = tokens * per_layer * layers
    logits = min(tokens * vocabulary, max(LOGITS_PER_CHUNK[run.device.type], MIN_CHUNK_TOKENS * vocabulary))
    # Logits with their gradient, and the embeddings in mixed precision.
    activations += (4 + small) * logits + small % 4 * actor.table
    update = {"gradients": 4 * max(trained.values()) // parts, "micro-batch": activations}
    if parts > 1:  # two layers and the embeddings, gathered, and, where they train, their fp32 gradients
        update["gathered"] = (4 if args.lora_r else 12) * ((model.all - model.table) // layers + model.table)
    elif not args.lora_r:  # a gradient of the embeddings before it is added; layers in mixed precision
        update["micro-batch"] += 4 * model.table + small % 4 * (model.all - model.table)

    phases = {"update": standing | update, "rollout": standing | rollout}
    if parts == 1 or on_cpu:  # a sharded run is built in main memory; models as loaded, the sampler in fp32
        phases["building"] = {
            "actor": 4 * actor.all,
            "sampler": 4 * sampler,
            "reward models": sum(size.bytes for size in run.rewards),
        }
    peak, fullest = max((sum(sizes.values()), phase) for phase, sizes in phases.items())
    return Plan(phases, fullest, peak, slots, token_budget)


def fitted_plan(run: PlannedRun, available: float) -> Plan:
    """The plan with the most sequences sampled together that fits into ``available`` bytes, and then with the
    largest micro-batches. If its ``peak`` is above ``available``, nothing fits."""
    slots = SLOTS
    tokens = tokens_per_forward(run.device, largest=True)
    while True:
        plan = memory_plan(run, slots, tokens)
        if plan.peak <= available or slots == ROW_MULTIPLE:
            return plan
        if tokens > LEAST_TOKENS:
            tokens //= 2
        else:
            slots //= 2


def check_memory(run: PlannedRun) -> tuple[Plan, str]:
    """-> (``Plan``, a note that says where memory goes and how much is free). InputError where the run cannot
    fit."""
    device = run.device
    if run.args.offload_frozen and device.type != "cuda":
        raise InputError(
            "--offload_frozen 1: there is no GPU with a memory of its own, which it would spare; leave it out"
        )
    models = (run.models["actor"], *run.rewards)
    loaded = sum(size.bytes for size in models if size.device == device)  # to be sharded: elsewhere
    available = USABLE * (free_memory(device) + loaded)
    plan = fitted_plan(run, available)
    parts = [f"{part} {shown(size)}" for part, size in plan.phases[plan.fullest].items() if size]
    text = (
        f"at least {shown(plan.peak)} of the {shown(available)} that {device} can give, with {plan.slots} "
        f"sequences sampled at a time:\n         {', '.join(parts)}"
    )
    if plan.peak > available:
        raise InputError(f"--model {run.args.model}: does not fit: {text}; {REMEDIES}")
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
