"""Attention of packed rows: compiled, padded, by torch's flash attention (here its definition: its kernel
needs a GPU), and of single queries."""

import warnings
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

from trainer.compute import attention, fused_layers
from trainer.compute.batching import Layout
from trainer.compute.cpu import kernels as cpu

LENGTHS = [7, 7, 1, 12, 3]


def by_definition(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """``varlen_attn`` of torch 2.11, sequence by sequence, with grouped heads as its kernel takes them."""
    assert query.dtype == key.dtype == value.dtype
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (max_q, max_k) == (cu_seq_q.diff().max(), cu_seq_k.diff().max())
    assert type(window_size) is tuple and window_size[1] == 0
    parts = []
    bounds = (pairwise(x.tolist()) for x in (cu_seq_q, cu_seq_k))
    for (start, end), of_keys in zip(*bounds, strict=True):
        wide = torch.promote_types(query.dtype, torch.float32)
        rows = query[start:end], key[slice(*of_keys)], value[slice(*of_keys)]
        q, k, v = (x.transpose(0, 1).to(wide) for x in rows)
        keys = k.shape[1]  # the last query sees the last of them
        behind = torch.arange(keys - (end - start), keys)[:, None] - torch.arange(keys)
        seen = (behind >= 0) & ((window_size[0] < 0) | (behind <= window_size[0]))
        parts.append(by_products(q, k, v, seen, scale).transpose(0, 1))
    return torch.cat(parts).to(query.dtype)


def by_products(query, key, value, seen, scale):
    """query [..., heads, T, dim], key and value [..., their heads, S, dim], seen bool [..., T, S]"""
    repeats = query.shape[-3] // key.shape[-3]
    scores = scale * query @ key.repeat_interleave(repeats, -3).mT
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(repeats, -3)


def with_gqa(*args, enable_gqa=False, **more):
    """The same as torch 2.13 has it: grouped heads must be announced."""
    assert enable_gqa
    return by_definition(*args, **more)


@pytest.fixture(autouse=True)
def forget():
    """Nothing that was tried before is remembered."""
    attention._flash_works.cache_clear()
    yield
    attention._flash_works.cache_clear()


@pytest.fixture
def here(monkeypatch):
    """Flash attention is tried on the CPU."""
    monkeypatch.setattr(attention, "FLASH_DEVICE", "cpu")
    monkeypatch.setattr(attention, "MAX_COMPILED_SIZE", 0)  # where C functions would compute
    monkeypatch.setattr(varlen, "varlen_attn", by_definition)


@pytest.mark.parametrize("kind", ["compiled", "compiled in bf16", "padded", "flash", "flash of torch 2.13"])
@pytest.mark.parametrize("window", [None, 1, 4, 20, 99])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(6, 2, 6), (3, 3, 16), (4, 1, 34)])
@pytest.mark.parametrize(
    "beginnings", [(), [(5, 13), (4, 0), (3, 2), (0, 0), (5, 13), (3, 2), (5, 13)]], ids=len
)
def test_packed_sequences_attend_as_each_does_alone_in_fp64(
    beginnings, heads, groups, dim, window, kind, monkeypatch
):
    """Flash attention in fp64 too, which no real kernel takes: rounding can hide no wrong place. With equal
    beginnings computed once, the gradient of one is the sum over its sequences."""
    compiled = "compiled" in kind
    if compiled and cpu.library() is None:
        pytest.skip("no C compiler here")
    lengths, calls = [37, 16, 5, 1, 64, 3, 14], []
    packing = Layout(lengths, beginnings=beginnings)
    count = len(packing.row)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    computed = [*zip(packing.row.tolist(), packing.position.tolist(), strict=True)]
    group, common = zip(*(beginnings or [(row, 0) for row in range(7)]), strict=True)
    all_tokens = [  # of the sequences, one by one: their places among those that are computed
        computed.index((group.index(group[row]) if column < common[row] else row, column))
        for row, length in enumerate(lengths)
        for column in range(length)
    ]
    assert count == sum(lengths) - bool(beginnings) * (2 * 13 + 2)
    rows = [torch.randn(1, count, n, dim) for n in (heads, groups, groups)]
    angle = torch.randn(1, count, 1, dim // 2)
    turns = [torch.cat((x, x), -1) for x in (angle.cos(), angle.sin())]
    kernel = with_gqa if "2.13" in kind else by_definition

    def called(*args, **more):
        calls.append(args)
        return kernel(*args, **more)

    called.__kwdefaults__ = kernel.__kwdefaults__
    monkeypatch.setattr(varlen, "varlen_attn", called)
    monkeypatch.setattr(attention, "FLASH_DEVICE", "cpu" if "flash" in kind else "cuda")

    def rotated(*rows):
        rows = [x.transpose(1, 2) for x in rows]
        cos, sin = (x.double().transpose(1, 2) for x in turns)
        return *(fused_layers._rotate(x, cos, sin) for x in rows[:2]), rows[2]

    def wanted(*rows):
        rows = [x[0].transpose(0, 1)[all_tokens] for x in rotated(*rows)]
        seen = ((window or 0) - 1, 0)
        bounds = starts.int()
        out = by_definition(*rows, bounds, bounds, 64, 64, scale=0.4, window_size=seen)
        return out[starts[packing.row] + packing.position][None]

    def ours(*rows):
        if compiled:
            return attention.rotated_attention(*rows, *turns, packing, window, 0.4)
        more = {"packing": packing, "scaling": 0.4, "sliding_window": window}
        return attention.attention(None, *rotated(*rows), None, **more)[0]

    dtype = torch.bfloat16 if "bf16" in kind else torch.float32 if compiled else torch.float64
    rows = [x.to(dtype) for x in rows]
    results, upstream = [], torch.randn(rows[0].shape)
    for function, kind_ in ((wanted, torch.float64), (ours, dtype)):
        leaves = [x.to(kind_, copy=True).requires_grad_() for x in rows]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a trial of flash attention that fails
            out = function(*leaves)
        nodes = [out.grad_fn]
        for node in nodes:
            nodes += [other for other, _ in node.next_functions if other]
        # Its gradient is a copy into zeros, once more as large as queries, keys and values.
        assert function is wanted or "SelectBackward0" not in {node.name() for node in nodes}
        results.append([out, *torch.autograd.grad((out * upstream.to(kind_)).sum(), leaves)])
    assert bool(calls) == ("flash" in kind)
    if compiled:  # its arrays must fit on a thread's stack
        monkeypatch.setattr(attention, "MAX_COMPILED_SIZE", 64 * max(16, dim) - 1)
        assert ours(*rows) is None
    near = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for exact, found in zip(*results, strict=True):
        assert (exact.shape, found.dtype) == (found.shape, dtype)
        assert (exact - found).abs().max() <= near * max(1, exact.abs().max())


def _refuses(*args, scale=None, **more):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore")


def _sees_the_future(*args, window_size=(-1, 0), **more):
    return by_definition(*args, **more, window_size=(-1, 0)).flip(0)


def test_a_kernel_that_does_not_work_is_named_once_and_never_used(here, monkeypatch):
    """In fp32 and on a CPU none is tried."""
    packing, called = Layout(LENGTHS), []
    rows = [torch.randn(sum(LENGTHS), 2, 8).bfloat16() for _ in range(3)]

    def used(kernel, *rows):
        """Whether this kernel takes part in attention, whose result is that of padded rows in any case"""
        monkeypatch.setattr(
            varlen, "varlen_attn", lambda *args, **more: called.append(1) or kernel(*args, **more)
        )
        called.clear()
        out, _ = attention.attention(
            None, *(x.transpose(0, 1)[None] for x in rows), None, packing=packing, scaling=0.3
        )
        assert (out[0] - attention._padded_attention(*rows, packing, None, 0.3)).abs().max() < 0.03
        return bool(called)

    for kernel, reason in ((_refuses, "only supports Ampere"), (_sees_the_future, "its results differ")):
        attention._flash_works.cache_clear()
        with pytest.warns(UserWarning, match=f"no flash attention of packed rows, .*{reason}"):
            assert used(kernel, *rows)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not used(kernel, *rows)
    attention._flash_works.cache_clear()
    assert not used(by_definition, *(x.float() for x in rows))
    assert used(by_definition, *rows)
    attention._flash_works.cache_clear()
    monkeypatch.setattr(attention, "FLASH_DEVICE", "cuda")
    assert not used(by_definition, *rows)


def test_a_kernel_that_cannot_share_keys_computes_whole_sequences_only(here, monkeypatch):
    called = []

    def kernel(query, key, value, cu_seq_q, cu_seq_k, *more, **others):
        called.append(1)
        out = by_definition(query, key, value, cu_seq_q, cu_seq_k, *more, **others)
        return out if cu_seq_q.equal(cu_seq_k) else 0.5 * out

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    for beginnings, works in (([(0, 5), (0, 5)], False), ((), True)):
        packing = Layout([7, 8], beginnings=beginnings)
        rows = [torch.randn(2, len(packing.row), 8).bfloat16()[None] for _ in range(3)]
        found = []
        for _ in range(2):
            called.clear()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                out, _ = attention.attention(None, *rows, None, packing=packing, scaling=0.3)
            found.append((bool(called), len(caught)))
        assert found == [(True, not works), (works, 0)]
        plain = attention._padded_attention(*(x[0].transpose(0, 1) for x in rows), packing, None, 0.3)
        assert (out[0] - plain).abs().max() < 0.03


def test_the_gradient_of_a_key_that_many_see_is_a_sum_in_fp32():
    """In bf16 the sum would stay at 256."""
    x = torch.ones(2, 1, 4).bfloat16().requires_grad_()
    attention._at(x, torch.zeros(1000, dtype=torch.int64)).sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert x.grad[:, 0].tolist() == [[1000] * 4, [0] * 4]


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_grouped_heads_are_repeated_where_no_fused_kernel_takes_them(on_cpu, window, monkeypatch):
    """torch's fused attention as a GPU runs it, but on a CPU, and a CPU's. The result is that of products."""
    query, key, value = (torch.randn(2, n, 6, 8) for n in (4, 2, 2))
    behind = torch.arange(6)[:, None] - torch.arange(6)
    wanted = by_products(query, key, value, (behind >= 0) & (behind < (window or 6)), 0.3).transpose(1, 2)
    monkeypatch.setattr(torch.Tensor, "is_cpu", on_cpu)
    seen, real = [], F.scaled_dot_product_attention

    def watched(query, key, value, mask, **more):
        seen.append((key.shape[1] == query.shape[1], more["enable_gqa"]))
        return real(query, key, value, mask, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    torch.testing.assert_close(attention._causal_attention(query, key, value, window, 0.3), wanted)
    assert seen == [(not on_cpu, on_cpu)]
