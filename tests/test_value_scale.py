"""The critic's values on the scale of the returns: rewards of any size are learned alike."""

import math

import pytest
import torch
from steps import collected, filled, take_step
from test_invariants import first, make_run
from tiny import tiny_llama, values_of

from model.critic import CriticModel
from trainer.advantages import AdvantageScale, ValueScale, group_spread, scores_differ
from trainer.compute.batch import length_mask

STEPS = 8


class Rows:
    """What the scales read of a rollout: two responses, of three tokens and of one."""

    finished = torch.tensor([True, True])
    scores = torch.tensor([1.0, 0.0])
    step_rewards = None

    def __init__(self, returns, values=((0.0,) * 3,) * 2):
        self.action_mask = length_mask(torch.tensor([3, 1]), 3)
        self.mc_returns = torch.tensor(returns)
        self.values = torch.tensor(values)


def make_critic():
    torch.manual_seed(0)
    critic = CriticModel.from_model(tiny_llama(10))
    torch.nn.init.normal_(critic.value_head.weight)
    return critic


def alone(total):
    return total


def update(scale, *batches, has_signal=True):
    for batch in batches:
        scale.fit(batch, has_signal, alone)


def test_another_scale_changes_no_value_and_a_line_maps_all_values():
    critic, tokens = make_critic(), torch.randint(10, (2, 5))
    before = values_of(critic, tokens)
    critic.rescale(37.0)
    assert torch.allclose(values_of(critic, tokens), before, atol=1e-5)
    assert critic.scale == 37
    critic.map_values(0.5, 2.5)
    assert torch.allclose(values_of(critic, tokens), 0.5 * before + 2.5, atol=1e-5)


RETURNS = [[1.0, 1.0, 5.0], [1.0, 9.0, 9.0]]  # mean 2, variance 3, and padding
FIRST = {  # returns, values; the line that maps the values; the variance afterwards
    "values ten times as large: 0.1 of them, less 1, is closest; then variance 4, and no other line": [
        (RETURNS, [[10.0, 30.0, 50.0], [30.0, 9.0, 9.0]], (0.1, -1.0), 3.0),
        ([[0.0, 4.0, 4.0], [0.0, 9.0, 9.0]], [[0.0] * 3] * 2, (1.0, 0.0), 3.5),
    ],
    "the error 1, 1, 3.7, 1 is less than the returns vary: only its mean is added": [
        (RETURNS, [[0.0, 0.0, 1.3], [0.0, 9.0, 9.0]], (1.0, 1.675), 3.0)
    ],
    "the error 4, 0, 0, 0 varies as the returns do": [
        (RETURNS, [[-3.0, 1.0, 5.0], [1.0, 9.0, 9.0]], (1.0, 1.0), 3.0)
    ],
    "the error -10, 0, 0, 0 is more: variance 18.75 instead of 12": [
        ([[2.0, 2.0, 10.0], [2.0] * 3], [[12.0, 2.0, 10.0], [2.0] * 3], (28 / 83, 4 - 6.5 * 28 / 83), 12.0)
    ],
    "equal returns say something about the mean only": [
        ([[3.0] * 3] * 2, [[10.0, 30.0, 50.0], [30.0, 9.0, 9.0]], (1.0, -27.0), 1.0),
        (RETURNS, [[-17.0, 3.0, 23.0], [3.0, 9.0, 9.0]], (0.1, 1.7), 3.0),
    ],
}


@pytest.mark.parametrize("batches", FIRST.values(), ids=FIRST)
def test_the_scale_is_the_std_of_the_batches_and_the_first_sets_slope_and_mean(batches):
    critic, tokens = make_critic(), torch.randint(10, (2, 5))
    scale, wanted = ValueScale(critic), values_of(critic, tokens)
    for returns, values, (slope, shift), variance in batches:
        batch = Rows(returns, values)
        update(scale, batch)
        wanted = slope * wanted + shift
        assert torch.allclose(values_of(critic, tokens), wanted, atol=1e-5)
        assert torch.allclose(
            batch.values, batch.action_mask * (slope * torch.tensor(values) + shift), atol=1e-6
        )
        assert critic.scale == pytest.approx(math.sqrt(variance))


ONE = [1.0] * 20  # batches whose returns have these standard deviations
NEARLY_CONSTANT = [1e-3] * 10


@pytest.mark.parametrize(
    ("stds", "variance"),
    [
        (ONE, 1.0),
        ([*ONE, 2.0], 0.9 + 0.1 * 4),  # it follows the last ten batches or so
        ([*ONE, 5e5], 0.9 + 0.1 * 4),  # an outlier counts as four times what was
        ([*ONE, 5e5, 1.5e19], 0.9 + 0.1 * 4),  # the square of this one is no number of fp32
        ([*NEARLY_CONSTANT, 0.5], 0.9e-6 + 0.1 * 4e-6),
        (
            [*NEARLY_CONSTANT, 0.5, 0.5],
            0.9 * 1.3e-6 + 0.1 * 0.25,
        ),  # but it was none: the second counts in full
        (
            [*NEARLY_CONSTANT, 0.5, 0.5, *[0.0] * 150],
            0.9 * 1.3e-6 + 0.1 * 0.25,
        ),  # equal returns change nothing
        ([0.0], 1.0),
        ([0.0, 100.0], 1e4),  # the first that differ count in full
    ],
)
def test_how_the_scale_follows_the_batches(stds, variance):
    scale = ValueScale(make_critic())
    update(scale, *[Rows([[0.3, 0.3 + 2 * std, 0.3 + 2 * std], [0.3, 0.0, 0.0]]) for std in stds])
    update(scale, Rows(RETURNS), has_signal=False)  # what only the KL makes different
    assert scale.critic.scale == pytest.approx(variance**0.5, rel=1e-3)
    restored = ValueScale(make_critic())
    restored.load_state_dict(scale.state_dict())
    assert restored.state_dict() == scale.state_dict() and restored.critic.scale == scale.critic.scale


def test_returns_and_values_that_are_no_numbers_leave_the_critic_alone():
    critic, tokens = make_critic(), torch.randint(10, (2, 5))
    scale, before = ValueScale(critic), values_of(critic, tokens)
    broken = Rows([[1.0, 2.0, 5.0], [1.0, 0.0, 0.0]])
    broken.values[0, 1] = torch.nan
    huge = [[1e20, 2e20, 5e20], [1e20, 0.0, 0.0]]  # the critic is right, but the squares are too large
    update(scale, Rows([[1.0, math.nan, 5.0], [1.0, 0.0, 0.0]]), broken, Rows(huge, huge))
    assert values_of(critic, tokens).equal(before)
    assert (scale.batches, critic.scale) == (0, 1.0)


def learned(files, factor, offset=0.0, init="actor"):
    """A few steps with every score times ``factor``, plus ``offset`` -> (actor's weights, metrics)."""
    rates = {"learning_rate": 1e-3, "critic_learning_rate": 3e-3}
    run, prompts = make_run(files, max_steps=STEPS, kl_coef=0.1 * factor, critic_init=init, **rates)
    combine = run.reward.combine
    run.reward.combine = lambda *a: {k: factor * v + offset for k, v in combine(*a).items()}
    metrics = [take_step(run, step, first(run, prompts))[0] for step in range(STEPS)]
    return torch.cat([p.detach().flatten() for p in run.models.actor.parameters()]), metrics


@pytest.mark.parametrize(("factor", "offset", "init"), [(0.01, 0.5, "actor"), (100.0, 0.0, "reward")])
def test_rewards_of_any_size_and_level_are_learned_alike(files, factor, offset, init):
    """Also where the critic starts from the reward model, whose scores have the size of before."""
    weights, metrics = learned(files, 1.0, init=init)
    scaled, others = learned(files, factor, offset, init)
    start = torch.cat([p.flatten() for p in make_run(files)[0].models.reference.parameters()])
    assert (scaled - weights).norm() < 0.02 * (weights - start).norm()
    for one, other in zip(metrics, others, strict=True):
        for name in ("value/loss", "value/explained_variance", "policy/entropy", "kl/k3"):
            assert other[name] == pytest.approx(one[name], rel=0.02, abs=1e-3), name
        assert other["value/scale"] == pytest.approx(factor * one["value/scale"], rel=1e-3)
        assert other["value/mean"] == pytest.approx(factor * one["value/mean"] + offset, abs=0.02 * factor)
    assert abs(metrics[-1]["value/mean"] - metrics[0]["value/mean"]) > 0.05  # the critic does learn


def test_what_advantages_are_divided_by():
    """Their own size; where all scores are equal, that of the batches before; never below a tenth of it. It
    follows as the values' scale does: after ten batches of 0.3 one of 0.6 makes the variance
    0.9 * 0.09 + 0.1 * 0.36."""
    scale = AdvantageScale()
    assert scale.state_dict() == {"batches": 0, "variance": 0.0, "last": 0.0}
    # No batch had anything to tell so far.
    assert scale.divisor(0.0, False) == scale.divisor(0.003, False) == 1.0
    assert [scale.divisor(0.3, True) for _ in range(10)] == [0.3] * 10
    divisors = [scale.divisor(0.003, False), scale.divisor(0.0, False), scale.divisor(0.0, True)]
    assert divisors == pytest.approx([0.3] * 3)
    assert scale.divisor(0.5, False) == 0.5
    assert scale.divisor(0.6, True) == 0.6
    follows = (0.9 * 0.09 + 0.1 * 0.36) ** 0.5
    assert scale.divisor(0.0, False) == pytest.approx(follows)
    assert math.isnan(scale.divisor(math.nan, True)) and scale.divisor(math.inf, True) == math.inf
    small, restored = AdvantageScale(), AdvantageScale()
    for each in (small, restored):
        each.load_state_dict(scale.state_dict())
    assert small.divisor(0.003, True) == pytest.approx(0.1 * follows)
    for each in (scale, restored):
        assert each.divisor(1.0, True) == 1.0
    assert restored.state_dict() == scale.state_dict()
    assert scale.variance == pytest.approx(0.9 * follows**2 + 0.1)  # in full: the batch before was large too
    batch = Rows(RETURNS)
    stds = torch.tensor([[3.0, 3.0, 3.0], [1.0, 1.0, 1.0]])  # of four tokens: sqrt((3 * 9 + 1) / 4)
    small.whiten(batch, batch.mc_returns, group_spread(stds, batch, 2, alone), True, divided=True)
    assert batch.advantage_scale == pytest.approx(7**0.5)
    assert batch.advantages.tolist() == [[1, 1, 5], [1, 0, 0]]  # divided by a group's own already


def test_answers_that_differ_by_their_kl_only_are_no_lesson():
    """RLOO with the KL in the rewards. Two answers score 1 and 0, two the same: the size is that of the first
    two, sqrt((3 * 4 + 4) / 4). Where no prompt has a lesson, it is that of the batches before."""
    batch = Rows([[2.0, 2.0, 2.0], [-2.0, 0.0, 0.0], [0.1, 0.1, 0.1], [-0.1, 0.0, 0.0]])
    batch.action_mask = length_mask(torch.tensor([3, 1, 3, 1]), 3)
    batch.scores = torch.tensor([1.0, 0.0, 5.0, 5.0])
    scale = AdvantageScale()
    for size in (2.0, 0.0):
        scale.whiten(batch, batch.mc_returns, group_spread(batch.mc_returns, batch, 2, alone), True)
        assert (batch.advantage_std, batch.advantage_scale) == (size, 2)
        assert batch.advantages.tolist() == (batch.mc_returns / 2).tolist()
        batch.scores = torch.tensor([1.0, 1.0, 5.0, 5.0])


def test_a_batch_is_informative_where_scores_or_the_rewards_of_tokens_differ():
    batch = Rows(RETURNS)
    assert scores_differ(batch, alone)
    batch.scores = torch.tensor([1.0, 1.0])
    assert not scores_differ(batch, alone)
    assert scores_differ(batch, lambda total: total + torch.tensor([3.0, 9.0, 1.0]))  # another process has 3
    for rewards, found in (([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]], True), ([[0.0] * 3, [0.0, 9.0, 9.0]], False)):
        batch.step_rewards = torch.tensor(rewards)
        assert scores_differ(batch, alone) == found


@pytest.mark.parametrize(
    "more",
    [{}, {"advantage": "rloo", "num_generations": 4}, {"advantage": "reinforce"}],
    ids=lambda x: x.get("advantage", "gae"),
)
def test_a_solved_task_is_no_full_lesson(files, more):
    """A batch with different scores, then one whose scores are all 1: values that differ by 0.003 or so are
    not whitened to 1, and the weight of the KL does not grow."""
    run, prompts = make_run(files, **({"critic_warmup_steps": None} if more else {}), **more)
    units = []
    for step in range(2):
        batch = collected(run, step, first(run, prompts))
        if step:
            batch.scores = torch.ones(16)
            if run.models.critic:
                torch.nn.init.normal_(run.models.critic.value_head.weight, std=1e-3)
                torch.nn.init.constant_(run.models.critic.value_head.bias, 1 / run.models.critic.scale)
        rollout = filled(run, step, batch)
        units.append(rollout.advantage_scale)
    assert units[1] == pytest.approx(units[0])
    assert units[0] > 0.1 and rollout.advantage_std < 0.02
    assert rollout.advantages.abs().max() < 0.1
