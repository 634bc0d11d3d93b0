"""Training with several processes or GPUs: how they keep gradients and weights the same, and how they end.

Every process holds the whole models and trains on its own share of each batch. All start with equal weights.
Losses are sums divided by a number of the whole minibatch, so gradients add up (``sum_gradients``); then
every process clips the same gradient and does the same step. After each batch ``check_identical`` compares
weights. Models are not wrapped (as by DistributedDataParallel), because a forward that bypasses its wrapper
would skip the sum unnoticed. With ``--shard 1``: compute/sharding.py. A process that hangs is noticed after
``PATIENCE``. How processes end: docs/scale.md.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _take_tensors
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from errors import CollectiveError, InputError, as_input_error, first_line
from model.weights import sharded_and_whole, weights_hash

SUMMED = 1 << 26  # bytes of gradients that are added up at a time: 64 MiB, which are copied
PATIENCE = timedelta(minutes=30)  # the longest wait for a process that is slow (its reward function) or hangs

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The process group (torch.distributed), as this process sees it: its ``rank`` among ``size`` processes,
    and its device. With one process there is no group, and every method works without one."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of every process' tensor, in place. All processes must call it, in the same order."""
        self.collective(dist.all_reduce, tensor)
        return tensor

    def gather(self, item: T) -> list[T]:
        """Every process' (picklable) item, as a list by rank. All must call it, in the same order."""
        items = [item] * self.size
        self.collective(dist.all_gather_object, items, item)
        return items

    def from_main(self, item: T) -> T:
        """The main process' (picklable) item. All must call it, in the same order."""
        return self.gather(item)[0]

    def collective(self, operation: Callable[..., object], *args: object) -> None:
        """Call an operation that needs all processes, where there are several. SystemExit if the connection
        to one of them broke."""
        try:
            if self.size > 1:
                operation(*args)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self.lost_contact(error) from None

    def lost_contact(self, error: RuntimeError) -> SystemExit:
        """-> what ends this process where the connection to another one broke. torchrun prints which process
        ended first, and why."""
        return SystemExit(
            f"error: process {self.rank} lost contact with the others ({first_line(error)[:120]}); go on "
            "with --resume"
        )

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """If this block raises ``InputError`` in one process, all processes raise ``CollectiveError`` at its
        end; that of the main process has the message.

        All processes must enter the block. In a block within a block one exception is allowed: a process may
        fail in the outer block before it comes to the inner one. Then the others raise its error at the end
        of the inner block.
        """
        own_error = None
        try:
            yield
        except CollectiveError:  # in a block inside this one
            raise
        except InputError as error:
            own_error = error
        for rank, first in enumerate(self.gather(own_error)):
            if first:
                text = str(first) if rank == 0 else f"process {rank}: {first}"
                raise CollectiveError(text if self.is_main else "") from own_error

    def check_identical(self, **modules: nn.Module) -> None:
        """End all processes (SystemExit) unless they hold exactly the same weights.

        modules: {name: module}. Checksums are compared, so a difference in the last bit is found, and so are
        two numbers that have changed places. Of a sharded module its vectors are compared.
        """
        if self.size == 1:
            return
        sums = {name: weights_hash(module) for name, module in modules.items()}
        everyone = self.gather(sums)
        if any(other != sums for other in everyone):
            raise SystemExit(
                f"error: processes hold different weights, nothing is saved; checksums by rank: {everyone}"
            )

    def share_of(self, items: Sequence[T]) -> list[T]:
        """This process' share of a dataset's items. Where there are too few to share, every process takes
        all, which gives the same means."""
        return list(items if len(items) < self.size else items[self.rank :: self.size])

    def batches_of(self, count: int, size: int) -> list[list[int]]:
        """This process' share of the places 0 to ``count`` - 1 -> lists of at most ``size`` places, equally
        many in all processes: [] where only others have some left."""
        places = self.share_of(range(count))
        most = count if count < self.size else -(-count // self.size)
        return [places[start : start + size] for start in range(0, most, size)]

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradients of all parameters that train by their sums over all processes; one that a
        process does not have counts as 0. Sharded parameters are left out: torch has summed theirs in the
        backward."""
        if self.size == 1:
            return
        grads = []
        for p in sharded_and_whole(parameters)[1]:
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                grads.append(p.grad)
        for some in _take_tensors(grads, SUMMED):
            vector_to_parameters(self.sum(parameters_to_vector(some)), some)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *raised: object) -> None:
        """Leave the group at the end of a run. After an error this process waits for no other."""
        if self.size == 1:
            return
        if raised[0] is None:
            dist.destroy_process_group()
        elif dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()  # destroying it would wait for the others


def init_world(device: str, require: int = False) -> World:
    """Join the processes that ``torchrun`` started, if it did -> ``World``.

    device: --device, "" for a GPU if there is one; require: --ddp. Each process takes a GPU of its own; where
    a single machine has fewer, --device cuda:N puts all on that one. Raises InputError if the device cannot
    be used, or if ``require`` is set and torchrun has not started this process.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # on this machine
    backend = "gloo"
    if require and "WORLD_SIZE" not in os.environ:
        raise InputError(f"--ddp: start with 'torchrun --nproc_per_node N {sys.argv[0]} …'")
    with as_input_error(f"--device {device or 'cuda'}: not usable here (--device cpu always is)"):
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if place.type == "cuda":
            gpus = torch.cuda.device_count()
            number = place.index or 0
            if size > 1 and processes <= gpus:
                number = int(os.environ["LOCAL_RANK"])
                backend = "nccl"  # which refuses two processes on one GPU
            elif size > 1 and gpus and (place.index is None or processes < size):
                raise InputError(
                    f"{processes} processes and {gpus} GPUs here: start one for each GPU (--nproc_per_node), "
                    "or put all on one with --device cuda:0, which is slow"
                )
            place = torch.device("cuda", number)
            torch.cuda.set_device(place)
        elif place.type == "mps":
            if size > 1:
                raise InputError("a Mac's GPU takes one process; start it without torchrun")
            if not torch.backends.mps.is_available():
                raise InputError("torch finds no GPU of a Mac")
        elif place.type != "cpu":
            raise InputError("only cpu, cuda and mps are supported")
        torch.zeros(1, device=place)
    if size == 1:
        return World(0, 1, place)
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group(
        backend, store=store_of_attempt(store), rank=rank, world_size=size, timeout=PATIENCE
    )
    return World(rank, size, place)


def store_of_attempt(store: dist.Store) -> dist.Store:
    """torchrun's store -> the part of it that only the processes of this attempt use (``--max_restarts``).

    All attempts of an agent have one store, where the last one has left its addresses: who reads these waits
    for ever. Raises InputError on several machines, whose agents count attempts differently.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0":
        return store
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        raise InputError(
            "torchrun --max_restarts: works on one machine; type the same command again on all machines, "
            "with --run_name and --resume auto"
        )
    return dist.PrefixStore(f"attempt_{attempt}", store)
