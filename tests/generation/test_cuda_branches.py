"""What sampling does on a GPU only, tested on a CPU with captures that refuse what a GPU refuses."""

import contextlib
import gc
import warnings
import weakref
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from recorded_graphs import LAY_OUT, RecordedGraphs, Waits, sample_as_on_a_gpu, without_kernels
from test_engine import LONG, PROMPTS, VOCABULARY, draw, forgetful, in_three_turns
from test_families import FAMILIES, build
from tiny import refused, tiny_llama
from torch.utils._python_dispatch import _disable_current_modes

from trainer.compute import memory
from trainer.generation import cuda_graphs, engine
from trainer.generation.cuda_graphs import CudaGraphs
from trainer.generation.engine import Sampler
from trainer.generation.kv_cache import bytes_per_token
from trainer.generation.sampler_copy import SamplerCopy
from trainer.generation.sampling import noise_keys

SPREAD = 3.0  # of the models' distributions, see ``build``


@pytest.fixture(scope="module")
def model():
    return tiny_llama(VOCABULARY, layers=2, spread=3.0)


@pytest.fixture
def gpu(monkeypatch):
    """The branches of a GPU, with its smallest shapes of steps."""
    sample_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(engine, "MIN_GRAPH_COLUMNS", 4)
    monkeypatch.setattr(engine, "GRAPH_ROWS", 4)
    return monkeypatch


def plain(policy, rows=range(16), **more):
    """What a CPU samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "CudaGraphs", CudaGraphs)
        patch.setattr(SamplerCopy, "_lay_out", LAY_OUT)
        return draw(policy, rows, **more)


@pytest.fixture(scope="module")
def expected(model):
    """The responses of a CPU to all prompts."""
    with pytest.MonkeyPatch.context() as patch:
        without_kernels(patch)
        return draw(model, range(16)).responses()


def answers(sampler, rows=range(16), limit=10, temperature=1.0, seed=7):
    rows = list(rows)
    keys = noise_keys(seed, 3, rows)
    return sampler.sample([PROMPTS[i] for i in rows], keys, [0], limit, temperature)


@pytest.mark.parametrize("slots", [7, 64])
def test_captured_steps_sample_what_plain_steps_sample(model, gpu, slots):
    """Padded shapes, several row counts, few checks; one sampler for fewer and longer prompts, temperatures,
    newer weights, after Ctrl-C and after a release: no token changes."""
    sampler = Sampler(model, slots=slots)

    def check(policy=model, rows=range(16), limit=10, temperature=1.0):
        expected = plain(policy, rows, max_gen_len=limit, temperature=temperature)
        rollout = answers(sampler, rows, limit, temperature)
        assert rollout.tokens.equal(expected.tokens)
        assert rollout.response_len.equal(expected.response_len)
        assert rollout.finished.equal(expected.finished)
        assert (rollout.sampler_logprobs - expected.sampler_logprobs).abs().max() < 1e-5
        return rollout

    check(rows=range(3), limit=4)
    captures = sampler.graphs.warm_ups
    first = check()  # longer prompts: another engine, with graphs of its own
    assert sampler.sizes == (16, 16, 10)
    assert sampler.graphs.warm_ups == captures + len(sampler.graphs.captured)
    check(temperature=0.0)
    captured, engine_before = sampler.graphs.captured, sampler.engine
    rows, columns, temperatures = ({key[i] for key in captured} for i in range(3))
    assert rows <= {1, 2, *range(4, 17, 4), min(slots, 16)}
    assert len(rows) >= (3 if slots == 7 else 2)
    assert columns <= {4, 8, 16}
    assert temperatures == {1.0}  # a step of greedy rows is the same one
    check(rows=range(3), limit=5)
    assert sampler.engine is engine_before  # smaller: no new one
    assert sampler.graphs.warm_ups == captures + len(captured)  # none twice
    captures = sampler.graphs.warm_ups
    other = tiny_llama(VOCABULARY, seed=1, layers=2, spread=3.0)
    sampler.load(other)
    assert check(other).responses() != first.responses()
    sampler.load(model)
    check()
    assert sampler.graphs.warm_ups <= captures + 3  # row counts that the calls before did not have
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        steps, advance = iter([engine.Engine.advance, interrupt]), lambda self: next(steps)(self)
        patch.setattr(engine.Engine, "advance", advance)
        answers(sampler)
    assert (sampler.engine.done == 0).any()  # sequences of a call that is gone
    check()
    sampler.release()
    assert check().sampler_logprobs.equal(first.sampler_logprobs)


def interrupt(engine):
    raise KeyboardInterrupt


class Replayed(RecordedGraphs):
    """A capture whose replay is the step itself, so that compiled kernels can take part."""

    def warm_up(self, step):
        step()
        step()

    def record(self, step):
        return step


def test_steps_that_read_lengths_on_the_device_have_one_shape_for_each_row_count(model, monkeypatch):
    """Here it is the compiled attention of a CPU, on a GPU Triton's: columns make no further graphs."""
    expected = draw(model, range(16))
    monkeypatch.setattr(engine, "CudaGraphs", Replayed)
    monkeypatch.setattr(engine, "MIN_GRAPH_COLUMNS", 4)
    sampler = Sampler(model, slots=7)
    rollout = answers(sampler)
    if not sampler.engine.cache.fused:
        pytest.skip("no C compiler here")
    assert rollout.responses() == expected.responses()
    assert (rollout.sampler_logprobs - expected.sampler_logprobs).abs().max() < 1e-5
    width = sampler.engine.cache.width
    assert {key[:2] for key in sampler.graphs.captured} == {(4, width), (7, width)}


@pytest.mark.parametrize("name", ["GPT-2", "Mistral", "Qwen3-MoE", "MiniMind 3 MoE"])
def test_other_families_can_be_captured(name, gpu):
    """Mixtures of experts too: no size of a decoding step depends on what their routers choose."""
    policy = build(FAMILIES[name](), SPREAD)
    sampler = Sampler(policy, slots=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = answers(sampler).responses()
    assert found == plain(policy).responses()
    assert sampler.graphs.possible
    assert len(sampler.graphs.captured) >= 2


def test_captures_wait_where_they_may_and_leave_the_stream_as_it_was(monkeypatch):
    """The first step of all looks for kernels, which waits. Later captures warm up with one step, in which
    alone a wait is an error. What torch says of that mode is left out. torch.cuda.graph's own exit raises
    before it goes back to the stream."""
    streams, modes, found = ["main"], ["default"], []
    side = SimpleNamespace(wait_stream=print)

    def set_mode(mode):
        if mode == "error":
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        modes.append(mode)

    @contextlib.contextmanager
    def stream(new):
        streams.append(new)
        try:
            yield
        finally:
            streams.pop()

    @contextlib.contextmanager
    def graph(*args, **more):
        yield
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(cuda_graphs, "capture_stream", lambda: side)
    names = {"current_stream": lambda: side, "stream": stream, "graph": graph, "CUDAGraph": lambda: None}
    names |= {"get_sync_debug_mode": lambda: modes[-1], "set_sync_debug_mode": set_mode}
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    warnings.simplefilter("error")  # pytest sets it back
    step = lambda: found.append((modes[-1], list(streams)))  # noqa: E731
    graphs = CudaGraphs(torch.device("cuda"))
    with monkeypatch.context() as patch:
        patch.setattr(CudaGraphs, "record", lambda self, step: lambda: None)
        for key in (1, 2, 1):
            graphs.run(key, step, torch.zeros(1))
        graphs.forget()
        graphs.run(1, step, torch.zeros(1))
    assert found == [(mode, ["main", side]) for mode in ("default", "error", "error", "error")]
    with pytest.raises(ZeroDivisionError):
        graphs.run(2, lambda: 1 / 0, torch.zeros(1))
    assert modes[-2:] == ["error", "default"]
    with pytest.raises(RuntimeError, match="previous error during capture"):
        graphs.record(step)
    assert found[-1] == ("default", ["main", side])
    assert (streams, graphs.pool) == (["main"], None)


class Waiting(torch.nn.Module):
    """A norm that asks for a number in every forward, as some rotary embeddings do."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x) + 0.0 * (x.abs().max().item() > 1e9)


def test_a_model_that_waits_is_found_out_once_and_before_a_capture(model, gpu, expected):
    gpu.setattr(RecordedGraphs, "record", lambda self, step: pytest.fail("a capture was begun"))
    sampler = Sampler(model, slots=7)
    sampler.copy.model.model.norm = Waiting(sampler.copy.model.model.norm)
    with pytest.warns(UserWarning, match="no CUDA graphs, decoding is slower: operation not perm") as record:
        assert answers(sampler, range(3), limit=5).responses() == [r[:5] for r in expected[:3]]
        assert answers(sampler).responses() == expected  # a new engine: it does not ask again
        sampler.release()
        assert answers(sampler).responses() == expected
    assert sampler.graphs.warm_ups == 1
    assert len([w for w in record if "CUDA graphs" in str(w.message)]) == 1


def test_a_capture_that_fails_changes_no_result(model, gpu, expected):
    """After the warm-up: the step has changed positions and results, which must be put back."""

    def fail(self, step):
        step()
        raise RuntimeError("operation failed due to a previous error during capture\nand more")

    gpu.setattr(RecordedGraphs, "record", fail)
    sampler = Sampler(model, slots=7)
    with pytest.warns(UserWarning, match="slower: operation failed due to a previous error during capture$"):
        assert answers(sampler).responses() == expected
    assert not sampler.graphs.possible
    assert sampler.graphs.captured == {}


def test_out_of_memory_in_a_capture_takes_half_the_slots_and_keeps_graphs(model, gpu, expected):
    record, failures = RecordedGraphs.record, [torch.OutOfMemoryError("CUDA out of memory. Tried to …")]

    def fails_once(self, step):
        if failures:
            raise failures.pop()
        return record(self, step)

    gpu.setattr(RecordedGraphs, "record", fails_once)
    sampler = Sampler(model, slots=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answers(sampler).responses() == expected
    assert sampler.engine.slots == 3
    assert sampler.graphs.captured
    sampler.release()
    answers(sampler)
    assert sampler.engine.slots == 3  # what did not fit is not tried again


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_an_engine_that_is_let_go_frees_its_memory_at_once(model, gpu, no_collector):
    """No cycle of references: two caches must never be in memory together."""
    sampler, built, plain_engine = Sampler(model, slots=7), [], engine.Engine

    def parts():
        cache = sampler.engine.cache
        found = (sampler.engine, cache, cache.keys[0], cache.values[0], sampler.engine.noise)
        return [weakref.ref(x) for x in (*found, sampler.engine.done)]

    def look(*args):
        built.append([x() for x in old])
        return plain_engine(*args)

    answers(sampler, range(3))
    old = parts()
    gpu.setattr(engine, "Engine", look)
    answers(sampler)  # more prompts: another engine
    old = parts()
    sampler.release()
    assert (sampler.engine, sampler.graphs.captured) == (None, {})
    assert [*built, [x() for x in old]] == [[None] * 6] * 2


def test_memory_is_collected_before_it_is_emptied(monkeypatch, no_collector):
    """What a cycle of references keeps alive must be gone when torch gives its memory back."""
    alive = []

    def fail():
        node = torch.nn.Module()
        node.hook = lambda: node
        alive.append(weakref.ref(node))
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(alive[0]()))
    assert memory.attempt(fail) == (False, None)
    assert alive[1:] == [None]


def test_a_cache_too_small_for_half_is_an_error_that_names_the_tokens(model, monkeypatch):
    """It is raised when one sequence is left, and only after the cache before has gone."""
    tried = []

    class Full(engine.KVCache):
        def __init__(self, policy, slots, width):
            tried.append((slots, [x() for x in caches]))
            super().__init__(policy, slots, width)
            caches.append(weakref.ref(self))
            raise torch.OutOfMemoryError("CUDA out of memory")

    caches = []
    monkeypatch.setattr(engine, "KVCache", Full)
    refused("out of memory for a single sequence of 16 tokens", answers, Sampler(model, slots=7))
    assert [slots for slots, _ in tried] == [7, 3, 1]
    assert all(cache is None for _, caches in tried for cache in caches)


def test_an_engine_for_the_sizes_of_a_run_is_built_once(model, gpu, expected):
    built, init = [], engine.Engine.__init__
    gpu.setattr(engine.Engine, "__init__", lambda self, *args: built.append(args[1:3]) or init(self, *args))
    sampler = Sampler(model, slots=7, sizes=(16, 6 + 10, 10))
    for count, limit in ((2, 3), (16, 10), (9, 10)):
        found = answers(sampler, range(count), limit).responses()
        assert found == [r[:limit] for r in expected[:count]]
    assert built == [(7, (16, 16, 10))]
    gpu.setattr(engine, "CudaGraphs", CudaGraphs)
    sampler = Sampler(model, sizes=(16, 200, 100))  # a CPU: long prompts may never come, nor be room for them
    answers(sampler, range(3))
    assert sampler.sizes == (3, 13, 10)


def test_fewer_slots_where_the_cache_would_be_too_large(model, expected):
    one = 16 * bytes_per_token(model.config, 4)
    assert one == 16 * 2 * 2 * 16 * 4  # keys and values, two layers, one head of 16, fp32
    sampler = Sampler(model, cache_bytes=5 * one + 1)
    assert answers(sampler).responses() == expected
    assert sampler.engine.slots == 5
    assert sampler.engine.cache.values[1].shape == (5, 1, 16, 16)
    sampler = Sampler(model, cache_bytes=one - 1)
    answers(sampler, range(3))
    assert sampler.engine.slots == 1  # never none


def test_a_rollout_waits_for_its_checks_and_its_results(model, gpu):
    """The device's numbers are read once a check, and once where sequences have left."""
    sampler, keys, pad = Sampler(model, slots=7), noise_keys(7, 3, range(16)), engine.pad_right

    def on_the_host(*args):
        with _disable_current_modes():
            return pad(*args)

    gpu.setattr(engine, "pad_right", on_the_host)
    answers(sampler)
    results, wanted, new_batch = [], plain(model), engine.new_batch
    checks, compact = [], engine.Engine.compact

    def check(self):
        checks.append(self.live)
        with _disable_current_modes():
            compact(self)

    gpu.setattr(engine.Engine, "compact", check)
    # Where the host waits: the rollout, and whether its numbers are finite.
    gpu.setattr(engine, "new_batch", lambda *parts: results.append(parts) or MagicMock())
    with Waits(refuse=False) as waits:
        sampler.sample(PROMPTS, keys, [0], 10, 1.0)
    assert set(waits.found) <= {"lift_fresh"}  # lists that become tensors in pinned memory (``send``)
    assert 3 < len(checks) < 16
    assert new_batch(*results[0]).responses() == wanted.responses()


@pytest.mark.parametrize("slots", [5, 64])
def test_equal_prompts_go_through_the_model_once(model, slots, monkeypatch):
    """Each answer is that of a prompt alone: the noise depends on the row, the keys and values do not."""
    rows, computed, pad_right = [3, 5, 3, 3, 9, 5, 0, 3], [], engine.pad_right
    keys = noise_keys(7, 3, range(8))
    alone = [Sampler(model).sample([PROMPTS[i]], keys[n : n + 1], [0], 10, 1.0) for n, i in enumerate(rows)]
    look = lambda prompts, *more: computed.append(len(prompts)) or pad_right(prompts, *more)  # noqa: E731
    monkeypatch.setattr(engine, "pad_right", look)
    together = Sampler(model, slots=slots).sample([PROMPTS[i] for i in rows], keys, [0], 10, 1.0)
    assert together.responses() == [x.responses()[0] for x in alone]
    assert computed == [4] if slots == 64 else sum(computed) < 8
    assert len({tuple(together.responses()[row]) for row in (0, 2, 3, 7)}) > 1


@pytest.mark.parametrize("version", [2, 3])
def test_all_experts_compute_what_the_chosen_ones_compute(version):
    """A GPU's copy decodes so, without waiting; an expert that was not chosen may be infinite, as in
    fp16. The tokens of a prompt go only through the experts that they chose."""
    policy = build(FAMILIES[f"MiniMind {version} MoE"](), SPREAD)
    moe = next(m for m in policy.modules() if hasattr(m, "experts"))
    hidden = torch.rand(6, 1, 32)
    with torch.no_grad():
        moe.experts[1].down_proj.weight.fill_(torch.inf)
        moe.gate.weight.copy_(torch.tensor([1.0, -1.0, 0.9, 0.8])[:, None].expand(4, 32))
        moe.all_in_steps = False
        wanted = moe(hidden)
    moe.all_in_steps = True
    assert wanted.isfinite().all()
    with Waits(refuse=True), torch.inference_mode():
        assert torch.allclose(moe(hidden), wanted, atol=1e-5)
    with Waits(refuse=False) as waits, torch.inference_mode():
        moe(torch.randn(3, 2, 32))
    assert waits.found


@pytest.mark.parametrize("slots", [4, 64])
def test_later_turns_go_on_from_the_cache_in_captured_steps(model, gpu, slots):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "CudaGraphs", CudaGraphs)
        patch.setattr(SamplerCopy, "_lay_out", LAY_OUT)
        expected, logprobs, prefilled = in_three_turns(forgetful(model), LONG)
    sampler = Sampler(model, slots=slots)
    found, others, some = in_three_turns(sampler, LONG)
    assert found == expected and (some == 0 if slots == 64 else 0 < some < prefilled)
    assert torch.allclose(others, logprobs, atol=1e-5)
    steps = [key[-1] for key in sampler.graphs.captured]
    assert 1 <= steps.count("_feed") < steps.count("_decode") + 2
