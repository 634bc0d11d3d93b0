"""Sharded models (--shard 1): what they compute is what whole ones do, and how they end. Critic, sampler,
adapters and checkpointing in whole runs: test_processes.py.

The cases need several processes: a test starts this file once in each, which writes down what failed there.
"""

import copy
import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/model")]

import pytest
import torch
from test_families import FAMILIES, VOCAB
from tiny import PYTHON, finish, ranks, start_script, tiny_llama
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from model.weights import full_tensor, local_part
from trainer.compute.batching import Layout, micro_batches, pad_right
from trainer.compute.memory import each_micro_batch
from trainer.compute.scoring import PolicyScorer, prepare_training
from trainer.compute.sharding import ShardGroup, layers_of, shard
from trainer.runs.distributed import init_world
from trainer.runs.optimizer_step import clip_gradients, make_optimizer

FEW = ("Llama, tied", "Qwen3-MoE", "MiniMind 3 MoE")  # families
PROMPT = 3  # tokens of a prompt
RESPONSES = {0: (5, 2, 7), 1: (4, 6, 1, 3)}  # tokens of each process' responses


def run(folder, processes, *kind):
    """-> what each process has found"""
    started = [start_script([PYTHON, __file__, str(folder), *kind], rank) for rank in ranks(processes)]
    for process in started:
        finish(process, seconds=300)
    return [json.loads((folder / f"{n}.json").read_text()) for n in range(processes)]


SLOW = [pytest.param(2, FAMILIES, marks=pytest.mark.slow), pytest.param(3, FEW, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("processes", "families"), [(2, FEW), *SLOW])
def test_sharded_models_compute_what_whole_ones_do(tmp_path, processes, families):
    assert run(tmp_path, processes, "", *families) == [{}] * processes


@pytest.mark.parametrize("kind", ["train", "score"])
def test_memory_that_runs_out_in_one_process_ends_all_in_one_line_each(tmp_path, kind):
    """The others, which wait for it in a gather, say that they have lost it."""
    other, out_of_memory = run(tmp_path, 2, kind)
    assert out_of_memory.startswith("error: out of memory. With --shard 1 ")
    assert "--resume and --gradient_checkpointing 1 or a larger --accumulation_steps" in out_of_memory
    assert other.startswith("error: process 0 lost contact with the others (")


# ----------------------------------------------------------------------------------- what each process does


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
    return max((full_tensor(a) - b).abs().max().item() for a, b in zip(left, right, strict=True)) / most


def compare(models, shard_group, loss, gradient, dtype=torch.float32):
    """The first model, sharded, beside the second, which is the same: loss, the summed gradient and its norm.
    Each process keeps about its share of the numbers, gathered layer by layer."""
    world, (model, other) = shard_group.world, models
    scorer, plain = (PolicyScorer(x, dtype) for x in models)
    wanted = [x.clone() for x in gradients(plain, trained(other), world)]
    value = run_through(plain, rows_of(world.rank)).item()
    shard(scorer, shard_group, dtype)
    mine = run_through(scorer, rows_of(world.rank))
    mine.backward()
    world.sum_gradients(model.parameters())
    norm = clip_gradients(model, 1e9)
    exact = torch.stack([x.double().square().sum() for x in wanted]).sum().sqrt().item()
    off = furthest([p.grad for p in trained(model)], wanted)
    kept = sum(local_part(p).numel() for p in model.parameters() if isinstance(p, DTensor))
    shares = world.gather(kept / sum(p.numel() for p in other.parameters()))
    assert abs(mine.item() - value) <= loss * (1 + abs(value))
    assert off <= gradient
    assert norm == pytest.approx(exact, rel=max(1e-6, gradient))
    assert sum(shares) == pytest.approx(1, abs=0.06)
    assert len(layers_of(model)) == 2


def families(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[name]()).float().eval()
    models = model, copy.deepcopy(model)
    for x in models:
        prepare_training(x.base_model, 0)
    return models


def llama():
    model = tiny_llama(VOCAB, layers=3, spread=2.0)
    prepare_training(model.base_model, 0)
    return model


def steps(shard_group):
    """Three optimizer steps with moments in bf16, rounded with other random bits, are nearly those of a whole
    model: clipping by the norm over all processes, AdamW on the parts. test_processes.py has fp32's."""
    world, models = shard_group.world, [llama(), llama()]
    scorers = [PolicyScorer(x) for x in models]
    shard(scorers[0], shard_group, torch.float32)
    optimizers = []
    for model in models:
        parts = [[p for p in trained(model) if isinstance(p, DTensor) == kind] for kind in (True, False)]
        groups = [{"params": part} for part in parts if part]
        optimizers.append(make_optimizer(groups, 1e-2, "bfloat16", 0))
    for _ in range(3):
        run_through(scorers[0], rows_of(world.rank)).backward()
        world.sum_gradients(models[0].parameters())
        gradients(scorers[1], trained(models[1]), world)
        for model, optimizer in zip(models, optimizers, strict=True):
            clip_gradients(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert furthest(trained(models[0]), trained(models[1])) < 1e-3


class Experts(GradientCheckpointingLayer):
    """A layer of which a process uses one expert."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, given):
        x, expert = given
        return self.experts[expert](x), expert


def unreached(shard_group):
    """Each process uses an expert of its own, and none the last one. Without torch 2.13's option the sums
    would be those of different experts, and nothing would say so."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return
    model, world = nn.Sequential(Experts(), Experts()), shard_group.world
    plain = copy.deepcopy(model)
    shard(model, shard_group, torch.float32)
    for net, given in ((model, [world.rank]), (plain, range(world.size))):
        for rank in given:
            net((torch.ones(2, 6) * (1 + rank), rank % 2))[0].sum().backward()
    wanted = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained(plain)]
    assert furthest([p.grad for p in trained(model)], wanted) < 1e-6


def passes(shard_group):
    """Processes make equally many: one with fewer micro-batches cuts its largest, or makes one of no rows."""
    given = [([[4, 3, 2, 1, 0]], [[0], [1], [2]]), ([], [[0, 1]]), ([[0], [1]], [[5]])]
    wanted = [([[4, 3], [2], [1, 0]], [[0], [1], [2]]), ([[]], [[0, 1]]), ([[0], [1]], [[5], []])]
    mine = shard_group.world.rank % 2
    assert [shard_group.equal_passes(case[mine]) for case in given] == [case[mine] for case in wanted]


def out_of_memory(shard_group, kind):
    """Memory runs out in process 1, in its second micro-batch -> what each process says as it ends."""
    scorer, ids = PolicyScorer(llama()), rows_of(0)
    shard(scorer, shard_group, torch.float32)
    lengths = [len(x) for x in ids]
    calls = []

    def work(rows):
        calls.append(rows)
        if shard_group.world.rank == 1 and len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")
        run_through(scorer, [ids[row] for row in rows or [0]])

    try:
        if kind == "train":
            for rows in shard_group.equal_passes(micro_batches(lengths, 9)):
                shard_group.run(work, rows)
        else:
            scorer.shard_group = shard_group
            each_micro_batch(lengths, 9, work, shard_group=scorer.shard_group)
    except SystemExit as error:
        return str(error.code)


def failures(shard_group, names):
    """names: of families -> {case: why it failed}. With two processes, results are those of a whole model
    bit for bit; with three, sums are rounded in another order."""
    two = shard_group.world.size == 2
    cases = {}
    exact = 0 if two else 2e-6
    for name in names:
        cases[name] = partial(compare, families(name), shard_group, loss=exact, gradient=exact)
    for name in FEW[:2]:
        limits = {"loss": 1e-6, "gradient": 0 if two else 1e-5}
        if name == "Qwen3-MoE":  # its experts compute outside autocast, in the dtype of their weights
            limits = {"loss": 1, "gradient": 0.02}
        cases[f"{name}, bf16"] = partial(compare, families(name), shard_group, **limits, dtype=torch.bfloat16)
    for function in (steps, passes, unreached):
        cases[function.__name__] = partial(function, shard_group)
    found = {}
    for name, case in cases.items():
        try:
            case()
        except AssertionError:
            found[name] = traceback.format_exc()
    return found


def main(folder, kind, *names):
    torch.set_num_threads(1)
    with init_world("cpu") as world:
        found = out_of_memory(ShardGroup(world), kind) if kind else failures(ShardGroup(world), names)
        (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
