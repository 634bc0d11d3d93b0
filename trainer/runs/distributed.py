"""Training with several processes or GPUs: how they keep gradients and weights the same, and how they end.

Without ``--shard 1`` every process holds the whole models. It trains on its own share of each batch
(dataset/data_order.py):

1. All start with equal weights, because they load the same files and use the same seed.
2. Losses are sums over tokens (or pairs), divided by their number in the minibatch over all processes
   (``update`` and ``backward`` in train_ppo.py, ``learn`` in supervised.py). So the gradients of all
   processes add up to the gradient of the whole minibatch.
3. They are added up after the backward (``sum_gradients``). Every process then clips the same gradient and
   does the same AdamW step.
4. After each batch ``check_identical`` compares the weights of all processes bit for bit. If they differ, the
   run ends and saves nothing.

Models are not wrapped (as by DistributedDataParallel), because a forward that bypasses its wrapper would skip
the sum unnoticed. ``torchrun`` sets RANK, LOCAL_RANK and WORLD_SIZE; without it a run has one process, whose
sums are its own numbers. Backend: nccl on GPUs, gloo on CPUs. torchrun ends all processes when one has died.
When one hangs, the others wait for it up to ``PATIENCE`` and then end.

With ``--shard 1`` no process keeps a whole model (compute/sharding.py). Then torch
sums the gradients of matrices, 3. holds for vectors, and 4. compares these.
"""

import os
import sys
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from errors import InputError, SaidElsewhere, first_line
from model.loading import as_input_error
from model.weights import sharded_and_whole

SUMMED = 1 << 26  # bytes of gradients that are added up at a time: 64 MiB, which are copied
PIECE = 2**16  # numbers of a tensor that are summed at once, for a checksum
PATIENCE = timedelta(minutes=30)  # the longest wait for a process that is slow (its reward function) or hangs


@dataclass(frozen=True)
class World:
    """This process: its ``rank`` among ``size`` processes, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self):
        return self.rank == 0

    def sum(self, tensor):
        """The sum of every process' tensor, in place. All processes must call it, in the same order."""
        if self.size > 1:
            self.collective(dist.all_reduce, tensor)
        return tensor

    def gather(self, item):
        """Every process' (picklable) item, as a list by rank. All must call it, in the same order."""
        items = [item]
        if self.size > 1:
            items = [None] * self.size
            self.collective(dist.all_gather_object, items, item)
        return items

    def from_main(self, item):
        """The main process' (picklable) item. All must call it, in the same order."""
        return self.gather(item)[0]

    def collective(self, operation, *args):
        """Call an operation that needs all processes. SystemExit if the connection to one of them broke."""
        try:
            return operation(*args)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self.lost_contact(error) from None

    def lost_contact(self, error):
        """-> what ends this process where the connection to another one broke. torchrun prints which process
        ended first, and why."""
        reason = first_line(error)[:120]
        return SystemExit(
            f"error: process {self.rank} lost contact with the others ({reason}); go on with --resume"
        )

    @contextmanager
    def all_or_none(self):
        """If this block raises ``InputError`` in one process, all processes raise it at the end of the block.

        The main process raises ``InputError``, whose message is printed; the others raise ``SaidElsewhere``,
        which prints nothing. All processes must enter the block, unless they raise before, in a block around
        it: then those inside raise that error.
        """
        error = None
        try:
            yield
        except InputError as met:
            if met.agreed:  # in a block inside this one
                raise
            error = met
        met = [(rank, text) for rank, text in enumerate(self.gather(error and str(error))) if text]
        if met:
            rank, text = met[0]
            kind = InputError if self.is_main else SaidElsewhere
            agreed = kind(text if rank == 0 else f"process {rank}: {text}")
            agreed.agreed = True
            raise agreed from error

    def check_identical(self, **modules):
        """End all processes (SystemExit) unless they hold exactly the same weights.

        modules: {name: module}. Checksums are compared (``bits_in_order``), so a difference in the last bit
        is found, and so are two numbers that have changed places.
        """
        if self.size == 1:
            return
        whole = {name: sharded_and_whole(module.parameters())[1] for name, module in modules.items()}
        sums = {name: hash(tuple(map(bits_in_order, parameters))) for name, parameters in whole.items()}
        everyone = self.gather(sums)
        if any(other != everyone[0] for other in everyone):
            raise SystemExit(
                f"error: processes hold different weights, nothing is saved; checksums by rank: {everyone}"
            )

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        """Leave the group if all processes end here: at the end of a run, after an ``InputError`` that all
        have raised, or after a signal. After any other error this process ends without waiting for them."""
        signal = isinstance(error, SystemExit) and isinstance(error.code, int)
        agreed = kind is None or signal or (isinstance(error, InputError) and error.agreed)
        if self.size > 1 and agreed:
            dist.destroy_process_group()


def bits_in_order(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's fp32 bit patterns that depends on every bit and on its place."""
    pieces = tensor.detach().float().view(torch.int32).flatten().split(PIECE)
    places = torch.arange(1, PIECE + 1, device=tensor.device)  # int64: the sum of a piece is below 2 ** 63
    return hash(tuple(torch.stack([(bits * places[: len(bits)]).sum() for bits in pieces]).tolist()))


def sum_gradients(parameters: Iterable[torch.nn.Parameter], world: World) -> None:
    """Replace the gradients of all parameters that train by their sums over all processes; one that a process
    does not have counts as 0. Sharded parameters are left out: torch has summed theirs in the backward."""
    if world.size == 1:
        return
    wanted = [p for p in sharded_and_whole(parameters)[1] if p.requires_grad]
    for p in wanted:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for grads in _take_tensors([p.grad for p in wanted], SUMMED):
        numbers = world.sum(_flatten_dense_tensors(grads))
        for grad, part in zip(grads, _unflatten_dense_tensors(numbers, grads), strict=True):
            grad.data = part


def init_world(device, require=False):
    """Join the processes that ``torchrun`` started, if it did -> ``World``.

    device: --device, "" for a GPU if there is one; require: --ddp. Raises InputError if the device cannot be
    used, or if ``require`` is set and torchrun has not started this process.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if require and "WORLD_SIZE" not in os.environ:
        raise InputError(f"--ddp: start with 'torchrun --nproc_per_node N {sys.argv[0]} …'")
    with as_input_error(f"--device {device}: not usable here (--device cpu always is)"):
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda":
            index = int(os.environ["LOCAL_RANK"]) if size > 1 else device.index or 0
            if index >= torch.cuda.device_count():
                raise InputError(f"there are {torch.cuda.device_count()} GPUs")
            device = torch.device("cuda", index)
            torch.cuda.set_device(device)
        elif device.type != "cpu":  # mps has no fp64, in which sampling and metrics are computed
            raise InputError("only cpu and cuda are supported")
        torch.zeros(1, device=device)
    if size == 1:
        return World(0, 1, device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store, rank, size = next(dist.rendezvous("env://"))
    store = store_of_attempt(store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    return World(rank, size, device)


def store_of_attempt(store: dist.Store) -> dist.Store:
    """torchrun's store -> the part of it that only the processes of this attempt use (``--max_restarts``).

    All attempts of an agent have one store, where the last one has left its addresses: who reads these waits
    for ever. Raises InputError on several machines, whose agents count attempts differently.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or attempt == "0":
        return store  # a new one
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        raise InputError(
            "torchrun --max_restarts: works on one machine; type the same command again on all machines, "
            "with --run_name and --resume auto"
        )
    return dist.PrefixStore(f"attempt_{attempt}", store)


def share_of(items, world):
    """This process' share of a dataset's items, as a list. Where there are too few to share, every process
    takes all, which gives the same means."""
    few = len(items) < world.size
    places = range(len(items)) if few else range(world.rank, len(items), world.size)
    return [items[i] for i in places]


def batches_of(count, size, world):
    """This process' share of the places 0 to ``count`` - 1 -> lists of at most ``size`` places, equally many
    in all processes: [] where only others have some left."""
    places = share_of(range(count), world)
    most = count if count < world.size else -(-count // world.size)
    return [places[start : start + size] for start in range(0, most, size)]
