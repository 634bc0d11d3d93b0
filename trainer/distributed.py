"""One process or many: everything the trainer needs to know about the others.

``torchrun`` sets RANK, LOCAL_RANK and WORLD_SIZE; without it a run is a world of one, and every function here
is then the identity. Backend: nccl on GPUs, gloo on CPUs.
"""

import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from errors import InputError


@dataclass(frozen=True)
class World:
    """Who this process is among ``size`` processes, and its device."""

    rank: int
    size: int
    device: torch.device
    _wrapped: list = field(default_factory=list)

    @property
    def is_main(self):
        return self.rank == 0

    def sum(self, tensor):
        """The sum of every process' tensor; all must call it, in the same order."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, item):
        """Every process' (picklable) item, in the order of ranks."""
        items = [item]
        if self.size > 1:
            items = [None] * self.size
            dist.all_gather_object(items, item)
        return items

    def wrap(self, module):
        """DistributedDataParallel where there is more than one process: gradients become means over them."""
        if self.size == 1:
            return module
        ids = [self.device.index] if self.device.type == "cuda" else None
        self._wrapped.append(DistributedDataParallel(module, device_ids=ids, broadcast_buffers=False))
        return self._wrapped[-1]

    def accumulate(self, module, last):
        """Context of one micro-batch's backward: gradients travel only with the last one."""
        return nullcontext() if self.size == 1 or last else module.no_sync()

    def assert_identical(self, **modules):
        """RuntimeError, on every process, where the processes do not hold the very same weights.

        A weight is compared through the sum of its bit pattern, which no rounding can blur.
        """
        sums = {
            name: sum(int(p.detach().view(torch.int32).sum(dtype=torch.int64)) for p in module.parameters())
            for name, module in modules.items()
        }
        everyone = self.gather(sums)
        if any(other != everyone[0] for other in everyone):
            raise RuntimeError(f"processes hold different weights; checksums by rank: {everyone}")
        return sums

    def close(self):
        """Leave the other processes. A wrapper's reducer must go first: were it the last owner of the process
        group, it would join gloo's threads while holding the lock that they wait for, and never end."""
        if self.size > 1:
            for module in self._wrapped:
                module.reducer = module.logger = None
            dist.destroy_process_group()


def init_world(device, require=False):
    """Join the processes that ``torchrun`` started, or be alone. Raises InputError for an unusable device."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if require and "WORLD_SIZE" not in os.environ:
        raise InputError("--ddp: start with 'torchrun --nproc_per_node N trainer/train_ppo.py …'")
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
    if size > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=10))
    return World(int(os.environ.get("RANK", "0")) if size > 1 else 0, size, device)
