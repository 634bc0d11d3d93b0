"""Frozen models that wait in the host's memory; on a CPU "the device" is another copy in the same memory."""

import pytest
import torch
from test_invariants import make_run, same, weights
from tiny import run_files, tiny_llama

from model.lora import frozen_copy
from trainer import train_ppo
from trainer.compute.memory import HostMemory

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return run_files(tmp_path_factory.mktemp("files"))


def pointers(model):
    return [p.data_ptr() for p in model.parameters()]


def test_a_model_is_on_the_device_in_the_block_and_nowhere_else():
    model, other, host = tiny_llama(10), tiny_llama(10, seed=1), HostMemory(CPU)
    ids, numbers = torch.tensor([[1, 2, 3]]), [p.detach().clone() for p in model.parameters()]
    host.take([model], [])
    waiting, logits = pointers(model), model(ids).logits
    with pytest.raises(KeyError), host.on_device(model, other):  # the other one was not taken
        assert not set(waiting) & set(pointers(model))
        assert model(ids).logits.equal(logits)
        assert model.lm_head.weight is model.model.embed_tokens.weight  # tied as before
        raise KeyError
    assert pointers(model) == waiting
    assert same(numbers, model.parameters())


def test_what_a_trained_model_shares_stays():
    trained, host = tiny_llama(10), HostMemory(CPU)
    for p in list(trained.parameters())[:3]:
        p.requires_grad_(False)
    copy = frozen_copy(trained)
    host.take([copy], [trained])
    with host.on_device(copy):
        shared = set(pointers(copy)) & set(pointers(trained))
    assert len(shared) == 3


def test_what_is_copied_into_a_waiting_model_is_there_on_the_device():
    model, newer, host = tiny_llama(10), tiny_llama(10, seed=1), HostMemory(CPU)
    host.take([model], [])
    model.load_state_dict(newer.state_dict())  # as the old actor's are
    with host.on_device(model):
        assert same(model.parameters(), newer.parameters())


@pytest.mark.parametrize("lora_r", [0, 2])
def test_a_run_with_it_is_the_same_and_scores_with_models_on_the_device(files, lora_r, monkeypatch):
    """A phase that forgot to fetch its model would compute with the waiting copy, which is made wrong."""
    results = []
    for offload in (0, 1):
        run, prompts = make_run(files, lora_r=lora_r, update_old_actor_freq=2, learning_rate=1e-2)
        run.args = run.args.completed(offload_frozen=offload)
        run.prepare()
        assert bool(run.host.waiting) == offload
        if offload:
            spoil(run.host)
        batches, scores = iter([[prompts[i] for i in range(16)]] * 3), []
        for step in range(3):
            batch = train_ppo.collect(run, step, batches)
            scores.append(batch.scores["model"])
            train_ppo.learn(run, step, batch)
        results.append([*scores, *weights(run)])
    assert same(*results)


def spoil(host):
    """Let the waiting reference and reward models be NaN; on the device they have their numbers."""
    for pairs in list(host.waiting.values())[:2]:  # not those of the old actor, from which is sampled
        for i, (p, numbers) in enumerate(pairs):
            p.data = torch.full_like(numbers, torch.nan)
            pairs[i] = (p, numbers)
