"""The C kernels: the same values and gradients as torch's operations; machines without a C compiler."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_llama

from trainer.compute import attention, fused_layers, logprobs
from trainer.compute.batching import Layout
from trainer.compute.cpu import kernels
from trainer.compute.kernels import kernels_for
from trainer.compute.scoring import pack_sequences
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys

DTYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler here")


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(compiled, plain, tolerance):
    for i, (a, b) in enumerate(zip(compiled, plain, strict=True)):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= tolerance * max(1, b.abs().max()), i


@pytest.mark.parametrize(("heads", "groups", "dim"), [(6, 2, 6), (3, 3, 16), (4, 1, 34)])
@pytest.mark.parametrize("window", [None, 1, 4, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype, window, heads, groups, dim):
    """Packed sequences, compared with attention in fp64 over each sequence on its own."""
    lengths = [37, 16, 5, 1, 64]
    packing = Layout(lengths)
    counts = enumerate((heads, groups, groups))
    inputs = [draw(1, sum(lengths), n, dim, dtype=dtype, seed=i) for i, n in counts]
    angle = draw(1, sum(lengths), 1, dim // 2, seed=4)
    turns = [torch.cat((x, x), -1) for x in (angle.cos(), angle.sin())]
    upstream = draw(1, sum(lengths), heads, dim, seed=5)

    def compiled(query, key, value):
        return attention.rotated_attention(query, key, value, *turns, packing, window, 0.4)

    def plain(query, key, value):
        query, key = (fused_layers._rotate(x, *(c.double() for c in turns)) for x in (query, key))
        out = []
        for start, end in pairwise(packing.starts.tolist()):
            places = torch.arange(end - start)
            seen = ~attention.hidden_places(places[:, None] - places, window)
            own = (x[:, start:end].transpose(1, 2) for x in (query, key, value))
            out.append(F.scaled_dot_product_attention(*own, seen, scale=0.4, enable_gqa=True))
        return torch.cat([x.transpose(1, 2) for x in out], 1)

    results = []
    for function, kind in ((compiled, dtype), (plain, torch.float64)):
        leaves = [x.to(kind, copy=True).requires_grad_() for x in inputs]
        out = function(*leaves)
        grads = torch.autograd.grad((out * upstream.to(kind)).sum(), leaves)
        results.append([x.detach().double() for x in (out, *grads)])
    assert_close(*results, {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype])


def test_a_masked_logit_and_one_that_is_no_number():
    logits = torch.zeros(2, 20)
    logits[0, 3:] = -torch.inf
    logits[1, 7] = torch.nan
    logs, entropy, p = logprobs._logprobs(logits, torch.tensor([1, 1]), 1.0, True)
    third = torch.tensor(1 / 3)
    assert torch.allclose(logs[0], third.log())
    assert torch.allclose(entropy[0], -third.log())
    assert p[0].tolist() == pytest.approx([1 / 3] * 3 + [0] * 17)
    assert logs[1].isnan()
    assert entropy[1].isnan()


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "window", "normed"),
    [(4, 4, 16, None, False), (6, 2, 20, 3, True), (7, 1, 6, None, True), (8, 2, 64, 9, False)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding(dtype, heads, groups, dim, window, normed):
    """Sequences of different lengths, decoded token by token, compared with attention over each whole one."""
    rows, steps, starts = 3, 21, torch.tensor([0, 5, 17])
    lanes = kernels.lanes()
    keys = torch.zeros(rows, groups, 48 // lanes, dim, lanes, dtype=dtype)
    values = torch.zeros(rows, groups, 48, dim, dtype=dtype)
    norms = [1 + 0.3 * draw(dim, dtype=dtype, seed=i) for i in (5, 6)] if normed else [None, None]
    joints = draw(rows, 48, heads + 2 * groups, dim, dtype=dtype)
    angle = draw(48, dim // 2, seed=1)
    cos, sin = (torch.cat((x, x), -1).to(dtype) for x in (angle.cos(), angle.sin()))
    for t in range(int(starts.max()) + steps):  # the sequences begin at different times
        position = (t - (starts.max() - starts)).clamp(min=0)
        joint = joints[torch.arange(rows), position]
        turns = (x[position, None, None] for x in (cos, sin))
        out = kernels.decode_attention(joint, *turns, norms, 1e-3, position, keys, values, window, 0.3)
    for row in range(rows):
        last = int(position[row])
        q, k, v = joints[row, : last + 1].double().transpose(0, 1).split([heads, groups, groups])
        if normed:
            q, k = (F.rms_norm(x, (dim,), w.double(), 1e-3) for x, w in zip((q, k), norms, strict=True))
        turn = [c[None, : last + 1, None] for c in (cos, sin)]
        q, k = (fused_layers._rotate(x[None].transpose(1, 2), *turn) for x in (q, k))
        q, k = (x[0].transpose(0, 1) for x in (q, k))
        seen = ~attention.hidden_places(last - torch.arange(last + 1), window)
        expected = F.scaled_dot_product_attention(q[:, -1:], k, v, seen, scale=0.3, enable_gqa=True)[:, 0]
        assert (out[row].double() - expected).abs().max() < {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]


def test_no_result_depends_on_the_number_of_threads():
    x, weight = draw(333, 48).requires_grad_(), draw(48, seed=1).requires_grad_()
    norm = SimpleNamespace(weight=weight, variance_epsilon=1e-5)
    results = []
    threads = torch.get_num_threads()
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        y = fused_layers._add_norm(x, None, norm)[1]
        logs = logprobs._logprobs(x.detach(), torch.arange(333) % 48, 1.0, False)[:2]
        results.append([y, *logs, *torch.autograd.grad(y, [x, weight], y.detach())])
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(a.equal(b) for a, b in zip(results[0], other, strict=True))


def test_tensors_that_the_kernels_cannot_compute_are_left_to_torch():
    x = torch.ones(4, 16)
    assert kernels_for(x, None, x.bfloat16())
    for other in (x.double(), x.half(), x.T, x[:, ::2], x.to("meta")):
        assert not kernels_for(x, other)
    assert kernels_for(x, result=torch.bfloat16)
    assert not kernels_for(x, result=torch.float16)  # it would be written as if it were fp32


def test_without_kernels_the_same_noise_gives_the_same_tokens(monkeypatch):
    prompts, found = [[2 + i % 5] * (1 + i % 6) for i in range(24)], []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(kernels, "library", lambda: None)
        model = tiny_llama(12, layers=2, spread=3.0)
        assert pack_sequences(model.base_model)
        sampled = Sampler(model, torch.float32).sample(prompts, noise_keys(7, 3, range(24)), [0], 20, 1.0)
        found.append(sampled.responses())
    assert found[0] == found[1]


@pytest.fixture
def build(tmp_path, monkeypatch):
    """-> a function that compiles a small source in a folder of its own, or finds it compiled
    -> (whether it worked, cached files)"""
    (tmp_path / "one.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr(kernels, "SOURCES", tmp_path)
    made = kernels.library.__wrapped__
    return lambda: (made() is not None, list((tmp_path / "__pycache__").glob("*")))


def test_compiled_once_and_kept(build):
    worked, kept = build()
    assert worked and len(kept) == 1
    before = kept[0].stat().st_mtime_ns
    assert build() == (True, kept)
    assert kept[0].stat().st_mtime_ns == before


def test_a_damaged_file_is_compiled_again(build, tmp_path, monkeypatch):
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "key.so").write_bytes(b"cut off")  # as a full disk may leave it
    monkeypatch.setattr(kernels, "_key", lambda command: "key")
    assert build() == (True, [tmp_path / "__pycache__" / "key.so"])


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "echo"])
def test_no_compiler(build, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    assert build() == (False, [])


def test_kernels_work_where_the_compiled_file_cannot_be_stored(build, tmp_path):
    (tmp_path / "__pycache__").write_text("a file where the folder should be")
    assert build() == (True, [])
