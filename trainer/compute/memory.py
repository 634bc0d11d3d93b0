"""Memory: how much is free, what is done where it runs out, and frozen models that wait outside the GPU.

Where memory runs out, the work is done again in smaller pieces. No result depends on how a batch is cut. With
``--shard 1`` the run ends instead (sharding.py), and so it does where a single sequence does not fit.

Training keeps the smaller micro-batches for the rest of the run (runs/optimizer_step.py), scoring halves the
micro-batch that did not fit (``each_micro_batch``), and sampling starts again with half the slots
(generation/engine.py). To need less from the start: ``--accumulation_steps``, ``--gradient_checkpointing 1``,
``--moments_dtype bfloat16``, ``--offload_frozen 1``, ``--lora_r``. What fills it: docs/performance.md.

``HostMemory`` is ``--offload_frozen 1``. ``keep_freed_memory`` is about speed: it makes the C library reuse
what tensors free. ``peak_memory`` is for the summary of a run.
"""

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from errors import InputError
from progress_bar import phase
from trainer.compute.batching import Beginnings, halve, micro_batches
from trainer.compute.threads import least_of_groups

# How torch, CUDA, Triton ("out of memory") and cuBLAS say that memory ran out
OUT_OF_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # there is no room for what cuBLAS itself needs
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, of the device or of the machine."""
    return any(text in str(error) for text in OUT_OF_MEMORY)


def attempt(work: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    """Call ``work(*args)`` -> (True, its result), or (False, None) where memory ran out."""
    try:
        return True, work(*args)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    # Only after the except block: until the exception is gone, its frames hold the tensors that fill memory.
    free_unused_memory()
    return False, None


def free_unused_memory() -> None:
    """Free what nothing uses any more, and give back what torch keeps of a GPU's memory for later, and what
    the C library of Linux keeps of the main memory."""
    gc.collect()  # tensors in a cycle of references, which would otherwise wait for Python's collector
    empty_device_cache()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def empty_device_cache() -> None:
    """Give back what torch keeps of a GPU's memory for later; without a GPU nothing happens."""
    torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def each_micro_batch(
    lengths: list[int],
    token_budget: int,
    work: Callable[[list[int]], object],
    name: str = "scoring",
    shard_group: Any = None,  # ``ShardGroup``, of sharding.py
    beginnings: Beginnings = (),
) -> None:
    """Call ``work(rows)`` for every micro-batch of sequences of these lengths. A micro-batch for which memory
    runs out is halved, and both halves are done again. InputError if a single sequence does not fit.

    name: of the progress bar; shard_group: of a sharded model that ``work`` calls: then all processes must
    call this function, and ``work([])`` makes a pass of any sequence."""
    waiting = micro_batches(lengths, token_budget, beginnings)
    if shard_group:
        waiting = shard_group.equal_passes(waiting)
    with phase(name, len(lengths), "sequences") as bar:
        while waiting:
            rows = waiting.pop(0)
            if shard_group:
                shard_group.run(work, rows)
            elif not attempt(work, rows)[0]:
                if len(rows) == 1:
                    raise out_of_memory_error(lengths[rows[0]])
                waiting = halve(rows) + waiting
                continue
            bar.update(len(rows))


def out_of_memory_error(length: int) -> InputError:
    """-> the InputError for a sequence of ``length`` tokens that does not fit into memory on its own."""
    return InputError(
        f"out of memory for a single sequence of {length} tokens; lower --max_gen_len or --max_seq_len, or "
        "add --gradient_checkpointing 1"
    )


def keep_freed_memory() -> None:
    """On Linux, make the C library keep memory that tensors free, instead of giving it back to the system.

    A page that the system has to find and clear costs a CPU more time than computing what goes into it. Where
    the user has set MALLOC_… variables, nothing is changed.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD: the largest possible; larger blocks are still given back
    mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
    mallopt(-2, 1 << 26)  # M_TOP_PAD


def peak_memory() -> int:
    """The most main memory that this process has had so far, in bytes."""
    try:
        import resource
    except ImportError:  # Windows
        now = psutil.Process().memory_info()
        return getattr(now, "peak_wset", now.rss)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still get: of the GPU, or its share of the machine's main memory, in a
    container of that. A Mac's GPU has what is free of the main memory, up to a limit."""
    if device.type != "cuda":
        available = min(psutil.virtual_memory().available, free_in_groups())
        if device.type == "mps":
            available = min(
                available, torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
            )
        return int(available) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def free_in_groups() -> float:
    """Bytes that the control groups of this process leave it, infinity if they have no limit: psutil does not
    know them. Pages of files count as free: the system takes them back where it needs memory."""

    def free(group):
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + int(facts["active_file"]) + int(facts["inactive_file"])

    return least_of_groups(free)


class HostMemory:
    """Frozen models that wait in the host's memory while the GPU does not need them (``--offload_frozen 1``).

    Reference, reward models and, if it is not the actor, the old actor are needed for one phase of a step
    each. In between their weights lie in pinned host memory, which a GPU reads at the full speed of its bus.
    They do not change on the GPU, so nothing is copied back. ``take`` gets the models, ``on_device`` fetches
    them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # {model: [(parameter, its numbers on the host)]}
        self.waiting: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def take(self, models: Iterable[nn.Module], trained: Sequence[nn.Module]) -> None:
        """Move the models' weights to the host, but those that a model in ``trained`` has as well."""
        stay = {p for model in trained for p in model.parameters()}
        for model in models:
            weights = [p for p in model.parameters() if p not in stay]
            for p in weights:
                p.data = p.data.cpu().pin_memory()
            self.waiting[model] = [(p, p.data) for p in weights]

    @contextmanager
    def on_device(self, *models: nn.Module) -> Iterator[None]:
        """In this block the models are on the device. Those that were not taken are there all the time."""
        pairs = [pair for model in models for pair in self.waiting.get(model, [])]
        try:
            for p, numbers in pairs:
                p.data = numbers.to(self.device, copy=True, non_blocking=True)
            yield
        finally:
            for p, numbers in pairs:
                p.data = numbers
