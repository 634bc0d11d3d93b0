"""Cutting a rollout into rows and micro-batches, where tokens lie, and that no forward waits for a GPU."""

import random
from contextlib import contextmanager

import pytest
import torch
from recorded_graphs import Waits
from tiny import tiny_llama

from model.critic import CriticModel
from trainer import losses
from trainer.compute.batch import Batch
from trainer.compute.batching import Layout, micro_batches, tokens_per_micro_batch
from trainer.compute.precision import LossScale
from trainer.compute.scoring import PolicyScorer, ValueScorer, load_balance_loss, prepare_training
from trainer.runs.distributed import World
from trainer.runs.metrics import Metrics
from trainer.runs.optimizer_step import GradientSource, Progress, Updater


def make_rollout(count=7, seed=0):
    """A rollout of random tokens and numbers, all fields filled; token 0, which pads, is one of them."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    prompt = torch.tensor([rng.randint(1, 6) for _ in range(count)])
    response = torch.tensor([rng.randint(1, 9) for _ in range(count)])
    tokens = torch.randint(20, (count, int((prompt + response).max())), generator=generator)
    shape = (count, int(response.max()))
    names = ("sampler_logprobs", "old_logprobs", "importance_weights", "ref_logprobs", "values", "rewards")
    fields = {name: torch.randn(shape, generator=generator) for name in (*names, "advantages", "returns")}
    return Batch(tokens, prompt, response, torch.ones(count, dtype=torch.bool), **fields)


def test_micro_batches_hold_each_row_once_within_the_budget_and_waste_little():
    """What fits in one pass is one micro-batch, however uneven the lengths: a second one would read all
    weights and add all gradients again."""
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.randint(1, 9) ** rng.randint(1, 3) for _ in range(rng.randint(1, 40))]
        budget = rng.randint(1, 900)
        cut = micro_batches(lengths, budget)
        assert sorted(row for batch in cut for row in batch) == list(range(len(lengths)))
        for batch in cut:
            longest = max(lengths[row] for row in batch)
            assert len(batch) == 1 or sum(lengths[row] for row in batch) <= budget
            assert len(batch) == 1 or len(batch) * longest <= 2 * budget
        whole = tokens_per_micro_batch(10**6, lengths, pieces=1)
        assert len(micro_batches(lengths, whole)) == 1
    lengths = [rng.randint(10, 200) for _ in range(256)]
    computed = sum(len(b) * max(lengths[row] for row in b) for b in micro_batches(lengths, 2000))
    assert computed < 1.1 * sum(lengths)


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_no_accumulation_step_holds_more_than_its_share_of_the_tokens(pieces):
    """However the lengths are mixed: --accumulation_steps is there to save memory."""
    lengths, cuts = [100] * 4 + [10] * 60, []
    updater = Updater(None, {}, LossScale(torch.float32), Progress(token_budget=4096), grad_clip=1.0)

    def loss_of(rows):
        cuts.append(sum(lengths[row] for row in rows))
        return torch.zeros((), requires_grad=True), Metrics()

    updater.gradients([GradientSource(lengths, loss_of)], pieces)
    assert max(cuts) <= 1000 / pieces
    assert len(cuts) == 1 if pieces == 1 else len(cuts) >= pieces


@contextmanager
def no_waits(monkeypatch):
    """In this block nothing may read a number of a tensor, or make a tensor whose size depends on one."""

    def refused(self, *args, **kwargs):
        raise AssertionError("waits for the GPU")

    with monkeypatch.context() as patch, Waits(refuse=False) as waits:
        for name in ("item", "tolist", "cpu", "numpy", "__int__", "__bool__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, name, refused)
        yield
    assert set(waits.found) <= {"lift_fresh"}  # lists that become tensors in pinned memory (``send``)


@pytest.mark.parametrize("kl_in_reward", [0.0, 0.1])
def test_a_micro_batch_never_waits_for_a_gpu(kl_in_reward, monkeypatch):
    """Rows, forward, losses and backward of policy and critic, and their metrics, once lengths and prompts
    are known on the host. (The compiled kernels of CPUs are not looked into.)"""
    policy = tiny_llama(20, layers=2, spread=2.0).requires_grad_(True)
    critic = CriticModel.from_model(policy)
    for backbone in (policy.base_model, critic.backbone):
        prepare_training(backbone, 0)
    scorer, value_scorer = PolicyScorer(policy, learn_entropy=True), ValueScorer(critic)
    metrics, rollout = Metrics(), make_rollout()
    rollout.prompt_len[[1, 3]] = 2
    rollout.tokens[1, :2] = rollout.tokens[3, :2]  # their prompts are equal
    rollout.loss_mask = rollout.action_mask
    rollout.layout  # noqa: B018
    gates = torch.randn(9, 4), torch.randn(9, 4)
    experts = Layout([4, 5])
    with no_waits(monkeypatch):
        mb = rollout.rows([3, 1, 5], scorer.shares_prompts)
        assert mb.layout.key_index is not None
        count = mb.response_len.sum()
        logprobs, entropy, _ = scorer(mb.tokens, mb.layout, 0.7)
        balance = load_balance_loss(gates, experts, 2)
        loss, info = losses.policy_loss(logprobs, mb, 0.2, 0.2, kl_in_reward=kl_in_reward, decay=0.9)
        loss = loss + 0.1 * losses.kl_loss(logprobs, mb)
        entropy = losses.masked_sum(entropy, mb.action_mask)
        metrics.add_all({**info, "policy/entropy": entropy}, count)
        metrics.add("policy/balance_loss", balance, len(mb.tokens))
        (loss - 0.1 * entropy + balance).backward()
        loss, info = losses.value_loss(
            value_scorer(mb.tokens, mb.layout)[0], mb.values, mb.returns, mb.action_mask, 0.5, 1.0
        )
        metrics.add_all(info, count)
        loss.backward()
    assert metrics.sums(["value/loss"], World(0, 1, torch.device("cpu")))[0] > 0


def test_metrics_are_gathered_in_one_piece():
    """Numbers, tensors of several types and both kinds of counts -> the same as one by one, in fp64."""
    metrics = Metrics()
    metrics.add("a", torch.tensor(0.1), torch.tensor(3))
    metrics.add("a", torch.tensor(0.2), 2)
    metrics.add("b", 7, 1)
    metrics.add("c", torch.tensor(5), torch.tensor(2.0))
    sum_a = torch.tensor([0.1, 0.2]).double().sum().item()
    alone = World(0, 1, torch.device("cpu"))
    assert metrics.means(alone) == {"a": sum_a / 5, "b": 7.0, "c": 2.5}
    assert metrics.sums(["c", "b"], alone) == [5.0, 7.0]
