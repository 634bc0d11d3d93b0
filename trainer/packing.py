"""Sequences one behind the other, without padding: what a forward computes is real tokens only.

A micro-batch goes through the model as one row of N tokens, each at its own sequence's position. Only
attention (``attention.py``) has to know where a sequence ends.
"""

import torch

from model.loading import quiet
from trainer.attention import ATTENTION
from trainer.ppo import length_mask

WASTE = 1.1  # padded over real tokens of one attention call, at the most


class _Pad(torch.autograd.Function):
    """[n, ...] -> [size, ...] with row i at place[i] (all different) and zeros elsewhere."""

    @staticmethod
    def forward(ctx, x, place, size):
        ctx.save_for_backward(place)
        return x.new_zeros(size, *x.shape[1:]).index_copy_(0, place, x)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, *ctx.saved_tensors), None, None


class _Unpad(torch.autograd.Function):
    """The other way: [size, ...] -> the rows at place."""

    @staticmethod
    def forward(ctx, x, place):
        ctx.save_for_backward(place)
        ctx.size = len(x)
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, *ctx.saved_tensors, grad), None


def take_rows(x, index):
    """x [n, ...] -> x[index], for an index without repetitions, whose gradient is then a copy and no sum."""
    return _Unpad.apply(x, index)


class Group:
    """Neighbouring sequences of similar length, which attention treats as one padded batch."""

    def __init__(self, lengths, device):
        self.count, self.longest = len(lengths), max(lengths)
        self.place = None  # of each token in the padded batch; None where nothing is padded
        if self.count * self.longest != sum(lengths):
            real = length_mask(torch.tensor(lengths, device=device), self.longest)
            self.place = real.view(-1).nonzero().squeeze(1)

    def pad(self, x):
        """[tokens, ...] -> [count, longest, ...]"""
        if self.place is not None:
            x = _Pad.apply(x, self.place, self.count * self.longest)
        return x.view(self.count, self.longest, *x.shape[1:])

    def unpad(self, x):
        """[count, longest, ...] -> [tokens, ...]"""
        x = x.reshape(self.count * self.longest, *x.shape[2:])
        return x if self.place is None else _Unpad.apply(x, self.place)


class Packing:
    """Where the sequences of a packed row stand. lengths: list of B ints; sorted, less is padded."""

    def __init__(self, lengths, device):
        cuts, longest, total = [0], 0, 0
        for i, length in enumerate(lengths):
            longest, total = max(longest, length), total + length
            if longest * (i + 1 - cuts[-1]) > WASTE * total:
                cuts.append(i)
                longest = total = length
        parts = [lengths[a:b] for a, b in zip(cuts, [*cuts[1:], len(lengths)], strict=True)]
        self.groups = [Group(part, device) for part in parts]
        self.sizes = [sum(part) for part in parts]


@torch.no_grad()
def pack_sequences(backbone):
    """Have a backbone's attention read packed rows, if that leaves its states what they were; models whose
    attention is their own are left alone. -> whether it does."""
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
    return backbone.config._attn_implementation == ATTENTION


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
    output = backbone(
        input_ids=tokens[real][None],
        position_ids=positions[real][None],
        # Four dimensions mean "made already": transformers builds no mask of [N, N], ours comes from packing.
        attention_mask=tokens.new_zeros(1, 1, 1, 1, dtype=torch.bool),
        packing=Packing(lengths.tolist(), tokens.device),
        use_cache=False,
        **extra,
    )
    output.last_hidden_state = output.last_hidden_state[0]
    return output
