"""Out of memory: the work is done again in smaller pieces. No result depends on how a batch is cut.

Training keeps the smaller micro-batches for the rest of the run (runs/optimizer_step.py), scoring halves the
micro-batch that did not fit (``each_micro_batch``), and sampling starts again with half the slots
(generation/engine.py). To need less from the start: ``--accumulation_steps``, ``--gradient_checkpointing 1``,
``--moments_dtype bfloat16``, ``--offload_frozen 1``, ``--lora_r``. What fills it: docs/performance.md.

``keep_freed_memory`` is about speed: it makes the C library reuse what tensors free. ``peak_memory`` is for
the summary of a run.
"""

import ctypes
import gc
import os
import sys

import psutil
import torch

from errors import InputError
from progress_bar import phase
from trainer.compute.batching import halves, micro_batches

# How torch, CUDA, Triton ("out of memory") and cuBLAS say that memory ran out
FULL = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error):
    """Whether a RuntimeError says that memory ran out, of the device or of the machine."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in FULL)


def attempt(work, *args):
    """Call ``work(*args)`` -> (True, its result), or (False, None) where memory ran out."""
    try:
        return True, work(*args)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    # Only after the except block: until the exception is gone, its frames hold the tensors that fill memory.
    free_unused_memory()
    return False, None


def free_unused_memory():
    """Free what nothing uses any more, and give back what torch keeps of a GPU's memory for later, and what
    the C library of Linux keeps of the main memory."""
    gc.collect()  # tensors in a cycle of references, which would otherwise wait for Python's collector
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "malloc_trim"):  # not every C library has it
        libc.malloc_trim(0)


def halve_until_it_fits(work, token_budget, longest, undo, in_step=None):
    """Call ``work(token_budget)``. Where memory runs out, call ``undo()`` and try again with half the budget.

    longest: tokens of the longest sequence; in_step: of a sharded run, whose processes do so together, from
    the same numbers. -> (the result, the budget that fitted). Raises InputError where not even a single
    sequence fits.
    """
    while True:
        fits, result = attempt(work, token_budget)
        if in_step:
            fits = in_step.all_fitted(fits)
        if fits:
            return result, token_budget
        undo()
        if token_budget <= longest:  # no micro-batch had more tokens than the longest sequence
            raise out_of_memory_error(longest)
        token_budget //= 2


def each_micro_batch(lengths, token_budget, work, name="scoring", model=None, dummy=None):
    """Call ``work(rows)`` for every micro-batch of sequences of these lengths. A micro-batch for which memory
    runs out is halved, and both halves are done again. InputError if a single sequence does not fit.

    name: of the progress bar; model: the module that ``work`` calls, which may be sharded: then all processes
    must call this function, and ``dummy()`` makes a pass of a single sequence (``InStep`` in sharding.py)."""
    if in_step := getattr(model, "in_step", None):
        in_step.score(model, lengths, token_budget, work, dummy, name)
        return
    waiting = micro_batches(lengths, token_budget)[::-1]
    with phase(name, len(lengths), "sequences") as bar:
        while waiting:
            rows = waiting.pop()
            if attempt(work, rows)[0]:
                bar.done += len(rows)
            elif len(rows) == 1:
                raise out_of_memory_error(lengths[rows[0]])
            else:
                waiting += halves(rows)[::-1]


def out_of_memory_error(length):
    """-> the InputError for a sequence of ``length`` tokens that does not fit into memory on its own."""
    return InputError(
        f"out of memory for a single sequence of {length} tokens; lower --max_gen_len or --max_seq_len, or "
        "add --gradient_checkpointing 1"
    )


def keep_freed_memory(sharded=False):
    """On Linux, make the C library keep memory that tensors free, instead of giving it back to the system.

    A page that the system has to find and clear costs a CPU more time than computing what goes into it. Where
    the user has set MALLOC_… variables, nothing is changed.

    sharded: a run with --shard 1 gives back what is larger than 1 MiB. It gathers and frees layer after
    layer, and the gaps that nothing else fits into would take more memory than sharding spares.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not every C library has it
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3
        if sharded:
            libc.mallopt(mmap_threshold, 1 << 20)
            return
        libc.mallopt(mmap_threshold, 1 << 25)  # the largest possible; larger blocks are still given back
        libc.mallopt(trim_threshold, (1 << 31) - 1)
        libc.mallopt(top_pad, 1 << 26)


def peak_memory():
    """The most main memory that this process has had so far, in bytes."""
    try:
        import resource
    except ImportError:  # Windows
        now = psutil.Process().memory_info()
        return getattr(now, "peak_wset", now.rss)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
