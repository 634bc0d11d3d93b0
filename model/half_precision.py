"""Frozen weights that are kept in 16 bits, in models that compute as if all weights were fp32.

``keep_in_half`` takes a model of transformers whose weights were loaded in bf16 or fp16. Its linear layers
and embeddings, which are nearly all of it, stay in 16 bits. Everything else becomes fp32, and so does every
hidden state. A number of 16 bits is exact in fp32, so results are those of the same weights in fp32, bit for
bit, under autocast too. ``make_fp32`` undoes it. The classes keep the names and the shapes of the weights.
"""

import torch
import torch.nn.functional as F
from torch import nn


class HalfLinear(nn.Linear):
    """A linear layer with 16-bit weights. Without autocast it computes in the dtype of its input."""

    def forward(self, x):
        """Inputs [..., in] -> [..., out]"""
        if torch.is_autocast_enabled(x.device.type):  # it casts by itself
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class HalfEmbedding(nn.Embedding):
    """An embedding with 16-bit weights that returns fp32."""

    def forward(self, ids):
        """Ids [...] -> fp32 [..., width]"""
        return super().forward(ids).float()


class ScoreHead(nn.Linear):
    """A score head: it computes in fp32, autocast or not, from inputs of any floating-point type."""

    def forward(self, x):
        """States [..., hidden] -> fp32 [..., 1]"""
        return fp32_head(self, x)


def fp32_head(head, x):
    """A linear layer with one output, computed in real fp32: without autocast, and on a GPU without TF32,
    forward and backward. States [..., hidden] -> fp32 [..., 1]"""
    with torch.autocast(x.device.type, enabled=False):
        product = sum_of_products if x.device.type == "cuda" else F.linear
        return product(x.float(), head.weight, head.bias)


def sum_of_products(x, weight, bias=None):
    """``F.linear`` for one output, but no matrix product, so that a GPU never computes it in TF32."""
    y = (x * weight[0]).sum(-1, keepdim=True)
    return y if bias is None else y + bias


HALF = {nn.Linear: HalfLinear, nn.Embedding: HalfEmbedding}
FULL = {half: full for full, half in HALF.items()}


def keep_in_half(model):
    """Change a model that was loaded in 16 bits, in place: see above. Buffers that are not saved are left
    for ``fill_buffers`` in loading.py to compute again."""
    for module in model.modules():
        if type(module) in HALF and module.weight.dtype in (torch.bfloat16, torch.float16):
            module.__class__ = HALF[type(module)]
        elif type(module) not in FULL:
            _to_fp32(module)


def make_fp32(model):
    """Make every weight fp32 and every class torch's own again, in place. Shared weights stay shared."""
    for module in model.modules():
        module.__class__ = FULL.get(type(module), type(module))
        _to_fp32(module)


def _to_fp32(module):
    """All floating-point weights and buffers of this module, without its children."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()


def make_score_heads(model):
    """Make every linear layer with one output that is a direct child of the model a ``ScoreHead`` in fp32."""
    for head in model.children():
        if type(head) in (nn.Linear, HalfLinear) and head.out_features == 1:
            head.__class__ = ScoreHead
            _to_fp32(head)
