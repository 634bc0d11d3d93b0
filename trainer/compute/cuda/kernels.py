"""GPU kernels: the Triton functions of this folder as functions of tensors.

Triton comes with torch for CUDA and compiles each kernel at its first use. Where they cannot compute with
given tensors (``kernels_for``), or where there is no Triton (``check``), the callers use torch's operations;
tests/compute/test_cuda_kernels.py compares the two, without a GPU in Triton's interpreter.
"""

from functools import cache

import torch
import triton

from trainer.compute.attention import matmul_attention
from trainer.compute.cuda import attention, layers
from trainer.compute.cuda import logits as from_logits
from trainer.compute.precision import fast_dtype

TYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 1024  # numbers that one program of a pointwise kernel computes; of a kernel with rows, at least
PARTS = 512  # programs that share the rows where sums over all rows are wanted
LANES = 2048  # numbers of a row that a program reads at a time where a row is a vocabulary


def check(device="cuda"):
    """Run the kernels that ``fuse_layers`` does not try once, small, in the dtype of mixed precision, so that
    no run meets one in its middle that cannot work on this GPU. Raises whatever Triton raises, and
    RuntimeError where attention gives wrong numbers: its products of matrices are compiled in ways that
    differ between GPUs."""
    dtype = fast_dtype("auto", torch.device(device))
    x = torch.linspace(-2, 2, 64, device=device).view(2, 32)
    half = x.to(dtype)
    each = x[:, 0].contiguous()
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    rms_norm_backward(x, x[0], rms_norm(x, x[0], 1e-6, dtype, half)[2], half, x, dtype)
    turns = half[:, :16].reshape(2, 1, 1, 16)
    rotate(half.view(2, 1, 2, 16), turns, turns)
    silu_mul_backward(half, half, silu_mul(half, half))
    token_logprobs(x, ids, 1.0, each.clone(), each.clone(), each.clone())
    token_logprobs_backward(x.clone(), ids, each, each, 1.0, dtype, each, each)
    noise = torch.zeros(2, 1, dtype=torch.float64, device=device)
    state = ids + torch.arange(2, device=device), ids.clone(), ids.clone(), ids.bool()
    results = noise.long(), noise.float(), ids.clone(), ids.bool()
    sample_and_store(x, 1.0, noise, ids[:1], ids[:1] + 1, state, results)
    joint = torch.stack([half, half.cos(), half.sin()], 1)  # of two tokens the query, the key and the value
    keys = torch.linspace(-3, 3, 2 * 20 * 32, device=device).cos().to(dtype).view(2, 1, 20, 32)
    values = keys.flip(2)
    cos = torch.ones_like(joint[:, :1, None])
    sin = torch.zeros_like(joint[:, :1, None])
    found = decode_attention(joint, cos, sin, (None, None), 0.0, ids + 19, keys, values, None, 0.2)
    rows = [y.float() for y in (joint[:, :1, None], keys, values)]  # the new keys and values are in the cache
    wanted = matmul_attention(*rows, x.new_zeros(1, 1, 1, 20), 0.2)[:, 0]
    if not (found - wanted).abs().max() < 0.03:
        raise RuntimeError("attention gives wrong numbers")


def launch(kernel, grid, *args, **constants):
    """Start a kernel. Every kernel starts here: a program that counts or replaces them has one place to do
    so. grid: the number of programs; constants: its ``tl.constexpr`` arguments and ``num_warps``."""
    kernel[grid](*args, **constants)


def warps(numbers):
    """How many warps (of 32 threads) compute a tile of so many numbers"""
    return min(16, max(1, numbers // 256))


def _tiles(x):
    """A tensor [..., width] -> (rows, width, constants of a kernel that has whole rows in its tiles)"""
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    rows = max(1, BLOCK // block)
    return x.numel() // width, width, {"ROWS": rows, "BLOCK": block, "num_warps": warps(rows * block)}


def rms_norm(x, weight, eps, dtype, delta=None):
    """Norm of x [..., width], or of s = x + delta -> (y in ``dtype``, s or None, r [rows])."""
    rows, width, tile = _tiles(x)
    total = None if delta is None else torch.empty_like(x)
    y = torch.empty_like(x, dtype=dtype)
    r = torch.empty(rows, device=x.device)
    grid = (triton.cdiv(rows, tile["ROWS"]),)
    launch(layers.rms_norm, grid, x, delta, weight, total, y, r, rows, width, float(eps), **tile)
    return y, total, r


def rms_norm_backward(x, weight, r, grad, grad_x=None, delta_dtype=None):
    """Gradients of ``rms_norm``. grad_x: the gradient of s, added, or None. -> (gradient of x, the same in
    ``delta_dtype`` or None, gradient of the weight)."""
    rows, width, tile = _tiles(x)
    out = torch.empty_like(x)
    delta = None if delta_dtype is None else torch.empty_like(x, dtype=delta_dtype)
    programs = min(PARTS, triton.cdiv(rows, tile["ROWS"]))
    parts = torch.empty(programs, width, device=x.device)
    tensors = (x, weight, r, grad, grad_x, out, delta, parts)
    launch(layers.rms_norm_backward, (programs,), *tensors, rows, width, **tile)
    return out, delta, parts.sum(0).to(weight.dtype)


def rotate(x, cos, sin, back=False):
    """Rotate x [..., heads, dim] by cos and sin [..., 1, dim], or back -> the same shape"""
    y = torch.empty_like(x)
    heads, dim = x.shape[-2:]
    tile = {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(dim // 2)}
    grid = (x.numel() // (heads * dim),)
    sign = -1.0 if back else 1.0
    number = warps(tile["HEADS"] * tile["HALF"])
    launch(layers.rotate, grid, x, cos, sin, y, heads, dim, sign, **tile, num_warps=number)
    return y


def silu_mul(gate, up):
    """silu(gate) * up of [..., width], both contiguous, or the two halves of one contiguous tensor"""
    width = gate.shape[-1]
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grid = (y.numel() // width, triton.cdiv(width, BLOCK))
    launch(layers.silu_mul, grid, gate, up, y, width, gate.stride(-2), BLOCK=BLOCK)
    return y


def silu_mul_backward(gate, up, grad):
    """-> gradients of gate and of up"""
    grads = torch.empty_like(gate), torch.empty_like(up)
    count = gate.numel()
    grid = (triton.cdiv(count, BLOCK),)
    launch(layers.silu_mul_backward, grid, gate, up, grad, *grads, count, BLOCK=BLOCK)
    return grads


def token_logprobs(logits, targets, temperature, logprobs, entropy, total):
    """From logits [n, V] in fp32 write the log-probs of the targets [n], the entropies, and log sum e^(logits
    / temperature), which the gradient needs; each is [n]."""
    n, size = logits.shape
    block = min(LANES, triton.next_power_of_2(size))
    launch(
        from_logits.token_logprobs, (n,), logits, targets, logprobs, entropy, total, size, 1 / temperature,
        BLOCK=block, num_warps=warps(block),
    )  # fmt: skip


def token_logprobs_backward(
    logits, targets, total, grad, temperature, dtype, entropy=None, grad_entropy=None
):
    """-> grad (onehot(targets) - p) / temperature [n, V] in ``dtype``: the gradient of the logits, which may
    be overwritten. p: their probabilities; total [n]: as written by ``token_logprobs``; grad [n]: that of the
    log-probs. With ``entropy`` [n] and ``grad_entropy`` [n]: less grad_entropy p (log p + entropy) /
    temperature."""
    n, size = logits.shape
    out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    launch(
        from_logits.token_logprobs_backward, (n, triton.cdiv(size, BLOCK)),
        logits, targets, total, grad, entropy, grad_entropy, out, size, 1 / temperature, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def lanes():
    """None: keys lie in the cache as values do, and not in blocks (cpu/kernels.py)."""


def decode_attention(joint, cos, sin, norms, eps, positions, keys, values, window, scale):
    """Attention of n new tokens over a cache; their keys and values are written to it. -> [n, heads, dim]

    joint [n, heads + 2 groups, dim]: queries, keys and values of the new tokens, which stand at ``positions``
    [n] of the first n rows of the cache; keys and values [slots, groups, width, dim]: the cache; norms: the
    weights by which queries and keys are normed, or (None, None). cos and sin None: see ``cached_attention``.
    """
    n, heads, dim = joint.shape
    groups = keys.shape[1]
    wide = values.shape[3]
    if cos is not None:
        cos, sin = (x.expand(n, 1, 1, -1).contiguous() for x in (cos, sin))
        heads -= 2 * groups
    out = joint.new_empty(n, heads, wide)
    shared = heads // groups
    rows, d, w = [max(16, triton.next_power_of_2(x)) for x in (shared, dim, wide)]
    # 8 KiB of keys at once. Before the A100, Triton computes products without tensor cores. That needs
    # registers, so columns are few.
    columns = max(16, min(64, 8192 // (max(d, w) * keys.element_size())))
    number = 4
    if not _multiplies_in_tensor_cores(keys.device):
        columns = 16
        number = 8
    launch(
        attention.decode_attention,
        (n, groups),
        joint, cos, sin, *norms, positions, keys, values, out,
        *joint.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        dim, wide, window or keys.shape[2], float(scale), float(eps),
        SHARED=shared, ROWS=rows, D=d, W=w, COLUMNS=columns, num_warps=number, num_stages=3,
    )  # fmt: skip
    return out


def cached_attention(query, positions, keys, values, window, scale):
    """Attention of n tokens over a cache that has their keys and values already -> [n, heads, dim of values]

    query [n, heads, dim]; positions [n]; keys and values [n or more, groups, width, their dim].
    """
    norms = None, None
    return decode_attention(query, None, None, norms, 0.0, positions, keys, values, window, scale)


@cache
def _multiplies_in_tensor_cores(device):
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def sample_and_store(logits, temperature, noise, ends, limit, state, results):
    """``Engine._sample_and_store`` from logits [n, V] on. state: the engine's row, token, count and done of
    these n slots; results: its tokens, logprobs, response_len, finished; ends, limit: its eos and limit."""
    n, size = logits.shape
    block = max(16, min(4096, triton.next_power_of_2(size)))
    launch(
        from_logits.sample_and_store, (n,),
        logits, size, 1 / (temperature or 1), noise, *state, ends, len(ends),
        limit, *results, noise.shape[1], GREEDY=temperature == 0, BLOCK=block,
        BLOCKS=triton.next_power_of_2(triton.cdiv(size, block)), ENDS=triton.next_power_of_2(len(ends)),
        num_warps=warps(block),
    )  # fmt: skip
