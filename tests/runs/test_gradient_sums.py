"""Gradients that are summed over processes while the backward goes on: the same sums, whatever fails."""

import json
import os
import socket
from itertools import pairwise

import pytest
import torch
from tiny import PYTHON, WORDS, finish, run_files, start_script, word_tokenizer, write_jsonl
from torch import nn
from torch.utils.checkpoint import checkpoint

from errors import InputError
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.saving import save_policy
from trainer.compute.memory import attempt
from trainer.runs import gradient_sums
from trainer.runs.distributed import World
from trainer.runs.gradient_sums import GradientSums, cut_into_buckets

CASES = os.path.join(os.path.dirname(__file__), "sum_cases.py")


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(gradient_sums, "BUCKET", 20)


class Twice:
    """A world of two processes with the same gradients. ``events``: what happened, in order; a sum is there
    when it has been waited for."""

    size = 2

    def __init__(self):
        self.events = []

    def begin_sum(self, numbers):
        self.events.append(f"begin {numbers.numel()}")

        def wait():
            self.events.append(f"wait {numbers.numel()}")
            numbers.mul_(2)

        return wait


def model_of(*sizes):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def step(model, sums, world, pieces=(1, 2)):
    """The gradients of these micro-batches (rows each)."""
    for rows in sums.overlap(pieces):
        world.events.append("micro-batch")
        model(torch.ones(rows, model[0].in_features)).sum().backward()
    world.events.append("backward done")


# ----------------------------------------------------------------------------------- what is sent, and when


def test_sums_begin_in_the_last_backward_in_the_order_of_the_buckets():
    """Matrices from the last layer to the first, then all vectors."""
    world, model = Twice(), model_of(3, 4, 5, 6)
    sums = GradientSums(model.parameters(), world)
    assert [[p.numel() for p in bucket] for bucket in sums.buckets] == [[30], [20], [12, 6], [5, 4]]
    step(model, sums, world)
    begun = ["begin 30", "begin 20", "begin 18", "begin 9"]
    assert world.events == ["micro-batch", "micro-batch", *begun, "backward done"]
    assert all(p.grad is None for p in model.parameters())  # they are not counted twice in memory
    sums.finish()
    assert world.events[-4:] == ["wait 30", "wait 20", "wait 18", "wait 9"]
    plain = model_of(3, 4, 5, 6)
    plain(torch.ones(3, 3)).sum().backward()
    for p, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.grad, 2 * other.grad)
    step(model, sums, world)  # the next minibatch
    assert world.events[-6:] == ["micro-batch", *begun, "backward done"]


def test_a_bucket_is_sent_before_the_backward_goes_on():
    world, model = Twice(), model_of(3, 4, 5, 6)
    model[0].weight.register_hook(lambda _: world.events.append("first layer"))
    step(model, GradientSums(model.parameters(), world), world, [1])
    assert world.events.index("begin 20") < world.events.index("first layer") < world.events.index("begin 18")


def test_nothing_is_sent_while_others_follow():
    """Demonstrations are a second series of micro-batches."""
    world, model = Twice(), model_of(3, 4)
    sums = GradientSums(model.parameters(), world)
    for _ in sums.overlap([1], more=True):
        model(torch.ones(1, 3)).sum().backward()
    assert world.events == []
    step(model, sums, world, [1])
    sums.finish()
    assert model[0].bias.grad.tolist() == [4.0] * 4


def test_a_large_parameter_is_not_copied_and_a_frozen_one_is_left_out():
    world, model = Twice(), model_of(5, 6, 7)
    model[1].weight.requires_grad_(False)
    sums = GradientSums(model.parameters(), world)
    places = []
    model[0].weight.register_hook(lambda grad: places.append(grad.data_ptr()))
    step(model, sums, world, [1])
    sums.finish()
    assert model[0].weight.grad.data_ptr() == places[0]
    assert [len(bucket) for bucket in sums.buckets] == [1, 2]
    assert model[1].weight.grad is None


def test_a_large_vector_is_copied():
    """Here its gradient is the same memory as that of what it is added to, which the backward reads later."""
    world, vector, places = Twice(), nn.Parameter(torch.ones(30)), []
    sums = GradientSums([vector], world)
    vector.register_hook(lambda grad: places.append(grad.data_ptr()))
    for x in sums.overlap([torch.ones(30, requires_grad=True)]):
        (x + vector).square().sum().backward()
    sums.finish()
    assert vector.grad.data_ptr() != places[0]
    assert vector.grad.tolist() == [8.0] * 30


def test_a_parameter_that_is_used_twice_is_complete_once():
    """As embeddings and head that share their weights, also through gradient checkpointing."""
    world, shared = Twice(), nn.Linear(3, 3, bias=False)
    sums = GradientSums(shared.parameters(), world)
    for x in sums.overlap([torch.ones(1, 3), torch.ones(1, 3)]):
        shared(checkpoint(shared, shared(x), use_reentrant=False)).sum().backward()
    assert world.events == ["begin 9"]
    sums.finish()
    plain = nn.Linear(3, 3, bias=False)
    plain.load_state_dict(shared.state_dict())
    plain(plain(plain(torch.ones(4, 3)))).sum().backward()
    assert torch.allclose(shared.weight.grad, plain.weight.grad)


def test_a_model_that_adds_twice_is_refused():
    """Reentrant checkpointing of a layer that is used twice: its gradient is not complete the first time."""
    world, shared = Twice(), nn.Linear(3, 3, bias=False)
    sums = GradientSums(shared.parameters(), world)
    with pytest.raises(InputError, match="adds to a gradient twice in one backward"):
        for x in sums.overlap([torch.ones(1, 3, requires_grad=True)]):
            twice = checkpoint(shared, checkpoint(shared, x, use_reentrant=True), use_reentrant=True)
            twice.sum().backward()


def test_every_parameter_is_in_one_bucket_and_the_order_is_kept(monkeypatch):
    monkeypatch.setattr(gradient_sums, "BUCKET", 5)
    parameters = [torch.zeros(n) for n in (2, 3, 1, 9, 5, 4, 2)]
    found = cut_into_buckets(parameters)
    assert [[p.numel() for p in bucket] for bucket in found] == [[2, 3], [1], [9], [5], [4], [2]]
    assert all(a is b for a, b in zip((p for x in found for p in x), parameters, strict=True))


def test_one_process_has_no_hooks_and_keeps_its_gradients():
    model = model_of(3, 4)
    sums = GradientSums(model.parameters(), World(0, 1, torch.device("cpu")))
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    for rows in sums.overlap([1, 2]):
        model(torch.ones(rows, 3)).sum().backward()
    gradient = model[0].weight.grad
    sums.finish()
    assert model[0].weight.grad is gradient
    assert model[0].bias.grad.tolist() == [3.0] * 4


# ------------------------------------------------------------------------------------------- out of memory


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_what_was_sent_is_not_sent_again_and_its_new_gradients_are_freed(layer):
    """Memory runs out in the last backward; all is computed again in smaller pieces."""
    world, model = Twice(), model_of(3, 4, 5, 6)
    sums = GradientSums(model.parameters(), world)
    due, held = [True], []

    def fail(_):
        if due:
            due.clear()
            raise torch.OutOfMemoryError("CUDA out of memory")
        held.append(model[2].weight.grad is None)  # the first bucket's

    model[layer].bias.register_post_accumulate_grad_hook(fail)
    assert not attempt(step, model, sums, world, [3])[0]
    before = [event for event in world.events if event.startswith("begin")]
    assert len(before) == 2 - layer
    model.zero_grad()
    assert attempt(step, model, sums, world, [1, 1, 1])[0]
    begun = [event for event in world.events if event.startswith("begin")]
    assert begun == ["begin 30", "begin 20", "begin 18", "begin 9"]
    assert held == ([True] * 3 if layer == 0 else held)
    sums.finish()
    plain = model_of(3, 4, 5, 6)
    plain(torch.ones(3, 3)).sum().backward()
    for p, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.grad, 2 * other.grad)


def test_memory_that_runs_out_after_the_backward_is_an_attempt_that_failed(monkeypatch):
    """What no micro-batch reached is sent at the end of ``overlap``, where ``attempt`` still catches it."""
    world, model = Twice(), model_of(3, 4, 5, 6)
    model[2].requires_grad_(False)
    sums = GradientSums([*model.parameters(), nn.Parameter(torch.ones(7, 7))], world)
    zeros = torch.zeros_like

    def fail(p):
        monkeypatch.setattr(torch, "zeros_like", zeros)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros_like", fail)
    assert not attempt(step, model, sums, world, [1])[0]
    assert not [event for event in world.events if event.startswith("begin")]
    model.zero_grad()
    assert attempt(step, model, sums, world, [1])[0]
    assert len([event for event in world.events if event.startswith("begin")]) == len(sums.buckets)


# --------------------------------------------------------------------------------------- several processes


def run_cases(folder, processes, *names):
    """Run sum_cases.py in so many processes -> what each of them found."""
    (folder / str(processes)).mkdir()
    tokenizer = word_tokenizer(WORDS, chat=True)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    ids = {"vocab_size": len(tokenizer), "eos_token_id": 0, "pad_token_id": 0}
    experts = MiniMindForCausalLM(MiniMindConfig(use_moe=True, **sizes, **ids))
    save_policy(experts, tokenizer, folder / "experts.pth")
    records = [{"text": " ".join(WORDS[(n + i) % 8] for i in range(2 + n % 6))} for n in range(60)]
    given = {
        "files": run_files(folder, count=60),
        "texts": write_jsonl(folder / "texts.jsonl", records),
        "moe": {"model": str(folder / "experts.pth"), "critic_init": "actor"},
    }
    (folder / str(processes) / "given.json").write_text(json.dumps(given))
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(s.getsockname()[1])}
    shared = address | {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    argv = [PYTHON, CASES, str(folder / str(processes) / "given.json"), *names]
    for process in [
        start_script(argv, shared | {"RANK": str(n), "LOCAL_RANK": str(n)}) for n in range(processes)
    ]:
        finish(process, seconds=300)
    return [json.loads((folder / str(processes) / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_cases(tmp_path_factory.mktemp("two"), 2)


def test_the_weights_are_those_of_sums_after_the_backward_bit_for_bit(two):
    """Two batches of actor and critic, two PPO epochs, in buckets against a single one: with accumulation,
    demonstrations, early stops, overflows in fp16, adapters and checkpointing, experts in bf16, sums in
    bf16; and supervised fine-tuning with sums in bf16."""
    names = ["demonstrations", "stops", "fp16", "adapters", "experts", "sums in bf16", "stage 1"]
    for found in two:
        for name in names:
            case = found[name]
            assert case["same"], name
            assert (
                case["dtype"] == f"torch.{'bfloat16' if name in ('sums in bf16', 'stage 1') else 'float32'}"
            )
            assert case["begun"] == case["sent"] > 20, name  # all of them during the backward
            assert case.get("moved", 1) > 1e-3, name
        assert found["stops"]["stops"] > 0
        assert (
            found["stops"]["sent"] < found["sums in bf16"]["sent"]
        )  # the actor's later updates are left out
        assert found["fp16"]["skipped"] > 0


def test_experts_that_the_last_micro_batch_or_a_process_does_not_reach(two):
    """Each parameter's sum is that of its own, whatever was sent early; in bf16 up to rounding."""
    for rank, found in enumerate(two):
        cases = found["unreached"]
        assert all(case["same"] for case in cases.values())
        assert all(0 < case["relative"] < 2**-7 for case in cases.values())
        early = {name: case["begun"].count(True) for name, case in cases.items()}
        # Buckets: the matrices of the common layer, of experts 1 and 0, and all vectors. In the last
        # micro-batch process 0 reaches expert 1 in two cases, process 1 in all: one more is sent early.
        assert early == {"all": 2, "one": 2, "another": 1 + rank, "each its own": 1 + rank}


def test_out_of_memory_in_one_process_at_every_place(two):
    """In forwards and backwards, first and last ones, of samples and demonstrations, while a sum begins; in
    the second attempt too. Nothing hangs, all processes have the same gradients, and those are right."""
    for found in two:
        case = found["out of memory"]
        print(
            f"memory ran out at {case['places']} places: {case['met']}, gradients apart {case['apart']:.1e}"
        )
        assert case["places"] > 60
        assert sum(case["met"][1:]) > 30  # in this process; at the other places it was the other one
        assert case["met"][2] > 5  # twice in a step
        assert case["apart"] < 1e-5


def test_three_processes(tmp_path):
    """Three numbers are added in an order that depends on the buckets: the same up to rounding."""
    for found in run_cases(tmp_path, 3, "demonstrations"):
        case = found["demonstrations"]
        print(f"largest weight difference with three processes: {case['apart']:.1e}")
        assert case["apart"] < 1e-5 < case["moved"]
        assert case["begun"] == case["sent"] > 20
