"""Sequences one behind the other, without padding: what a forward computes is real tokens only.

A micro-batch goes through the model as one row of N tokens, each at its own sequence's position. Only
attention (``attention.py``) has to know where a sequence ends.
"""

import torch
import torch.nn.functional as F

from model.loading import quiet
from trainer.attention import ATTENTION
from trainer.layers import quicken
from trainer.ppo import length_mask
from trainer.precision import rows_to_add

WASTE = 1.1  # padded over real tokens of one attention call, at the most


class _Pad(torch.autograd.Function):
    """Rows x [n, ...] -> [size, ...] with row i at place[i] (all different). ``source`` [size] says which row
    stands where; in the places left over any row does: whatever stands there, nobody reads its results."""

    @staticmethod
    def forward(ctx, x, place, source):
        ctx.save_for_backward(place)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, *ctx.saved_tensors), None, None


class _Take(torch.autograd.Function):
    """The other way: [size, ...] -> the rows at place."""

    @staticmethod
    def forward(ctx, x, place):
        ctx.save_for_backward(place)
        ctx.size = len(x)
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, *ctx.saved_tensors, grad), None


def take_rows(x, place):
    """x [n, ...] -> x[place], for an index without repetitions, whose gradient is then a copy and no sum."""
    return _Take.apply(x, place)


class Packing:
    """Where the sequences of a packed row stand. Attention treats neighbours of similar length as one padded
    batch, a group. lengths: list of B ints; sorted, less is padded."""

    def __init__(self, lengths, device):
        self.groups, self.lengths, self.device = [], lengths, device  # (sequences, longest of them)
        total = 0
        for length in lengths:
            count, longest = self.groups[-1] if self.groups else (0, 0)
            count, longest, total = count + 1, max(longest, length), total + length
            if count > 1 and count * longest <= WASTE * total:
                self.groups[-1] = (count, longest)
            else:
                self.groups.append((1, length))
                total = length
        self.indices = {}  # by number of heads
        self.starts = torch.tensor([0, *lengths], device=device).cumsum(0)  # of each sequence, and the end

    @property
    def sizes(self):
        """Tokens of each group, padded."""
        return [count * longest for count, longest in self.groups]

    def index(self, heads):
        """Rows are heads of tokens. -> (padded row of each row, row that stands in each padded row)."""
        if heads not in self.indices:
            places, sources, first, start, base = [], [], 0, 0, 0
            head = torch.arange(heads)
            for count, longest in self.groups:
                lengths = torch.tensor(self.lengths[first : first + count])
                column = torch.arange(longest).minimum(lengths[:, None] - 1)  # [count, longest]
                token = start + (lengths.cumsum(0) - lengths)[:, None] + column
                sources.append((token[:, None] * heads + head[:, None]).flatten())  # [count, heads, longest]
                row = torch.arange(count)[:, None, None] * heads + head  # [count, 1, heads]
                row = base + row * longest + torch.arange(longest)[:, None]  # [count, longest, heads]
                places.append(row[length_mask(lengths, longest)].flatten())
                first, start, base = first + count, start + int(lengths.sum()), base + len(sources[-1])
            self.indices[heads] = torch.cat(places).to(self.device), torch.cat(sources).to(self.device)
        return self.indices[heads]

    def pad(self, x):
        """[tokens, heads, dim] -> one [sequences, heads, longest, dim] a group"""
        heads = x.shape[1]
        x = _Pad.apply(x.reshape(-1, x.shape[2]), *self.index(heads))
        parts = x.split([size * heads for size in self.sizes])
        shapes = [(count, heads, longest, -1) for count, longest in self.groups]
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def unpad(self, parts):
        """One [sequences, heads, longest, dim] a group -> [tokens, heads, dim]"""
        heads, dim = parts[0].shape[1], parts[0].shape[3]
        x = torch.cat([part.reshape(-1, dim) for part in parts])
        return _Take.apply(x, self.index(heads)[0]).view(-1, heads, dim)


@torch.no_grad()
def pack_sequences(backbone):
    """Have a backbone's attention read packed rows, if that leaves its states what they were, and its layers
    compute in fewer operations; models whose attention is their own are left alone. -> whether it does."""
    if backbone.config._attn_implementation == ATTENTION:
        return True
    before, device = backbone.config._attn_implementation, backbone.device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(backbone.get_input_embeddings().num_embeddings, (3, 9), generator=generator)
    arguments = tokens.to(device), torch.tensor([9, 8, 4], device=device)
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
    packs = backbone.config._attn_implementation == ATTENTION  # some models keep theirs without a word
    if packs:
        quicken(backbone)
    return packs


def packed_states(backbone, tokens, lengths, **extra):
    """Run a backbone on right-padded tokens [B, T] -> its output, with the states of the N real tokens, row
    by row, as ``last_hidden_state`` [N, H]."""
    real = length_mask(lengths, tokens.shape[1])
    if backbone.config._attn_implementation != ATTENTION:  # models whose attention is their own: padded
        output = backbone(input_ids=tokens, use_cache=False, **extra)
        output.last_hidden_state = output.last_hidden_state[real]
        if extra.get("output_router_logits"):
            output.router_logits = tuple(x[real.view(-1)] for x in output.router_logits)
        return output
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    lengths = lengths.tolist()
    count = sum(lengths)
    filler = rows_to_add(count, backbone.get_input_embeddings().weight)
    output = backbone(
        input_ids=F.pad(tokens[real], (0, filler))[None],
        position_ids=F.pad(positions[real], (0, filler))[None],
        # Four dimensions mean "made already": transformers builds no mask of [N, N], ours comes from packing.
        attention_mask=tokens.new_zeros(1, 1, 1, 1, dtype=torch.bool),
        packing=Packing([*lengths, filler] if filler else lengths, tokens.device),
        use_cache=False,
        **extra,
    )
    output.last_hidden_state = output.last_hidden_state[0, :count]
    if extra.get("output_router_logits"):
        output.router_logits = tuple(x[:count] for x in output.router_logits)
    return output
