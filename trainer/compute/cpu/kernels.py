"""CPU kernels: the C functions of this folder, compiled for this machine, as functions of tensors.

The first process that needs them compiles them in a few seconds and keeps the result in ``__pycache__``, as
Python does with its own compiled files. Without a C compiler (``CC``, or cc) the callers use torch's
operations (``kernels_for``; config.json says under ``versions.kernels`` whether there was one);
tests/compute/test_cpu_kernels.py compares the two.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
OPTIONS = "-O3 -march=native -Wno-psabi -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared"
PARTS = 16  # the same as in vectors.h
NO_WINDOW = 1 << 62
TYPES = (torch.float32, torch.bfloat16)


@cache
def library():
    """The compiled kernels, or None where they cannot be compiled."""
    command = [*shlex.split(os.environ.get("CC") or "cc"), *OPTIONS.split()]
    sources = sorted(map(str, SOURCES.glob("*.c")))
    kept = SOURCES / "__pycache__" / f"{_key(command)}.so"
    with suppress(OSError):  # the file does not exist yet, or it is damaged
        return ctypes.CDLL(str(kept))
    with (
        suppress(OSError, subprocess.SubprocessError),
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,  # Windows keeps what is loaded
    ):
        built = Path(folder) / kept.name
        subprocess.run([*command, *sources, "-o", str(built), "-lm"], check=True, capture_output=True)
        loaded = ctypes.CDLL(str(built))
        copy = kept.with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # if it cannot be kept, the next process compiles again
            kept.parent.mkdir(exist_ok=True)
            shutil.copy(built, copy)
            os.replace(copy, kept)  # in one atomic step
        with suppress(OSError):
            copy.unlink()
        return loaded
    return None


def _key(command):
    """-> a hash of all that a compiled file depends on: sources, command and the machine's CPU."""
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = sorted({line for line in facts if line.startswith(("flags", "Features", "model name"))})
    except OSError:
        cpu = [platform.processor()]
    sources = [path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.[ch]"))]
    parts = [*sources, *command, *cpu]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def lanes():
    """How many fp32 numbers a vector of this machine has."""
    return library().lanes()


def _call(name, numbers, tensors):
    """Call a kernel. numbers: its int and float arguments; tensors: its pointers, None for NULL."""
    mask = 0
    pointers = []
    for i, x in enumerate(tensors):
        if x is not None and x.dtype is torch.bfloat16:
            mask |= 1 << i
        pointers.append(None if x is None else x.data_ptr())
    function = getattr(library(), name)
    if function.argtypes is None:
        kinds = [ctypes.c_float if isinstance(x, float) else ctypes.c_int64 for x in numbers]
        function.argtypes = [ctypes.c_int64, ctypes.c_int64, *kinds, *[ctypes.c_void_p] * len(pointers)]
        function.restype = None
    function(mask, torch.get_num_threads(), *numbers, *pointers)


def rms_norm(x, weight, eps, dtype, delta=None):
    """Norm of x [..., width], or of s = x + delta -> (y in ``dtype``, s or None, r [rows])."""
    width = x.shape[-1]
    y = torch.empty_like(x, dtype=dtype)
    rows = x.numel() // width
    total = None if delta is None else torch.empty_like(x)
    r = torch.empty(rows, dtype=torch.float32)
    _call("rms_norm", (rows, width, float(eps)), (x, delta, weight, total, y, r))
    return y, total, r


def rms_norm_backward(x, weight, r, grad, grad_x=None, delta_dtype=None):
    """Gradients of ``rms_norm``. grad_x: the gradient of s, added, or None. -> (gradient of x, the same in
    ``delta_dtype`` or None, gradient of the weight)."""
    width = x.shape[-1]
    out = torch.empty_like(x)
    delta = None if delta_dtype is None else torch.empty_like(x, dtype=delta_dtype)
    parts = torch.empty(PARTS, width)
    _call("rms_norm_backward", (x.numel() // width, width), (x, weight, r, grad, grad_x, out, delta, parts))
    return out, delta, parts.sum(0).to(weight.dtype)


def rotate(x, cos, sin, back=False):
    """Rotate x [..., heads, dim] by cos and sin [..., 1, dim], or back -> the same shape"""
    y = torch.empty_like(x)
    heads, dim = x.shape[-2:]
    _call("rotate", (x.numel() // (heads * dim), heads, dim, int(back)), (x, cos, sin, y))
    return y


def silu_mul(gate, up):
    """silu(gate) * up of [..., width], both contiguous, or the two halves of one contiguous tensor"""
    width = gate.shape[-1]
    y = torch.empty(gate.shape, dtype=gate.dtype)
    _call("silu_mul", (y.numel() // width, width, gate.stride(-2)), (gate, up, y))
    return y


def silu_mul_backward(gate, up, grad):
    """-> gradients of gate and of up"""
    width = gate.shape[-1]
    grads = torch.empty_like(gate), torch.empty_like(up)
    _call("silu_mul_backward", (gate.numel() // width, width), (gate, up, grad, *grads))
    return grads


def attention(query, key, value, cos, sin, starts, window, scale):
    """Causal attention within sequences that lie one behind the other -> [tokens, heads, dim].

    query [tokens, heads, dim]; key and value [tokens, groups, dim]; cos and sin [tokens, dim] rotate queries
    and keys; starts [sequences + 1]: the first token of each sequence, then the number of tokens; window: of
    sliding attention, or None.
    """
    out = torch.empty_like(query)
    _call("attention", _sizes(query, key, starts, window, scale), (query, key, value, cos, sin, starts, out))
    return out


def attention_backward(query, key, value, cos, sin, starts, window, scale, grad):
    """-> gradients of query, key and value; grad: that of the output"""
    grads = [torch.empty_like(x) for x in (query, key, value)]
    tensors = (query, key, value, cos, sin, starts, grad, *grads)
    _call("attention_backward", _sizes(query, key, starts, window, scale), tensors)
    return grads


def _sizes(query, key, starts, window, scale):
    return len(starts) - 1, query.shape[-2], key.shape[-2], query.shape[-1], window or NO_WINDOW, float(scale)


def decode_attention(joint, cos, sin, norms, eps, positions, keys, values, window, scale):
    """Attention of n new tokens over a cache; their keys and values are written to it. -> [n, heads, dim]

    joint [n, heads + 2 groups, dim]: queries, keys and values of the new tokens, which stand at ``positions``
    [n] of the first n rows of the cache; keys [slots, groups, width / lanes, dim, lanes] and values [slots,
    groups, width, dim]: the cache; norms: the weights by which queries and keys are normed, or (None, None).
    """
    n, heads, dim = joint.shape
    _, groups, width, _ = values.shape
    heads -= 2 * groups
    out = joint.new_empty(n, heads, dim)
    numbers = (n, heads, groups, dim, width, window or NO_WINDOW, float(scale), float(eps))
    _call("decode_attention", numbers, (joint, cos, sin, *norms, positions, keys, values, out))
    return out


def token_logprobs(logits, targets, temperature, probabilities=None):
    """logits [n, V] -> (log-probs [n] of the targets [n], entropy [n]). The probabilities go into
    ``probabilities`` [n, V] fp32, if given; it may be the tensor of the logits."""
    logprobs = torch.empty(len(logits))
    entropy = torch.empty(len(logits))
    tensors = (logits, targets, logprobs, entropy, probabilities)
    _call("token_logprobs", (*logits.shape, float(temperature)), tensors)
    return logprobs, entropy


def token_logprobs_backward(probabilities, targets, grad, dtype, entropy=None, grad_entropy=None):
    """-> grad (onehot(targets) - probabilities) [n, V] in ``dtype``; grad [n]. With ``entropy`` [n] and
    ``grad_entropy`` [n]: less grad_entropy probabilities (log probabilities + entropy)"""
    out = torch.empty_like(probabilities, dtype=dtype)
    tensors = (probabilities, targets, grad, entropy, grad_entropy, out)
    _call("token_logprobs_backward", tuple(out.shape), tensors)
    return out


def sample_tokens(logits, temperature, u):
    """``generation.sampling.sample_tokens``: logits [n, V], u [n] fp64 -> (tokens [n], their log-probs [n]
    fp32)"""
    tokens = torch.empty(len(u), dtype=torch.int64)
    logprobs = torch.empty(len(u), dtype=torch.float32)
    _call(
        "sample_tokens",
        (*logits.shape, float(temperature)),
        (logits, u.double().contiguous(), tokens, logprobs),
    )
    return tokens, logprobs
