"""Packing: sequences go through a model one behind the other, so that it computes real tokens only.

A micro-batch is one row of N tokens, each with its position in its own sequence. Only attention
(attention.py) has to know where a sequence ends.

The lengths of sequences are known on the host. So the tables that say where the tokens lie are made there,
from lists, once for all forwards of a micro-batch (``Layout``), and copied to the device in one piece. A GPU
never has to be asked for a length, which would mean to wait until it is idle.
"""

import math
import warnings

import numpy as np
import torch
import torch.nn.functional as F

from model.loading import quiet
from trainer.compute.attention import ATTENTION, Packing
from trainer.compute.batching import ragged, send_arrays
from trainer.compute.fused_layers import fuse_layers
from trainer.compute.kernels import difference
from trainer.compute.precision import rows_to_add


class Layout:
    """The places of B sequences: of all their N tokens, and of the M tokens whose predictions are wanted.

    lengths: B ints. wanted: the M places among the N tokens, none of them at the start of a sequence, because
    nothing predicts it. On the device there are

    - ``length`` [B], and ``row`` and ``position`` [N] of each token in the right-padded rows, row by row;
    - ``wanted_row`` and ``wanted_position`` [M] of each wanted token, and ``predicted_by`` [M], the place
      among the N tokens of the state that predicts it;
    - ``response`` [M], the place of each response token in [B, R], flat, of a layout ``of_responses``.
    """

    shape = None  # (B, R), R the longest response, of ``of_responses``

    def __init__(self, lengths, wanted=(), device="cpu", response=()):
        self.lengths = [int(x) for x in lengths]
        self.packings = {}  # what ``packed_states`` keeps here
        row, position = ragged(self.lengths)
        wanted = np.asarray(wanted, np.int64)
        tables = [self.lengths, row, position, row[wanted], position[wanted], wanted - 1, response]
        self.length, self.row, self.position, *wanted = send_arrays(tables, device)
        self.wanted_row, self.wanted_position, self.predicted_by, self.response = wanted

    @classmethod
    def of_responses(cls, prompt_len, response_len, device="cpu"):
        """The layout of prompts with their responses (two lists of B ints, the responses not empty): the
        response tokens are wanted."""
        prompt = np.array(prompt_len, np.int64)
        count = np.array(response_len, np.int64)
        row, column = ragged(count)
        first = (prompt + count).cumsum() - count  # of each response, among the N tokens
        width = int(count.max())
        layout = cls(prompt + count, first[row] + column, device, row * width + column)
        layout.prompt_len = prompt_len
        layout.response_len = response_len
        layout.shape = len(prompt), width
        return layout

    def spread(self, flat):
        """flat [M], a number for each response token -> [B, R], 0 elsewhere. Keeps gradients. Of a layout
        without responses it stays as it is."""
        if self.shape is None:
            return flat
        return flat.new_zeros(math.prod(self.shape)).index_copy_(0, self.response, flat).view(self.shape)


@torch.no_grad()
def pack_sequences(backbone):
    """Let a backbone read packed rows, and fuse its layers (``fuse_layers``) -> whether it reads packed rows.

    Packed and padded states are compared first. Where they differ, and where a model does not use the
    attention interface of transformers, the backbone stays as it was, and a warning says so.
    """
    config = backbone.config
    before = config._attn_implementation
    if before == ATTENTION:
        return True
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(backbone.get_input_embeddings().num_embeddings, (3, 9), generator=generator)
    tokens = tokens.to(backbone.device)

    def states():
        return packed_states(backbone, tokens, [9, 8, 4]).last_hidden_state

    def packed():
        with quiet():
            backbone.set_attn_implementation(ATTENTION)
        return states()

    if difference(states, packed, backbone.device):
        backbone.set_attn_implementation(before)
    if config._attn_implementation != ATTENTION:  # some keep their own and raise no error
        warnings.warn(f"{type(backbone).__name__}: computed with padding, which is slower", stacklevel=2)
        return False
    fuse_layers(backbone, states)
    return True


def packed_states(backbone, tokens, layout, **extra):
    """Run a backbone on right-padded tokens [B, T] -> its output, whose ``last_hidden_state`` [N, H] has the
    states of the N real tokens, row by row. layout: ``Layout``, or B lengths. extra: of a ``BalanceLoss``."""
    if not isinstance(layout, Layout):
        layout = Layout(layout, device=tokens.device)
    row = layout.row
    position = layout.position
    if backbone.config._attn_implementation == ATTENTION:
        count = len(row)
        filler = rows_to_add(count, backbone.get_input_embeddings().weight)
        if filler not in layout.packings:
            lengths = [*layout.lengths, filler] if filler else layout.lengths
            layout.packings[filler] = Packing(lengths, tokens.device)
        output = backbone(
            input_ids=F.pad(tokens[row, position], (0, filler))[None],
            position_ids=F.pad(position, (0, filler))[None],
            # Of four dimensions: transformers builds none of [N, N]. ``packing`` has the bounds instead.
            attention_mask=tokens.new_zeros(1, 1, 1, 1, dtype=torch.bool),
            packing=layout.packings[filler],
            use_cache=False,
            **extra,
        )
        output.last_hidden_state = output.last_hidden_state[0, :count]
        place = slice(count)
    else:
        output = backbone(input_ids=tokens, use_cache=False, **extra)
        output.last_hidden_state = output.last_hidden_state[row, position]
        place = row * tokens.shape[1] + position
    if extra:  # the logits of routers
        output.router_logits = tuple(x[place] for x in output.router_logits)
    return output
