"""Decoding with the GPU kernels, beside torch's operations: on a GPU where there is one, else in Triton's
interpreter."""

from types import SimpleNamespace

import pytest
import torch
from recorded_graphs import lay_out_as_on_a_gpu
from test_families import FAMILIES, VOCAB, build

pytest.importorskip("triton", reason="Triton exists for Linux only")
import triton_interpreter  # noqa: F401

from trainer.compute import kernels
from trainer.compute.cuda import kernels as cuda
from trainer.compute.scoring import pack_sequences
from trainer.generation import kv_cache
from trainer.generation.engine import Engine, Sampler
from trainer.generation.kv_cache import tabulate_rotary
from trainer.generation.sampler_copy import JoinedLinear
from trainer.generation.sampling import noise_keys, uniform
from trainer.generation.stops import Forbidden

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Slots:
    """What ``Engine._sample_and_store`` reads and writes: six slots, some of them done, and nine rows."""

    def __init__(self):
        def ids(*values):
            return torch.tensor(values, device=DEVICE)

        row, count, done = ids(4, 8, 0, 2, 7, 8), ids(0, 2, 3, 1, 4, 0), ids(0, 1, 0, 0, 0, 1)
        begun = ids(0, 1, 1, 0, 0, 1)
        self.state = torch.stack([row, torch.full_like(row, 3), 7 + count, count, begun, done])
        self.row, self.token, self.position, self.count, self.begun, self.done = self.state
        self.noise = uniform(noise_keys(1, 0, range(9)), 6).to(DEVICE)
        self.eos, self.limit, self.forbidden = ids(1, 4, 6), 5, Forbidden(2, (1, 4, 6))
        self.tokens = torch.zeros(9, 6, dtype=torch.int64, device=DEVICE)
        self.logprobs = torch.zeros(9, 6, device=DEVICE)
        self.device = torch.device(DEVICE)
        self.temperature = 0.8
        self._logits = lambda states: states
        self.stop_table = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)
        self.stop_table[0, 2], self.stop_table[1, 3] = 1, 2  # token 3 ends a response, behind token 2


def test_what_is_kept_of_a_token(monkeypatch):
    """Done slots, an end, the limit: the kernel and ``Engine._sample_and_store`` in torch keep the same."""
    plain, fused = Slots(), Slots()
    kinds = set()
    for step in range(5):
        logits = 2 * numbers(6, 8, seed=step)
        with monkeypatch.context() as patch:
            patch.setattr("trainer.generation.engine.kernels_for", lambda *tensors: None)
            patch.setattr("trainer.generation.sampling.kernels_for", lambda *tensors: None)
            Engine._sample_and_store(plain, slice(0, 6), logits)
        with monkeypatch.context() as patch:
            patch.setattr("trainer.generation.engine.kernels_for", lambda *tensors: cuda)
            Engine._sample_and_store(fused, slice(0, 3), logits[:3])
            Engine._sample_and_store(fused, slice(3, 6), logits[3:])
        for name in ("row", "position", "count", "done"):
            assert getattr(fused, name).equal(getattr(plain, name)), name
        assert fused.token[plain.done == 0].equal(plain.token[plain.done == 0])
        assert fused.tokens[:8, :5].equal(plain.tokens[:8, :5])
        assert torch.allclose(fused.logprobs[:8, :5], plain.logprobs[:8, :5], atol=1e-6)
        ended = plain.done >= 2
        kinds |= set(zip(plain.done.bool().tolist(), ended.tolist(), strict=True))
    assert kinds == {(False, False), (True, False), (True, True)}
    assert plain.done.all()


@pytest.fixture
def forced(monkeypatch):
    """-> a function: from its call on, sampling on a CPU takes a GPU's branches and kernels in decoding."""
    decoding = ("TYPES", "lanes", "decode_attention", "sample_and_store")
    mixed = SimpleNamespace(**vars(kernels.cpu) | {name: getattr(cuda, name) for name in decoding})

    def force():
        if DEVICE == "cpu":
            for module in (kernels, kv_cache):
                monkeypatch.setattr(module, "kernels_of", lambda kind: mixed)
            lay_out_as_on_a_gpu(monkeypatch)

    return force


def answers(model, dtype, temperature=0.9, sampler=None):
    """-> a rollout in slots that are used again, and its sampler"""
    prompts = [[2 + (7 * i + j) % (VOCAB - 2) for j in range(1 + 3 * i)] for i in range(3)]
    pack_sequences(model.base_model)
    sampler = sampler.load(model) if sampler else Sampler(model, dtype, slots=2)
    return sampler.sample(prompts, noise_keys(0, 0, range(3)), [0, 1], 5, temperature), sampler


SLOW = {"Llama", "Qwen3", "Qwen3-MoE", "Mistral"}
FUSED = dict.fromkeys(("Llama", "Qwen2, mixed windows", "Qwen3", "Qwen3-MoE", "MiniMind 2 MoE"), True)
FUSED |= dict.fromkeys(("Mistral", "Gemma 3", "GPT-2"), False)
KINDS = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FUSED]


@pytest.mark.parametrize("name", KINDS)
def test_families_sample_the_same(name, forced, monkeypatch):
    """With fused layers, which leave their last sum to the next one, and with masks of a model's own."""
    model = build(FAMILIES[name]())
    left = []

    def keeps(cache, delta, layer, keeps=kv_cache.KVCache.keeps):
        kept = keeps(cache, delta, layer)
        left.append((kept, layer, cache.positions is not None))
        return kept

    monkeypatch.setattr(kv_cache.KVCache, "keeps", keeps)
    wanted, _ = answers(model, torch.float32)
    assert not [kept for kept, _, _ in left if kept]  # on a CPU, whose numbers are to stay
    forced()
    found, sampler = answers(model.to(DEVICE), torch.float32)
    cache, fused = sampler.engine.cache, FUSED[name]
    assert cache.fused == fused
    rotary = getattr(sampler.copy.model.base_model, "rotary_emb", None)
    assert ("forward" in vars(rotary)) == cache.fused if rotary else not cache.fused
    assert found.responses() == wanted.responses()
    assert (found.sampler_logprobs.cpu() - wanted.sampler_logprobs).abs().max() < 1e-4
    last = model.config.num_hidden_layers - 1
    kept = {(layer, decodes) for kept, layer, decodes in left if kept}
    assert kept == ({(layer, True) for layer in range(last)} if fused else set())


def test_a_gpu_without_bf16_decodes_fused_in_fp16(forced):
    model = build(FAMILIES["Llama"]())
    pack_sequences(model.base_model)
    assert not kv_cache.KVCache(model.cpu().half(), 4, 20).fused  # on a CPU
    forced()
    cache = kv_cache.KVCache(model.to(DEVICE), 4, 20)
    assert cache.fused
    assert (cache.dtype, cache.width, cache.block) == (torch.float16, 20, None)
    for begin in (cache.prefill, lambda first: cache.decode(torch.zeros(1), 1)):
        cache.delta = torch.ones(1)  # of a call that was interrupted between two layers
        begin(0)
        assert cache.delta is None


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "dynamic"])
def test_rotary_positions_from_a_table(kind):
    more = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    more |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    config = FAMILIES["Llama"]()
    config.rope_parameters = more
    model = build(config).bfloat16().to(DEVICE)
    rotary, x = model.model.rotary_emb, numbers(2, 3, 8, dtype=torch.bfloat16)
    positions = torch.tensor([[0, 59, 7], [17, 1, 2]], device=DEVICE)
    wanted = rotary(x, positions)
    tabulate_rotary(model, 60)
    found = rotary(x, positions)
    assert ("forward" in vars(rotary)) == (kind != "dynamic")
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.bfloat16
        assert a.is_contiguous()
        assert a.equal(b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_weights_keep_their_place(dtype, monkeypatch):
    """Newer weights are copied into the same memory, which holds every weight once."""
    lay_out_as_on_a_gpu(monkeypatch)
    model, other = (build(FAMILIES["Qwen2"]()).to(DEVICE) for _ in range(2))
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1 * numbers(*p.shape))
    first, sampler = answers(model, dtype)
    joined = [x for x in sampler.copy.model.modules() if isinstance(x, JoinedLinear)]
    assert len(joined) == 2 * model.config.num_hidden_layers
    before = [x.weight.data_ptr() for x in joined]
    second, _ = answers(other, dtype, sampler=sampler)
    assert [x.weight.data_ptr() for x in joined] == before
    assert second.responses() == answers(other, dtype)[0].responses() != first.responses()
    stored = {x.data_ptr(): x.nbytes() for x, _ in sampler.copy.storages}
    assert sum(stored.values()) == sum(p.numel() for p in model.parameters()) * dtype.itemsize
