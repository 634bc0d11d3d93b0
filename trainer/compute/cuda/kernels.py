"""GPU kernels: the Triton functions of triton_kernels.py as functions of tensors.

Triton comes with torch for CUDA and compiles each kernel at its first use. Where they cannot compute with
given tensors (``kernels_for``), or where there is no Triton (``check``), the callers use torch's operations;
tests/compute/test_layer_kernels.py compares the two, without a GPU in Triton's interpreter.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from trainer.compute.cuda import triton_kernels
from trainer.compute.precision import fast_dtype

TYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 1024  # numbers that one program of a pointwise kernel computes; of a kernel with rows, at least
PARTS = 512  # of how many partial sums a sum over all rows is made
LOGITS_BLOCK = 2048  # logits of a row that a program reads at a time


def check(device: str = "cuda") -> None:
    """Run the kernels of logits and of decoding once, small, in the dtype of mixed precision, so that no run
    meets one in its middle that cannot work on this GPU (``fuse_layers`` tries those of layers). Raises
    whatever Triton raises, and RuntimeError where attention gives wrong numbers: products of matrices are
    compiled in ways that differ between GPUs."""
    dtype = fast_dtype("auto", torch.device(device))

    def numbers(*shape):
        return torch.arange(math.prod(shape), device=device).sin().view(shape)

    logits = numbers(2, 32)
    each = numbers(2)  # numbers of rows and of slots; what the kernels write there is not looked at
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    token_logprobs(logits, ids, 1.0, each, each, each)
    over_rows("token_logprobs_backward", logits, ids, each, each, each, each, logits.to(dtype), 1.0)
    noise = numbers(2, 1).double()
    sample_and_store(logits, 1.0, noise, ids[:1], 1, [ids] * 4, (ids.clone(), each))
    qkv = numbers(2, 3, 32).to(dtype)  # of two tokens, with one head
    keys = 3 * numbers(2, 1, 20, 32).to(dtype)
    values = keys.flip(2)
    query = qkv[:, None, :1]
    found = torch.empty_like(query)
    cos = torch.ones_like(query)
    positions = torch.full_like(ids, 19)
    decode_attention(
        2, 1, 1, 32, 20, 20, 0.2, 0.0, qkv, cos, 0 * cos, None, None, positions, keys, values, found
    )
    # The new keys and values are in the cache from here on.
    wanted = F.scaled_dot_product_attention(query.float(), keys.float(), values.float(), scale=0.2)
    if not (found - wanted).abs().max() < 0.03:
        raise RuntimeError("attention gives wrong numbers")


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: int) -> None:
    """Start a kernel. Every kernel starts here: a program that counts or replaces them has one place to do
    so. grid: the number of programs; constants: its ``tl.constexpr`` arguments and ``num_warps``."""
    kernel[grid](*arguments, **constants)


def _warps(numbers: int) -> int:
    """How many warps (of 32 threads) compute a tile of so many numbers"""
    return min(16, max(1, numbers // 256))


def over_rows(name: str, x: Tensor, *arguments: Any) -> None:
    """Start a kernel over the rows of x [..., width]. Norms need whole rows in a block."""
    width = x.shape[-1]
    rows = x.numel() // width
    whole = triton.next_power_of_2(width)
    block = whole if "norm" in name else min(whole, BLOCK)
    tall = max(1, BLOCK // block)
    tiles = PARTS if name == "rms_norm_backward" else triton.cdiv(rows, tall)
    launch(
        getattr(triton_kernels, name), (tiles, triton.cdiv(width, block)), x, *arguments, rows, width,
        ROWS=tall, BLOCK=block, num_warps=_warps(tall * block),
    )  # fmt: skip


def lanes() -> None:
    """None: keys lie in the cache as values do, not in blocks as a CPU's (cpu/kernels.py)."""


def decode_attention(
    n: int,
    heads: int,
    kv_heads: int,
    dim: int,
    width: int,
    window: int,
    scale: float,
    eps: float,
    qkv: Tensor,
    *tensors: Tensor | None,
) -> None:
    """Attention of new tokens over a cache: sizes and tensors as ``KVCache.attend`` passes them."""
    shared = heads // kv_heads
    d = max(16, triton.next_power_of_2(dim))
    # 8 KiB of keys at once. Before the A100, Triton computes products without tensor cores. That needs
    # registers, so columns are few.
    columns = max(16, min(64, 8192 // (d * qkv.element_size())))
    number = 4
    if not _multiplies_in_tensor_cores(qkv.device):
        columns = 16
        number = 8
    launch(
        triton_kernels.decode_attention, (n, kv_heads),
        qkv, *tensors, dim, width, window, scale, eps,
        SHARED=shared, ROWS=max(16, triton.next_power_of_2(shared)), D=d, COLUMNS=columns,
        num_warps=number, num_stages=3,
    )  # fmt: skip


@cache
def _multiplies_in_tensor_cores(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, logprobs: Tensor, entropy: Tensor, total: Tensor
) -> None:
    """From logits [n, V] in fp32 write the log-probs of the targets [n], the entropies, and log sum e^(logits
    / temperature), which the gradient needs; each is [n]."""
    n, size = logits.shape
    block = min(LOGITS_BLOCK, triton.next_power_of_2(size))
    launch(
        triton_kernels.token_logprobs, (n,),
        logits, targets, logprobs, entropy, total, size, 1 / temperature,
        BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


def sample_and_store(
    logits: Tensor,
    temperature: float,
    noise: Tensor,
    ends: Tensor,
    limit: int,
    state: Sequence[Tensor],
    results: Sequence[Tensor],
) -> None:
    """``Engine._sample_and_store`` from logits [n, V] on. state: the engine's row, token, count and done of
    these n slots; results: its tokens and logprobs; ends, limit: its eos and limit."""
    n, size = logits.shape
    block = max(16, min(4096, triton.next_power_of_2(size)))
    launch(
        triton_kernels.sample_and_store, (n,),
        logits, size, 1 / temperature, noise, *state, ends, len(ends), limit, *results, noise.shape[1],
        BLOCK=block, BLOCKS=triton.next_power_of_2(triton.cdiv(size, block)), num_warps=_warps(block),
    )  # fmt: skip
