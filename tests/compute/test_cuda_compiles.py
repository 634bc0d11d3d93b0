"""Every Triton kernel compiles for three generations of GPUs, in the forms in which kernels.py launches it.

Triton's interpreter, in which the other tests run, accepts what the compiler refuses. To compile needs no
GPU: this file runs itself as a program without the interpreter, records what the functions of kernels.py
launch, and compiles that. A kernel which no row of ``CALLS`` launches is an error.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny import ROOT

pytest.importorskip("triton", reason="Triton exists for Linux only")

# (compute capability, type). 75 is a T4, which computes in fp16; 80 an A100, and nearly an RTX 30 or 40; 90
# an H100 or H200. The less usual sizes are compiled for the last of these only.
TARGETS = [(75, torch.float16), (80, torch.bfloat16)]
TARGETS += [(90, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
SHARED = {75: 64 << 10, 80: 99 << 10, 90: 227 << 10}  # bytes of shared memory for a program; 99 KiB on an RTX


def tensor(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


def norms(k, dtype, width):
    x, small, weight = tensor(5, width), tensor(5, width, dtype=dtype), tensor(width)
    each, parts = tensor(5), tensor(k.PARTS, width)
    k.over_rows("rms_norm", x, None, weight, None, small, each, 1e-6)
    k.over_rows("rms_norm", x, small, weight, x, small, each, 1e-6)
    k.over_rows("rms_norm_backward", x, weight, each, small, None, x, None, parts)
    k.over_rows("rms_norm_backward", x, weight, each, small, x, x, small, parts)


def rotations(k, dtype, heads, dim):
    x = tensor(2, 3, heads, dim, dtype=dtype)
    k.over_rows("rotate", x, *[tensor(2, 3, 1, dim)] * 2, x, heads, 1.0)


def gates(k, dtype, width):
    x = tensor(5, width, dtype=dtype)
    k.over_rows("silu_mul", x, x, x, width)
    k.over_rows("silu_mul_backward", x, x, x, x, x)


def logprobs(k, dtype, size):
    logits, targets, each = tensor(3, size), torch.zeros(3, dtype=torch.int64), tensor(3)
    out = tensor(3, size, dtype=dtype)
    k.token_logprobs(logits, targets, 0.7, each, each, each)
    for learned in (None, each):
        k.over_rows("token_logprobs_backward", logits, targets, each, each, learned, learned, out, 1 / 0.7)


def decoding(k, dtype, heads, groups, dim, normed):
    """A step, with norms of heads or without"""
    joint, turns = tensor(3, heads + 2 * groups, dim, dtype=dtype), [tensor(3, 1, 1, dim, dtype=dtype)] * 2
    cache, norm = tensor(4, groups, 48, dim, dtype=dtype), tensor(dim, dtype=dtype) if normed else None
    positions = torch.zeros(3, dtype=torch.int64)
    sizes, out = (3, heads, groups, dim, 48, 48, 0.1, 1e-6), tensor(3, heads, dim, dtype=dtype)
    k.decode_attention(*sizes, joint, *turns, norm, norm, positions, cache, cache, out)


def sampling(k, dtype, size, ends):
    ids, numbers = (torch.zeros(3, dtype=t) for t in (torch.int64, torch.float64))
    kept = torch.zeros(3, 5, dtype=torch.int64), tensor(3, 5)
    state = ids, ids, ids, ids
    noise, eos = numbers.expand(5, 3).T.contiguous(), torch.zeros(ends, dtype=torch.int64)
    k.sample_and_store(tensor(3, size), 0.7, noise, eos, 5, state, kept)


# (function, usual sizes, less usual ones). Triton compiles a kernel anew for a number that is 1 or is not a
# multiple of 16.
CALLS = [
    (norms, (896,), (100,), (128,), (8192,)),
    (rotations, (14, 64), (1, 36)),
    (gates, (4864,), (37,)),
    (logprobs, (151936,), (50257,)),
    (decoding, (14, 2, 64, 0), (16, 8, 128, 1), (8, 8, 80, 0), (71, 1, 256, 1)),
    (sampling, (151936, 1), (50257, 3)),
]


@pytest.mark.slow
def test_every_kernel_compiles():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    }
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


STATES = {"row", "token", "count", "done"}  # of slots, parts of one tensor


def compile_all():
    """Compile what every row of ``CALLS`` launches. -> lines that say what is wrong"""
    from triton.runtime.jit import JITFunction

    from trainer.compute.cuda import kernels, triton_kernels

    found = {name: x for name, x in vars(triton_kernels).items() if isinstance(x, JITFunction)}
    known = {name: x for name, x in found.items() if not name.startswith("_")}
    launches, wrong = set(), []
    for arch, dtype in TARGETS:
        kernels._multiplies_in_tensor_cores = lambda device, arch=arch: arch >= 80
        for function, usual, *others in CALLS:
            for sizes in (usual, *others) if (arch, dtype) == TARGETS[-1] else (usual,):
                calls = []
                kernels.launch = lambda *args, calls=calls, **constants: calls.append((args, constants))
                function(kernels, dtype, *sizes)
                for (kernel, grid, *args), constants in calls:
                    launches.add(kernel.fn.__name__)
                    problem = _compile(kernel, grid, args, constants, arch)
                    if problem:
                        wrong.append(f"{kernel.fn.__name__} {arch} {dtype} {sizes}: {problem}")
    if {p.name for p in known["sample_and_store"].params if p.do_not_specialize_on_alignment} != STATES:
        wrong.append("sample_and_store: would be compiled again where the states of slots lie otherwise")
    return wrong + [f"{name}: no row of CALLS launches it" for name in known.keys() - launches]


def _compile(kernel, grid, args, constants, arch):
    """Compile a launch for a GPU that need not be there. -> what is wrong, or None"""
    from triton.runtime import driver

    driver.set_active(_gpu(arch))
    try:
        shared = kernel.run(*args, grid=grid, warmup=True, **constants).metadata.shared
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if shared <= SHARED[arch] else f"{shared} bytes of shared memory, of {SHARED[arch]}"


def _gpu(arch):
    """What Triton's compiler asks the driver of a GPU; compiled kernels are kept by device"""
    from triton.backends.compiler import GPUTarget

    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: arch,
        get_current_stream=lambda device: 0,
    )


if __name__ == "__main__":
    problems = compile_all()
    print(*problems, sep="\n")
    sys.exit(bool(problems))
