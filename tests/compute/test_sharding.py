"""Sharded models (--shard 1): what they compute is what whole ones do, also where memory runs out."""

import json
import os
import pickle

import pytest
import torch
from test_families import FAMILIES, VOCAB, build
from tiny import PYTHON, finish, ranks, start_script

from model.shards import outline
from trainer.compute.attention import ATTENTION
from trainer.compute.fused_layers import attention_forward, is_fused
from trainer.compute.packing import pack_sequences
from trainer.generation.sampler_copy import SamplerCopy

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


def test_only_the_main_process_loads_a_model(found):
    """The others have its outline: no numbers, but shared weights are shared, and methods are their own."""
    for rank, mine in enumerate(found):
        case = mine["loading"]
        assert case["calls"] == ["good"] * (rank == 0)
        assert case["outline"] == (rank > 0)
        assert case["tied"] and case["buffers"] and case["methods"] and case["packs"]
        assert case["copied"] == VOCAB


def test_an_error_of_one_process_while_models_are_loaded_ends_all(found):
    """Also of a process that fails before the main one loads, while the others wait for that."""
    for mine in found:
        assert mine["loading"]["after bad"] == ["bad: no such model", True]
        assert mine["loading"]["after good"] == ["process 1: its own mistake", True]


def test_experts_that_a_process_does_not_reach_are_summed_too(found):
    """Without torch 2.13's option the sums would be those of different experts, and nothing would say so."""
    for mine in found:
        assert mine["unreached"] is None or mine["unreached"] < 1e-6


def test_three_optimizer_steps_are_those_of_a_whole_model(found):
    """Clipping by the norm over all processes, AdamW on the parts. Moments in bf16 are rounded with other
    random bits."""
    for mine in found:
        assert mine["steps"]["float32"] < 2e-6
        assert mine["steps"]["bfloat16"] < 1e-3


def test_the_sampler_gathers_whole_weights_and_frees_them(found):
    for mine in found:
        assert mine["sampler"] == {"freed": 0, "equal": True, "packed": True}


def test_processes_make_the_same_number_of_passes(found):
    """A process with fewer micro-batches cuts its largest, or makes one without rows."""
    lengths = [[len(case) for case in mine["passes"]] for mine in found]
    assert all(other == lengths[0] for other in lengths)
    first = found[0]["passes"]
    assert first == [[[4, 3], [2], [1, 0]], [None], [[0], [1]]]
    assert found[1]["passes"][2] == [[5], None]


def test_memory_that_runs_out_in_one_process_costs_no_gather_and_no_sum(found):
    """Before each of the gathers and sums of a pass, in process 1 alone, once: no process hangs, all learn of
    it, and the second attempt gives the gradient of a whole model. Scores of the first attempt that could be
    kept are right."""
    for mine in found:
        for case in mine["out of memory"]:
            assert case["collectives"] == 12  # 4 gathers forward, 4 backward, 4 sums
            assert case["retried"] == case["collectives"]
            assert case["gradient"] < 2e-6
            assert case["scores"] < 1e-5


def test_a_single_sequence_that_does_not_fit_is_one_line(found):
    for mine in found:
        assert mine["too long"].startswith(
            "error: out of memory for a single sequence of 9 tokens; lower --max_gen_len"
        )


def test_processes_agree_on_the_least_memory(found):
    for mine in found:
        assert mine["least"] == 7 - (len(found) - 1)
        assert mine["failed before"] == "process 1: no reward model"


def test_an_outline_is_copied_as_it_was_found_to_be(monkeypatch):
    """Its numbers are not set, so nothing can be tried: zeros say that even StableLM can be packed."""
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    for name, packs in (("StableLM", False), ("Llama", True)):
        model = build(FAMILIES[name]())
        pack_sequences(model.base_model)
        copied = SamplerCopy(pickle.loads(outline(model)), torch.float32, "cpu").model
        assert (copied.config._attn_implementation == ATTENTION) == packs
        assert any(is_fused(x, attention_forward) for x in copied.modules()) == packs
