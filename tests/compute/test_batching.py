"""Cutting a rollout into rows and micro-batches, and padding them."""

import random
from types import SimpleNamespace

import pytest
import torch

from trainer.compute.batching import micro_batches, pad_right, pass_size
from trainer.compute.precision import LossScale
from trainer.compute.rollout_data import Rollout
from trainer.runs.metrics import Metrics
from trainer.runs.optimizer_step import gradients_that_fit


def make_rollout():
    return Rollout(
        tokens=torch.tensor([[5, 6, 7, 8, 9], [1, 2, 3, 0, 0], [4, 4, 0, 0, 0]]),
        prompt_len=torch.tensor([2, 1, 1]),
        response_len=torch.tensor([3, 2, 1]),
        finished=torch.tensor([True, False, True]),
        sampler_logprobs=torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, 0.0], [-6.0, 0.0, 0.0]]),
    )


def test_mask_comes_from_the_lengths():
    """Token 0 is a valid response token here: padding is found by the lengths alone."""
    assert make_rollout().mask.tolist() == [[True] * 3, [True, True, False], [True, False, False]]


def test_rows_cut_off_padding_and_keep_fields_together():
    part = make_rollout().rows([2, 1])
    assert part.tokens.tolist() == [[4, 4, 0], [1, 2, 3]]
    assert part.sampler_logprobs.tolist() == [[-6, 0], [-4, -5]]
    assert part.finished.tolist() == [True, False]
    assert part.values is None


def test_responses_are_what_follows_the_prompt():
    assert make_rollout().responses() == [[7, 8, 9], [2, 3], [4]]


def test_micro_batches_hold_each_row_once_within_the_budget():
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.randint(1, 60) for _ in range(rng.randint(1, 40))]
        budget = rng.randint(1, 300)
        cut = micro_batches(lengths, budget)
        assert sorted(row for batch in cut for row in batch) == list(range(len(lengths)))
        for batch in cut:
            longest = max(lengths[row] for row in batch)
            assert len(batch) == 1 or sum(lengths[row] for row in batch) <= budget
            assert len(batch) == 1 or len(batch) * longest <= 2 * budget


def test_what_fits_in_one_pass_is_one_micro_batch():
    """However uneven the lengths: a second micro-batch would read all weights and add all gradients again."""
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.randint(1, 9) ** rng.randint(1, 3) for _ in range(rng.randint(1, 40))]
        whole = pass_size(len(lengths), max(lengths), sum(lengths))
        assert len(micro_batches(lengths, whole)) == 1


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_no_accumulation_step_holds_more_than_its_share_of_the_tokens(pieces):
    """However the lengths are mixed: --accumulation_steps is there to save memory."""
    lengths, cuts = [100] * 4 + [10] * 60, []
    progress, scale = SimpleNamespace(token_budget=4096), LossScale(torch.float32)
    run = SimpleNamespace(progress=progress, optimizers={}, loss_scale=scale, in_step=None)

    def loss_of(rows):
        cuts.append(rows)
        return torch.zeros((), requires_grad=True), Metrics()

    gradients_that_fit(run, [(lengths, loss_of)], pieces)
    assert max(sum(lengths[row] for row in rows) for rows in cuts) <= 1000 / pieces
    assert len(cuts) == 1 if pieces == 1 else len(cuts) >= pieces


def test_a_budget_that_fitted_is_kept_for_the_rest_of_the_run():
    run = SimpleNamespace(progress=SimpleNamespace(token_budget=4096), optimizers={}, in_step=None)
    run.loss_scale = LossScale(torch.float32)
    tried = []

    def loss_of(rows):
        tried.append(100 * len(rows))
        if len(rows) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return torch.zeros((), requires_grad=True), Metrics()

    gradients_that_fit(run, [([100] * 10, loss_of)])
    assert tried == [1000, 500, *[200] * 5]
    assert run.progress.token_budget == 250
    gradients_that_fit(run, [([100] * 10, loss_of)])
    assert tried[7:] == [200] * 5


def test_micro_batches_waste_little_on_padding():
    rng = random.Random(0)
    lengths = [rng.randint(10, 200) for _ in range(256)]
    computed = sum(len(b) * max(lengths[row] for row in b) for b in micro_batches(lengths, 2000))
    assert computed < 1.1 * sum(lengths)


def test_pad_right():
    tokens, lengths = pad_right([[3], [1, 2, 3]])
    assert tokens.tolist() == [[3, 0, 0], [1, 2, 3]]
    assert lengths.tolist() == [1, 3]
