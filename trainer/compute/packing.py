"""Packing: sequences go through a model one behind the other, so that it computes real tokens only.

A micro-batch is one row of N tokens, each with its position in its own sequence. Only attention
(attention.py) has to know where a sequence ends.

The lengths of sequences are known on the host. So the tables that say where the tokens lie are made there,
from lists, once for all forwards of a micro-batch (``Layout``), and copied to the device in one piece. A GPU
never has to be asked for a length, which would mean to wait until it is idle.
"""

import math
import warnings
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F

from model.loading import quiet
from trainer.compute.attention import ATTENTION
from trainer.compute.batching import send
from trainer.compute.fused_layers import fuse_layers
from trainer.compute.kernels import difference
from trainer.compute.precision import rows_to_add

WASTE = 1.1  # one attention call has at most this many times its real tokens, padding included


class Layout:
    """The places of B sequences: of all their N tokens, and of the M tokens whose predictions are wanted.

    lengths: B ints. wanted: two arrays of M ints, the row and the position of each wanted token, row by row,
    all different and none at position 0 (nothing predicts it); without it none is wanted.
    """

    def __init__(self, lengths, wanted=None):
        none = np.zeros(0, np.int64)
        self.lengths = [int(x) for x in lengths]
        self.wanted = (none, none) if wanted is None else wanted
        self.starts = np.cumsum([0, *self.lengths])  # [B + 1], among the N tokens
        self.shape = None  # (B, R), R the longest response, of ``of_responses``
        self.response = none
        self.tables = {}  # on each device
        self.packings = {}  # what ``packed_states`` keeps here

    @classmethod
    def of_responses(cls, prompt_len, response_len):
        """The layout of prompts with their responses (two lists of B ints, the responses not empty): the
        response tokens are wanted."""
        prompt, count = np.array(prompt_len, np.int64), np.array(response_len, np.int64)
        row, column = ragged(count)
        layout = cls(prompt + count, (row, prompt[row] + column))
        layout.shape = len(prompt), int(count.max())
        layout.response = row * layout.shape[1] + column
        return layout

    def on(self, device):
        """-> {name: int64 table on this device}"""
        if device not in self.tables:
            row, position = ragged(self.lengths)
            wanted_row, wanted_position = self.wanted
            arrays = {
                "length": self.lengths,  # [B]
                "row": row,  # [N] of each token in the right-padded rows, row by row
                "position": position,  # [N]
                "wanted_row": wanted_row,  # [M] of each wanted token
                "wanted_position": wanted_position,  # [M]
                # [M] the place among the N tokens of the state that predicts it
                "predicted_by": self.starts[wanted_row] + wanted_position - 1,
                "response": self.response,  # [M] the place of each response token in [B, R], flat
            }
            tables = send_arrays(arrays.values(), device)
            self.tables[device] = dict(zip(arrays, tables, strict=True))
        return self.tables[device]

    def spread(self, flat):
        """flat [M], a number for each response token -> [B, R], 0 elsewhere. Keeps gradients."""
        places = self.on(flat.device)["response"]
        return flat.new_zeros(math.prod(self.shape)).index_copy_(0, places, flat).view(self.shape)


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


class _Take(torch.autograd.Function):
    """[size, …] -> the rows at place. torch's own gradient adds rows up, one after the other."""

    @staticmethod
    def forward(ctx, x, place):
        ctx.save_for_backward(place)
        ctx.size = len(x)
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, *ctx.saved_tensors, grad), None


def take_rows(x, place):
    """x [n, ...] -> x[place]. place has no repetitions, so that the gradient is a copy and not a sum."""
    return _Take.apply(x, place)


class Packing:
    """Where the sequences of a packed row lie, for attention, which reads this in every layer.

    lengths: list of B ints. ``starts``: each sequence's first place and the end, int64 [B + 1]. Attention
    that has no kernel for packed rows computes neighbours of similar length as one padded batch, a group:
    ``groups`` are (number of sequences, longest). Sorted lengths need less padding.
    """

    def __init__(self, lengths, device):
        self.lengths, self.device = lengths, device
        self.longest = max(lengths)
        (self.starts,) = send_arrays([np.cumsum([0, *lengths])], device)
        self.places = {}  # {number of heads: see ``place``}
        self.groups, total = [], 0
        for length in lengths:
            count, longest = self.groups[-1] if self.groups else (0, 0)
            count, longest, total = count + 1, max(longest, length), total + length
            if count > 1 and count * longest <= WASTE * total:
                self.groups[-1] = (count, longest)
            else:
                self.groups.append((1, length))
                total = length

    @cached_property
    def starts_int32(self):
        """``starts`` in the type that flash attention reads."""
        return self.starts.to(torch.int32)

    @property
    def sizes(self):
        """Tokens of each group, padding included."""
        return [count * longest for count, longest in self.groups]

    def place(self, heads):
        """Where each row of [tokens * heads, dim] lies in the groups, which are [sequences, heads, longest,
        dim] one behind the other."""
        if heads not in self.places:
            row, column = ragged(self.lengths)
            longest = np.concatenate([[longest] * count for count, longest in self.groups])  # [B]
            first = (np.cumsum(longest) - longest)[row]  # the padded tokens before a token's sequence
            place = (first * heads)[:, None] + longest[row][:, None] * np.arange(heads) + column[:, None]
            (self.places[heads],) = send_arrays([place.ravel()], self.device)
        return self.places[heads]

    def pad(self, x):
        """[tokens, heads, dim] -> list of [sequences, heads, longest, dim], one for each group"""
        _, heads, dim = x.shape
        padded = x.new_zeros(sum(self.sizes) * heads, dim)
        padded.index_copy_(0, self.place(heads), x.reshape(-1, dim))
        parts = padded.split([size * heads for size in self.sizes])
        shapes = [(count, heads, longest, dim) for count, longest in self.groups]
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def unpad(self, parts):
        """List of [sequences, heads, longest, dim], one for each group -> [tokens, heads, dim]"""
        heads, dim = parts[0].shape[1], parts[0].shape[3]
        x = torch.cat([part.reshape(-1, dim) for part in parts])
        return take_rows(x, self.place(heads)).view(-1, heads, dim)


@torch.no_grad()
def pack_sequences(backbone):
    """Let a backbone read packed rows, and fuse its layers (``fuse_layers``) -> whether it reads packed rows.

    Packed and padded states are compared first. Where they differ, and where a model does not use the
    attention interface of transformers, the backbone stays as it was, and a warning says so.
    """
    config, device = backbone.config, backbone.device
    if config._attn_implementation == ATTENTION:
        return True
    before = config._attn_implementation
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(backbone.get_input_embeddings().num_embeddings, (3, 9), generator=generator)

    def states():
        return packed_states(backbone, tokens.to(device), [9, 8, 4]).last_hidden_state

    def packed():
        with quiet():
            backbone.set_attn_implementation(ATTENTION)
        return states()

    if difference(states, packed, device):
        backbone.set_attn_implementation(before)
    if config._attn_implementation != ATTENTION:  # some keep their own and raise no error
        warnings.warn(f"{type(backbone).__name__}: computed with padding, which is slower", stacklevel=2)
        return False
    fuse_layers(backbone)
    return True


def packed_states(backbone, tokens, layout, **extra):
    """Run a backbone on right-padded tokens [B, T] -> its output, whose ``last_hidden_state`` [N, H] has the
    states of the N real tokens, row by row. layout: ``Layout``, or B lengths. extra: further arguments of the
    backbone."""
    layout = layout if isinstance(layout, Layout) else Layout(layout)
    tables = layout.on(tokens.device)
    row, position = tables["row"], tables["position"]
    if backbone.config._attn_implementation == ATTENTION:
        count = len(row)
        filler = rows_to_add(count, backbone.get_input_embeddings().weight)
        kind = (tokens.device, filler)
        if kind not in layout.packings:
            lengths = [*layout.lengths, filler] if filler else layout.lengths
            layout.packings[kind] = Packing(lengths, tokens.device)
        output = backbone(
            input_ids=F.pad(tokens[row, position], (0, filler))[None],
            position_ids=F.pad(position, (0, filler))[None],
            # Of four dimensions: transformers builds none of [N, N]. ``packing`` has the bounds instead.
            attention_mask=tokens.new_zeros(1, 1, 1, 1, dtype=torch.bool),
            packing=layout.packings[kind],
            use_cache=False,
            **extra,
        )
        output.last_hidden_state = output.last_hidden_state[0, :count]
        place = slice(count)
    else:
        output = backbone(input_ids=tokens, use_cache=False, **extra)
        output.last_hidden_state = output.last_hidden_state[row, position]
        place = row * tokens.shape[1] + position
    if extra.get("output_router_logits"):
        output.router_logits = tuple(x[place] for x in output.router_logits)
    return output
