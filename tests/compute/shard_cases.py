"""Cases of test_sharding.py that need several processes; the test starts this script once in each.

argv: a folder, and "train" or "score" for the case in which memory runs out, which ends the processes. Each
writes what it found there, as RANK.json.
"""

import copy
import json
import os
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/model")]

import torch
from test_families import FAMILIES, VOCAB
from tiny import tiny_llama
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from errors import InputError
from model.critic import CriticModel
from model.lora import add_adapters, merged
from model.weights import local_part, whole
from trainer.compute.batching import Layout, micro_batches, pad_right
from trainer.compute.memory import each_micro_batch
from trainer.compute.scoring import PolicyScorer, ValueScorer, prepare_training
from trainer.compute.sharding import InStep, layers_of, shard
from trainer.generation.sampler_copy import SamplerCopy
from trainer.runs.distributed import init_world, sum_gradients
from trainer.runs.optimizer_step import clip_gradients, make_optimizer

FEW = ("Llama, tied", "Qwen2", "Qwen3-MoE", "MiniMind 3 MoE")  # families
PROMPT, RESPONSES = 3, {0: (5, 2, 7), 1: (4, 6, 1, 3)}  # tokens: of a prompt; of each process' responses


def rows_of(rank):
    """The sequences of a process -> lists of ids."""
    generator = torch.Generator().manual_seed(rank)
    counts = RESPONSES[rank % 2]
    return [torch.randint(2, VOCAB, (PROMPT + n,), generator=generator).tolist() for n in counts]


def run_through(scorer, ids):
    """Loss of these sequences, as a sum."""
    layout = Layout.of_responses([PROMPT] * len(ids), [len(x) - PROMPT for x in ids])
    x, *rest = scorer(pad_right(ids)[0], layout)
    return x.sin().sum() + rest[-1]


def gradients(scorer, parameters, world):
    """The gradients of all processes' sequences, by the weights of this one."""
    for p in parameters:
        p.grad = None
    for rank in range(world.size):
        run_through(scorer, rows_of(rank)).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def furthest(left, right):
    """The largest difference, as a share of the largest number."""
    most = max(x.abs().max().item() for x in right)
    return max((whole(a) - b).abs().max().item() for a, b in zip(left, right, strict=True)) / most


def of_scorer(scorer, plain, in_step, dtype):
    """A sharded scorer beside the same one unsharded -> what differs."""
    world = in_step.world
    model, other = next(scorer.children()), next(plain.children())
    wanted = [x.clone() for x in gradients(plain, trained(other), world)]
    values = [run_through(plain, rows_of(rank)).item() for rank in range(world.size)]
    shard(scorer, in_step, dtype)
    mine = run_through(scorer, rows_of(world.rank))
    mine.backward()
    sum_gradients(model.parameters(), world)
    norm = clip_gradients(model, 1e9)
    exact = torch.stack([x.double().square().sum() for x in wanted]).sum().sqrt().item()
    parts = [local_part(p) for p in model.parameters() if isinstance(p, DTensor)]
    return {
        "loss": abs(mine.item() - values[world.rank]) / (1 + abs(mine.item())),
        "gradient": furthest([p.grad for p in trained(model)], wanted),
        "norm": abs(norm / exact - 1),
        "share": sum(map(torch.Tensor.numel, parts)) / sum(p.numel() for p in other.parameters()),
        "layers": len(layers_of(model)),
    }


def family(name, in_step, dtype):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[name]()).float().eval()
    models = [model, copy.deepcopy(model)]
    for x in models:
        prepare_training(x.base_model, 0)
    return of_scorer(*(PolicyScorer(x, dtype) for x in models), in_step, dtype)


def llama(checkpointing=0, lora_r=0):
    model = tiny_llama(VOCAB, layers=3, spread=2.0).requires_grad_(not lora_r)
    prepare_training(model.base_model, checkpointing)
    if lora_r:
        add_adapters(model.base_model, lora_r, seed=1)
        for name, p in model.named_parameters():
            if "lora_B" in name:  # it starts at zero, and so would the gradient of the other one
                p.data.normal_(generator=torch.Generator().manual_seed(2))
    return model


def critic(lend=False):
    critic = CriticModel.from_model(llama(), lend=lend)
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(3))
    prepare_training(critic.backbone, 0)
    return critic


def sampler(in_step):
    """The sampler's copy of a sharded model, freed and loaded again."""
    model = llama(lora_r=2)
    plain = dict(merged(model))
    copied = SamplerCopy(llama(), torch.float32, torch.device("cpu"))
    shard(PolicyScorer(model), in_step, torch.float32)
    copied.unload()
    freed = sum(x.untyped_storage().nbytes() for places in copied.places.values() for x in places)
    copied.load(model)
    pairs = [(x, plain[name]) for name, places in copied.places.items() for x in places]
    return {"freed": freed, "equal": all(torch.allclose(x, wanted, atol=1e-6) for x, wanted in pairs)}


def steps(in_step):
    """Three optimizer steps with moments in bf16, of a sharded model and of a whole one -> the largest
    difference of weights."""
    world, models = in_step.world, [llama(), llama()]
    scorers = [PolicyScorer(x) for x in models]
    shard(scorers[0], in_step, torch.float32)
    optimizers = []
    for model in models:
        parts = [[p for p in trained(model) if isinstance(p, DTensor) == kind] for kind in (True, False)]
        groups = [{"params": part} for part in parts if part]
        optimizers.append(make_optimizer(groups, 1e-2, "bfloat16", 0))
    for _ in range(3):
        run_through(scorers[0], rows_of(world.rank)).backward()
        sum_gradients(models[0].parameters(), world)
        gradients(scorers[1], trained(models[1]), world)
        for model, optimizer in zip(models, optimizers, strict=True):
            clip_gradients(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return furthest(trained(models[0]), trained(models[1]))


class Experts(GradientCheckpointingLayer):
    """A layer of which a process uses one expert."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, x, expert):
        return self.experts[expert](x)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x, expert):
        for layer in self.layers:
            x = layer(x, expert)
        return x.sum()


def unreached(in_step):
    """Each process uses an expert of its own, and none the last one -> the largest difference of gradients,
    or None where torch cannot sum them."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return None
    model, world = Layers(), in_step.world
    plain = copy.deepcopy(model)
    shard(model, in_step, torch.float32)
    model(torch.ones(2, 6) * (1 + world.rank), world.rank % 2).backward()
    for rank in range(world.size):
        plain(torch.ones(2, 6) * (1 + rank), rank % 2).backward()
    wanted = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained(plain)]
    return furthest([p.grad for p in trained(model)], wanted)


def out_of_memory(in_step, kind):
    """Memory runs out in process 1, in its second micro-batch -> what each process says as it ends."""
    scorer, ids = PolicyScorer(llama()), rows_of(0)
    shard(scorer, in_step, torch.float32)
    lengths = [len(x) for x in ids]
    calls = []

    def work(rows):
        calls.append(rows)
        if in_step.world.rank == 1 and len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")
        run_through(scorer, [ids[row] for row in rows or [0]])

    try:
        if kind == "train":
            for rows in in_step.passes(micro_batches(lengths, 9)):
                in_step.run(partial(work, rows))
        else:
            scorer.in_step = in_step
            each_micro_batch(lengths, 9, work, in_step=scorer.in_step)
    except SystemExit as error:
        return str(error.code)


def failed_before(in_step):
    """Process 1 fails while the others ask for the least -> the message."""
    try:
        with in_step.world.all_or_none():
            if in_step.world.rank == 1:
                raise InputError("no reward model")
            in_step.least(1)
    except InputError as error:
        return str(error)


def passes(in_step):
    """Cuts of processes that have different numbers of micro-batches."""
    cases = [([[4, 3, 2, 1, 0]], [[0], [1], [2]]), ([], [[0, 1]]), ([[0], [1]], [[5]])]
    return [in_step.passes(case[in_step.world.rank % 2]) for case in cases]


def cases(world):
    in_step = InStep(world)
    names = FAMILIES if world.size == 2 else FEW
    found = {name: family(name, in_step, torch.float32) for name in names}
    found |= {f"{name}, bf16": family(name, in_step, torch.bfloat16) for name in FEW}
    pairs = {
        "checkpointing": (PolicyScorer(llama(1)), PolicyScorer(llama(1))),
        "adapters": (PolicyScorer(llama(1, 2)), PolicyScorer(llama(1, 2))),
        "critic": (ValueScorer(critic(lend=True)), ValueScorer(critic())),
    }
    found |= {name: of_scorer(*pair, in_step, torch.float32) for name, pair in pairs.items()}
    others = {"sampler": sampler, "steps": steps, "passes": passes, "unreached": unreached}
    found |= {name: function(in_step) for name, function in others.items()}
    return found | {"least": in_step.least(7 - world.rank), "failed before": failed_before(in_step)}


def main(folder, kind=""):
    torch.set_num_threads(1)
    with init_world("cpu") as world:
        found = out_of_memory(InStep(world), kind) if kind else cases(world)
        (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
