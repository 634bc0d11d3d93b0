"""CPU kernels: the C functions of this folder, compiled for this machine.

The first process that needs them compiles them in a few seconds and keeps the result in ``__pycache__``, as
Python does with its own compiled files. Without a C compiler (``CC``, or cc) the callers use torch's
operations (``kernels_for``; config.json says under ``versions.kernels`` whether there was one);
tests/compute/test_cpu_kernels.py compares the two.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = Path(__file__).parent
OPTIONS = "-O3 -march=native -Wno-psabi -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared"
PARTS = 16  # of how many partial sums a sum over all rows is made, as in vectors.h
TYPES = (torch.float32, torch.bfloat16)
NUMBERS = {int: ctypes.c_int64, float: ctypes.c_float}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be compiled."""
    command = [*shlex.split(os.environ.get("CC") or "cc"), *OPTIONS.split()]
    cached = SOURCES / "__pycache__" / f"{_key(command)}.so"
    with suppress(OSError):  # the file does not exist yet, or it is damaged
        return ctypes.CDLL(str(cached))
    with suppress(OSError, subprocess.SubprocessError), tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / cached.name
        sources = map(str, SOURCES.glob("*.c"))
        subprocess.run([*command, *sources, "-o", str(built), "-lm"], check=True, capture_output=True)
        with suppress(OSError):  # if it cannot be kept, the next process compiles again
            cached.parent.mkdir(exist_ok=True)
            copy = shutil.copy(built, cached.with_suffix(f".{os.getpid()}"))
            os.replace(copy, cached)  # in one atomic step
        return ctypes.CDLL(str(built))
    return None


def _key(command):
    """A hash of all that a compiled file depends on: command, sources and the machine's CPU."""
    parts = [repr(command).encode()]
    parts += [path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))]
    with suppress(OSError):  # Linux only
        facts = Path("/proc/cpuinfo").read_bytes().splitlines()
        parts += sorted({line for line in facts if line.startswith((b"flags", b"Features", b"model name"))})
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:16]


def call(name: str, *arguments: Any) -> int:
    """Call a C function with the addresses of contiguous tensors, and with numbers; None is NULL. Its first
    argument says which of the tensors are in bf16, one bit for each pointer."""
    function = getattr(library(), name)
    if function.argtypes is None:
        kinds = [NUMBERS.get(type(x), ctypes.c_void_p) for x in arguments]
        function.argtypes = [ctypes.c_int64, ctypes.c_int64, *kinds]
    bf16 = 0
    pointer = 1
    values = []
    for x in arguments:
        if isinstance(x, Tensor):
            if x.dtype is torch.bfloat16:
                bf16 |= pointer
            values.append(x.data_ptr())
        else:
            values.append(x)
        if type(x) not in NUMBERS:
            pointer *= 2
    return function(bf16, torch.get_num_threads(), *values)


# -> how many fp32 numbers a vector of this machine has: the keys in one block of the KV cache
lanes = partial(call, "lanes")


def over_rows(name: str, x: Tensor, *arguments: Any) -> None:
    """Call a C function over the rows of x [..., width]."""
    width = x.shape[-1]
    call(name, x.numel() // width, width, x, *arguments)


# Attention of new tokens over a cache: sizes and tensors as ``KVCache.attend`` passes them
decode_attention = partial(call, "decode_attention")


def packed_shape(out: int, width: int) -> tuple[int, int, int]:
    """-> the shape of a weight [out, width] as ``pack_weight`` lays it out for ``linear``, in panels"""
    columns = call("panel_columns")
    return -(-out // columns), width, columns
