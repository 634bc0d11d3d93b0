"""The C kernels: what only a CPU has, any number of threads, and machines without a C compiler.

Their other results: test_layer_kernels.py, test_attention.py, test_logprobs.py, test_sampling.py.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from trainer.compute import fused_layers, logprobs
from trainer.compute.cpu import kernels

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler here")


def test_no_result_depends_on_the_number_of_threads():
    x, weight = (torch.randn(*shape, requires_grad=True) for shape in ((333, 48), (48,)))
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


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# query heads, groups, head_dim, window, whether heads are normed. Windows end in and before what is shared
HEADS = [(4, 4, 16, None, 0), (6, 2, 20, 30, 1), (7, 1, 6, 3, 0), (6, 2, 80, None, 1), (9, 3, 64, 11, 0)]


@pytest.mark.parametrize(("heads", "groups", "dim", "window", "normed"), HEADS)
def test_decoding_reads_what_several_rows_begin_with_in_one_of_them(heads, groups, dim, window, normed):
    """The same bits as from rows of their own. There, the others hold NaN in the blocks that are shared."""
    block, n, alike = kernels.lanes(), 5, 37
    width = 75 + (-75 % block)
    whole = alike // block * block
    positions = torch.tensor([40, 38, 37, width - 1, 36])
    alone = torch.tensor([[i, i, 0] for i in range(n)])
    shared = torch.tensor([[1, 1, 0], [0, 1, alike], [3, 1, alike], [2, 2, 0], [4, 4, 0]])
    for dtype in (torch.float32, torch.bfloat16):
        keys, values = (numbers(n, groups, width, dim, dtype=dtype, seed=i) for i in (1, 2))
        for x in (keys, values):
            x[[0, 3], :, :whole] = x[1, :, :whole]
        keys = keys.unflatten(2, (-1, block)).transpose(3, 4).contiguous()
        joint = numbers(n, heads + 2 * groups, dim, dtype=dtype, seed=3)
        cos, sin = (numbers(n, 1, dim, dtype=dtype, seed=i) for i in (4, 5))
        norms = [1 + 0.3 * numbers(dim, dtype=dtype, seed=i) for i in (6, 7)] if normed else [None, None]
        sizes = n, heads, groups, dim, width, window or width, 0.3, 1e-3
        found = []
        for table in (alone, shared):
            if table is shared:
                keys[[0, 3], :, : whole // block] = values[[0, 3], :, :whole] = torch.nan
            found.append(joint.new_empty(n, heads, dim))
            kernels.decode_attention(
                *sizes, joint, cos, sin, *norms, positions, keys, values, found[-1], table
            )
        assert found[0].isfinite().all()
        assert found[0].equal(found[1])


# rows, in, out of each of the layers that are joined: also parts of panels, tiles and sums
PRODUCTS = [(1, 1, (1,)), (13, 77, (100,)), (8, 576, (40, 3, 49)), (133, 300, (96,)), (3, 1030, (7, 48))]


@pytest.mark.parametrize(("rows", "width", "outs"), PRODUCTS)
def test_products_from_panels(rows, width, outs):
    """As in fp64; and a row is the same whatever stands beside it."""
    total = sum(outs)
    packed = torch.full(kernels.packed_shape(total, width), torch.nan)
    parts = [numbers(out, width, seed=i) for i, out in enumerate(outs)]
    for i in (*range(1, len(parts)), 0):  # in any order
        kernels.over_rows("pack_weight", parts[i], packed, sum(outs[:i]))
    x = numbers(rows, width, seed=9)
    bias = numbers(total, seed=10)
    for added in (None, bias):
        y = torch.full((rows + 1, total), 7.0)
        kernels.over_rows("linear", x, packed, added, y, total)
        assert (y[rows] == 7).all()  # nothing is written behind the results
        wanted = F.linear(x.double(), torch.cat(parts).double(), None if added is None else added.double())
        assert (y[:rows] - wanted).abs().max() < 1e-6 * width**0.5 * x.abs().max() * 4
        one = torch.empty(1, total)
        kernels.over_rows("linear", x[-1:], packed, added, one, total)
        assert one.equal(y[rows - 1 : rows])


def test_long_sums_of_products_keep_their_digits():
    packed = torch.zeros(kernels.packed_shape(1, 8192))
    kernels.over_rows("pack_weight", torch.full((1, 8192), 0.1), packed, 0)
    y = torch.empty(1, 1)
    kernels.over_rows("linear", torch.ones(1, 8192), packed, None, y, 1)
    assert y.item() == pytest.approx(819.2, rel=1e-5)  # one after the other, they give 819.147


@pytest.fixture
def build(tmp_path, monkeypatch):
    """-> a function that compiles a small source in a folder of its own, or finds it compiled
    -> (whether it worked, cached files)"""
    (tmp_path / "one.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr(kernels, "SOURCES", tmp_path)
    made = kernels.library.__wrapped__

    def build():
        library = made()
        return library is not None and library.one() == 1, list((tmp_path / "__pycache__").glob("*"))

    return build


def test_compiled_once_and_kept_and_anew_for_other_sources(build, tmp_path):
    worked, kept = build()
    assert worked and len(kept) == 1
    before = kept[0].stat().st_mtime_ns
    assert build() == (True, kept)
    assert kept[0].stat().st_mtime_ns == before
    (tmp_path / "one.h").write_text("\n")
    assert len(build()[1]) == 2


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
