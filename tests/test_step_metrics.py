"""What is logged of the responses of a batch as texts, against numbers worked out by hand."""

import random

import pytest
import torch

from trainer.compute.rollout_data import as_rollout
from trainer.runs.distributed import World
from trainer.step_metrics import ID_BITS, batch_metrics, repetition

ALONE = World(0, 1, torch.device("cpu"))
BEHIND = 7  # what stands behind a response, in every column


def rollout_of(*responses, prompts=None):
    """A rollout of these responses (lists of token ids); prompts: theirs, all [3, 3, 3] if not given."""
    width = max(map(len, responses)) + 5
    tokens = torch.tensor([[*ids, *[BEHIND] * (width - len(ids))] for ids in responses])
    lengths = torch.tensor([len(ids) for ids in responses])
    prompts = prompts or [[3, 3, 3]] * len(responses)
    rollout = as_rollout(prompts, tokens, torch.zeros(tokens.shape), lengths, lengths > 0)
    rollout.tokens[rollout.tokens == BEHIND] = 3  # padding that repeats itself, as the prompts do
    return rollout


def test_repetition_by_hand():
    cases = {
        (1, 2, 4, 1, 2, 4): 1 / 4,  # 124 241 412 124
        (5, 5, 5, 5): 1 / 2,
        (5, 5, 5, 5, 5, 5, 5): 4 / 5,
        (1, 2, 4, 4, 2, 1): 0,
        (1, 0, 0, 1, 0): 0,  # 100 001 010
        (5, 5, 5): 0,  # a single trigram
        (5, 5): 0,
        (5,): 0,
    }
    rollout = rollout_of(*map(list, cases), prompts=[[3] * (1 + n) for n in range(len(cases))])
    assert repetition(rollout).tolist() == pytest.approx(list(cases.values()))


def test_responses_of_one_or_two_tokens_have_no_trigrams():
    for longest in (1, 2):
        assert repetition(rollout_of([5], [5] * longest)).tolist() == [0, 0]


def test_repetition_equals_counting_for_any_token_ids():
    draw, largest = random.Random(0), 2**ID_BITS - 1
    responses = [[draw.choice((0, 1, 4, largest)) for _ in range(draw.randint(1, 40))] for _ in range(200)]
    wanted = []
    for ids in responses:
        trigrams = list(zip(ids, ids[1:], ids[2:], strict=False))
        wanted.append((len(trigrams) - len(set(trigrams))) / max(len(trigrams), 1))
    assert repetition(rollout_of(*responses)).tolist() == pytest.approx(wanted)
    assert 0.1 < sum(wanted) / len(wanted) < 0.9


def test_scores_and_lengths_by_hand():
    """Lengths 1, 2, 3, 4, so deviations -1.5, -0.5, 0.5, 1.5; scores 1, 5, 1, 5: -2, 2, -2, 2. The std is 2,
    the correlation (3 - 1 - 1 + 3) / sqrt(5 * 16)."""
    rollout = rollout_of(*([5] * n for n in (1, 2, 3, 4)))
    found = batch_metrics(rollout, torch.tensor([1.0, 5.0, 1.0, 5.0]), ALONE)
    assert found["reward/score_std"] == 2.0
    assert found["rollout/score_length_corr"] == pytest.approx(4 / 80**0.5)
    for slope in (-0.1, 1e6):
        line = batch_metrics(rollout, slope * torch.arange(4.0) + 3, ALONE)
        assert line["rollout/score_length_corr"] == pytest.approx(1 if slope > 0 else -1)


@pytest.mark.parametrize("score", [0.0, 0.1, -12345.678])
def test_scores_or_lengths_that_are_all_alike_have_no_correlation(score):
    lengths = rollout_of(*([5] * n for n in (1, 2, 3, 4, 5, 6, 7)))
    found = batch_metrics(lengths, torch.full((7,), score), ALONE)
    assert found["reward/score_std"] == found["rollout/score_length_corr"] == 0
    rounded = torch.full((7,), score) * (1 + 1e-7 * torch.arange(7.0))
    assert batch_metrics(lengths, rounded, ALONE) == found
    found = batch_metrics(rollout_of([5, 6], [6, 5], [5, 5]), torch.tensor([score, 1.0, 2.0]), ALONE)
    assert found["rollout/score_length_corr"] == 0
    assert found["reward/score_std"] > 0.1
    alone = batch_metrics(rollout_of([5, 6]), torch.tensor([score]), ALONE)
    assert alone["reward/score_std"] == alone["rollout/score_length_corr"] == 0


def test_responses_are_the_same_where_all_their_tokens_are():
    """Three of six: one occurs three times, to other prompts; one is the beginning of another one."""
    responses = [[5, 6], [5, 6], [5, 6, 6], [6, 5], [5, 6], [5, 6, 6]]
    prompts = [[1] * (1 + n) for n in range(6)]
    found = batch_metrics(rollout_of(*responses, prompts=prompts), torch.zeros(6), ALONE)
    assert found["rollout/distinct"] == 3 / 6
    assert batch_metrics(rollout_of([5], [6]), torch.zeros(2), ALONE)["rollout/distinct"] == 1
