"""How much memory a PPO run takes, part by part, by arithmetic. memory_check.py compares it with the machine.

Models and AdamW's two moments are there all the time. The rest comes and goes with the phases of a step:

update      gradients of one model (critic and actor take turns), the activations of a micro-batch, for the
            actor a chunk of logits
rollout     keys and values, which stay for the other phases unless memory is short, and logits
reward,     with --offload_frozen 1: the models that wait in the host's memory and come for this phase
score
building    before the first step: the sampler begins as a copy in fp32; there are no moments yet

With --shard 1 each process has its part of what stays: weights, gradients, moments. Whole are activations,
keys and values, the sampler, which is there in rollouts only, and what is gathered to compute with
(``_gathered``).

No model is needed, only its ``Sizes``, so the same arithmetic serves for other flags and other machines.
"""

from dataclasses import dataclass

import torch
from torch import nn

from errors import InputError
from model.lora import adapter_size
from trainer.compute.batching import tokens_per_pass
from trainer.compute.logprobs import CHUNK, MAX_KEPT, MIN_CHUNK_TOKENS
from trainer.compute.precision import holds
from trainer.generation.engine import CACHE_BYTES, ROW_MULTIPLE, SLOTS
from trainer.generation.kv_cache import bytes_per_token

GB = 1e9
# Numbers that one layer keeps for the backward of one token: so many in fp32 per hidden unit (residuals), in
# mixed precision per hidden unit (norms, queries, outputs), per intermediate unit (gate, up, their product).
KEPT = {"fp32": 2, "hidden": 6, "intermediate": 4}


@dataclass
class Sizes:
    """What the arithmetic needs to know of a model: how many numbers are where. ``Sizes.of`` counts them."""

    config: object
    all: int  # numbers of the model
    body: int  # those of its base model, which a critic takes over
    linear: int  # in linear layers, the head included if it has weights of its own
    table: int  # in the embeddings
    head: int  # in the output head: vocabulary times width
    own_head: int  # the same, 0 where the head has the embeddings' weights
    adapters: int  # what adapters of rank 1 would add; 0 if there can be none
    exact: bool  # whether ``dtype`` holds every weight of these as it is (``keep_exact`` in precision.py)
    bytes: int  # that the model takes now
    rounds: bool = True  # whether frozen copies of it are rounded; code from outside is left as it is

    @classmethod
    def of(cls, model, dtype):
        """Count a model's numbers. Weights without memory (torch's meta device) count as exact."""
        tables = _tables(model)
        known = {id(p) for p in tables}
        linear = [m.weight for m in model.base_model.modules() if isinstance(m, nn.Linear)]
        linear += tables[1:] if len(known) == 2 else []  # a head that is not tied
        try:
            adapters = adapter_size(model.base_model, 1)
        except InputError:
            adapters = 0
        return cls(
            model.config.get_text_config(),
            all=sum(p.numel() for p in model.parameters()),
            body=sum(p.numel() for p in model.base_model.parameters()),
            linear=sum(p.numel() for p in linear),
            table=tables[0].numel() if tables else 0,
            head=tables[0].numel() if tables else 0,
            own_head=tables[1].numel() if len(known) == 2 else 0,
            adapters=adapters,
            exact=all(holds(p, dtype) for p in (*linear, *tables[:1])),
            bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        )

    @property
    def layer(self):
        """Numbers of one layer, of which all have about equally many."""
        return (self.all - self.table - self.own_head) // self.config.num_hidden_layers

    def frozen(self, small, rounded=True):
        """Bytes of a copy that does not train. small: of a number of mixed precision; rounded: whether linear
        layers are kept in it even where they are not the same numbers then."""
        halved = (self.linear + self.table) if self.exact else self.linear * (rounded and self.rounds)
        return halved * small + (self.all - halved) * 4


def _tables(model):
    """The weights of embeddings and head; none where the code of a reward model does not name them."""
    try:
        found = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:
        return []
    return [module.weight for module in found if module]


@dataclass
class Plan:
    """Where memory goes, in bytes. token_budget: tokens of a micro-batch; cache: of keys and values."""

    standing: dict  # {part: bytes} what is there all the time
    phases: dict  # {phase: {part: bytes}} what a phase has besides, without keys and values
    building: dict  # {part: bytes} all that is there while the run is built
    cache: int
    slots: int  # sequences that are sampled together
    token_budget: int
    release_cache: bool  # whether keys and values are freed between rollouts

    def parts(self, phase):
        """{part: bytes} of all that is there in a phase."""
        if phase == "building":
            return self.building
        kept = phase == "rollout" or not self.release_cache
        return self.standing | self.phases[phase] | ({"KV cache": self.cache} if kept else {})

    @property
    def fullest(self):
        """The phase that takes the most memory."""
        return max([*self.phases, "building"], key=lambda phase: sum(self.parts(phase).values()))

    @property
    def peak(self):
        """The most bytes that are in use at a time."""
        return sum(self.parts(self.fullest).values())


def memory_plan(
    args,
    sizes,
    device,
    dtype,
    held_out=0,
    budget=None,
    release_cache=False,
    slots=SLOTS,
    processes=1,
):
    """The memory of a run with these flags -> ``Plan``.

    sizes: {"actor": ``Sizes``, "rewards": a list} and, with a critic, "critic": of the model that it starts
    from, "demonstration": tokens of the longest one that the actor learns besides, if it does; dtype: of
    mixed precision; held_out: responses of the evaluation, which are sampled like a batch's; budget: tokens
    of a micro-batch, by default the fixed number of the device; slots: sequences that are sampled together at
    most; processes: that train together.
    """
    actor, small, parts = sizes["actor"], dtype.itemsize, _parts(args, processes)
    budget, width = budget or tokens_per_pass(device), args.max_seq_len + args.max_gen_len
    slots = min(slots, held_out if args.offline_data_path else max(args.batch_size, held_out))
    if device.type == "cpu":
        slots += -slots % ROW_MULTIPLE
    cache = slots * width * bytes_per_token(actor.config, small)
    weights = _weights(args, sizes, device, small, parts)
    if not slots:  # nothing is sampled
        del weights["sampler"]
    trained = _trained(args, sizes)
    updates = [_update(args, sizes, name, budget, device, dtype, processes) for name in trained]
    phases = {
        "update": max(updates, key=lambda parts: sum(parts.values())),
        "rollout": {"logits": 16 * slots * actor.config.vocab_size},  # fp32, and what sampling makes of them
    }
    building = _building(args, sizes, weights)
    if parts > 1:
        phases["rollout"]["sampler"] = weights.pop("sampler", 0)
        phases["rollout"]["gathered"] = 4 * actor.table  # it gets one matrix after the other
        phases["score"] = _gathered(actor, dtype, "actor", False)
        building = {}  # by the main process, in main memory: less than loading takes (memory_check.py)
    weights = {name: size // parts for name, size in weights.items()}
    if args.offload_frozen:
        for phase, names in {"reward": ["reward models"], "score": ["reference", "old actor"]}.items():
            phases[phase] = phases.get(phase, {}) | {x: weights.pop(x) for x in names if x in weights}
    moments = 2 * (2 if args.moments_dtype == "bfloat16" else 4) * sum(trained.values()) // parts
    cache = min(CACHE_BYTES, cache) if device.type == "cpu" else cache
    weights["moments"] = moments
    return Plan(weights, phases, building, cache, slots, budget, release_cache)


def _parts(args, processes):
    """Into how many parts models are cut, of which each process has one."""
    return processes if args.shard else 1


def _gathered(model, dtype, name, trained):
    """{part: bytes} that a process of a sharded run gathers while it goes through a model: the layer that
    computes and the next one in ``dtype``, embeddings and head in fp32. trained: whether they have gradients:
    those of a layer are there in ``dtype`` and as the fp32 numbers that are summed."""
    root = model.table + (model.own_head if name == "actor" else 0)
    size = 2 * dtype.itemsize * model.layer + 4 * root
    return {"gathered": size + ((dtype.itemsize + 4) * model.layer + 8 * root if trained else 0)}


def _trained(args, sizes):
    """{model: how many of its numbers train}"""
    names = [name for name in ("actor", "critic") if name in sizes]
    if args.lora_r:
        return {name: args.lora_r * sizes[name].adapters for name in names}
    return {name: sizes[name].body if name == "critic" else sizes[name].all for name in names}


def _weights(args, sizes, device, small, parts):
    """{model: the bytes of its weights} during the steps. What is shared counts once."""
    actor, critic, trained = sizes["actor"], sizes.get("critic"), _trained(args, sizes)
    own = {name: 4 * count for name, count in trained.items()}
    if args.lora_r:
        weights = {**own, "actor": actor.frozen(small, rounded=False) + own["actor"]}
        if parts > 1:  # what is shared before is cut for each model on its own
            weights["reference"] = actor.frozen(small, rounded=False)
            if critic:
                weights["critic"] += critic.frozen(small, rounded=False)
    else:
        weights = {**own, "reference": actor.frozen(small)}
    if args.update_old_actor_freq > 1:
        halved = actor.linear * (4 - small)
        weights["old actor"] = own["actor"] if args.lora_r else own["actor"] - halved
    rewards = 0
    for model in sizes["rewards"]:
        if args.lora_r and model is critic:  # they share their weights, which have become fp32
            rewards += model.frozen(small, rounded=False)
        else:
            rewards += min(model.bytes, model.frozen(small))
    if rewards:
        weights["reward models"] = rewards
    if args.ema_beta and device.type == "cpu":  # it is in main memory always
        weights["average"] = own["actor"]
    tied = 0 if actor.own_head else actor.head  # a CPU lays it out a second time, as a head
    return weights | {"sampler": small * (actor.all + (tied if device.type == "cpu" else 0))}


def _building(args, sizes, weights):
    """{part: bytes} while the run is built, at the fuller of two moments: when the sampler's copy is in fp32,
    which is made first, and when all models are there. None of them is rounded; with adapters they share the
    actor's weights."""
    actor, critic = sizes["actor"], sizes.get("critic")
    shared = critic.all if critic and args.lora_r and critic is not actor else 0
    rewards = sum(4 * model.all if shared and model is critic else model.bytes for model in sizes["rewards"])
    building = {"actor": 4 * actor.all, "reward models": rewards}
    sampler = weights.get("sampler", 0)
    names = [name for name in ("reference", "old actor") if name in weights and not args.lora_r]
    copies = {"sampler": sampler} | dict.fromkeys(names, 4 * actor.all)
    if critic:
        copies["critic"] = 0 if args.lora_r else 4 * critic.body
    first = {"sampler": sampler and max(4 * actor.all, sampler)}
    return building | max(first, copies, key=lambda parts: sum(parts.values()))


def _update(args, sizes, name, budget, device, dtype, processes):
    """{part: bytes} of an optimizer step of this model."""
    model, small, full = sizes[name], dtype.itemsize, not args.lora_r
    gradients = 4 * _trained(args, sizes)[name]
    mixed_in = sizes.get("demonstration", 0) if name == "actor" else 0
    longest = args.max_seq_len + args.max_gen_len
    needed = -(-args.mini_batch_size * (longest + mixed_in) // args.accumulation_steps)
    needed = min(needed, args.mini_batch_size * max(longest, mixed_in))  # they have passes of their own
    tokens, parts = min(budget, needed), _parts(args, processes)
    # In mixed precision a forward keeps copies of the linear layers' weights; with --shard 1 it gathers them.
    copies = 0 if dtype == torch.float32 or args.lora_r or parts > 1 else small * model.linear
    kept = copies + _activations(args, model, tokens, dtype)
    head = chunk = 0
    if name == "actor":
        logits = tokens * model.config.vocab_size
        chunk = min(logits, max(CHUNK[device.type], MIN_CHUNK_TOKENS * model.config.vocab_size))
        mixed, on_gpu = dtype != torch.float32, device.type == "cuda"
        # a GPU: logits and their gradient; elsewhere probabilities, some kept and the others made again
        chunk *= (4 + small * mixed) if on_gpu else 8
        chunk += 0 if on_gpu else 4 * min(logits, MAX_KEPT)
        head = 4 * model.head if full else 0
        head += (2 if full and not on_gpu else 1) * small * model.head * mixed
    table = 4 * model.table if full and (name == "actor" or tokens < needed) else 0
    if processes > parts:
        gradients += 8 * model.table if full else 0  # a large one is copied where processes are summed up
    gradients //= parts
    step = {"gradients": gradients, "micro-batch": kept + max(head + chunk, table)}
    if args.accumulation_steps == 1 and tokens == needed and not mixed_in:
        # One backward: gradients come as activations go. The head's is the first, the embeddings' the last.
        # On a CPU they do not fit into the gaps that copies leave, which have half their size.
        last = table + (copies if device.type == "cpu" else 0)
        step["micro-batch"] = max(kept + head + chunk - gradients, last)
    return step | (_gathered(model, dtype, name, full) if parts > 1 else {})


def _activations(args, model, tokens, dtype):
    """The bytes of activations that a forward keeps for its backward."""
    config, small = model.config, dtype.itemsize
    hidden = config.hidden_size
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    layer = 4 * KEPT["fp32"] * hidden + small * (
        KEPT["hidden"] * hidden + KEPT["intermediate"] * intermediate
    )
    if args.gradient_checkpointing:  # the residual of every layer, and one layer at a time
        return tokens * (4 * hidden * config.num_hidden_layers + layer)
    return tokens * layer * config.num_hidden_layers
