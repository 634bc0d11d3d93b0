"""Where memory runs out: cut finer and do it again, no result depends on the cut. What is freed is kept."""

import ctypes
import os
import sys

import torch

from errors import InputError
from trainer.record import micro_batches


def attempt(work, *args):
    """-> (did it fit into memory?, what ``work(*args)`` returned)."""
    try:
        return True, work(*args)
    except RuntimeError as error:
        full = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not full:
            raise
    # Here and not above: until the exception is gone, its frames hold the tensors that fill the memory.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return False, None


def halving(work, token_budget, longest, undo):
    """``work(token_budget)``; where memory runs out ``undo()``, and again with half the budget.

    -> (its result, the budget that fitted). Raises InputError once a single sequence, of ``longest`` tokens
    at the most, does not fit.
    """
    while True:
        fits, result = attempt(work, token_budget)
        if fits:
            return result, token_budget
        undo()
        if token_budget <= longest:  # every sequence was alone already
            raise too_long(longest)
        token_budget //= 2


def each_micro_batch(lengths, token_budget, work):
    """Call ``work(rows)`` for every micro-batch of sequences of these lengths. Rows for which memory runs out
    are halved, and each half is done again. Raises InputError where a single sequence does not fit."""
    waiting = micro_batches(lengths, token_budget)[::-1]
    while waiting:
        rows = waiting.pop()
        if not attempt(work, rows)[0]:
            if len(rows) == 1:
                raise too_long(lengths[rows[0]])
            half = len(rows) // 2
            waiting += [rows[half:], rows[:half]]


def too_long(length):
    """The InputError for a sequence that does not fit on its own."""
    return InputError(
        f"out of memory for a single sequence of {length} tokens; lower --max_gen_len or --max_seq_len, or "
        "add --gradient_checkpointing 1"
    )


def keep_freed_memory():
    """On Linux, have the C library keep what tensors free for the next ones, instead of giving it back.

    A page that the system has to find and clear costs a CPU more than computing what goes into it. Settings
    of the user's own (MALLOC_…) are left alone.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not every C library has it
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3
        libc.mallopt(mmap_threshold, 1 << 25)  # the most that it takes; what is larger is given back as ever
        libc.mallopt(trim_threshold, (1 << 31) - 1)
        libc.mallopt(top_pad, 1 << 26)
