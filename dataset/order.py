"""The order in which records are visited: pure functions, the same whatever the number of processes."""

import os
import signal
from functools import lru_cache

import numpy as np
from torch.utils.data import DataLoader, Sampler

from errors import InputError


def epoch_order(n, seed, epoch):
    """A permutation of range(n) as an array, a pure function of its arguments.

    Ten million numbers take half a second and 40 MB. RandomState's stream is frozen (NEP 19): a run resumed
    under another numpy goes on in the same order.
    """
    order = np.arange(n, dtype=np.uint32)
    np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32, epoch]).shuffle(order)
    return order


_epoch_order = lru_cache(maxsize=2)(epoch_order)  # a batch may reach into the next epoch


def global_batch(n, seed, step, size):
    """Dataset indices of global batch ``step``: ``size`` entries of the endless stream of epochs."""
    places = (divmod(position, n) for position in range(step * size, (step + 1) * size))
    return [int(_epoch_order(n, seed, epoch)[i]) for epoch, i in places]


def local_positions(batch_size, mini_batch_size, rank, world):
    """Positions in the global batch of this process' rows, minibatch after minibatch.

    Minibatch k is the k-th slice of ``world * mini_batch_size`` positions, of which ``rank`` holds every
    ``world``-th: its local rows [k * mini_batch_size, (k + 1) * mini_batch_size).
    """
    positions = []
    for first in range(0, batch_size, mini_batch_size):
        last = min(first + mini_batch_size, batch_size)
        positions.extend(range(first * world + rank, last * world, world))
    return positions


class PromptBatches(Sampler):
    """For a DataLoader's ``batch_sampler``: this process' dataset indices, one list for each step in
    [first_step, last_step). ``batch_size`` and ``mini_batch_size`` are per process."""

    def __init__(self, n, seed, first_step, last_step, batch_size, mini_batch_size, rank, world):
        self.n, self.seed, self.size = n, seed, world * batch_size
        self.steps = range(first_step, last_step)
        self.positions = local_positions(batch_size, mini_batch_size, rank, world)

    def __len__(self):
        return len(self.steps)

    def __iter__(self):
        for step in self.steps:
            batch = global_batch(self.n, self.seed, step, self.size)
            yield [batch[position] for position in self.positions]


def prompt_loader(dataset, order, num_workers):
    """The batches of ``order`` as lists of items, made by ``num_workers`` processes ahead of time, if any."""
    # Forked, since what a dataset has open does not travel otherwise.
    how = {"multiprocessing_context": "fork", "worker_init_fn": _prepare_worker} if num_workers else {}
    return DataLoader(dataset, batch_sampler=order, collate_fn=list, num_workers=num_workers, **how)


def _prepare_worker(worker):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # their threads do not survive a fork
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of a whole group: the main process saves, then ends them


def next_batch(batches):
    """The next list of items. A worker's InputError arrives as a traceback's text: its last line counts."""
    try:
        return next(batches)
    except InputError as error:
        raise InputError(str(error).rpartition("InputError: ")[2]) from error
