"""Micro-batches: how sequences are cut into pieces of a certain number of tokens, and padded.

A batch is the prompts that one step samples, a minibatch is what one optimizer step learns from, and a
micro-batch is what goes through a model in one forward.
"""

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from trainer.compute.kernels import differentiable


def tokens_per_pass(device):
    """The most tokens of one forward: few on a CPU, for activations in its cache; more to keep a GPU busy."""
    return 1 << 11 if device.type == "cpu" else 1 << 13


def pass_size(count, longest, tokens):
    """The size of a forward over ``count`` rows, in tokens: the real tokens, or half of the padded tokens,
    whichever is more. Only models that cannot pack rows compute the padding; the rule is the same for all."""
    return max(tokens, -(-count * longest // 2))


def micro_batches(lengths, token_budget):
    """Cut rows into micro-batches of at least one row, whose ``pass_size`` is at most ``token_budget``.

    Rows are sorted by length first, longest first. So a micro-batch has little padding, and memory runs out
    in the first one or never. lengths: list of B ints -> list of lists of row numbers, each row in one.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches = []
    tokens = 0
    for row in order:
        tokens += lengths[row]
        if batches and pass_size(len(batches[-1]) + 1, lengths[batches[-1][0]], tokens) <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
            tokens = lengths[row]
    return batches


def halves(rows):
    """A list of rows -> its two halves; a single row stays as it is."""
    half = len(rows) // 2
    return [rows[:half], rows[half:]] if half else [rows]


def pad_right(sequences, device="cpu"):
    """Lists of ids -> (tokens [B, T] int64, padded with 0, lengths [B] int64). Padding changes no result."""
    lengths = torch.tensor([len(s) for s in sequences])
    tokens = pad_sequence([torch.tensor(s, dtype=torch.int64) for s in sequences], batch_first=True)
    return send(tokens, device), send(lengths, device)


def send(x, device):
    """A tensor of the CPU -> the same on this device. The host does not wait for a GPU: it copies from pinned
    memory, which torch keeps until the copy is done."""
    if torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def ragged(lengths):
    """Lengths (B ints) -> (row [N], column [N]): the places of all elements of B rows, row by row."""
    lengths = np.asarray(lengths, np.int64)
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def send_arrays(arrays, device):
    """Arrays of ints -> int64 tensors on this device, in one copy."""
    arrays = [np.asarray(x, np.int64) for x in arrays]
    whole = send(torch.from_numpy(np.concatenate(arrays)), device)
    return whole.split([len(x) for x in arrays])


def take_rows(x, place):
    """x [n, ...] -> x[place]. place has no repetitions, so that the gradient is a copy: torch's own adds rows
    up, one after the other."""
    shape = x.shape

    def forward(x):
        return x.index_select(0, place), ()

    def gradient(grad):
        return (grad.new_zeros(shape).index_copy_(0, place, grad),)

    return differentiable(forward, gradient, x)
