"""Sharding (``--shard 1``): each process keeps a part of every model, and lends it when it is needed.

torch's FSDP2 (``fully_shard``) does the work. Of every matrix each process keeps some rows, with their
gradient and AdamW's moments. Before a layer computes, all processes gather its matrices, in the dtype of
mixed precision, and forget them after it; the backward gathers them again and then sums the layer's gradient:
each process receives the sum of its rows. Embeddings, head and value head are gathered in fp32 for a whole
forward or backward. Vectors (norms, biases) stay whole in every process and compute in fp32; their gradients
are summed as those of unsharded runs are (runs/distributed.py). So sharded and unsharded runs
compute the same, up to the order in which sums are made.

Every gather needs all processes. So they go through a model in step (``InStep``): with the same number of
passes, and to the end of a pass even where memory runs out in one of them.

Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO stage 3); Zhao et al. 2023, arXiv:2304.11277 (FSDP).
"""

import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from model.shards import is_sharded, local_part
from progress_bar import phase
from trainer.compute.batching import halves, micro_batches
from trainer.compute.memory import attempt, out_of_memory_error

# Deprecated from torch 2.13 on, which has other names for them; torch 2.11 has only these.
DEPRECATED = r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"
warnings.filterwarnings("ignore", DEPRECATED, FutureWarning)


def shard(root, in_step, dtype, model=None):
    """Shard the matrices of a module in place, layer by layer. All processes must call it. The main
    process has the whole, and sends the others their rows; where all have it, each takes its own.

    root: a module that is only used by calling it: a scorer (scoring.py) or a backbone; dtype: of mixed
    precision, in which layers are gathered; model: of which the root is a part, default none. What has one
    or no dimension stays whole, on the device, and so does what the model has besides the root.
    """
    device = in_step.world.device
    model, sharded = model or root, set(root.parameters())
    loaded = [p.detach() for p in model.parameters()]
    whole = {p for p in model.parameters() if p.dim() < 2 or p not in sharded}
    for p in whole:
        p.data = p.data if p.is_meta else p.data.to(device)
    options = {"mesh": in_step.mesh, "reshard_after_forward": True, "ignored_params": whole}
    kinds = {"reduce_dtype": torch.float32, "cast_forward_inputs": False}
    layers = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, **kinds)
    for layer in layers_of(root):
        fully_shard(layer, mp_policy=layers, **options)
    fully_shard(root, mp_policy=MixedPrecisionPolicy(**kinds), **options)
    if hasattr(root, "balanced"):  # of a ``ValueScorer``: it is called instead of the module
        register_fsdp_forward_method(root, "balanced")
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sums, not means
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(in_step.gather)
            module.set_custom_reduce_scatter(in_step.scatter)
            if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
                # A matrix that only some processes use (an expert of its own) would be added to another one.
                module.set_reduce_scatter_unused_params(True)
    waits = any(x.is_meta for x in loaded)
    if waits:
        assert not any(x.is_meta for x in model.buffers()), "an outline's buffers have numbers"
        model._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
    if in_step.most(waits)[0]:
        in_step.hand_out(loaded, list(model.parameters()))


def layers_of(module):
    """A model's layers: those that can be checkpointed, else the parts of its first list."""
    layers = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
    return layers or list(next((m for m in module.modules() if isinstance(m, nn.ModuleList)), ()))


class InStep:
    """The processes of a sharded run go through its models together. All must call each method, in the same
    order.

    Where memory runs out in one process, the others wait for it in the next gather or sum of the same pass.
    So it goes on: it makes the pass again with a single sequence, leaves out the gathers and sums that it has
    taken part in, and does the rest. What it sends is right where weights are gathered, so the others' scores
    are. The sums of gradients are worthless: after the last pass all learn of it, and do the work again in
    smaller pieces.
    """

    def __init__(self, world):
        self.world = world
        self.mesh = init_device_mesh(world.device.type, (world.size,))
        self.done = self.skip = 0  # gathers and sums of this pass: how many were made, are to be left out
        self.failed = False  # whether memory has run out here since ``all_fitted``
        self.gather, self.scatter = _Gather(self), _Scatter(self)

    @torch.no_grad()
    def hand_out(self, loaded, parameters):
        """Fill parameters, sharded or whole, with the numbers that the main process has loaded. loaded: its
        whole tensors, which are forgotten one by one; other processes' have no memory."""
        for p in parameters:
            x = loaded.pop(0)
            x = torch.empty_like(x, device=p.device) if x.is_meta else x.to(p.device)
            if is_sharded(p):  # each receives its rows only
                x = self.world.collective(distribute_tensor, x, p.device_mesh, p.placements)
            else:
                self.world.collective(dist.broadcast, x, 0)
            local_part(p).copy_(local_part(x))

    def most(self, *numbers):
        """The largest of each number over all processes, as a list of ints."""
        numbers = torch.tensor(numbers, device=self.world.device)
        self.world.collective(dist.all_reduce, numbers, dist.ReduceOp.MAX)
        return numbers.tolist()

    def least(self, number):
        """The smallest of a number over all processes, as an int. Where one of them has failed and left a
        block of ``World.all_or_none``, the others, which are still in it, raise its error here."""
        with self.world.all_or_none():
            pass
        return -self.most(-int(number))[0]

    def all_fitted(self, fitted=True):
        """Whether memory sufficed in all processes."""
        failed, self.failed = self.failed or not fitted, False
        return not self.most(failed)[0]

    def passes(self, pieces):
        """Micro-batches (lists of rows), cut further so that every process has equally many; None for a pass
        without rows, where a process has too few."""
        pieces = list(pieces)
        for _ in range(self.most(len(pieces))[0] - len(pieces)):
            largest = max((piece for piece in pieces if piece), key=len, default=())
            if len(largest) > 1:
                pieces.remove(largest)
                pieces += halves(largest)
            else:
                pieces.append(None)
        return pieces

    def train(self, root, lengths, token_budget, work):
        """Call ``work(rows)``, which goes through ``root`` forward and backward, for every micro-batch of
        sequences of these lengths. If memory runs out anywhere, ``all_fitted`` says so, and the gradients
        are worthless."""
        single = min(range(len(lengths)), key=lengths.__getitem__)
        for rows in self.passes(micro_batches(lengths, token_budget)):
            self._attempt(root, work, rows, lambda: work([single]), lengths[single])

    def score(self, root, lengths, token_budget, work, dummy, name):
        """Call ``work(rows)``, which goes through ``root`` without gradients, for every micro-batch; those
        for which memory ran out are halved and done again. dummy(): the same pass with a single sequence,
        whose result nobody reads; name: of the progress bar."""
        waiting, shortest = micro_batches(lengths, token_budget), min(lengths, default=1)
        with phase(name, len(lengths), "sequences") as bar:
            while self.most(len(waiting))[0]:
                pieces, waiting = self.passes(waiting), []
                for rows in pieces:
                    failed_before = self.failed
                    if self._attempt(root, work, rows, dummy, shortest):
                        bar.done += len(rows or ())
                    elif rows:
                        if len(rows) == 1 and not failed_before:
                            raise _end(lengths[rows[0]])
                        waiting += halves(rows)
                self.failed = False

    def _attempt(self, root, work, rows, dummy, length):
        """Make one pass through ``root``: ``work(rows)``, or ``dummy()`` where there are no rows or where an
        earlier pass did not fit -> whether it is of use. length: of the dummy's sequence."""
        self.done, useful = 0, not self.failed
        if useful:
            if attempt(work, rows)[0] if rows else attempt(dummy)[0]:
                return True
            if not hasattr(root, "reset_iter_state"):
                raise SystemExit(
                    f"error: out of memory; torch {torch.__version__} cannot go on then with --shard 1; "
                    "raise --accumulation_steps, or install torch 2.13 or later"
                )
            if self.done:  # else the pass had not begun
                root.reset_iter_state()
            self.failed, self.skip = True, self.done
        if not attempt(dummy)[0]:
            raise _end(length)
        return False


def _end(length):
    """-> what ends this process where a sequence does not fit. Not an InputError, on which all processes
    agree after a block: the others wait in the middle of a pass, and end when this process has."""
    return SystemExit(f"error: {out_of_memory_error(length)}")


class _Counted:
    """A collective that ``InStep`` can leave out, because this process has taken part in it before."""

    def __init__(self, in_step):
        self.in_step = in_step

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def counted(self, collective, *args, **options):
        if self.in_step.skip:
            self.in_step.skip -= 1
            return None
        work = self.in_step.world.collective(partial(collective, **options), *args)
        self.in_step.done += 1
        return work


class _Gather(_Counted):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return self.counted(
            dist.all_gather_into_tensor, output_tensor, input_tensor, group=group, async_op=async_op
        )


class _Scatter(_Counted):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return self.counted(
            dist.reduce_scatter_tensor, output_tensor, input_tensor, group=group, op=op, async_op=async_op
        )
