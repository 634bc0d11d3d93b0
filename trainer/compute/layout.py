"""Where the tokens of a micro-batch lie: the index tables of its forward passes, made once for all of them.

The lengths of sequences are known on the host. So the tables are made there, from lists, and copied to the
device in one piece. A GPU never has to be asked for a length, which would mean to wait until it is idle.
"""

from itertools import accumulate

import numpy as np
import torch

from trainer.compute.batching import send

NAMES = ("length", "row", "position", "wanted_row", "wanted_position", "predicted_by", "response")


class Layout:
    """The places of B sequences: of all their N tokens, and of the M tokens whose predictions are wanted.

    lengths: B ints. wanted: two arrays of M ints, the row and the position of each wanted token, row by row,
    all different and none at position 0 (nothing predicts it); without it none is wanted. Tables, int64:

        length [B]
        row, position [N]              of each token in the right-padded rows, row by row
        wanted_row, wanted_position    [M] of each wanted token
        predicted_by [M]               the place among the N tokens of the state that predicts it
        response [M]                   the place of each response token in [B, R], flat (``of_responses``)
    """

    def __init__(self, lengths, wanted=None):
        self.lengths = [int(x) for x in lengths]
        self.wanted = wanted if wanted is not None else (np.zeros(0, np.int64),) * 2
        self.starts = np.array([0, *accumulate(self.lengths)])  # [B + 1], among the N tokens
        self.shape, self.response = None, np.zeros(0, np.int64)
        self.tables, self.packings = {}, {}  # on each device; what packing.py keeps here

    @classmethod
    def of_responses(cls, prompt_len, response_len):
        """The layout of prompts with their responses (two lists of B ints, the responses not empty): the
        response tokens are wanted. ``shape``: (B, R), R the longest response."""
        prompt, count = np.array(prompt_len, np.int64), np.array(response_len, np.int64)
        row, column = ragged(count)
        layout = cls(prompt + count, (row, prompt[row] + column))
        layout.shape = len(prompt), int(count.max())
        layout.response = row * layout.shape[1] + column
        return layout

    def on(self, device):
        """-> {name: table on this device}"""
        if device not in self.tables:
            before = self.starts[self.wanted[0]] + self.wanted[1] - 1
            arrays = [self.lengths, *ragged(self.lengths), *self.wanted, before, self.response]
            self.tables[device] = dict(zip(NAMES, send_arrays(arrays, device), strict=True))
        return self.tables[device]

    def spread(self, flat):
        """flat [M], a number for each response token -> [B, R], 0 elsewhere. Keeps gradients."""
        return _Spread.apply(flat, self.on(flat.device)["response"], self.shape)


class _Spread(torch.autograd.Function):
    """``Layout.spread``: places are all different, so the gradient is a copy and not a sum."""

    @staticmethod
    def forward(ctx, flat, places, shape):
        ctx.save_for_backward(places)
        out = flat.new_zeros(shape)
        out.view(-1).index_copy_(0, places, flat)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad.reshape(-1).index_select(0, *ctx.saved_tensors), None, None


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
