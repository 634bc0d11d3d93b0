"""CPU kernels: the C functions of this folder, compiled for this machine, as functions of tensors.

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCES = Path(__file__).parent
OPTIONS = "-O3 -march=native -Wno-psabi -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared"
NO_WINDOW = 1 << 62
TYPES = (torch.float32, torch.bfloat16)
NUMBERS = {int: ctypes.c_int64, float: ctypes.c_float}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be compiled."""
    command = [*shlex.split(os.environ.get("CC") or "cc"), *OPTIONS.split()]
    kept = SOURCES / "__pycache__" / f"{_key(command)}.so"
    with suppress(OSError):  # the file does not exist yet, or it is damaged
        return ctypes.CDLL(str(kept))
    with suppress(OSError, subprocess.SubprocessError), tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / kept.name
        sources = map(str, SOURCES.glob("*.c"))
        subprocess.run([*command, *sources, "-o", str(built), "-lm"], check=True, capture_output=True)
        with suppress(OSError):  # if it cannot be kept, the next process compiles again
            kept.parent.mkdir(exist_ok=True)
            copy = shutil.copy(built, kept.with_suffix(f".{os.getpid()}"))
            os.replace(copy, kept)  # in one atomic step
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


def _call(name, arguments=()):
    """Call a C function with numbers and pointers; None is NULL. Its first argument says which of the tensors
    are in bf16, one bit for each pointer."""
    function = getattr(library(), name)
    if function.argtypes is None:
        kinds = [NUMBERS.get(type(x), ctypes.c_void_p) for x in arguments]
        function.argtypes = [ctypes.c_int64, ctypes.c_int64, *kinds]
    bf16 = 0
    pointer = 1
    values = []
    for x in arguments:
        if type(x) in NUMBERS:
            values.append(x)
            continue
        values.append(None if x is None else x.data_ptr())
        if x is not None and x.dtype is torch.bfloat16:
            bf16 |= pointer
        pointer *= 2
    return function(bf16, torch.get_num_threads(), *values)


def lanes() -> int:
    """How many fp32 numbers a vector of this machine has: the keys in one block of the KV cache."""
    return _call("lanes")


# ------------------------------------------------------------------------------------------------ layers


@dataclass
class Layers:
    """Norms, rotary positions and gates with their gradients, as functions of tensors: a CPU's and a GPU's.

    start(name, x, *arguments): start the kernel of this name over the rows of x [..., width]; parts: of how
    many partial sums it makes a sum over all rows.
    """

    start: Callable[..., None]
    parts: int

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, delta: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Norm of x [..., width], or of s = x + delta -> (y in ``dtype``, s or None, r [rows])."""
        y = torch.empty_like(x, dtype=dtype)
        total = None if delta is None else torch.empty_like(x)
        r = torch.empty(x.numel() // x.shape[-1], device=x.device)
        self.start("rms_norm", x, delta, weight, total, y, r, float(eps))
        return y, total, r

    def rms_norm_backward(
        self,
        x: Tensor,
        weight: Tensor,
        r: Tensor,
        grad: Tensor,
        grad_x: Tensor | None = None,
        delta_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gradients of ``rms_norm``. grad_x: the gradient of s, added, or None. -> (gradient of x, the same
        in ``delta_dtype`` or None, gradient of the weight)."""
        out = torch.empty_like(x)
        delta = None if delta_dtype is None else torch.empty_like(x, dtype=delta_dtype)
        parts = torch.empty(self.parts, x.shape[-1], device=x.device)
        self.start("rms_norm_backward", x, weight, r, grad, grad_x, out, delta, parts)
        return out, delta, parts.sum(0).to(weight.dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
        """Rotate x [..., heads, dim] by cos and sin [..., 1, dim], or back -> the same shape"""
        y = torch.empty_like(x)
        self.start("rotate", x, cos, sin, y, x.shape[-2], -1.0 if back else 1.0)
        return y

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up of [..., width], both contiguous, or the two halves of one contiguous tensor"""
        y = gate.new_empty(gate.shape)
        self.start("silu_mul", gate, up, y, gate.stride(-2))
        return y

    def silu_mul_backward(self, gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """-> gradients of gate and of up"""
        grad_gate = torch.empty_like(gate)
        grad_up = torch.empty_like(up)
        self.start("silu_mul_backward", gate, up, grad, grad_gate, grad_up)
        return grad_gate, grad_up


def _over_rows(name, x, *arguments):
    width = x.shape[-1]
    _call(name, (x.numel() // width, width, x, *arguments))


_layers = Layers(_over_rows, parts=16)  # as PARTS in vectors.h
rms_norm = _layers.rms_norm
rms_norm_backward = _layers.rms_norm_backward
rotate = _layers.rotate
silu_mul = _layers.silu_mul
silu_mul_backward = _layers.silu_mul_backward


# ------------------------------------------------------------------------------------------------ attention


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    starts: Tensor,
    window: int | None,
    scale: float,
) -> Tensor:
    """Causal attention within sequences that lie one behind the other -> [tokens, heads, dim].

    query [tokens, heads, dim]; key and value [tokens, groups, dim]; cos and sin [tokens, dim] rotate queries
    and keys; starts [sequences + 1]: the first token of each sequence, then the number of tokens; window: of
    sliding attention, or None.
    """
    out = torch.empty_like(query)
    sizes = _sizes(query, key, starts, window, scale)
    _call("attention", (*sizes, query, key, value, cos, sin, starts, out))
    return out


def attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    starts: Tensor,
    window: int | None,
    scale: float,
    grad: Tensor,
) -> list[Tensor]:
    """-> gradients of query, key and value; grad: that of the output"""
    grads = [torch.empty_like(x) for x in (query, key, value)]
    sizes = _sizes(query, key, starts, window, scale)
    _call("attention_backward", (*sizes, query, key, value, cos, sin, starts, grad, *grads))
    return grads


def _sizes(query, key, starts, window, scale):
    heads, dim = query.shape[-2:]
    return len(starts) - 1, heads, key.shape[-2], dim, window or NO_WINDOW, float(scale)


def decode_attention(
    joint: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: Sequence[Tensor | None],
    eps: float,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int | None,
    scale: float,
) -> Tensor:
    """Attention of n new tokens over a cache; their keys and values are written to it. -> [n, heads, dim]

    joint [n, heads + 2 groups, dim]: queries, keys and values of the new tokens, which stand at ``positions``
    [n] of the first n rows of the cache: keys [slots, groups, width / lanes, dim, lanes] and values [slots,
    groups, width, dim]. norms: the weights by which queries and keys are normed, or (None, None).
    """
    n, heads, dim = joint.shape
    groups, width = values.shape[1:3]
    heads -= 2 * groups
    out = joint.new_empty(n, heads, dim)
    sizes = (n, heads, groups, dim, width, window or NO_WINDOW, float(scale), float(eps))
    _call("decode_attention", (*sizes, joint, cos, sin, *norms, positions, keys, values, out))
    return out


# ------------------------------------------------------------------------------------------------ logits


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, probabilities: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits [n, V] -> (log-probs [n] of the targets [n], entropy [n]). The probabilities go into
    ``probabilities`` [n, V] fp32, if given; it may be the tensor of the logits."""
    logprobs = torch.empty(len(logits))
    entropy = torch.empty(len(logits))
    _over_rows("token_logprobs", logits, targets, logprobs, entropy, probabilities, float(temperature))
    return logprobs, entropy


def token_logprobs_backward(
    probabilities: Tensor,
    targets: Tensor,
    grad: Tensor,
    dtype: torch.dtype,
    entropy: Tensor | None = None,
    grad_entropy: Tensor | None = None,
) -> Tensor:
    """-> grad (onehot(targets) - probabilities) [n, V] in ``dtype``; grad [n]. With ``entropy`` [n] and
    ``grad_entropy`` [n]: less grad_entropy probabilities (log probabilities + entropy)"""
    out = torch.empty_like(probabilities, dtype=dtype)
    _over_rows("token_logprobs_backward", probabilities, targets, grad, entropy, grad_entropy, out)
    return out


def sample_tokens(logits: Tensor, temperature: float, u: Tensor) -> tuple[Tensor, Tensor]:
    """``generation.sampling.sample_tokens``: logits [n, V], u [n] fp64 -> (tokens [n], their log-probs [n]
    fp32)"""
    tokens = torch.empty(len(u), dtype=torch.int64)
    logprobs = torch.empty(len(u), dtype=torch.float32)
    _over_rows("sample_tokens", logits, u.double().contiguous(), tokens, logprobs, float(temperature))
    return tokens, logprobs
