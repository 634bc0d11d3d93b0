"""Data order: which records make up which batch, and which of them each process gets.

The order depends on the seed, the epoch and the global batch size only, not on the number of processes. So a
resumed run goes on in the order of the run that was stopped.
"""

import math
from functools import lru_cache

import numpy as np


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(n) as an array; it depends on the arguments only.

    Ten million numbers take half a second and 40 MB. numpy has promised not to change RandomState's stream
    (NEP 19), so a run that is resumed with another numpy continues in the same order.
    """
    order = np.arange(n, dtype=np.uint32)
    np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32, epoch]).shuffle(order)
    return order


# Of prompts and demonstrations; a batch may reach into the next epoch.
epoch_order = lru_cache(maxsize=4)(permutation)


def global_batch(n: int, seed: int, step: int, size: int) -> list[int]:
    """Dataset indices of global batch ``step``: ``size`` entries of the endless stream of epochs."""
    places = (divmod(position, n) for position in range(step * size, (step + 1) * size))
    return [int(epoch_order(n, seed, epoch)[i]) for epoch, i in places]


def local_positions(batch_size: int, rank: int, world: int, group_size: int) -> list[int]:
    """The positions in the global batch that this process holds, in the order of its local rows: every
    ``world``-th prompt, with all its responses (completions) one after the other.

    Position p is response p % group_size to prompt p // group_size of the global batch. ``batch_size``, in
    responses, is per process.
    """
    prompts = range(rank, batch_size // group_size * world, world)
    return [prompt * group_size + sample for prompt in prompts for sample in range(group_size)]


def minibatch_rows(batch_size: int, mini_batch_size: int, group_size: int) -> list[list[int]]:
    """[the local rows of each minibatch of a batch]. Over all processes a minibatch is the same set of
    positions, whatever their number is.

    The responses to a prompt go into as many minibatches as can be: with a critic, four responses in one
    minibatch ended at 0.80 on the demo, in four minibatches at 0.95 (docs/log.md). Both ``group_size`` and
    ``mini_batch_size`` must divide ``batch_size``.
    """
    spread = math.gcd(batch_size // mini_batch_size, group_size)
    rows = mini_batch_size * spread  # of the prompts that share their minibatches
    return [
        [row for row in range(first, first + rows) if row % group_size % spread == part]
        for first in range(0, batch_size, rows)
        for part in range(spread)
    ]


def minibatch_order(step: int, older: int, count: int, epochs: int, seed: int) -> list[int]:
    """What step ``step`` learns from: numbers of minibatches, ``count`` * ``epochs`` of them.

    The step's own batch and up to ``older`` ones before it have ``count`` minibatches each, the oldest
    batch's first. A batch's minibatches are in an order of their own, for each PPO epoch another. Each step
    that has the batch takes the next few of them, so none is used twice more often than another.
    """
    total = count * epochs

    def share(born: int, now: int) -> int:
        """How many of a batch's minibatches a step takes; over all batches ``total``."""
        age = now - born
        batches = min(now, older) + 1
        return -(-(age + 1) * total // batches) + (-age * total // batches)

    places = []
    oldest = max(0, step - older)
    for born in range(oldest, step + 1):
        first = sum(share(born, now) for now in range(born, step))
        mine = share(born, step)
        for number in range(first, first + mine):
            epoch, place = divmod(number, count)
            minibatch = int(permutation(count, seed, born * epochs + epoch)[place])
            places.append(((number - first + 0.5) / mine, (born - oldest) * count + minibatch))
    return [minibatch for _, minibatch in sorted(places)]  # the batches take turns
