"""--kl_target: the weight of the KL follows the KL of each batch."""

import math
from types import SimpleNamespace

import pytest
import torch
from test_invariants import make_run

from trainer.options.kl_target import KlTarget
from trainer.runs.health import History, remedy_of
from trainer.runs.optimizer_step import TrainState


def controller(target=2.0, horizon=40, responses=4, coef=0.1, every=1):
    args = SimpleNamespace(kl_coef=coef, kl_target=target, kl_horizon=horizon, update_old_actor_freq=every)
    args.batch_size = responses
    return KlTarget(args, TrainState(None, None, peak=1.0, total_steps=400), 1, lambda x: x)


def follow(it, kls, batch=1, sum_over_processes=None):
    """A batch of responses with these KLs, each in two tokens of which one is padding -> the weight."""
    kls = torch.tensor(kls)
    mask = torch.tensor([[True, True, False]] * len(kls))
    ref = torch.tensor([[-1.0, -2.0, 0.0]]).expand(len(kls), 3)
    old = ref + torch.stack([kls / 4, 3 * kls / 4, torch.full_like(kls, 1e9)], 1)
    newest = SimpleNamespace(
        old_logprobs=old, ref_logprobs=ref, action_mask=mask, newest=lambda count: newest
    )
    it.sum_over_processes = sum_over_processes or it.sum_over_processes
    it.before_estimate(batch, newest)
    return it.coef


def test_the_weight_by_hand_also_over_processes():
    """KL 2.2 of responses is a tenth above the target 2: 0.1 * (1 + 0.1 * 4 / 40)."""
    assert follow(controller(), [2.0, 2.4, 2.2, 2.2]) == pytest.approx(0.1 * 1.01)
    assert follow(controller(), [1.6, 2.0, 1.8, 1.8]) == pytest.approx(0.1 * 0.99)
    it = controller()
    assert [follow(it, [9.0] * 4), follow(it, [9.0] * 4)] == pytest.approx([0.1 * 1.02, 0.1 * 1.02**2])
    assert follow(controller(), [-3.0] * 4) == pytest.approx(0.1 * 0.98)
    assert follow(controller(), [math.nan] * 4) == follow(controller(), [math.inf] * 4) == 0.1

    # The other one has four responses with a KL of 1.8 in all: together 1.1 a response.
    def add(total):
        return total + torch.tensor([1.8, 4.0])

    assert follow(controller(target=1.0, horizon=80), [1.75] * 4, 1, add) == pytest.approx(0.1 * 1.01)


@pytest.mark.parametrize(
    ("every", "kls", "changes"),
    [(1, [0.0] * 3, [0, 0, -1]), (3, [0.0] * 3 + [9.0] * 4, [0, 0, 0, 1, 1, 1, 2])],
)
def test_each_old_actor_counts_once_and_only_after_the_actor_has_learned(every, kls, changes):
    """Batches 0 to 2 of three each are samples of the start, whose KL is 0 whatever the weight."""
    it = controller(every=every)
    it.train_state.first_batch = 1  # critic warm-up in batch 0
    found = [follow(it, [kl] * 4, batch) for batch, kl in enumerate(kls)]
    assert found == pytest.approx([0.1 * (1.02**n if n > 0 else 0.98**-n) for n in changes])


def test_the_horizon_is_four_batches_and_one_shorter_than_a_batch_counts_as_one(files):
    assert controller(horizon=None, responses=16).horizon == 64
    assert make_run(files, kl_target=1, kl_horizon=15)[0].kl.horizon == 16


def test_remedies_name_the_target_where_there_is_one():
    flags = {"kl_coef": 0.02, "kl_target": 6.0}
    more_kl = "--kl_coef x3"
    assert remedy_of(more_kl, History(flags)) == "--kl_target 2"
    assert remedy_of("--kl_coef 0.05", History(flags)) == "--kl_coef 0.05"
    assert remedy_of(more_kl, History({**flags, "kl_target": 0.0})) == "--kl_coef 0.06"
    assert remedy_of(more_kl, History({"kl_coef": 0.0})) == "--kl_coef 0.02"
