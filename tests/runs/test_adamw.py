"""AdamW with moments in bf16: its formulas beside torch's, and random rounding."""

import math

import pytest
import torch
from torch.optim import AdamW

from trainer.runs import optimizer_step
from trainer.runs.optimizer_step import make_optimizer, rounded_at_random

BF16 = torch.bfloat16


def random_bits(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(count, dtype=torch.int32).random_(0, 1 << 16, generator=generator)


def test_random_rounding_is_right_in_the_mean_and_never_further_than_a_neighbour():
    x = torch.tensor([1.001, 3.14159, 1e-12, 7.3e20, 1.3 * 2.0**-100]).repeat_interleave(100_000)
    rounded = rounded_at_random(x.clone(), random_bits(len(x)))
    assert rounded.equal(rounded.to(BF16).float())  # all are numbers of bf16
    for exact, part in zip(x.view(5, -1), rounded.view(5, -1), strict=True):
        neighbours = part.unique()
        assert len(neighbours) == 2
        assert neighbours[0] < exact[0] < neighbours[1]
        assert not ((exact[0] < neighbours) & (neighbours < neighbours[1])).any()
        spacing = (neighbours[1] - neighbours[0]).double().item()
        assert abs(part.double().mean().item() - exact[0].double().item()) < 4 * spacing / math.sqrt(400_000)
    x = torch.randn(10_000).to(BF16).float().abs()  # what bf16 holds stays
    assert rounded_at_random(x.clone(), random_bits(len(x))).equal(x)


def test_the_second_moment_falls_where_rounded_to_the_nearest_it_would_stand_still():
    p = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = make_optimizer([p], 0.0, "bfloat16", seed=1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.state[p]["exp_avg_sq"].fill_(1.0)
    p.grad.zero_()
    for _ in range(700):
        optimizer.step()
    assert torch.tensor(0.999).to(BF16).item() == 1.0
    assert optimizer.state[p]["exp_avg_sq"].double().mean().item() == pytest.approx(0.999**700, rel=0.005)
    assert optimizer.state[p]["exp_avg_sq"].dtype == optimizer.state[p]["exp_avg"].dtype == BF16


def test_beside_torchs_adamw(monkeypatch):
    """The first step is the same: moments are rounded after use. Later ones differ as bf16 does."""
    monkeypatch.setitem(optimizer_step.CHUNK, "cpu", 1000)  # several chunks, the last one smaller
    options = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    torch.manual_seed(0)
    start, pairs = torch.randn(70, 50), []
    for kind in (
        lambda p: AdamW([p], 1e-2, fused=True, **options),
        lambda p: make_optimizer([{"params": [p], **options}], 1e-2, "bfloat16", 7),
    ):
        p = torch.nn.Parameter(start.clone())
        pairs.append((p, kind(p)))
    for step in range(100):
        grad = torch.randn(70, 50) + 0.3
        for p, optimizer in pairs:
            p.grad = grad.clone()
            optimizer.step()
        (full, _), (half, _) = pairs
        if step == 0:
            assert (full - half).abs().max() < 1e-6
    assert (full - half).norm() < 0.005 * (full - start).norm()
    ours = pairs[1][1].state[half]
    assert int(ours["step"]) == 100
    theirs = pairs[0][1].state[full]
    for name in ("exp_avg", "exp_avg_sq"):
        assert (ours[name].float() - theirs[name]).norm() < 0.02 * theirs[name].norm()


def test_bits_depend_on_seed_step_and_parameter_alone():
    def moments(seed, count):
        torch.manual_seed(count)  # the global random state has no part in it
        parameters = [torch.nn.Parameter(torch.zeros(5000)) for _ in range(2)]
        optimizer, seen = make_optimizer(parameters, 1e-3, "bfloat16", seed), []
        for _ in range(2):
            for p in parameters:
                p.grad = torch.full_like(p, 0.7)
            optimizer.step()
            seen += [optimizer.state[p]["exp_avg_sq"].clone() for p in parameters]
        return seen

    one, again, other = moments(3, 0), moments(3, 1), moments(4, 0)
    assert all(a.equal(b) for a, b in zip(one, again, strict=True))
    assert not any(a.equal(b) for a, b in zip(one, other, strict=True))
    assert not one[0].equal(one[1])  # another parameter
    ups = [x > x.float().mean() for x in (one[0], one[2])]
    assert not ups[0].equal(ups[1])  # another step
