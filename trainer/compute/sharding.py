"""Sharding (``--shard 1``): each process keeps a part of every model, and lends it when it is needed.

torch's FSDP2 (``fully_shard``) does the work. Of every matrix each process keeps some rows, with their
gradient and AdamW's moments. Before a layer computes, all processes gather its matrices, in the dtype of
mixed precision, and forget them after it; the backward gathers them again and then sums the layer's gradient:
each process receives the sum of its rows. Embeddings, head and value head are gathered in fp32 for a whole
forward or backward. Vectors (norms, biases) stay whole in every process and compute in fp32; their gradients
are summed as those of unsharded runs are (runs/distributed.py). So sharded and unsharded runs
compute the same, up to the order in which sums are made.

Every gather (``full_tensor`` of a matrix) needs all processes. So they go through a model together, with the
same number of passes (``ShardGroup``). Where memory runs out in one process it ends, and so do the others,
which would wait for it.

Every process loads the whole models into main memory first.

Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO stage 3); Zhao et al. 2023, arXiv:2304.11277 (FSDP).
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.compute.batching import halve
from trainer.compute.memory import is_out_of_memory

OUT_OF_MEMORY = (
    "error: out of memory. With --shard 1 no process can go back within a step; go on from the newest "
    "checkpoint with --resume and --gradient_checkpointing 1 or a larger --accumulation_steps"
)


def shard(
    root: nn.Module, shard_group: "ShardGroup", dtype: torch.dtype, model: nn.Module | None = None
) -> None:
    """Shard the matrices of a module in place, layer by layer. All processes must call it, with the same
    weights.

    root: a module that is only used by calling it: a scorer (scoring.py) or a backbone; dtype: of mixed
    precision, in which layers are gathered; model: of which the root is a part, default none. What has one
    or no dimension stays whole, on the device, and so does what the model has besides the root.
    """
    # Nothing changes in place what a scorer returns.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    device = shard_group.world.device
    sharded = set(root.parameters())
    unsharded = {p for p in (model or root).parameters() if p.dim() < 2 or p not in sharded}
    for p in unsharded:
        p.data = p.data.to(device)

    def split(module, gathered_in):
        policy = MixedPrecisionPolicy(
            param_dtype=gathered_in, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        fully_shard(
            module,
            mesh=shard_group.mesh,
            reshard_after_forward=True,
            mp_policy=policy,
            ignored_params=unsharded,
        )

    for layer in layers_of(root):
        split(layer, None if dtype == torch.float32 else dtype)
    split(root, None)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sums, not means
            module.set_force_sum_reduction_for_comms(True)
            if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
                # A matrix that only some processes use (an expert of its own) would be added to another one.
                module.set_reduce_scatter_unused_params(True)
    (model or root).to(device)  # buffers


def layers_of(module: nn.Module) -> list[nn.Module]:
    """A model's layers, as transformers marks them."""
    return [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]


class ShardGroup:
    """The process group of a sharded run, whose processes go through its models together: all must call each
    method, in the same order."""

    def __init__(self, world: Any) -> None:  # a ``World``, of a layer above, so not imported
        self.world = world
        self.mesh = init_device_mesh(world.device.type, (world.size,))

    def equal_passes(self, pieces: list[list[int]]) -> list[list[int]]:
        """Micro-batches (lists of rows), cut further so that every process has equally many; [] for a pass
        without rows, where a process has too few."""
        pieces = list(pieces)
        for _ in range(max(self.world.gather(len(pieces))) - len(pieces)):
            largest: list[int] = max(pieces, key=len, default=[])
            if len(largest) > 1:
                pieces.remove(largest)
                pieces += halve(largest)
            else:
                pieces.append([])
        return pieces

    def run(self, work: Callable[..., object], *args: Any) -> None:
        """Call ``work(*args)``, a pass through a sharded model. SystemExit in one line where memory runs out
        here, or where another process has ended. Not an InputError, on which all processes agree after a
        block: the others wait within the pass."""
        try:
            work(*args)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise SystemExit(OUT_OF_MEMORY) from None
            if isinstance(error, dist.DistBackendError) or "gloo" in str(error):
                raise self.world.lost_contact(error) from None
            raise
