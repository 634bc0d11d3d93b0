"""Packing: sequences go through a model one behind the other, so that it computes real tokens only.

A micro-batch is one row of N tokens, each with its position in its own sequence. Only attention
(attention.py) has to know where a sequence ends.
"""

import warnings
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F

from model.loading import quiet
from trainer.compute.attention import ATTENTION
from trainer.compute.fused_layers import fuse_layers
from trainer.compute.layout import Layout, send_arrays
from trainer.compute.precision import exact_products, rows_to_add

WASTE = 1.1  # one attention call has at most this many times its real tokens, padding included


class _Pad(torch.autograd.Function):
    """Rows x [n, ...] -> [size, ...] with row i at place[i] (all different). source [size]: the row at each
    place. The places left over are padding: they hold copies of rows, and their results are never read."""

    @staticmethod
    def forward(ctx, x, place, source):
        ctx.save_for_backward(place)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, *ctx.saved_tensors), None, None


class _Take(torch.autograd.Function):
    """The reverse of ``_Pad``: [size, ...] -> the rows at place."""

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
        self.groups, self.lengths, self.device = [], lengths, device
        self.longest, total = max(lengths), 0
        for length in lengths:
            count, longest = self.groups[-1] if self.groups else (0, 0)
            count, longest, total = count + 1, max(longest, length), total + length
            if count > 1 and count * longest <= WASTE * total:
                self.groups[-1] = (count, longest)
            else:
                self.groups.append((1, length))
                total = length
        self.indices = {}  # {number of heads: its index}
        (self.starts,) = send_arrays([np.cumsum([0, *lengths])], device)

    @cached_property
    def starts_int32(self):
        """``starts`` in the type that flash attention reads."""
        return self.starts.to(torch.int32)

    @property
    def sizes(self):
        """Tokens of each group, padding included."""
        return [count * longest for count, longest in self.groups]

    def index(self, heads):
        """Indices for rows of [tokens * heads, dim] -> (padded place of a row, row at each padded place)."""
        if heads not in self.indices:
            places, sources, first, start, base = [], [], 0, 0, 0
            head = np.arange(heads)
            for count, longest in self.groups:
                lengths = np.array(self.lengths[first : first + count])
                column = np.arange(longest)
                token = start + (np.cumsum(lengths) - lengths)[:, None]
                token = token + np.minimum(column, lengths[:, None] - 1)  # [count, longest]
                sources.append((token[:, None] * heads + head[:, None]).ravel())  # [count, heads, longest]
                row = np.arange(count)[:, None, None] * heads + head  # [count, 1, heads]
                row = base + row * longest + column[:, None]  # [count, longest, heads]
                places.append(row[column < lengths[:, None]].ravel())
                first, start, base = first + count, start + int(lengths.sum()), base + len(sources[-1])
            both = [np.concatenate(x) for x in (places, sources)]
            self.indices[heads] = send_arrays(both, self.device)
        return self.indices[heads]

    def pad(self, x):
        """[tokens, heads, dim] -> list of [sequences, heads, longest, dim], one for each group"""
        heads = x.shape[1]
        x = _Pad.apply(x.reshape(-1, x.shape[2]), *self.index(heads))
        parts = x.split([size * heads for size in self.sizes])
        shapes = [(count, heads, longest, -1) for count, longest in self.groups]
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def unpad(self, parts):
        """List of [sequences, heads, longest, dim], one for each group -> [tokens, heads, dim]"""
        heads, dim = parts[0].shape[1], parts[0].shape[3]
        x = torch.cat([part.reshape(-1, dim) for part in parts])
        return _Take.apply(x, self.index(heads)[0]).view(-1, heads, dim)


@torch.no_grad()
def pack_sequences(backbone):
    """Let a backbone read packed rows, and fuse its layers (``fuse_layers``) -> whether it reads packed rows.

    Packed and padded states are compared first, in fp32 without TF32. Where they differ, and where a model
    does not use the attention interface of transformers, the backbone stays as it was, and a warning says so.
    """
    if backbone.config._attn_implementation == ATTENTION:
        return True
    if backbone.device.type == "meta":  # an outline: the process that has the weights has tried
        return False
    with exact_products(backbone.device):
        packs = _packs(backbone)
        if packs:
            fuse_layers(backbone)
    if not packs:
        warnings.warn(f"{type(backbone).__name__}: computed with padding, which is slower", stacklevel=2)
    return packs


def _packs(backbone):
    """Give the backbone the attention of packed rows, if that gives the same states -> whether it has it."""
    before, device = backbone.config._attn_implementation, backbone.device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(backbone.get_input_embeddings().num_embeddings, (3, 9), generator=generator)
    arguments = tokens.to(device), [9, 8, 4]
    padded = packed_states(backbone, *arguments).last_hidden_state
    try:
        with quiet():
            backbone.set_attn_implementation(ATTENTION)
        packed = packed_states(backbone, *arguments).last_hidden_state
        fits = torch.allclose(packed, padded, rtol=1e-4, atol=1e-4 * padded.abs().max().item())
    except (ValueError, TypeError, RuntimeError):
        fits = False
    if not fits:
        backbone.set_attn_implementation(before)
    return backbone.config._attn_implementation == ATTENTION  # some keep their own and raise no error


def packed_states(backbone, tokens, layout, **extra):
    """Run a backbone on right-padded tokens [B, T] -> its output, whose ``last_hidden_state`` [N, H] has the
    states of the N real tokens, row by row. layout: ``Layout``, or B lengths. extra: further arguments of the
    backbone."""
    layout = layout if isinstance(layout, Layout) else Layout(layout)
    tables = layout.on(tokens.device)
    row, position = tables["row"], tables["position"]
    if backbone.config._attn_implementation != ATTENTION:  # not packed: run on padded rows
        output = backbone(input_ids=tokens, use_cache=False, **extra)
        output.last_hidden_state = output.last_hidden_state[row, position]
        if extra.get("output_router_logits"):
            place = row * tokens.shape[1] + position
            output.router_logits = tuple(x[place] for x in output.router_logits)
        return output
    count = len(row)
    filler = rows_to_add(count, backbone.get_input_embeddings().weight)
    if (kind := (tokens.device, filler)) not in layout.packings:
        lengths = [*layout.lengths, filler] if filler else layout.lengths
        layout.packings[kind] = Packing(lengths, tokens.device)
    output = backbone(
        input_ids=F.pad(tokens[row, position], (0, filler))[None],
        position_ids=F.pad(position, (0, filler))[None],
        # A mask of four dimensions: transformers builds none of [N, N]. ``packing`` has the bounds instead.
        attention_mask=tokens.new_zeros(1, 1, 1, 1, dtype=torch.bool),
        packing=layout.packings[kind],
        use_cache=False,
        **extra,
    )
    output.last_hidden_state = output.last_hidden_state[0, :count]
    if extra.get("output_router_logits"):
        output.router_logits = tuple(x[:count] for x in output.router_logits)
    return output
