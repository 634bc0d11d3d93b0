"""How much memory this process can still get: of a GPU, or of the machine and the container that it is in."""

import contextlib
import os

import psutil
import torch

from trainer.compute.threads import CGROUPS, OWN, own_groups

UNLIMITED = 1 << 60  # version 1 writes a number of this size where there is no limit


def free_memory(device, alone=False):
    """Bytes that this process can still get: of the GPU, or its share of the machine's main memory; alone:
    all of that."""
    if device.type == "cuda":
        return _free_on_gpu(device)
    free = min(psutil.virtual_memory().available, free_in_groups())
    return free // (1 if alone else int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _free_on_gpu(device):
    """What the driver has left and what torch holds and does not use, within the fraction of the GPU that
    torch was allowed (``torch.cuda.set_per_process_memory_fraction``)."""
    free, total = torch.cuda.mem_get_info(device)
    used, held = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    allowed = total
    if hasattr(torch.cuda, "get_per_process_memory_fraction"):
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free + held - used, allowed - used)


def free_in_groups(groups=CGROUPS, own=OWN):
    """Bytes that the control groups of this process leave it; ``UNLIMITED`` if they have no limit. Pages of
    files count as free: the system takes them back where it needs memory."""
    return min((_free_in(group) for group in own_groups("memory", groups, own)), default=UNLIMITED)


def _free_in(group):
    names = ("memory.max", "memory.current", "active_file", "inactive_file")  # version 2
    if not (group / names[0]).exists():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file")
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit, used = ((group / name).read_text().strip() for name in names[:2])
        if limit != "max" and int(limit) < UNLIMITED:
            facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return max(0, int(limit) - int(used) + sum(int(facts[name]) for name in names[2:]))
    return UNLIMITED
