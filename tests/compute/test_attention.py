"""Attention of packed rows: padded, by torch's flash attention (here its definition), and of single queries.

The kernel of flash attention needs a GPU (tests/gpu), compiled attention is in test_cpu_kernels.py.
"""

import warnings
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_llama
from torch.nn.attention import varlen
from transformers import MistralConfig, MistralForCausalLM

from trainer.compute import attention
from trainer.compute.batching import Layout
from trainer.compute.scoring import pack_sequences, packed_states, prepare_training

LENGTHS = [7, 7, 1, 12, 3]
TOKENS = torch.randint(20, (5, 12), generator=torch.Generator().manual_seed(0))


def by_definition(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """``varlen_attn`` of torch 2.11, sequence by sequence, with grouped heads as its kernel takes them."""
    assert query.dtype == key.dtype == value.dtype
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == max_k == cu_seq_q.diff().max()
    assert type(window_size) is tuple and window_size[1] == 0
    parts = []
    for start, end in pairwise(cu_seq_q.tolist()):
        wide = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (x[start:end].transpose(0, 1).to(wide) for x in (query, key, value))
        behind = torch.arange(end - start)[:, None] - torch.arange(end - start)
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


def sliding():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=20, num_key_value_heads=2, sliding_window=4, **sizes)
    return MistralForCausalLM(config).eval()


def llama():
    return tiny_llama(20, layers=2, spread=2.0)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("make", [llama, sliding])
def test_packed_states_and_gradients_are_those_of_padded_sequences(make, compiled, monkeypatch):
    """Only real tokens are computed."""
    if not compiled:
        monkeypatch.setattr(attention, "MAX_COMPILED_SIZE", 0)
    results = []
    for packed in (False, True):
        net, rows = make().base_model.requires_grad_(True), []
        assert not packed or pack_sequences(net)
        net.layers[0].mlp.register_forward_hook(lambda *given, rows=rows: rows.append(given[2].shape[:-1]))
        states = packed_states(net, TOKENS, Layout(LENGTHS))[0]
        states.square().sin().sum().backward()
        results.append([states, *(p.grad for p in net.parameters())])
        assert rows == [(1, sum(LENGTHS)) if packed else TOKENS.shape]
    assert results[0][0].shape == (sum(LENGTHS), 32)
    for padded, packed in zip(*results, strict=True):
        assert (padded - packed).abs().max() < 2e-5 * max(1, padded.abs().max())


@pytest.mark.parametrize("kernel", [by_definition, with_gqa])
@pytest.mark.parametrize("window", [None, 1, 4, 99])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_flash_and_padded_attention_are_by_definition(heads, window, kernel, here, monkeypatch):
    """In fp64, which no real kernel takes, so that a wrong place cannot hide behind rounding."""
    packing, calls = Layout(LENGTHS), []
    rows = [torch.randn(1, n, sum(LENGTHS), 8, dtype=torch.float64) for n in (heads[0], heads[1], heads[1])]

    def called(*args, **more):
        calls.append(more["window_size"])
        return kernel(*args, **more)

    called.__kwdefaults__ = kernel.__kwdefaults__
    monkeypatch.setattr(varlen, "varlen_attn", called)

    def exact(query, key, value):
        last = (window or 0) - 1
        starts = packing.starts.int()
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return by_definition(q, k, v, starts, starts, 12, 12, scale=0.3, window_size=(last, 0))[None]

    def ours(*rows):
        more = {"scaling": 0.3, "sliding_window": window}
        return attention.attention(None, *rows, None, packing=packing, **more)[0]

    results = []
    for device, function in (("cuda", exact), ("cuda", ours), ("cpu", ours)):
        monkeypatch.setattr(attention, "FLASH_DEVICE", device)
        copies = [x.clone().requires_grad_(True) for x in rows]
        out = function(*copies)
        results.append([out, *torch.autograd.grad(out.sin().sum(), copies)])
        assert bool(calls) == (device == "cpu")
        nodes, kinds = [out.grad_fn], set()
        for node in nodes:
            nodes += [other for other, _ in node.next_functions if other]
            kinds.add(node.name())
        # Its gradient is a copy into zeros, once more as large as queries, keys and values
        assert ("SelectBackward0" in kinds) == (function is exact)
    assert calls[-1] == (window - 1 if window else -1, 0)
    for found in results[1:]:
        for one, other in zip(results[0], found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make", [llama, sliding])
def test_a_model_in_bf16_computes_the_same_with_flash_attention(make, here, monkeypatch):
    """Under autocast: as far from the states in fp32 as padded attention is, within a factor. The trial may
    be in the first forward of gradient checkpointing: what it keeps must not count as the layer's."""
    found = []
    for device, dtype, checkpointing in (
        ("cuda", torch.float32, 0),
        ("cuda", torch.bfloat16, 0),
        ("cpu", torch.bfloat16, 0),
        ("cpu", torch.bfloat16, 1),
    ):
        monkeypatch.setattr(attention, "FLASH_DEVICE", device)
        attention._flash_works.cache_clear()
        net = make().base_model.requires_grad_(True)
        prepare_training(net, checkpointing)
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            states = packed_states(net, TOKENS, Layout(LENGTHS))[0].float()
        states.sin().sum().backward()
        assert attention._flash_works.cache_info().currsize == (device == "cpu")
        found.append([states, *(p.grad for p in net.parameters())])
    exact, padded, flash, _ = (x[0] for x in found)
    assert 0 < (flash - exact).abs().max() < 2 * (padded - exact).abs().max()
    assert all(a.equal(b) for a, b in zip(*found[2:], strict=True))


def _refuses(*args, scale=None, **more):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore")


def _is_full(*args, scale=None, **more):
    raise torch.OutOfMemoryError("out of memory")


def _sees_the_future(*args, window_size=(-1, 0), **more):
    return by_definition(*args, **more, window_size=(-1, 0)).flip(0)


def test_a_kernel_that_does_not_work_is_named_once_and_never_used(here, monkeypatch):
    """Memory that runs out in the trial says nothing about the kernel. In fp32 and on a CPU none is tried."""
    packing = Layout(LENGTHS)
    rows = [torch.randn(sum(LENGTHS), 2, 8).bfloat16() for _ in range(3)]
    for kernel, reason in ((_refuses, "only supports Ampere"), (_sees_the_future, "its results differ")):
        attention._flash_works.cache_clear()
        monkeypatch.setattr(varlen, "varlen_attn", kernel)
        with pytest.warns(UserWarning, match=f"no flash attention of packed rows, .*{reason}"):
            assert attention._flash_attention(*rows, packing, None, 0.3) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert attention._flash_attention(*rows, packing, None, 0.3) is None
    attention._flash_works.cache_clear()
    monkeypatch.setattr(varlen, "varlen_attn", _is_full)
    with pytest.raises(torch.OutOfMemoryError):
        attention._flash_attention(*rows, packing, None, 0.3)
    assert attention._flash_attention(*(x.float() for x in rows), packing, None, 0.3) is None
    monkeypatch.setattr(varlen, "varlen_attn", by_definition)
    assert attention._flash_attention(*rows, packing, None, 0.3) is not None
    monkeypatch.setattr(attention, "FLASH_DEVICE", "cuda")
    assert attention._flash_attention(*rows, packing, None, 0.3) is None


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


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_single_queries_over_a_cache(groups):
    """Queries in bf16 over keys in fp32, as a CPU decodes; each row sees its own number of columns."""
    query, key, value = torch.randn(3, 4, 1, 8).bfloat16(), *torch.randn(2, 3, groups, 7, 8)
    seen = (torch.arange(7) <= torch.tensor([0, 6, 3])[:, None])[:, None, None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    module = SimpleNamespace(num_key_value_groups=4 // groups)
    out, _ = attention.attention(module, query, key, value, mask, scaling=0.3)
    wanted = by_products(query.float(), key, value, seen, 0.3).transpose(1, 2)
    assert out.shape == (3, 1, 4, 8)
    torch.testing.assert_close(out, wanted.bfloat16(), rtol=1e-2, atol=1e-2)
