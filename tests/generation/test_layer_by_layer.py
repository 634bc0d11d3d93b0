"""Sampling layer by layer (--shard 1): the tokens are those of a whole copy, whatever a process meets."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from same_runs import EXACT, same_metrics, sizes
from test_families import FAMILIES, build
from tiny import PYTHON, finish, flags, ranks, read_jsonl, run_files, start_script, write_jsonl

from model.shards import outline
from trainer import train_ppo
from trainer.compute.attention import ATTENTION
from trainer.compute.fused_layers import attention_forward, is_fused
from trainer.compute.packing import pack_sequences
from trainer.generation.cuda_graphs import CudaGraphs
from trainer.generation.layer_by_layer import LayeredCopy
from trainer.generation.sampler_copy import SamplerCopy

SCRIPT = str(Path(__file__).with_name("layer_cases.py"))
FEW = ("Llama, tied", "Qwen3-MoE", "Gemma 3", "GPT-2", "OPT-350m", "MiniMind 2 MoE")  # as two processes try


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    """What each process found."""
    folder, size = tmp_path_factory.mktemp("cases"), request.param
    names = "few" if size == 2 else "all"
    for process in [start_script([PYTHON, SCRIPT, str(folder), names], rank) for rank in ranks(size)]:
        finish(process)
    return [json.loads((folder / f"{n}.json").read_text()) for n in range(size)]


def test_every_family_samples_the_same_tokens(found):
    """From unequally many prompts, of unequal lengths, with answers of unequal lengths. Log-probs too are
    those of a whole copy bit for bit, where that one is not packed."""
    for mine in found:
        for name in (*(FEW if len(found) == 2 else FAMILIES), "bf16"):
            assert mine[name]["bits"], name
            assert mine[name]["tokens"] or name == "bf16", name


def test_adapters_are_merged(found):
    assert all(mine["adapted"]["same"] for mine in found)


def test_a_process_has_a_part_of_the_layers_and_two_of_them_in_turn(found):
    for mine in found:
        case = mine["memory"]
        layers = case["numbers"] - case["root"]
        assert case["held"] == pytest.approx(case["root"] + layers / len(found) + 2 * layers / 6, rel=0.03)
        assert case["built"] == pytest.approx(case["root"] + 2 * layers / 6, rel=0.03)
        assert case["left"] == 0
        assert case["parts"]


def test_memory_that_runs_out_in_one_process_leaves_nobody_waiting(found):
    """In the embeddings, in each layer and in the head, in the first forward and in a later one: that process
    has half the slots from then on, and all sample the same tokens as ever."""
    for rank, mine in enumerate(found):
        assert len(mine["out_of_memory"]) == 10
        for same, furthest, slots in mine["out_of_memory"]:
            assert same
            assert furthest < 1e-5
            assert slots == (2 if rank == 1 else 4)


def test_a_sequence_that_does_not_fit_in_one_process_is_an_error_of_all(found):
    """The others sample to their end first."""
    for rank, mine in enumerate(found):
        whole, text = mine["too_long"]
        assert whole == (rank != 1)
        assert text.startswith("process 1: out of memory for a single sequence of 15 tokens")


def test_processes_may_sample_unequally_often(found):
    """Inside one block, in which one of them may fail."""
    for rank, mine in enumerate(found):
        assert mine["unequal"] == {"right": True, "failed": rank == 1}


def test_steps_of_a_gpu_are_not_captured(found):
    graphs = CudaGraphs(torch.device("cuda"), LayeredCopy.steps_can_be_captured)
    assert graphs.asynchronous
    assert not graphs.possible
    assert CudaGraphs(torch.device("cuda")).possible
    assert all(mine["as_on_a_gpu"]["same"] for mine in found)


def test_processes_agree_on_the_least_memory_and_on_the_places_of_weights(found):
    for mine in found:
        assert mine["least"] == 7 - (len(found) - 1)
        assert mine["failed_before"] == "process 1: no reward model"
        assert mine["another_layout"].startswith("error: processes put the weights of the sampler into diff")


def test_layers_in_another_order_are_an_error(found):
    assert all(mine["out_of_order"] == "layer 2 computes where layer 1 was gathered" for mine in found)


def test_an_outline_is_copied_as_it_was_found_to_be(monkeypatch):
    """Its numbers are not set, so nothing can be tried: zeros say that even StableLM can be packed."""
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    for name, packs in (("StableLM", False), ("Llama", True)):
        model = build(FAMILIES[name]())
        pack_sequences(model.base_model)
        copied = SamplerCopy(pickle.loads(outline(model)), torch.float32, "cpu").model
        assert (copied.config._attn_implementation == ATTENTION) == packs
        assert any(is_fused(x, attention_forward) for x in copied.modules()) == packs


def test_a_run_that_samples_layer_by_layer_equals_one_process(tmp_path):
    """With answers that are sampled again, unequally many in each process, and with evaluations."""
    files = run_files(tmp_path)
    del files["reward_model"]
    (tmp_path / "few.py").write_text(
        "def score(prompts, responses, answers):\n"
        "    return [float({'a', 'c'} <= set(r.split())) for r in responses]\n"
    )
    held_out = write_jsonl(tmp_path / "eval.jsonl", [{"prompt": f"{a} b"} for a in "abc"])
    files |= {"reward_fn": f"{tmp_path / 'few.py'}:score", "eval_data_path": held_out, **EXACT}
    files |= {"advantage": "rloo", "num_generations": 4, "filter_groups": 2, "max_gen_len": 6, "max_steps": 2}
    one, two = tmp_path / "one", tmp_path / "two"
    train_ppo.main(flags(**files, **sizes(32), out_dir=one))
    argv = flags(**files, **sizes(16), out_dir=two, shard=1)
    said = [finish(p)[0] for p in [start_script([PYTHON, SCRIPT, "train", *argv], r) for r in ranks(2)]]
    assert "it gathers each layer for each token" in said[0]
    assert all("loaded 6 times" in text for text in said)  # two steps, twice each, and two evaluations
    texts = [[row["response"] for row in read_jsonl(run / "r/samples.jsonl")] for run in (one, two)]
    assert texts[0] == texts[1]
    same_metrics(one / "r", two / "r", but=("perf/", "policy/"), rel=1e-4, abs=2e-5)
    assert read_jsonl(two / "r/metrics.jsonl")[1]["rollout/sampled_again"] > 0
