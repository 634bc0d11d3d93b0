"""Sharded models (--shard 1): what they compute is what whole ones do, and how they end."""

import json
import os

import pytest
from test_families import FAMILIES
from tiny import PYTHON, finish, ranks, start_script

FEW = ("Llama, tied", "Qwen2", "Qwen3-MoE", "MiniMind 3 MoE")  # families that three processes try
SCRIPT = os.path.join(os.path.dirname(__file__), "shard_cases.py")


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    """What each process found."""
    folder, size = tmp_path_factory.mktemp("cases"), request.param
    for process in [start_script([PYTHON, SCRIPT, str(folder)], rank) for rank in ranks(size)]:
        finish(process, seconds=300)
    return [json.loads((folder / f"{n}.json").read_text()) for n in range(size)]


def test_every_family_computes_the_same_in_parts(found):
    """Log-probs and the summed gradient, bit for bit with two processes; with three, sums are rounded in
    another order. Each process keeps about its share of the numbers, gathered layer by layer."""
    limit, names = (0.0, FAMILIES) if len(found) == 2 else (2e-6, FEW)
    for mine in found:
        for name in names:
            case = mine[name]
            assert case["loss"] <= limit, name
            assert case["gradient"] <= limit, name
            assert case["norm"] < 1e-6, name
            assert case["layers"] == 2, name
    for name in names:
        assert sum(mine[name]["share"] for mine in found) == pytest.approx(1, abs=0.06), name


def test_in_bf16_layers_are_gathered_in_bf16_and_compute_as_whole_ones_do(found):
    """Experts of Qwen3 compute outside autocast, in the dtype of their weights: there they are rounded."""
    for mine in found:
        for name in ("Llama, tied", "Qwen2", "MiniMind 3 MoE"):
            case = mine[f"{name}, bf16"]
            assert case["loss"] <= 1e-6, name
            assert case["gradient"] <= (0 if len(found) == 2 else 1e-5), name
        assert mine["Qwen3-MoE, bf16"]["gradient"] < 0.02


@pytest.mark.parametrize("case", ["checkpointing", "adapters", "critic"])
def test_checkpointed_layers_adapters_and_the_critic_do(found, case):
    for mine in found:
        assert mine[case]["loss"] <= 1e-6
        assert mine[case]["gradient"] <= 2e-6
        assert mine[case]["layers"] == 3


def test_experts_that_a_process_does_not_reach_are_summed_too(found):
    """Without torch 2.13's option the sums would be those of different experts, and nothing would say so."""
    for mine in found:
        assert mine["unreached"] is None or mine["unreached"] < 1e-6


def test_three_optimizer_steps_with_moments_in_bf16_are_nearly_those_of_a_whole_model(found):
    """Clipping by the norm over all processes, AdamW on the parts, rounded with other random bits. Of those
    in fp32 test_processes.py has whole runs."""
    for mine in found:
        assert mine["steps"] < 1e-3


def test_the_sampler_gathers_whole_weights_and_frees_them(found):
    for mine in found:
        assert mine["sampler"] == {"freed": 0, "equal": True}


def test_processes_make_the_same_number_of_passes(found):
    """A process with fewer micro-batches cuts its largest, or makes one without rows."""
    lengths = [[len(case) for case in mine["passes"]] for mine in found]
    assert all(other == lengths[0] for other in lengths)
    first = found[0]["passes"]
    assert first == [[[4, 3], [2], [1, 0]], [[]], [[0], [1]]]
    assert found[1]["passes"][2] == [[5], []]


def test_processes_agree_on_the_least_memory(found):
    for mine in found:
        assert mine["least"] == 7 - (len(found) - 1)
        assert mine["failed before"] == "process 1: no reward model"


@pytest.mark.parametrize("kind", ["train", "score"])
def test_memory_that_runs_out_in_one_process_ends_all_in_one_line_each(tmp_path, kind):
    """The others, which wait for it in a gather, say that they have lost it."""
    processes = [start_script([PYTHON, SCRIPT, str(tmp_path), kind], rank) for rank in ranks(2)]
    for process in processes:
        finish(process, seconds=100)
    other, out_of_memory = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (0, 1))
    assert out_of_memory.startswith("error: out of memory. With --shard 1 ")
    assert "--resume and --gradient_checkpointing 1 or a larger --accumulation_steps" in out_of_memory
    assert other.startswith("error: process 0 lost contact with the others (")
