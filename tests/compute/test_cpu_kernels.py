"""The C kernels: any number of threads, and machines without a C compiler.

Their results: test_layer_kernels.py, test_attention.py, test_logprobs.py, test_sampling.py.
"""

from types import SimpleNamespace

import pytest
import torch

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
