"""Batches: how sequences are cut into micro-batches of a certain number of tokens, padded, and packed.

A batch is the prompts that one step samples, a minibatch is what one optimizer step learns from, and a
micro-batch is what goes through a model in one forward: as one row of N tokens, sequence behind sequence, so
that only real tokens are computed (``packed_states`` in scoring.py). The lengths of sequences are known on
the host. So the tables that say where tokens lie are made there, once for all forwards of a micro-batch
(``Layout``), and copied to the device in one piece: a GPU is never waited for.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer.compute.precision import PRODUCT_ROW_MULTIPLE

Device = torch.device | str
NO_FP64 = "mps"  # a Mac's GPU


def tokens_per_forward(device: torch.device, largest: bool = False) -> int:
    """The most tokens of one forward: few on a CPU, for activations in its cache; more to keep a GPU busy.

    largest: the number with which memory_plan.py begins, and which it halves until a micro-batch of training
    fits: the larger, the less often a GPU waits for its next operation. PPO's scoring takes it too."""
    if device.type == "cpu":
        return 1 << 11
    # With deterministic algorithms the size does not follow from the memory that is free.
    return 1 << 16 if largest and not torch.are_deterministic_algorithms_enabled() else 1 << 13


def tokens_per_micro_batch(limit: int, lengths: Sequence[int], pieces: int) -> int:
    """The most tokens of a micro-batch, to learn from a minibatch of sequences of these lengths: ``limit``,
    but no more than all of it has, or with --accumulation_steps one of ``pieces`` of about equal size.

    limit: that of the memory plan at first, halved where memory runs out (``Progress.token_budget``)."""
    if pieces == 1:
        return min(limit, _forward_size(len(lengths), max(lengths), sum(lengths)))
    return min(limit, math.ceil(sum(lengths) / pieces))


def _forward_size(count, longest, tokens):
    """The size of a forward over ``count`` rows, in tokens: the real tokens, or half of the padded tokens,
    whichever is more. Only models that cannot pack rows compute the padding; the rule is the same for all."""
    return max(tokens, math.ceil(count * longest / 2))


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Cut rows into micro-batches of at least one row, whose size is at most ``token_budget`` tokens.

    Rows are sorted by length first, longest first. So a micro-batch has little padding, and memory runs out
    in the first one or never. lengths: of B rows -> lists of row numbers, each row in one.
    """
    batches: list[list[int]] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        tokens += lengths[row]
        if batches and _forward_size(len(batches[-1]) + 1, lengths[batches[-1][0]], tokens) <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
            tokens = lengths[row]
    return batches


def halve(rows: list[int]) -> list[list[int]]:
    """A list of several rows -> its two halves."""
    half = len(rows) // 2
    return [rows[:half], rows[half:]]


def pad_right(sequences: Sequence[Sequence[int]], device: Device = "cpu") -> tuple[Tensor, Tensor]:
    """Lists of ids -> (tokens [B, T] int64, padded with 0, lengths [B] int64). Padding changes no result."""
    lengths = torch.tensor([len(s) for s in sequences])
    tokens = pad_sequence([torch.tensor(s, dtype=torch.int64) for s in sequences], batch_first=True)
    return send(tokens, device), send(lengths, device)


def send(x: Tensor, device: Device) -> Tensor:
    """A tensor of the CPU -> the same on this device. The host does not wait for a GPU: it copies from pinned
    memory, which torch keeps until the copy is done."""
    if torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def fp64_device(device: torch.device) -> torch.device:
    """Where what belongs to this device is computed in fp64: on itself, but ``NO_FP64`` on the CPU."""
    return torch.device("cpu") if device.type == NO_FP64 else device


def in_fp64(x: Tensor) -> Tensor:
    """A tensor in fp64, on its ``fp64_device``."""
    return x.to(fp64_device(x.device)).double()


def _ragged(lengths):
    """Lengths (B ints) -> (row [N], column [N]): the places of all elements of B rows, row by row."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


class Layout:
    """The places of B sequences: of all their N tokens, and of the M states whose predictions are wanted.

    lengths: B ints. predicted_by: the M places among the N tokens, none of them at the end of a sequence: its
    state predicts no token. response: see ``of_responses``. The tensors are on the device.
    """

    shape = (0, 0)  # of a layout ``of_responses``: B, and R, the longest response
    prompt_len: Sequence[int]  # of it too
    response_len: Sequence[int]

    def __init__(
        self,
        lengths: Iterable[int],
        predicted_by: Sequence[int] | np.ndarray = (),
        device: Device = "cpu",
        response: Sequence[int] | np.ndarray = (),
    ) -> None:
        self.lengths = [int(x) for x in lengths]
        self.longest = max(self.lengths)
        row, position = _ragged(self.lengths)
        cu_seqlens = np.cumsum([0, *self.lengths])
        arrays = [cu_seqlens, self.lengths, row, position, predicted_by, response]
        tables = torch.from_numpy(np.concatenate(arrays).astype(np.int64))
        tensors = send(tables, device).split([len(x) for x in arrays])  # one copy to the device
        # [B + 1] the first place of each sequence and the end; [B]; [N] of each token in right-padded rows
        self.cu_seqlens, self.length, self.row, self.position = tensors[:4]
        # [M] the place among the N tokens of the state that predicts each wanted token, which is the next;
        # with responses, the token's place in [B, R], flat
        self.predicted_by, self.response = tensors[4:]

    @classmethod
    def of_responses(
        cls, prompt_len: Sequence[int], response_len: Sequence[int], device: Device = "cpu"
    ) -> "Layout":
        """The layout of prompts with their responses (two lists of B ints, the responses not empty): the
        response tokens are wanted."""
        prompt = np.array(prompt_len)
        count = np.array(response_len)
        row, column = _ragged(count)
        first = (prompt + count).cumsum() - count  # of each response, among the N tokens
        width = max(response_len)
        layout = cls(prompt + count, first[row] + column - 1, device, row * width + column)
        layout.prompt_len = prompt_len
        layout.response_len = response_len
        layout.shape = len(prompt), width
        return layout

    def scatter(self, flat: Tensor) -> Tensor:
        """flat [M], a number for each response token -> [B, R], 0 elsewhere. Keeps gradients. Of a layout
        without responses: flat as it is."""
        rows, width = self.shape
        if not rows:
            return flat
        return flat.new_zeros(rows * width).index_copy_(0, self.response, flat).view(rows, width)

    @cached_property
    def filled(self) -> "Layout":
        """The same with one more sequence, which makes N a multiple of ``PRODUCT_ROW_MULTIPLE``."""
        return Layout([*self.lengths, -len(self.row) % PRODUCT_ROW_MULTIPLE], device=self.row.device)
