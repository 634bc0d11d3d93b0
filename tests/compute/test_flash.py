"""Flash attention of packed rows, without a GPU: torch's function is replaced by its definition.

The kernel itself needs a GPU (tests of it: tests/gpu). Here: what it is called with, that it gives what the
groups give, and what happens where it cannot run.
"""

import copy
import warnings
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from test_packing import padded_batch, sliding
from tiny import tiny_llama
from torch.nn.attention import varlen

from trainer.compute import attention
from trainer.compute.batching import Layout
from trainer.compute.scoring import pack_sequences, packed_states, prepare_training

CPU = torch.device("cpu")
LENGTHS = [7, 7, 1, 12, 3]


def by_definition(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """``varlen_attn`` of torch 2.11, sequence by sequence, with grouped heads as its kernel takes them."""
    assert query.dtype == key.dtype == value.dtype
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == max_k == cu_seq_q.diff().max()
    assert type(window_size) is tuple
    assert window_size[1] == 0
    ends, parts = cu_seq_q.tolist(), []
    for start, end in pairwise(ends):
        wide = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (x[start:end].transpose(0, 1).to(wide) for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        i, j = torch.meshgrid(torch.arange(end - start), torch.arange(end - start), indexing="ij")
        seen = (j <= i) & ((window_size[0] < 0) | (j >= i - window_size[0]))
        scores = q @ k.transpose(1, 2) * (query.shape[2] ** -0.5 if scale is None else scale)
        parts.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts).to(query.dtype)


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


@pytest.mark.parametrize("kernel", [by_definition, with_gqa])
@pytest.mark.parametrize("window", [None, 1, 4, 12, 99])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_values_and_gradients_are_those_of_the_groups(heads, window, kernel, here, monkeypatch):
    """In fp64, which no real kernel takes, so that a wrong place cannot hide behind rounding."""
    packing, results = Layout(LENGTHS), []
    shapes = [(1, n, sum(LENGTHS), 8) for n in (heads[0], heads[1], heads[1])]
    rows = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    module, calls = torch.nn.Module(), []
    module.num_key_value_groups = heads[0] // heads[1]
    for there in (False, True):

        def called(*args, **more):
            calls.append(more["window_size"])
            return kernel(*args, **more)

        called.__kwdefaults__ = kernel.__kwdefaults__
        monkeypatch.setattr(varlen, "varlen_attn", called)
        monkeypatch.setattr(attention, "FLASH_DEVICE", "cpu" if there else "cuda")
        copies = [x.clone().requires_grad_(True) for x in rows]
        more = {"scaling": 0.3, "sliding_window": window}
        out, _ = attention.attention(module, *copies, None, packing=packing, **more)
        results.append([out, *torch.autograd.grad(out.sin().sum(), copies)])
        assert bool(calls) == there
    assert calls[-1] == (window - 1 if window else -1, 0)
    assert results[0][0].shape == (1, sum(LENGTHS), heads[0], 8)
    for groups, packed in zip(*results, strict=True):
        torch.testing.assert_close(groups, packed, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make", [lambda: tiny_llama(20, layers=2, spread=2.0), sliding])
def test_a_model_in_bf16_computes_the_same_with_it(make, here, monkeypatch):
    """Under autocast: as far from the states in fp32 as the groups are, within a factor."""
    monkeypatch.setattr(varlen, "varlen_attn", by_definition)
    tokens, lengths = padded_batch()
    model, states = make(), []
    for device, dtype in (("cuda", torch.float32), ("cuda", torch.bfloat16), ("cpu", torch.bfloat16)):
        monkeypatch.setattr(attention, "FLASH_DEVICE", device)
        net = copy.deepcopy(model).base_model
        assert pack_sequences(net)
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            states.append(packed_states(net, tokens, Layout(lengths)).last_hidden_state)
        states[-1].float().sin().sum().backward()
    exact, groups, packed = (x.float() for x in states)
    assert 0 < (packed - exact).abs().max() < 2 * (groups - exact).abs().max()
    assert attention._flash_works.cache_info().currsize == 1


def _refuses(*args, scale=None, **more):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore")


def _sees_the_future(*args, window_size=(-1, 0), **more):
    return by_definition(*args, **more, window_size=(-1, 0)).flip(0)


@pytest.mark.parametrize(
    ("kernel", "reason"), [(_refuses, "only supports Ampere"), (_sees_the_future, "its results differ")]
)
def test_a_kernel_that_does_not_work_is_named_once_and_never_used(kernel, reason, here, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    packing, rows = Layout(LENGTHS), [torch.randn(sum(LENGTHS), 2, 8).bfloat16() for _ in range(3)]
    with pytest.warns(UserWarning, match=f"no flash attention of packed rows, .*{reason}"):
        assert attention._flash_attention(*rows, packing, None, None) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attention._flash_attention(*rows, packing, None, None) is None


def test_memory_that_runs_out_in_the_trial_says_nothing_about_the_kernel(here, monkeypatch):
    def full(*args, scale=None, **more):
        raise torch.OutOfMemoryError("out of memory")

    packing, rows = Layout(LENGTHS), [torch.randn(sum(LENGTHS), 2, 8).bfloat16() for _ in range(3)]
    monkeypatch.setattr(varlen, "varlen_attn", full)
    with pytest.raises(torch.OutOfMemoryError):
        attention._flash_attention(*rows, packing, None, None)
    monkeypatch.setattr(varlen, "varlen_attn", by_definition)
    assert attention._flash_attention(*rows, packing, None, None) is not None


def test_the_trial_may_be_in_the_first_forward_of_gradient_checkpointing(here, monkeypatch):
    """What the trial keeps for its gradients must not count as the layer's: that layer is computed again
    without the trial, and torch compares the two numbers of kept tensors."""
    monkeypatch.setattr(varlen, "varlen_attn", by_definition)
    tokens, lengths = padded_batch()
    net, gradients = tiny_llama(20, layers=2).base_model, []
    for checkpointing in (1, 0):
        model = copy.deepcopy(net)
        prepare_training(model, checkpointing)
        attention._flash_works.cache_clear()
        with torch.autocast("cpu", torch.bfloat16):
            packed_states(model, tokens, Layout(lengths)).last_hidden_state.float().sin().sum().backward()
        assert attention._flash_works.cache_info().currsize == 1
        gradients.append([p.grad for p in model.parameters()])
    assert all(a.equal(b) for a, b in zip(*gradients, strict=True))


def test_on_a_cpu_and_in_fp32_it_is_not_tried(monkeypatch):
    packing = Layout(LENGTHS)
    monkeypatch.setattr(varlen, "varlen_attn", None)
    rows = [torch.randn(sum(LENGTHS), 2, 8) for _ in range(3)]
    assert attention._flash_attention(*(x.bfloat16() for x in rows), packing, None, None) is None
    monkeypatch.setattr(attention, "FLASH_DEVICE", "cpu")
    assert attention._flash_attention(*rows, packing, None, None) is None


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_grouped_heads_are_repeated_where_no_fused_kernel_takes_them(on_cpu, window, monkeypatch):
    """torch's fused attention as a GPU runs it, but on a CPU, and a CPU's. The result is that of products."""
    query, key, value = (torch.randn(2, n, 6, 8) for n in (4, 2, 2))
    behind = torch.arange(6)[:, None] - torch.arange(6)
    scores = 0.3 * query @ key.repeat_interleave(2, 1).mT
    scores = scores.masked_fill((behind < 0) | (behind >= (window or 6)), -torch.inf)
    wanted = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
    monkeypatch.setattr(torch.Tensor, "is_cpu", on_cpu)
    seen, real = [], F.scaled_dot_product_attention

    def watched(query, key, value, mask, **more):
        seen.append((key.shape[1] == query.shape[1], more["enable_gqa"]))
        return real(query, key, value, mask, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    out = attention._causal_attention(query, key, value, window, 0.3)
    assert seen == [(not on_cpu, on_cpu)]
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_single_queries_over_a_cache(groups):
    """Queries in bf16 over keys in fp32, as a CPU decodes; each row sees its own number of columns."""
    query, key, value = torch.randn(3, 4, 1, 8).bfloat16(), *torch.randn(2, 3, groups, 7, 8)
    hidden = torch.arange(7) > torch.tensor([0, 6, 3])[:, None]
    mask = torch.zeros(3, 7).masked_fill(hidden, -torch.inf)[:, None, None]
    out, _ = attention.attention(None, query, key, value, mask, scaling=0.3)
    scores = 0.3 * query.float() @ key.repeat_interleave(4 // groups, 1).mT + mask
    wanted = (scores.softmax(-1) @ value.repeat_interleave(4 // groups, 1)).transpose(1, 2)
    assert out.shape == (3, 1, 4, 8)
    torch.testing.assert_close(out, wanted.bfloat16(), rtol=1e-2, atol=1e-2)
