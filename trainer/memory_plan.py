"""How much memory a PPO run needs, part by part, and whether there is enough. Said before the first rollout.

    weights       actor, critic and the copies of the policy that do not train: reference, old actor, sampler
    optimizers    gradients and AdamW's two moments, fp32: twelve bytes for every trained weight
    KV cache      keys and values of the sequences that are sampled together
    micro-batch   what one forward keeps for its backward, and a chunk of logits

The first two cannot be made smaller while a run goes on: where they do not fit, ``check_memory`` ends it. The
other two shrink by themselves when memory runs out (compute/memory.py, generation/engine.py).
"""

import os

import psutil
import torch
from torch import nn

from errors import InputError
from model.lora import adapter_size
from trainer.compute.batching import tokens_per_pass
from trainer.compute.logprobs import CHUNK, MAX_KEPT, MIN_CHUNK_TOKENS
from trainer.generation.engine import CACHE_BYTES, SLOTS
from trainer.generation.kv_cache import bytes_per_token

GB = 1e9
# Numbers that one layer keeps for the backward of one token: so many in fp32 per hidden unit (residuals), in
# mixed precision per hidden unit (norms, queries, outputs), per intermediate unit (gate, up, their product).
KEPT = {"fp32": 2, "hidden": 6, "intermediate": 4}


def memory_plan(args, actor, critic_source, device, dtype, held_out=0):
    """The bytes that a run needs besides the actor and its reward models, which are loaded already.

    actor: the policy; critic_source: the model that the critic will start from; dtype: of mixed precision;
    held_out: the number of prompts that the evaluation samples. Its KV cache stays for the whole run.
    -> {"weights", "optimizers", "KV cache", "micro-batch"}
    """
    policy, critic = (sum(p.numel() for p in model.parameters()) for model in (actor, critic_source))
    small = dtype.itemsize
    linear = _linear_weights(actor)
    frozen = linear * small + (policy - linear) * 4  # a copy that does not train (compute/precision.py)
    sampler = policy * small + (linear * small if device.type == "cpu" else 0)  # laid out a second time
    if args.lora_r:
        trained = sum(adapter_size(x.base_model, args.lora_r) for x in (actor, critic_source))
        weights = sampler + 4 * trained + (0 if critic_source is actor else 4 * critic)
    else:
        trained = policy + critic
        weights = sampler + 2 * frozen + 4 * critic
    width = args.max_seq_len + args.max_gen_len
    slots = min(SLOTS, max(args.batch_size, held_out))
    cache = min(CACHE_BYTES, slots * width * bytes_per_token(actor.config, small))
    return {
        "weights": weights,
        "optimizers": 12 * trained,
        "KV cache": cache,
        "micro-batch": max(_kept(args, x, width, device, dtype) for x in (actor, critic_source)),
    }


def _linear_weights(model):
    return sum(m.weight.numel() for m in model.base_model.modules() if type(m) is nn.Linear)


def _kept(args, model, width, device, dtype):
    """The bytes that a micro-batch's forward keeps for its backward, its logits included. In mixed precision
    that has copies of the linear layers' weights in ``dtype``."""
    config, small = model.config, dtype.itemsize
    copies = 0 if dtype == torch.float32 else small * _linear_weights(model)
    tokens = min(tokens_per_pass(device), -(-args.mini_batch_size * width // args.accumulation_steps))
    hidden = config.hidden_size
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    layer = 4 * KEPT["fp32"] * hidden + small * (
        KEPT["hidden"] * hidden + KEPT["intermediate"] * intermediate
    )
    if args.gradient_checkpointing:  # the residual of every layer, and one layer at a time
        layers = 4 * hidden * config.num_hidden_layers + layer
    else:
        layers = layer * config.num_hidden_layers
    logits = tokens * config.vocab_size
    chunk = min(logits, max(CHUNK[device.type], MIN_CHUNK_TOKENS * config.vocab_size))
    return copies + tokens * layers + 4 * (min(logits, MAX_KEPT) + 2 * chunk)


def free_memory(device):
    """Bytes that this process can still get: of the GPU, or its share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_memory(args, actor, critic_source, device, dtype, held_out=0):
    """-> a line that says what the run needs and what is free. InputError where its models cannot fit."""
    plan = memory_plan(args, actor, critic_source, device, dtype, held_out)
    free = free_memory(device)
    parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in plan.items())
    text = f"about {sum(plan.values()) / GB:.1f} GB ({parts}); {free / GB:.1f} GB are free on {device}"
    if plan["weights"] + plan["optimizers"] > free:
        raise InputError(f"--model {args.model}: the run needs {text}; add --lora_r 16, or a smaller model")
    if sum(plan.values()) > free:
        text += ", so it will work in smaller pieces: lower --max_gen_len, --max_seq_len or --batch_size"
    return f"memory   {text}"
