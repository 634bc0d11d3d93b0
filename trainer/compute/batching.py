"""Batches: how sequences are cut into micro-batches of a certain number of tokens, padded, and packed.

A batch is the sequences of one step, a minibatch is what one optimizer step learns from, and a micro-batch is
what goes through a model in one forward: as one row of N tokens, sequence behind sequence, so that only real
tokens are computed (``packed_states`` in scoring.py). What several sequences begin with, as the answers to a
prompt do, is computed once for all of them that share a micro-batch (``Beginnings``). The lengths of
sequences are known on the host. So the tables that say where tokens lie are made there, once for all forwards
of a micro-batch (``Layout``), and copied to the device in one piece: a GPU is never waited for.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer.compute.precision import PRODUCT_ROW_MULTIPLE

Device = torch.device | str
NO_FP64 = "mps"  # a Mac's GPU
# Of each sequence the number of its group, and how many tokens all sequences of that group begin with, fewer
# than any of them has: these are computed once. Empty: every sequence is computed whole.
Beginnings = Sequence[tuple[int, int]]
# For each layer a token that is computed keeps as much for the backward as the keys and values of so many:
# each sequence has the keys of its beginning for itself while attention computes.
KEYS_PER_TOKEN = 12


def tokens_per_forward(device: torch.device, largest: bool = False) -> int:
    """The most tokens of one forward: few on a CPU, for activations in its cache; more to keep a GPU busy.

    largest: the number with which memory_plan.py begins. It is halved until a micro-batch of training fits. A
    larger one lets a GPU wait less often for its next operation. PPO's scoring takes it too."""
    if device.type == "cpu":
        return 1 << 11
    # With deterministic algorithms the size does not follow from the memory that is free.
    return 1 << 16 if largest and not torch.are_deterministic_algorithms_enabled() else 1 << 13


def tokens_per_micro_batch(limit: int, lengths: Sequence[int], pieces: int, saved: int = 0) -> int:
    """The most tokens of a micro-batch, to learn from a minibatch of sequences of these lengths: ``limit``,
    but no more than all of it has, or with --accumulation_steps one of ``pieces`` of about equal size.

    limit: that of the memory plan at first, halved where memory runs out (``Progress.token_budget``); saved:
    ``tokens_saved``."""
    if pieces == 1:
        return min(limit, _forward_size(len(lengths), max(lengths), sum(lengths), saved))
    return min(limit, math.ceil((sum(lengths) - saved) / pieces))


def _forward_size(count, longest, tokens, saved):
    """The size of a forward over ``count`` rows, in tokens: the real tokens, or half of the padded tokens,
    whichever is more. Only models that cannot pack rows compute the padding; the rule is the same for all.
    saved: how many of both are not computed."""
    return max(tokens - saved, math.ceil((count * longest - saved) / 2))


def _saved(beginning, copies):
    """By how many tokens a forward is smaller where a beginning is computed once instead of ``copies`` times,
    less the memory of its keys."""
    return (beginning - math.ceil(beginning / KEYS_PER_TOKEN)) * (copies - 1)


def tokens_saved(beginnings: Beginnings) -> int:
    """By how many tokens one forward over these sequences is smaller than if none of them began alike."""
    return sum(_saved(beginning, len(rows)) for rows, beginning in _groups(len(beginnings), beginnings))


def _groups(count, beginnings):
    """-> [(the rows of a group, the number of tokens that is computed once for them)]"""
    groups: dict[int, list[int]] = {}
    for row in range(count):
        groups.setdefault(beginnings[row][0] if beginnings else row, []).append(row)
    return [(rows, beginnings[rows[0]][1] if len(rows) > 1 else 0) for rows in groups.values()]


def micro_batches(lengths: Sequence[int], token_budget: int, beginnings: Beginnings = ()) -> list[list[int]]:
    """Cut rows into micro-batches of at least one row, whose size is at most ``token_budget`` tokens.

    Groups stay together: one that is too large is cut into as few pieces as can be. The rest is sorted by
    length, longest first. So a micro-batch has little padding, and memory runs out in the first one or never.
    lengths: of B rows -> lists of row numbers, each row in one.
    """

    def fits(count, longest, tokens, saved):
        return _forward_size(count, longest, tokens, saved) <= token_budget

    pieces: list[tuple[list[int], int, int]] = []  # of groups: rows, their tokens, how many of them are saved
    for group, beginning in _groups(len(lengths), beginnings):
        group.sort(key=lambda row: -lengths[row])
        for size in dict.fromkeys(math.ceil(len(group) / n) for n in range(1, len(group) + 1)):
            cut = [group[start : start + size] for start in range(0, len(group), size)]
            found = [(rows, sum(lengths[i] for i in rows), _saved(beginning, len(rows))) for rows in cut]
            if all(fits(len(rows), lengths[rows[0]], tokens, saved) for rows, tokens, saved in found):
                break
        pieces += found
    batches: list[list[int]] = []
    tokens = saved = 0  # of the last of them
    for rows, more, less in sorted(pieces, key=lambda piece: -lengths[piece[0][0]]):
        tokens += more
        saved += less
        if batches and fits(len(batches[-1]) + len(rows), lengths[batches[-1][0]], tokens, saved):
            batches[-1] += rows
        else:
            batches.append(rows)
            tokens = more
            saved = less
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


def common_beginnings(sequences: Sequence[list[int]], groups: Sequence[object]) -> Beginnings:
    """Token ids of sequences -> what those of each group begin with, which is less than any of them. groups:
    what is equal for the sequences of one."""
    members: dict[object, list[list[int]]] = {}
    for sequence, group in zip(sequences, groups, strict=True):
        members.setdefault(group, []).append(sequence)
    found = {}
    for number, (group, mine) in enumerate(members.items()):
        pairs = zip(min(mine), max(mine), strict=False)  # what these begin with, all between them do
        alike = next((place for place, (x, y) in enumerate(pairs) if x != y), len(min(mine)))
        found[group] = number, min(alike, *(len(x) - 1 for x in mine))
    return [found[group] for group in groups]


def _ragged(lengths):
    """Lengths (B ints) -> (row [N], column [N]): the places of all elements of B rows, row by row."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


class Padded(NamedTuple):
    """Segments of a packed row as the rows of a batch, padded on the right (``Layout.padded``)."""

    segments: int
    longest: int  # of their queries
    longest_k: int  # of their keys
    tokens: Tensor | None  # [n] their queries' places among the N tokens; None: all, in their order
    places: Tensor  # [n] the places of the same in the batch, flat
    keys: Tensor | None  # [m] their keys' places among the N tokens
    key_places: Tensor  # [m]
    position: Tensor | None  # [segments, longest] of each query among its keys; None: they begin together


class Layout:
    """The places of B sequences: of all their N tokens, and of the M states whose predictions are wanted.

    lengths: B ints. predicted_by: M places among the tokens of all sequences, row by row, none of them at the
    end of a sequence: its state predicts no token. response: see ``of_responses``. The tensors are on the
    device.
    """

    # Without ``beginnings`` the N tokens are all of them, and each sequence is a segment of the packed row.
    # With them the row goes group by group: what the sequences of a group begin with is a segment, then the
    # rest of each of them. Only attention has to know: the keys of such a rest are those of the beginning,
    # then its own. In a segment with q queries and k keys, query i sees the keys 0 to k - q + i.

    shape = (0, 0)  # of a layout ``of_responses``: B, and R, the longest response
    prompt_len: Sequence[int]  # of it too
    response_len: Sequence[int]
    prompt: Sequence[int]

    def __init__(
        self,
        lengths: Iterable[int],
        predicted_by: Sequence[int] | np.ndarray = (),
        device: Device = "cpu",
        response: Sequence[int] | np.ndarray = (),
        beginnings: Beginnings = (),
    ) -> None:
        self.lengths = [int(x) for x in lengths]
        self.longest = max(self.lengths)
        self.beginnings = beginnings
        groups = _groups(len(self.lengths), beginnings)
        segments = []  # of each the sequence, its first query, and the end of queries and keys
        for rows, beginning in groups:
            if beginning:
                segments.append((rows[0], 0, beginning))
            segments += [(row, beginning, self.lengths[row]) for row in rows]
        sequence, self._first, self._end = np.array(segments).T
        self.segments = len(segments)
        self.longest_q = int((self._end - self._first).max())
        segment, column = _ragged(self._end - self._first)
        row = sequence[segment]
        position = self._first[segment] + column
        # Of each token of all sequences, row by row: the place among the N where it is computed.
        self._start = np.cumsum(self.lengths) - self.lengths
        self._place = np.empty(sum(self.lengths), np.int64)
        self._place[self._start[row] + position] = np.arange(len(row))
        for rows, beginning in groups:
            computed = self._place[self._start[rows[0]] :][:beginning]
            for other in rows[1:]:
                self._place[self._start[other] :][:beginning] = computed
        key_segment, key_column = _ragged(self._end)
        shared = self.segments > len(self.lengths)
        self._keys = self._place[self._start[sequence[key_segment]] + key_column] if shared else []
        predicted_by = np.array(predicted_by, np.int64)
        arrays = [
            np.cumsum([0, *(self._end - self._first)]), np.cumsum([0, *self._end]), self._keys, self.lengths,
            row, position, self._place[predicted_by], self._place[predicted_by + 1], response,
        ]  # fmt: skip
        tables = torch.from_numpy(np.concatenate(arrays).astype(np.int64))
        tensors = send(tables, device).split([len(x) for x in arrays])  # one copy to the device
        # [segments + 1] where each segment's queries begin, and the end; the same of its keys; the places of
        # these keys among the N tokens: None where both are the same
        self.cu_seqlens, self.cu_seqlens_k, key_index = tensors[:3]
        self.key_index = key_index if shared else None
        # [B]; [N] of each token in right-padded rows
        self.length, self.row, self.position = tensors[3:6]
        # [M] the places among the N tokens of the state that predicts each wanted token, and of that token;
        # with responses, the token's place in [B, R], flat
        self.predicted_by, self.predicted, self.response = tensors[6:]

    @classmethod
    def of_responses(
        cls,
        prompt_len: Sequence[int],
        response_len: Sequence[int],
        device: Device = "cpu",
        prompt: Sequence[int] = (),
        shared: bool = False,
    ) -> "Layout":
        """The layout of prompts with their responses (two lists of B ints, the responses not empty): the
        response tokens are wanted. prompt: B numbers, the same for equal prompts; shared: whether equal
        prompts are computed once."""
        length = np.array(prompt_len)
        count = np.array(response_len)
        row, column = _ragged(count)
        first = (length + count).cumsum() - count  # of each response, among the tokens of all sequences
        width = max(response_len)
        beginnings = list(zip(prompt, prompt_len, strict=True)) if shared else ()
        layout = cls(length + count, first[row] + column - 1, device, row * width + column, beginnings)
        layout.prompt_len = prompt_len
        layout.response_len = response_len
        layout.prompt = prompt
        layout.shape = len(length), width
        return layout

    def places(self, columns: Sequence[int]) -> Tensor:
        """[B] the place among the N tokens of one token of each sequence, which is at these columns."""
        return send(torch.from_numpy(self._place[self._start + columns]), self.row.device)

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
        more = -len(self.row) % PRODUCT_ROW_MULTIPLE
        beginnings = [*self.beginnings, (-1, 0)] if self.beginnings else ()
        return Layout([*self.lengths, more], device=self.row.device, beginnings=beginnings)

    @cached_property
    def padded(self) -> list[Padded]:
        """The segments that have their own keys only, and apart from these, as they are far shorter, the
        rests."""
        if self.key_index is None:
            places = self.row * self.longest + self.position
            return [Padded(self.segments, self.longest, self.longest, None, places, None, places, None)]
        return [self._padded(self._first == 0), self._padded(self._first > 0)]

    def _padded(self, chosen):
        tokens, places, longest = _padded_places(self._end - self._first, chosen)
        keys, key_places, longest_k = _padded_places(self._end, chosen)
        first = self._first[chosen, None]
        # What is behind a segment's last query sees what that one sees, so that no row is without keys.
        position = np.minimum(first + np.arange(longest), self._end[chosen, None] - 1)
        arrays = [tokens, places, self._keys[keys], key_places, position.flatten()]
        tables = send(torch.from_numpy(np.concatenate(arrays)), self.row.device)
        tokens, places, keys, key_places, position = tables.split([len(x) for x in arrays])
        position = position.unflatten(0, (-1, longest)) if first.any() else None
        return Padded(len(first), longest, longest_k, tokens, places, keys, key_places, position)


def _padded_places(counts, chosen):
    """-> (which elements of ragged rows belong to the chosen ones; where these lie in a batch of the chosen
    rows, padded, flat; its width)"""
    row, column = _ragged(counts)
    width = int(counts[chosen].max())
    elements = np.flatnonzero(chosen[row])
    number = np.cumsum(chosen) - 1
    return elements, number[row[elements]] * width + column[elements], width
