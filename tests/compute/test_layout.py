"""Index tables of micro-batches: where tokens lie, and that a forward over them never waits for a GPU."""

import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from tiny import tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode

from model.critic import CriticModel
from trainer import ppo
from trainer.compute import attention
from trainer.compute.attention import _padded_attention
from trainer.compute.batching import Layout, _ragged
from trainer.compute.rollout_data import Rollout, length_mask
from trainer.compute.scoring import PolicyScorer, ValueScorer, load_balance_loss, prepare_training
from trainer.runs.distributed import World
from trainer.runs.metrics import Metrics

CPU = torch.device("cpu")


def make_rollout(count=7, seed=0):
    """A rollout of random tokens and numbers, all fields filled."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    prompt = torch.tensor([rng.randint(1, 6) for _ in range(count)])
    response = torch.tensor([rng.randint(1, 9) for _ in range(count)])
    tokens = torch.randint(20, (count, int((prompt + response).max())), generator=generator)
    shape = (count, int(response.max()))
    names = ("sampler_logprobs", "old_logprobs", "importance_weights", "ref_logprobs", "values", "rewards")
    fields = {name: torch.randn(shape, generator=generator) for name in (*names, "advantages", "returns")}
    return Rollout(tokens, prompt, response, torch.ones(count, dtype=torch.bool), **fields)


def test_tables_by_hand():
    """Two sequences of 3 and 4 tokens, whose responses have 2 and 1."""
    layout = Layout.of_responses([1, 3], [2, 1])
    tables = {name: x.tolist() for name, x in vars(layout).items() if torch.is_tensor(x)}
    assert (layout.lengths, layout.prompt_len, layout.response_len) == ([3, 4], [1, 3], [2, 1])
    assert tables == {
        "starts": [0, 3, 7],
        "length": [3, 4],
        "row": [0, 0, 0, 1, 1, 1, 1],
        "position": [0, 1, 2, 0, 1, 2, 3],
        "wanted_row": [0, 0, 1],
        "wanted_position": [1, 2, 3],
        "predicted_by": [0, 1, 5],  # one place before each: the state that predicts it
        "response": [0, 1, 2],  # in [2, 2]: the last place is padding
    }


def test_tables_are_those_of_the_masks():
    rollout = make_rollout()
    layout, mask = rollout.layout, rollout.mask
    row, column = mask.nonzero(as_tuple=True)
    real = length_mask(rollout.layout.length, rollout.tokens.shape[1])
    assert torch.stack([layout.row, layout.position]).equal(real.nonzero().T)
    assert layout.wanted_row.equal(row)
    assert layout.wanted_position.equal(rollout.prompt_len[row] + column)
    flat = torch.randn(int(mask.sum()), requires_grad=True)
    spread = rollout.layout.spread(flat)
    assert spread.equal(torch.zeros(mask.shape).masked_scatter(mask, flat))
    weights = torch.randn(mask.shape)
    (gradient,) = torch.autograd.grad((spread * weights).sum(), flat)
    assert gradient.equal(weights[mask])


def test_ragged_places_with_an_empty_row():
    row, column = _ragged([2, 0, 3])
    assert row.tolist() == [0, 0, 2, 2, 2]
    assert column.tolist() == [0, 1, 0, 1, 2]


def test_what_padded_groups_hold_is_where_the_index_says(monkeypatch):
    """Each token goes to its place in its sequence, and what attention makes of it comes back from there."""
    rng = random.Random(1)
    for heads in (1, 3):
        lengths = [rng.randint(1, 30) for _ in range(12)]
        packing = Layout(lengths)
        x, seen = torch.randn(sum(lengths), heads, 4), []
        with monkeypatch.context() as patch:
            patch.setattr(
                attention,
                "_causal_attention",
                lambda q, k, v, *_, seen=seen: seen.extend(q) or v.transpose(1, 2),
            )
            assert _padded_attention(x, x, x, packing, None, 1.0).equal(x)
        for sequence, own in zip(seen, x.split(lengths), strict=True):
            assert sequence[:, : len(own)].equal(own.transpose(0, 1))
        assert packing.starts.tolist() == [0, *np.cumsum(lengths)]
        assert packing.longest == max(lengths)


def test_rows_have_tables_of_their_own():
    rollout = make_rollout()
    one = rollout.rows([4, 2, 0])
    assert one.layout.lengths == [rollout.layout.lengths[i] for i in (4, 2, 0)]
    assert rollout.rows([4, 2]).layout.lengths == one.layout.lengths[:2]
    assert one.layout.prompt_len == rollout.prompt_len[[4, 2, 0]].tolist()
    assert one.layout.response_len == rollout.response_len[[4, 2, 0]].tolist()
    assert one.rows([2]).layout.lengths == rollout.layout.lengths[:1]  # rows of rows
    assert one.mask.equal(length_mask(one.response_len, one.layout.shape[1]))


WAITS = ("item", "tolist", "nonzero", "cpu", "numpy", "__int__", "__bool__", "__float__", "__index__")
DATA_DEPENDENT = ("_local_scalar_dense", "nonzero", "masked_select", "masked_scatter", "repeat_interleave")


class _NoWaits(TorchDispatchMode):
    """Refuses operations for which the host would wait for a GPU: their results' shapes depend on data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        sized = kwargs.get("output_size") is not None
        masks = [x for x in args[1] if x is not None and x.dtype == torch.bool] if name == "index" else []
        assert not masks, "indexing with a mask"
        assert name not in DATA_DEPENDENT or sized, name
        return func(*args, **kwargs)


@contextmanager
def no_waits(monkeypatch):
    """In this block nothing may read a number of a tensor, or make a tensor whose size depends on one."""

    def refused(self, *args, **kwargs):
        raise AssertionError("waits for the GPU")

    with monkeypatch.context() as patch, _NoWaits():
        for name in WAITS:
            patch.setattr(torch.Tensor, name, refused)
        yield


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_micro_batch_never_waits_for_a_gpu(kl_in, monkeypatch):
    """Rows, forward, losses and backward of policy and critic, and their metrics, once the lengths are known
    on the host. (The compiled kernels of CPUs are not looked into.)"""
    policy = tiny_llama(20, layers=2, spread=2.0).requires_grad_(True)
    critic = CriticModel.from_model(policy)
    for backbone in (policy.base_model, critic.backbone):
        prepare_training(backbone, 0)
    scorers = PolicyScorer(policy, learn_entropy=True), ValueScorer(critic)
    metrics, rollout = Metrics(), make_rollout()
    rollout.counted = rollout.mask  # as of --entropy_top
    rollout.layout  # noqa: B018
    with no_waits(monkeypatch):
        mb = rollout.rows([3, 1, 5])
        logprobs, entropy, balance = scorers[0](*mb.sequences, 0.7)
        loss, info = ppo.policy_objective(logprobs, mb, ppo.Clip(), kl_in, 0.1, 0.9)
        entropy = ppo.masked_sum(entropy, mb.mask)
        loss = loss - 0.1 * entropy
        metrics.add_all({**info, "policy/entropy": entropy}, mb.response_len.sum())
        metrics.add("policy/balance_loss", balance, len(mb.tokens))
        (loss + balance).backward()
        loss, info = ppo.value_loss(scorers[1](*mb.sequences)[0], mb.values, mb.returns, mb.mask, 0.5, 1.0)
        metrics.add_all({"value/loss": loss, **info}, mb.response_len.sum())
        loss.backward()
    assert metrics.totals(["value/loss"], "cpu").item() > 0


def test_the_balance_loss_of_experts_never_waits_for_a_gpu(monkeypatch):
    logits, layout = torch.randn(9, 4), Layout([4, 5])
    with no_waits(monkeypatch):
        loss = load_balance_loss((logits, logits), layout, 2)
    assert loss > 0


def test_metrics_are_gathered_in_one_piece():
    """Numbers, tensors of several types and both kinds of counts -> the same as one by one, in fp64."""
    metrics = Metrics()
    metrics.add("a", torch.tensor(0.1), torch.tensor(3))
    metrics.add("a", torch.tensor(0.2), 2)
    metrics.add("b", 7, 1)
    metrics.add("c", torch.tensor(5), torch.tensor(2.0))
    means = metrics.means(World(0, 1, CPU))
    assert means == {
        "a": (torch.tensor(0.1).double() + torch.tensor(0.2).double()).item() / 5,
        "b": 7.0,
        "c": 2.5,
    }
    assert metrics.totals(["c", "b"], CPU).tolist() == [5.0, 7.0]
    with pytest.raises(KeyError):
        metrics.totals(["d"], CPU)
