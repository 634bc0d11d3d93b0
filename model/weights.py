"""How weights are kept: frozen ones in 16 bits, and with ``--shard 1`` each process has some of their rows.

``keep_in_half`` takes a model of transformers whose weights were loaded in bf16 or fp16. Its linear layers
and embeddings, which are nearly all of it, stay in 16 bits; everything else becomes fp32, and so does every
hidden state. A number of 16 bits is exact in fp32, so results are those of the same weights in fp32, bit for
bit, under autocast too. With fp32 weights its classes compute as torch's own.

``weights_hash`` says whether two models have the same weights.
"""

import hashlib
import json
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# ---------------------------------------------------------------- sharded weights


def local_part(x: Tensor) -> Tensor:
    """What this process has of a tensor, in place: the rows of a sharded one, all of any other."""
    return x.to_local() if isinstance(x, DTensor) else x


def full_tensor(x: Tensor) -> Tensor:
    """All of a tensor. Of a sharded one all processes must ask for it, in the same order."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def sharded_and_whole(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors -> (those that are sharded, the others), in their order."""
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for x in tensors:
        parts[not isinstance(x, DTensor)].append(x)
    return parts


def all_finite(x: Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinite numbers. Its least and largest number show both, and cost
    an eighth of the time of a mask of all its numbers."""
    return not x.numel() or bool(torch.stack(x.aminmax()).isfinite().all())


# ---------------------------------------------------------------- fingerprints

PIECE = 2**16  # numbers of a parameter that are summed at once


def short_hash(content: object) -> str:
    """The hash of anything that JSON can hold -> 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def weights_hash(module: nn.Module) -> str:
    """The hash of all parameters that are not sharded, with their names -> 12 hexadecimal digits. It depends
    on every bit of their numbers in fp32, and on its place."""
    names = []
    sums = []
    for name, p in module.named_parameters():
        if isinstance(p, DTensor):
            continue
        names.append(name)
        places = torch.arange(1, PIECE + 1, device=p.device)  # int64: the sum of a piece is below 2 ** 63
        for bits in p.detach().float().view(torch.int32).flatten().split(PIECE):
            sums.append((bits * places[: len(bits)]).sum())
    return short_hash([names, torch.stack(sums).tolist()])


# ---------------------------------------------------------------- weights in 16 bits


class HalfLinear(nn.Linear):
    """A linear layer with 16-bit weights. Without autocast it computes in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [..., in] -> [..., out]"""
        if torch.is_autocast_enabled(x.device.type):  # it casts by itself
            return super().forward(x)
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class HalfEmbedding(nn.Embedding):
    """An embedding with 16-bit weights that returns fp32."""

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [...] -> fp32 [..., width]"""
        return super().forward(ids).float()


class ScoreHead(nn.Linear):
    """A linear layer with one output, computed in real fp32: without autocast, and on a GPU without TF32,
    forward and backward. Its inputs are of any floating-point type."""

    def forward(self, x: Tensor) -> Tensor:
        """States [..., hidden] -> fp32 [..., 1]"""
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            if not x.is_cuda:
                return super().forward(x)
            y = (x * self.weight[0]).sum(-1, keepdim=True)  # no matrix product, so never in TF32
            return y if self.bias is None else y + self.bias


HALF = {nn.Linear: HalfLinear, nn.Embedding: HalfEmbedding}


def keep_in_half(model: nn.Module) -> None:
    """Change a model that was loaded in 16 bits, in place: see above."""
    for module in model.modules():
        kind = HALF.get(type(module))
        if kind and next(module.parameters()).dtype in (torch.bfloat16, torch.float16):
            module.__class__ = kind
        else:
            _to_fp32(module)


def make_score_heads(model: nn.Module) -> None:
    """Make every linear layer with one output that is a direct child of the model a ``ScoreHead`` in fp32."""
    for head in model.children():
        if type(head) is nn.Linear and head.out_features == 1:
            head.__class__ = ScoreHead
            _to_fp32(head)


def _to_fp32(module: nn.Module) -> None:
    """All floating-point weights and buffers of this module, without its children."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
