"""Cases of test_layer_by_layer.py that need several processes; the test starts this script once in each.

argv: a folder and "few" or "all" families. Each process writes what it found there, as RANK.json. Or "train"
and flags: a run of train_ppo.py whose sampler gathers its layers.
"""

import copy
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/model")]

import torch
from test_families import FAMILIES, VOCAB, build
from tiny import tiny_llama

from errors import InputError
from model.lora import add_adapters, merged_copy
from trainer import memory_check, train_ppo
from trainer.compute.packing import pack_sequences
from trainer.compute.scoring import PolicyScorer
from trainer.compute.sharding import InStep, layers_of, shard
from trainer.generation.engine import Sampler
from trainer.generation.layer_by_layer import LayeredCopy
from trainer.generation.sampler_copy import JoinedLinear, SamplerCopy
from trainer.generation.sampling_noise import noise_keys
from trainer.runs.distributed import init_world

FEW = ("Llama, tied", "Qwen3-MoE", "Gemma 3", "GPT-2", "OPT-350m", "MiniMind 2 MoE")  # families
FULL = torch.OutOfMemoryError("out of memory")


def call_of(rank, more=0):
    """What a process samples: unequally many prompts of unequal lengths, answers of unequal lengths."""
    prompts = [[2 + i * j % (VOCAB - 2) for j in range(1, 3 + i)] for i in range(3 + 2 * rank + more)]
    return prompts, noise_keys(1, rank, list(range(len(prompts)))), [0], 6 + 3 * rank, 1.0


def policy():
    return tried(tiny_llama(VOCAB, layers=3, spread=2.0))


def tried(model):
    """As ``load_checked`` leaves a policy of a sharded run."""
    pack_sequences(model.base_model)
    return model


def sampler_of(model, in_step=None, dtype=torch.float32, sharded=None):
    """A sampler with this model's weights: a whole copy or, with ``in_step``, one that is gathered layer by
    layer from ``sharded``, which becomes so; by default it is the model itself."""
    sampler = Sampler(model, dtype, slots=4, world=in_step and in_step.world)
    sharded = model if sharded is None else sharded
    if in_step:
        sampler.copy.unload()
        shard(PolicyScorer(sharded), in_step, torch.float32)
    return sampler.load(sharded)


def plain_sampler(model, dtype=torch.float32):
    """A whole copy whose products are those of one that is gathered: its weights are not packed."""
    pack, SamplerCopy._pack = SamplerCopy._pack, lambda copied: copied._join(JoinedLinear)
    try:
        return sampler_of(model, dtype=dtype)
    finally:
        SamplerCopy._pack = pack


def sampled(sampler, call):
    rollout = sampler.sample(*call)
    return rollout.tokens.tolist(), rollout.sampler_logprobs.tolist()


def compare(model, in_step, dtype=torch.float32, sharded=None):
    """What a model samples from whole copies and layer by layer."""
    call = call_of(in_step.world.rank)
    packed, plain = sampled(sampler_of(model, dtype=dtype), call), sampled(plain_sampler(model, dtype), call)
    found = sampled(sampler_of(model, in_step, dtype, sharded), call)
    return {"tokens": found[0] == packed[0], "bits": found == plain}


def adapted(in_step):
    """A policy with adapters; its copy was made before there were any, as in a run."""
    start = policy()
    model = copy.deepcopy(start)
    add_adapters(model.base_model, 2, seed=1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(generator=torch.Generator().manual_seed(2))
    call = call_of(in_step.world.rank)
    wanted = sampled(plain_sampler(merged_copy(model)), call)
    return {"same": sampled(sampler_of(start, in_step, sharded=model), call) == wanted}


def memory(in_step):
    """Numbers of a new and of a loaded copy and of the model, and bytes of an unloaded one."""
    model = tried(tiny_llama(VOCAB, layers=6))
    numbers, root = sum(p.numel() for p in model.parameters()), model.get_input_embeddings().weight.numel()
    new = LayeredCopy(model, torch.float32, "cpu", in_step.world)
    copied = sampler_of(model, in_step).copy
    built, held = (
        sum(storage.nbytes() for storage in {p.untyped_storage() for p in x.weights.values()}) // 4
        for x in (new, copied)
    )
    held += sum(len(part) for part in copied.parts)
    copied.unload()
    left = sum(p.untyped_storage().nbytes() for p in copied.weights.values())
    return {
        "built": built,
        "held": held,
        "numbers": numbers,
        "root": root,
        "left": left,
        "parts": copied.parts is None,
    }


def fail_once(module, at):
    """Memory runs out in call ``at`` of this module."""
    forward, calls = module.forward, []

    def failing(*inputs, **options):
        calls.append(1)
        if len(calls) == at + 1:
            raise FULL
        return forward(*inputs, **options)

    module.forward = failing


def out_of_memory(in_step):
    """Memory runs out in process 1, in each part of a prefill and of a step -> [(whether the tokens are the
    same, the largest difference of a log-prob, slots in the end)]"""
    world, found = in_step.world, []
    model = policy()
    call = call_of(world.rank)
    wanted = sampled(plain_sampler(model), call)
    sampler = sampler_of(model, in_step)
    model = sampler.copy.model
    for at in (0, 2):  # the first and a later forward
        for module in (model.get_input_embeddings(), *layers_of(model), model.get_output_embeddings()):
            sampler.release()
            sampler.cache_bytes = None
            if world.rank == 1:
                fail_once(module, at)
            tokens, logprobs = sampled(sampler, call)
            furthest = (torch.tensor(logprobs) - torch.tensor(wanted[1])).abs().max().item()
            found.append([tokens == wanted[0], furthest, sampler.tried[0]])
    return found


def too_long(in_step):
    """Not even a single sequence fits in process 1 -> (what this one sampled is right, the message)."""
    model = policy()
    call = call_of(in_step.world.rank)
    wanted, found = sampled(plain_sampler(model), call), None
    sampler = sampler_of(model, in_step)
    if in_step.world.rank == 1:
        for _ in range(3):  # with 4, 2 and 1 slots
            fail_once(layers_of(sampler.copy.model)[1], 0)
    try:
        with in_step.world.all_or_none():
            found = sampled(sampler, call)
    except InputError as error:
        return [found == wanted, str(error)]


def as_on_a_gpu(in_step):
    """Several steps between two checks for finished sequences, in the shapes of a GPU."""
    model = policy()
    call = call_of(in_step.world.rank)
    wanted, sampler = sampled(plain_sampler(model), call), sampler_of(model, in_step)
    sampler.graphs.asynchronous = True
    return {"same": sampled(sampler, call)[0] == wanted[0]}


def another_layout(in_step):
    """Process 1 has put its weights elsewhere -> the message."""
    model = policy()
    sampler = sampler_of(model, in_step)
    if in_step.world.rank == 1:
        sampler.copy.places.popitem()
    try:
        sampler.load(model)
    except SystemExit as error:
        return str(error)


def least(in_step):
    return in_step.least(7 - in_step.world.rank)


def failed_before(in_step):
    """Process 1 fails while the others ask for the least -> the message."""
    try:
        with in_step.world.all_or_none():
            if in_step.world.rank == 1:
                raise InputError("no reward model")
            in_step.least(1)
    except InputError as error:
        return str(error)


def unequal(in_step):
    """Inside one block, one process samples three times, and the others twice or never. Then process 1 fails
    after its first time."""
    world = in_step.world
    model = policy()
    calls = [call_of(1, more) for more in range([3, 1, 0][world.rank])]
    wanted = [sampled(plain_sampler(model), call) for call in calls]
    sampler = sampler_of(model, in_step)
    with sampler.copy.together():
        found = [sampled(sampler, call) for call in calls]
    failed = False
    try:
        with sampler.copy.together():
            for call in calls:
                found.append(sampled(sampler, call))
                if world.rank == 1:
                    raise InputError("a reward failed")
    except InputError:
        failed = True
    return {"right": found == wanted + wanted[: len(found) - len(wanted)], "failed": failed}


def out_of_order(in_step):
    """A model that computes its layers in another order -> the message."""
    sampler = sampler_of(policy(), in_step)
    layers = sampler.copy.model.base_model.layers
    layers[1], layers[2] = layers[2], layers[1]
    try:
        sampler.sample(*call_of(0))
    except RuntimeError as error:
        return str(error)


def main(folder, names):
    torch.set_num_threads(1)
    with init_world("cpu") as world:
        in_step, found = InStep(world), {}
        for name in FEW if names == "few" else FAMILIES:
            found[name] = compare(tried(build(FAMILIES[name]())), in_step)
        found["bf16"] = compare(policy(), in_step, torch.bfloat16)
        for case in (adapted, as_on_a_gpu, memory, out_of_memory, too_long, unequal):
            found[case.__name__] = case(in_step)
        for case in (out_of_order, another_layout, least, failed_before):
            found[case.__name__] = case(in_step)
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def train(argv):
    """A run that samples layer by layer."""
    plan = memory_check.fitted_plan
    memory_check.fitted_plan = lambda *x, **more: (replace(plan(*x, **more)[0], layered=True), True)
    load, loads = LayeredCopy.load, []
    LayeredCopy.load = lambda copied, policy: loads.append(policy) or load(copied, policy)
    train_ppo.main(argv)
    print(f"loaded {len(loads)} times")


if __name__ == "__main__":
    train(sys.argv[2:]) if sys.argv[1] == "train" else main(*sys.argv[1:])
