"""One process or many: everything the trainer needs to know about the others.

``torchrun`` sets RANK, LOCAL_RANK and WORLD_SIZE; without it a run is a world of one, and every function here
is then the identity. Backend: nccl on GPUs, gloo on CPUs. Gradients are summed in the open, after the last
micro-batch (``sum_gradients``), so no model is wrapped: a forward that bypasses a wrapper, the way for
processes to drift apart unnoticed, cannot exist. Their weights are compared all the same (see below).
"""

import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from errors import InputError, SaidElsewhere
from trainer.heartbeat import Heartbeat

BUCKET = 1 << 24  # gradients that travel together
PATIENCE = timedelta(minutes=30)  # for a process that lives but is late: with its reward function, say


@dataclass(frozen=True)
class World:
    """Who this process is among ``size`` processes, and its device."""

    rank: int
    size: int
    device: torch.device
    heartbeat: Heartbeat | None = None

    @property
    def is_main(self):
        return self.rank == 0

    def sum(self, tensor):
        """The sum of every process' tensor; all must call it, in the same order."""
        if self.size > 1:
            self._collective(dist.all_reduce, tensor)
        return tensor

    def gather(self, item):
        """Every process' (picklable) item, in the order of ranks."""
        items = [item]
        if self.size > 1:
            items = [None] * self.size
            self._collective(dist.all_gather_object, items, item)
        return items

    def _collective(self, operation, *args):
        try:
            operation(*args)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the connection broke: torchrun says which process ended, and why
            reason = str(error).strip().splitlines()[0][:120]
            raise SystemExit(
                f"error: process {self.rank} has lost the others ({reason}); go on with --resume"
            ) from None

    def sum_gradients(self, module):
        """Every parameter's gradient becomes the sum over all processes. A parameter that no token of this
        process reached (an expert, say) counts as zero."""
        parameters = [p for p in module.parameters() if p.requires_grad] if self.size > 1 else []
        while parameters:
            bucket, count = [], 0
            while parameters and (not bucket or count + parameters[0].numel() <= BUCKET):
                bucket.append(parameters.pop(0))
                count += bucket[-1].numel()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = self.sum(torch.cat([grad.flatten() for grad in grads]))
            for p, grad in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = grad.view_as(p)

    @contextmanager
    def all_or_none(self):
        """An ``InputError`` that one process meets in this block ends all of them; the main one says it."""
        error = None
        try:
            yield
        except InputError as met:
            error = met
        met = [(rank, text) for rank, text in enumerate(self.gather(error and str(error))) if text]
        if met:
            rank, text = met[0]
            kind = InputError if self.is_main else SaidElsewhere
            agreed = kind(text if rank == 0 else f"process {rank}: {text}")
            agreed.agreed = True
            raise agreed from error

    def check_identical(self, **modules):
        """End all processes where they do not hold the very same weights.

        Weights are compared through the sum of their bit patterns, which no rounding can blur.
        """
        if self.size == 1:
            return
        sums = {name: sum(map(bit_sum, module.parameters())) for name, module in modules.items()}
        everyone = self.gather(sums)
        if any(other != everyone[0] for other in everyone):
            raise SystemExit(
                f"error: processes hold different weights, nothing is saved; checksums by rank: {everyone}"
            )

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        """Leave the other processes; without a farewell, so that they miss it, unless all are leaving."""
        signal = isinstance(error, SystemExit) and isinstance(error.code, int)
        agreed = kind is None or signal or (isinstance(error, InputError) and error.agreed)
        if self.size > 1 and agreed:
            self.heartbeat.end()
            dist.destroy_process_group()


def bit_sum(tensor):
    """The sum of a tensor's bit patterns in fp32, as an int: a checksum that sees every last bit."""
    return int(tensor.detach().float().view(torch.int32).sum(dtype=torch.int64))


def init_world(device, require=False):
    """Join the processes that ``torchrun`` started, or be alone. Raises InputError for an unusable device."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if require and "WORLD_SIZE" not in os.environ:
        raise InputError(f"--ddp: start with 'torchrun --nproc_per_node N {sys.argv[0]} …'")
    try:
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda":
            index = int(os.environ["LOCAL_RANK"]) if size > 1 else device.index or 0
            if index >= torch.cuda.device_count():
                raise RuntimeError(f"there are {torch.cuda.device_count()} GPUs")
            device = torch.device("cuda", index)
            torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--device {device}: not usable here ({reason}); try --device cpu") from None
    if size == 1:
        return World(0, 1, device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    return World(rank, size, device, Heartbeat(store.clone(), rank, size))
