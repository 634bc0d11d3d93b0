"""What is logged of the responses of a batch as texts, against numbers worked out by hand."""

import math

import pytest
import torch

from trainer.rewards.rules import repetition
from trainer.runs.distributed import World
from trainer.runs.metrics import Metrics
from trainer.step_metrics import add_scores, metrics_over_processes

ALONE = World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("ids", "share"),
    [
        ([1, 2, 4, 1, 2, 4], 1 / 4),  # 124 241 412 124
        ([5] * 4, 1 / 2),
        ([5] * 7, 4 / 5),
        ([1, 2, 4, 4, 2, 1], 0),
        ([1, 0, 0, 1, 0], 0),  # 100 001 010
        *[([5] * count, 0) for count in (1, 2, 3)],  # at most a single trigram
    ],
)
def test_repetition_by_hand(ids, share):
    assert repetition(ids) == share


def test_scores_and_lengths_by_hand():
    """Lengths 1, 2, 3, 4, so deviations -1.5, -0.5, 0.5, 1.5; scores 1, 5, 1, 5: -2, 2, -2, 2. The std is 2,
    the correlation (3 - 1 - 1 + 3) / sqrt(5 * 16)."""
    responses = [[5] * n for n in (1, 2, 3, 4)]
    found = metrics_over_processes(responses, torch.tensor([1.0, 5.0, 1.0, 5.0]), ALONE)
    assert found["reward/score_std"] == 2.0
    assert found["rollout/score_length_corr"] == pytest.approx(4 / 80**0.5)
    for slope in (-0.1, 1e6):
        line = metrics_over_processes(responses, slope * torch.arange(4.0) + 3, ALONE)
        assert line["rollout/score_length_corr"] == pytest.approx(1 if slope > 0 else -1)


@pytest.mark.parametrize("score", [0.0, 0.1, -12345.678])
def test_scores_or_lengths_that_are_all_alike_have_no_correlation(score):
    alike = torch.full((7,), score)
    for scores in (alike, alike * (1 + 1e-7 * torch.arange(7.0)), alike[:1]):
        found = metrics_over_processes([[5] * n for n in range(1, len(scores) + 1)], scores, ALONE)
        assert found["reward/score_std"] == found["rollout/score_length_corr"] == 0
    found = metrics_over_processes([[5, 6], [6, 5], [5, 5]], torch.tensor([score, 1.0, 2.0]), ALONE)
    assert found["rollout/score_length_corr"] == 0
    assert found["reward/score_std"] > 0.1


def test_responses_without_a_score_are_counted_and_left_out():
    responses = [[5] * n for n in (1, 9, 2, 3, 4)]
    scores = torch.tensor([1.0, math.nan, 5.0, 1.0, 5.0])
    found = metrics_over_processes(responses, scores, ALONE)
    assert found.pop("reward/unscored") == pytest.approx(0.2)
    others = metrics_over_processes([responses[n] for n in (0, 2, 3, 4)], scores[[0, 2, 3, 4]], ALONE)
    assert found == others | {"rollout/distinct": 1.0}
    none = metrics_over_processes(responses, torch.full((5,), math.nan), ALONE)
    assert none == {
        "reward/unscored": 1,
        "rollout/distinct": 1,
        "reward/score_std": 0,
        "rollout/score_length_corr": 0,
    }
    metrics = Metrics()
    add_scores(metrics, "reward/f", scores)
    assert metrics.means(ALONE) == {"reward/f": 3.0}
    add_scores(metrics, "reward/g", scores[1:2])
    assert math.isnan(metrics.means(ALONE)["reward/g"])  # nothing was said: no 0


def test_responses_are_the_same_where_all_their_tokens_are():
    """Three of six: one occurs three times, to other prompts; one is the beginning of another one."""
    responses = [[5, 6], [5, 6], [5, 6, 6], [6, 5], [5, 6], [5, 6, 6]]
    assert metrics_over_processes(responses, torch.zeros(6), ALONE)["rollout/distinct"] == 3 / 6
    assert metrics_over_processes([[5], [6]], torch.zeros(2), ALONE)["rollout/distinct"] == 1
