"""The kernels of layers and of decoding in C and in Triton, beside torch's. Log-probs: test_logprobs.py.

Triton's run on a GPU where there is one, else in its interpreter."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton exists for Linux only")
import triton_interpreter  # noqa: F401
from triton.runtime import interpreter

from trainer.compute import fused_layers
from trainer.compute import kernels as compute_kernels
from trainer.compute.cpu import kernels as cpu
from trainer.compute.cuda import kernels
from trainer.compute.kernels import kernels_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# [..., width]: tiles of several rows of which the last one is not full, an odd width, two numbers, a wide
# row, a row that fills its tile
SHAPES = [(21, 100), (2, 3, 37), (1, 2), (2, 8192), (3, 1024)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """A gradient has more tiles than programs: each computes several. In the interpreter each costs time."""
    monkeypatch.setattr(kernels, "PARTS", 2)


@pytest.fixture(autouse=True)
def nothing_beside_a_tensor_is_used(monkeypatch):
    """A kernel gets its tensors between guards: large numbers. What it reads there would show in the result,
    and what it writes there is found. A comparison of results alone would not see that. In the interpreter
    what it reads there is found too, if it is not used."""
    start, guard, large = kernels.launch, 1 << 13, 9984.0
    read, load = [], interpreter.InterpreterBuilder.create_masked_load

    def noted(self, pointers, mask, *more):
        read.append(pointers.data[mask.data].astype(np.int64))
        return load(self, pointers, mask, *more)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", noted)

    def launch(kernel, grid, *args, **constants):
        guarded = {}
        for x in args:
            if torch.is_tensor(x) and x.is_contiguous() and x.is_floating_point():
                edge = torch.full((guard,), large, dtype=x.dtype, device=x.device)
                guarded[x.data_ptr()] = x, torch.cat([edge, x.flatten(), edge])

        def inner(x):
            known = torch.is_tensor(x) and x.data_ptr() in guarded and x.is_contiguous()
            return guarded[x.data_ptr()][1][guard : guard + x.numel()] if known else x

        read.clear()
        start(kernel, grid, *map(inner, args), **constants)
        for x, wide in guarded.values():
            places = np.concatenate([np.zeros(0, np.int64), *read]) - wide.data_ptr()
            places = places[(places >= 0) & (places < wide.nbytes)] // wide.itemsize - guard
            assert ((places >= 0) & (places < x.numel())).all(), f"{kernel} reads beside a tensor"
            x.copy_(inner(x).view_as(x))
            assert (wide[:guard] == large).all(), f"{kernel} writes before a tensor"
            assert (wide[guard + x.numel() :] == large).all(), f"{kernel} writes behind a tensor"

    monkeypatch.setattr(kernels, "launch", launch)


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(ours, exact, dtype):
    """ours, in ``dtype``, is ``exact`` up to a rounding, or in fp32 up to a few."""
    assert ours.dtype == dtype
    tolerance = {} if dtype != torch.float32 else {"rtol": 3e-5, "atol": 3e-5 * exact.abs().max().item()}
    torch.testing.assert_close(ours, exact.to(dtype), **tolerance)


def exact_norm(x, weight, eps):
    x, weight = x.double(), weight.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.fixture(params=["C", "Triton"])
def layers(request, monkeypatch):
    """The kernels with which fused layers compute here: a CPU's or a GPU's."""
    if request.param == "C" and (cpu.library() is None or DEVICE != "cpu"):
        pytest.skip("no C compiler here, or the tensors are on a GPU")
    chosen = cpu if request.param == "C" else kernels
    monkeypatch.setattr(fused_layers, "kernels_for", lambda *tensors, **result: chosen)
    return chosen


def add_norm(x, delta, weight, eps):
    return fused_layers._add_norm(x, delta, SimpleNamespace(weight=weight, variance_epsilon=eps))


def gated(gate, up):
    mlp = SimpleNamespace(gate_proj=lambda x: gate, up_proj=lambda x: up, down_proj=lambda x: x)
    return fused_layers.mlp_forward(mlp, None)


def mixed(dtype):
    return torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32)


def types_of(layers, case=None):
    """case: the number of one of many, which Triton's interpreter, being slow, computes in one type."""
    if case is not None and layers is kernels and DEVICE == "cpu":
        return [DTYPES[case % 3]]
    return [dtype for dtype in DTYPES if dtype in layers.TYPES]


@pytest.mark.parametrize(("case", "shape"), list(enumerate(SHAPES)))
def test_rms_norm(layers, case, shape):
    """Training: x and the weight in fp32, delta and the result in ``dtype``."""
    x, weight, grad_s = numbers(*shape), 1 + 0.3 * numbers(shape[-1], seed=1), numbers(*shape, seed=3)
    for dtype in types_of(layers, case):
        delta, grad = (numbers(*shape, dtype=dtype, seed=i) for i in (4, 2))
        for change, more in ((None, None), (delta, None), (delta, grad_s)):
            leaves = [z.clone().requires_grad_() for z in (x, weight, *([] if change is None else [change]))]
            with mixed(dtype):
                total, y = add_norm(leaves[0], None if change is None else leaves[2], leaves[1], 1e-3)
            s = x if change is None else x + change
            doubles = [z.double().requires_grad_() for z in (s, weight)]
            exact = exact_norm(*doubles, 1e-3)
            assert_near(y, exact, dtype)
            assert total is leaves[0] if change is None else total.equal(s)
            wanted, wanted_weight = torch.autograd.grad(exact, doubles, grad.double())
            wanted = wanted if more is None else wanted + more
            out, given = ([y], [grad]) if more is None else ([y, total], [grad, more])
            ours, ours_weight, *copied = torch.autograd.grad(out, leaves, given)
            assert_near(ours, wanted, torch.float32)
            assert_near(ours_weight, wanted_weight, torch.float32)
            for copy in copied:
                assert_near(copy, wanted, dtype)


def test_rms_norm_of_a_model_in_half_precision(layers):
    """Sampling: everything in ``dtype``. The sum is rounded where it is written, not where it is normed."""
    for dtype in types_of(layers)[1:]:
        shapes = [(5, 96), (5, 96), (96,)]
        leaves = [numbers(*s, dtype=dtype, seed=i).requires_grad_() for i, s in enumerate(shapes)]
        x, delta, weight = leaves
        total, y = add_norm(x, delta, weight, 1e-6)
        wanted = x.double() + delta.double()
        assert_near(y, exact_norm(wanted, weight, 1e-6), dtype)
        assert_near(total, wanted, dtype)
        assert {z.dtype for z in torch.autograd.grad((y + total).sum(), leaves)} == {dtype}


def test_no_rows(layers):
    """A mixture of experts may have an expert without tokens."""
    x, up, weight = (numbers(*shape).requires_grad_() for shape in ((0, 96), (0, 96), (96,)))
    y = add_norm(x, None, weight, 1e-6)[1]
    assert y.shape == (0, 96)
    assert torch.autograd.grad(y.sum(), weight)[0].equal(torch.zeros_like(weight))
    assert [z.shape for z in torch.autograd.grad(gated(x, up).sum(), [x, up])] == [(0, 96)] * 2


@pytest.mark.parametrize(("case", "heads", "dim"), [(0, 3, 80), (1, 5, 12), (2, 1, 2)])
def test_rotate(layers, case, heads, dim):
    angles = numbers(2, 7, 1, dim // 2, seed=1)
    cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
    c, s = cos.double()[..., : dim // 2], sin.double()[..., : dim // 2]
    for dtype in types_of(layers, case):
        x = numbers(2, 7, heads, dim, dtype=dtype).requires_grad_()
        x1, x2 = x.detach().double().chunk(2, -1)
        turned = fused_layers._rotate(x, cos, sin)
        assert_near(turned, torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1), dtype)
        (back,) = torch.autograd.grad(turned, x, x.detach())
        assert_near(back, torch.cat([x1 * c + x2 * s, x2 * c - x1 * s], -1), dtype)


@pytest.mark.parametrize(("case", "shape"), list(enumerate([(40, 31), (3, 1, 1100), (1, 2)])))
def test_silu_mul(layers, case, shape):
    """Two tensors, or the two halves of one."""
    for dtype in types_of(layers, case):
        gate, up, grad = (3 * numbers(*shape, dtype=dtype, seed=i) for i in range(3))
        doubles = [z.double().requires_grad_() for z in (gate, up)]
        exact = F.silu(doubles[0]) * doubles[1]
        leaves = [z.clone().requires_grad_() for z in (gate, up)]
        y = gated(*leaves)
        assert_near(y, exact.detach(), dtype)
        wanted = torch.autograd.grad(exact, doubles, grad.double())
        for ours, of_doubles in zip(torch.autograd.grad(y, leaves, grad), wanted, strict=True):
            assert_near(ours, of_doubles, dtype)
        joint = SimpleNamespace(gate_up=lambda x: x, down_proj=lambda x: x)
        with torch.no_grad():
            assert fused_layers.mlp_forward(joint, torch.cat((gate, up), -1)).equal(y)


def test_gates_at_the_ends_of_what_fp32_holds(layers):
    gate = torch.tensor([[-1e30, -200.0, -87.5, 0.0, 87.5, 1e30, torch.inf, torch.nan]], device=DEVICE)
    y = gated(gate, torch.ones_like(gate))[0]
    assert y[:4].abs().max() < 1e-4
    assert y[4:7].tolist() == pytest.approx([87.5, 1e30, torch.inf])
    assert y[7].isnan()


# query heads, groups, head_dim, window, whether heads are normed
HEADS = [(4, 4, 16, None, 0), (6, 2, 20, 3, 1), (7, 1, 6, None, 1), (4, 2, 80, 7, 1), (34, 1, 16, 40, 0)]
HEADS += [(14, 1, 128, 1, 0)]


@pytest.mark.parametrize("case", range(len(HEADS)))
def test_decoding(layers, case):
    """A new token is normed, rotated and kept, and attends to its row of the cache, as in fp64. Rows at the
    first and the last column, and between. What a row has not reached holds NaN."""
    heads, groups, dim, window, normed = HEADS[case]
    block, n = layers.lanes(), 4
    width = 75 + (-75 % block if block else 0)
    positions = torch.tensor([0, width - 1, 33, 15], device=DEVICE)
    reached = torch.arange(width, device=DEVICE) < positions[:, None]
    empty = F.pad(~reached, (0, 0, 0, 1), value=True)[:, None, :, None]  # and a row that is not live
    place = torch.arange(n, device=DEVICE), slice(None), positions
    angle = numbers(n, 1, 1, dim // 2, seed=4)
    for dtype in types_of(layers, case):
        near = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
        cache = [numbers(n + 1, groups, width, dim, dtype=dtype, seed=i) for i in (1, 2)]
        cache = [x.masked_fill(empty, torch.nan) for x in cache]
        joint = numbers(n, heads + 2 * groups, dim, dtype=dtype, seed=3)
        cos, sin = (torch.cat((x, x), -1).to(dtype) for x in (angle.cos(), angle.sin()))
        norms = [1 + 0.3 * numbers(dim, dtype=dtype, seed=i) for i in (5, 6)] if normed else [None, None]
        keys, values = (x.clone() for x in cache)
        if block:
            keys = keys.unflatten(2, (-1, block)).transpose(3, 4).contiguous()
        out = joint.new_empty(n, heads, dim)
        sizes = n, heads, groups, dim, width, window or width, 0.3, 1e-3
        shared = () if block is None else (torch.tensor([[3, 3, 0], [1, 1, 0], [0, 0, 0], [2, 2, 0]]),)
        layers.decode_attention(*sizes, joint, cos, sin, *norms, positions, keys, values, out, *shared)
        if block:
            keys = keys.transpose(3, 4).flatten(2, 3)

        q, k, v = joint.double().split([heads, groups, groups], 1)
        if normed:
            q, k = (F.rms_norm(x, (dim,), w.double(), 1e-3) for x, w in zip((q, k), norms, strict=True))
        c, s, half = cos[:, 0].double(), sin[:, 0].double(), dim // 2
        q, k = (x * c + torch.cat((-x[..., half:], x[..., :half]), -1) * s for x in (q, k))
        for found, old, new in ((keys, cache[0], k), (values, cache[1], v)):
            assert (found[place].double() - new).abs().max() < near * new.abs().max()
            old[place] = found[place]
            assert found.nan_to_num(7).equal(old.nan_to_num(7))  # nothing else was written
        assert out.dtype == dtype
        for row, last in enumerate(positions.tolist()):
            seen = slice(max(0, last + 1 - (window or width)), last + 1)
            own = (x[row, :, seen].double() for x in (keys, values))
            wanted = F.scaled_dot_product_attention(q[row, :, None], *own, scale=0.3, enable_gqa=True)
            assert (out[row].double() - wanted.squeeze(1)).abs().max() < near * wanted.abs().max()


def test_tensors_that_the_kernels_cannot_compute_are_left_to_torch(layers, monkeypatch):
    """A result in a type that they do not have would be written as if it were fp32."""
    monkeypatch.setattr(compute_kernels, "kernels_of", lambda kind: layers)
    x = torch.ones(4, 16, device=DEVICE)
    known = types_of(layers)
    assert kernels_for(x, None, *(x.to(dtype) for dtype in known), result=known[-1]) is layers
    for other in (x.double(), x.T, x[:, ::2], x.to("meta"), *(x.to(t) for t in DTYPES if t not in known)):
        assert kernels_for(x, other) is None
    for dtype in {torch.float64, *DTYPES} - set(known):
        assert kernels_for(x, result=dtype) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_check_finds_attention_that_is_wrong(dtype, monkeypatch):
    monkeypatch.setattr(kernels, "fast_dtype", lambda *_: dtype)
    kernels.check(DEVICE)
    right = kernels.decode_attention
    monkeypatch.setattr(kernels, "decode_attention", lambda *args: right(*args) or args[-1].mul_(1.1))
    with pytest.raises(RuntimeError, match="attention gives wrong numbers"):
        kernels.check(DEVICE)


@pytest.mark.parametrize("text", ["CUDA out of memory", "CUBLAS_STATUS_NOT_INITIALIZED when calling cublas"])
def test_memory_that_runs_out_in_a_trial_says_nothing_about_what_was_tried(text, monkeypatch):
    def full():
        raise RuntimeError(text)

    def old():
        raise RuntimeError("PTX was compiled with an unsupported toolchain")

    monkeypatch.setattr(kernels, "check", full)
    with pytest.raises(RuntimeError, match=text):
        compute_kernels._cuda.__wrapped__()
    with pytest.raises(RuntimeError, match=text):
        compute_kernels.difference(lambda: torch.ones(1), full, torch.device("cpu"))
    monkeypatch.setattr(kernels, "check", old)
    with pytest.warns(UserWarning, match="unsupported toolchain; Triton needs a C compiler"):
        assert compute_kernels._cuda.__wrapped__() is None
    assert "toolchain" in compute_kernels.difference(lambda: torch.ones(1), old, torch.device("cpu"))
