"""Replay: older batches are learned from again, as if their responses were new."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from test_invariants import ALONE
from tiny import tiny_llama

from dataset.lm_dataset import epoch_order, local_positions
from trainer.compute.batch import Batch
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys
from trainer.options.replay import FIELDS, Replay
from trainer.runs.distributed import World
from trainer.train_ppo import minibatch_order

CPU = torch.device("cpu")


def rollout_of(seed, count=8):
    prompts = [[1 + (seed + i + n) % 8 for n in range(1 + i % 3)] for i in range(count)]
    rollout = Sampler(tiny_llama(10)).sample(prompts, noise_keys(seed, 0, range(count)), [0], 3 + seed, 1.0)
    rollout.ref_logprobs = torch.randn(rollout.sampler_logprobs.shape)
    rollout.scores = torch.randn(count)
    return rollout


def same_rows(left, right):
    """AssertionError unless two rollouts have the same responses and, on real tokens, the same numbers."""
    assert left.responses() == right.responses()
    for name in ("prompt_len", "response_len", "finished", "scores"):
        assert getattr(left, name).equal(getattr(right, name)), name
    for name in ("sampler_logprobs", "ref_logprobs"):
        assert getattr(left, name)[left.action_mask].equal(getattr(right, name)[right.action_mask]), name


def test_the_last_batches_are_kept_and_stand_before_the_new_one():
    replay, batches = Replay(2, list(range(8)), ALONE), [rollout_of(seed) for seed in range(4)]
    assert replay.add_replayed(batches[0]) is batches[0]
    for batch in batches[:3]:
        batch.outcomes = batch.sampler_logprobs  # made anew in every step
        replay.after_step(0, batch)
    assert set(replay.kept.tensors()) <= set(FIELDS)  # nothing else is read of them
    joined = replay.add_replayed(batches[3])
    for place, batch in enumerate(batches[1:]):
        same_rows(joined.rows(range(8 * place, 8 * place + 8)), batch)


def test_each_of_two_processes_keeps_the_global_batch_and_takes_its_rows_of_it():
    """Also after resuming with one process."""
    whole, mine = rollout_of(1), [local_positions(4, rank, 2, 1) for rank in (0, 1)]
    parts = [(p, {name: getattr(whole.rows(p), name) for name in FIELDS}) for p in mine]

    class Two(World):
        def gather(self, item):
            return parts

    replays = [Replay(1, positions, Two(rank, 2, CPU)) for rank, positions in enumerate(mine)]
    for replay, positions in zip(replays, mine, strict=True):
        replay.after_step(0, whole.rows(positions))
        same_rows(replay.add_replayed(rollout_of(2, 4)).rows(range(4)), whole.rows(positions))
    alone = Replay(1, list(range(8)), ALONE)
    alone.load_state_dict(replays[0].state_dict())
    same_rows(alone.add_replayed(rollout_of(2)).rows(range(8)), whole)


def test_what_a_checkpoint_keeps_restores_it():
    replay, restored = Replay(12, list(range(8)), ALONE), Replay(12, list(range(8)), ALONE)
    for seed in range(11):  # more than nine: numbers, not texts, are sorted
        replay.after_step(0, rollout_of(seed))
    restored.load_state_dict(dict(sorted(replay.state_dict().items())))  # a file sorts them by their names
    new = rollout_of(12)
    same_rows(restored.add_replayed(new), replay.add_replayed(new))


@pytest.mark.parametrize(
    ("older", "count", "epochs"), [(0, 4, 8), (1, 1, 1), (2, 2, 3), (8, 4, 1), (8, 5, 2)]
)
def test_each_minibatch_is_learned_from_equally_often(older, count, epochs):
    """Over all steps that have its batch, ``epochs`` times; a batch at a run's start or end may have more or
    fewer, but none of its minibatches twice more often than another. A step's number of them is the same."""
    uses, steps = Counter(), 30
    for step in range(steps):
        order = minibatch_order(step, older, count, epochs, seed=7)
        assert len(order) == count * epochs
        oldest = max(0, step - older)
        for k in order:
            assert 0 <= k < count * (min(step, older) + 1)
            uses[oldest + k // count, k % count] += 1
    for born in range(steps):
        each = [uses[born, minibatch] for minibatch in range(count)]
        assert max(each) - min(each) <= 1
        assert not older <= born < steps - older or set(each) == {epochs}


def test_orders_by_hand_and_which_rows_are_the_newest():
    expected = [k for epoch in (6, 7) for k in epoch_order(4, 5, epoch)]
    assert minibatch_order(3, 0, 4, 2, seed=5) == expected
    order = minibatch_order(9, 1, 4, 1, seed=0)
    assert [k // 4 for k in order] == [0, 1, 0, 1]
    order = minibatch_order(5, 1, 5, 1, seed=0)  # three of the new batch, two of the older one, spread evenly
    assert [k // 5 for k in order] == [1, 0, 1, 0, 1]
    for step in (2, 4, 5):  # a batch of one minibatch is learned from while it is new
        assert minibatch_order(step, 2, 1, 1, seed=0) == [2]
    batch = SimpleNamespace(tokens=range(5), rows=list)
    assert Batch.newest(batch, 4) == [1, 2, 3, 4]
    assert Batch.newest(batch, 5) is batch
