"""Decoding with the GPU kernels, beside torch's operations: on a GPU where there is one, else in Triton's
interpreter."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from test_families import FAMILIES, VOCAB, build

pytest.importorskip("triton", reason="Triton exists for Linux only")
import triton_interpreter  # noqa: F401

from trainer.compute import kernels
from trainer.compute.cuda import kernels as cuda
from trainer.compute.scoring import pack_sequences
from trainer.generation import kv_cache
from trainer.generation.engine import Engine, Sampler
from trainer.generation.kv_cache import tabulate_rotary
from trainer.generation.sampler_copy import JoinedLinear, SamplerCopy
from trainer.generation.sampling import noise_keys, sample_tokens, uniform
from trainer.generation.stops import EarlyEnds

LAY_OUT = SamplerCopy._lay_out
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
HEADS = [  # query heads, groups, head_dim, window
    (2, 2, 64, None),
    (4, 2, 80, 7),
    (14, 2, 64, None),
    (14, 1, 128, 1),
    (34, 1, 16, 40),
]


def numbers(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def by_hand(query, keys, values, positions, window, scale):
    """Attention in fp64 of each query [n, heads, dim] over its row of the cache [n, groups, width, dim]"""
    out = []
    for q, k, v, last in zip(query.double(), keys.double(), values.double(), positions.tolist(), strict=True):
        first = 0 if window is None else max(0, last + 1 - window)
        k, v = (x[:, first : last + 1].repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        out.append(((k @ q[:, :, None]).squeeze(2) * scale).softmax(1)[:, None] @ v)
    return torch.stack(out).squeeze(2)


@pytest.mark.parametrize(("heads", "groups", "dim", "window"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_new_token_is_normed_rotated_kept_and_attended(dtype, heads, groups, dim, window):
    """Normed where there is more than one group. Rows at the first and the last column, and between. What a
    row has not reached holds NaN."""
    normed, width, positions = groups > 1, 75, torch.tensor([0, 74, 33, 15], device=DEVICE)
    n = len(positions)
    reached = torch.arange(width, device=DEVICE) < positions[:, None]
    empty = ~torch.cat((reached, torch.zeros(1, width, dtype=torch.bool, device=DEVICE)))[:, None, :, None]
    keys, values = (
        numbers(n + 1, groups, width, dim, dtype=dtype, seed=i).masked_fill(empty, torch.nan) for i in (1, 2)
    )
    before = keys.clone(), values.clone()
    joint = numbers(n, heads + 2 * groups, dim, dtype=dtype, seed=3)
    angle = numbers(n, 1, 1, dim // 2, seed=4)
    cos, sin = (torch.cat((x, x), -1).to(dtype) for x in (angle.cos(), angle.sin()))
    norms = [1 + 0.3 * numbers(dim, dtype=dtype, seed=i) for i in (5, 6)] if normed else [None, None]
    out = cuda.decode_attention(joint, cos, sin, norms, 1e-3, positions, keys, values, window, 0.3)

    q, k, v = joint.double().split([heads, groups, groups], 1)
    if normed:
        q, k = (F.rms_norm(x, (dim,), w.double(), 1e-3) for x, w in zip((q, k), norms, strict=True))
    c, s, half = cos[:, 0].double(), sin[:, 0].double(), dim // 2
    q, k = (x * c + torch.cat((-x[..., half:], x[..., :half]), -1) * s for x in (q, k))
    place = torch.arange(n, device=DEVICE), slice(None), positions
    for cache, old, new in ((keys, before[0], k), (values, before[1], v)):
        assert (cache[place].double() - new).abs().max() < NEAR[dtype] * new.abs().max()
        cache[place], old[place] = new.to(dtype), new.to(dtype)
        assert cache.nan_to_num(7).equal(old.nan_to_num(7))  # nothing else was written
    wanted = by_hand(q, keys[:n], values[:n], positions, window, 0.3)
    assert out.dtype == dtype
    assert (out.double() - wanted).abs().max() < NEAR[dtype] * wanted.abs().max()


def draws(rows, seed=1):
    return torch.rand(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


@pytest.fixture
def by_torch(monkeypatch):
    def draw(logits, temperature, u):
        with monkeypatch.context() as patch:
            patch.setattr("trainer.generation.sampling.kernels_for", lambda *tensors: None)
            return sample_tokens(logits, temperature, u)

    return draw


def drawn(logits, temperature, u):
    """What the kernel draws -> (tokens, their log-probs): one token a row, which no id ends."""
    n = len(u)
    tokens, zeros = torch.zeros(n, 1, dtype=torch.int64, device=DEVICE), torch.zeros_like(u).long()
    state = torch.arange(n, device=DEVICE), zeros.clone(), zeros.clone(), zeros.clone()
    results = tokens, torch.zeros(n, 1, device=DEVICE)
    cuda.sample_and_store(logits, temperature, u[:, None].contiguous(), zeros[:1] - 2, 1, state, results)
    return tokens[:, 0], results[1][:, 0]


@pytest.mark.parametrize(
    ("dtype", "temperature", "size"),
    [
        (torch.float32, 1.0, 1),
        (torch.float32, 0.7, 9001),
        (torch.bfloat16, 1.0, 5000),
        (torch.bfloat16, 0.3, 1000),
        (torch.float16, 0.7, 64),
    ],
)
def test_the_same_noise_draws_the_same_tokens(dtype, temperature, size, by_torch):
    """As the torch form does, except where u is within rounding of the border between two tokens."""
    logits, u = 3 * numbers(40, size, dtype=dtype), draws(40)
    tokens, logs = drawn(logits, temperature, u)
    plain = by_torch(logits.float(), temperature, u)[0]
    p = (logits.double() / temperature).softmax(1)
    assert (logs - p.gather(1, tokens[:, None]).squeeze(1).log()).abs().max() < 1e-5
    assert (tokens != plain).sum() <= 1
    cdf = p.cumsum(1).gather(1, tokens[:, None]).squeeze(1)
    assert (u < cdf + 2e-6).all()
    assert (u > cdf - p.gather(1, tokens[:, None]).squeeze(1) - 2e-6).all()


def test_a_whole_vocabulary_is_drawn_in_order():
    """Equal logits: u picks the token at the same place, on both sides of the blocks' borders."""
    size = 10_000
    wanted = torch.tensor([0, 1, 4095, 4096, 8191, 8192, size - 1], device=DEVICE)
    for shift in (0.001, 0.999):
        u = (wanted.double() + shift) / size
        assert drawn(torch.ones(7, size, device=DEVICE), 1.0, u)[0].equal(wanted)


def test_no_token_of_probability_0_is_drawn():
    """Blocks and tokens of probability 0 before, between and after; logits far below 0; u at both ends."""
    for low in (0.0, -3e4):
        logits = torch.full((4, 13_000), -torch.inf, device=DEVICE)
        logits[:, [5000, 9000]] = low
        u = torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-53], dtype=torch.float64, device=DEVICE)
        tokens, logs = drawn(logits, 1.0, u)
        assert tokens.tolist() == [5000, 5000, 9000, 9000]
        assert logs.tolist() == pytest.approx([-0.6931472] * 4)


def test_the_last_draw_of_many_rows_has_a_probability():
    """Sums over blocks and inside one round differently; u at its end asks for a token behind the last."""
    logits = 8 * numbers(50, 5000)
    logits[:, 4990:] = -torch.inf
    u = torch.full((50,), 1 - 2**-53, dtype=torch.float64, device=DEVICE)
    tokens, logs = drawn(logits, 1.0, u)
    assert tokens.max() < 4990
    assert logs.isfinite().all()


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_logits_that_are_no_numbers_give_some_token_and_no_log_prob(temperature, by_torch):
    size = 3 * 4096  # three full blocks, and an empty one
    logits = numbers(4, size)
    logits[0, 4500], logits[1], logits[2], logits[3, 7] = torch.nan, torch.nan, -torch.inf, torch.inf
    args = logits, temperature, draws(4)
    for tokens, logs in (drawn(*args), by_torch(*args)):
        assert ((tokens >= 0) & (tokens < size)).all()
        assert logs.isnan().all()


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
        self.eos, self.limit, self.early_ends = ids(1, 4, 6), 5, EarlyEnds(2, (1, 4, 6))
        self.tokens = torch.zeros(9, 6, dtype=torch.int64, device=DEVICE)
        self.logprobs = torch.zeros(9, 6, device=DEVICE)
        self.temperature = 0.8
        self._logits = lambda states: states
        self.stop_table, self.least = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE), 2
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
            monkeypatch.setattr(SamplerCopy, "_lay_out", lambda copy, on_cpu: LAY_OUT(copy, False))

    return force


def answers(model, dtype, temperature=0.9, sampler=None):
    """-> a rollout in slots that are used again, and its sampler"""
    prompts = [[2 + (7 * i + j) % (VOCAB - 2) for j in range(1 + 3 * i)] for i in range(4)]
    pack_sequences(model.base_model)
    sampler = sampler.load(model) if sampler else Sampler(model, dtype, slots=3)
    return sampler.sample(prompts, noise_keys(0, 0, range(4)), [0, 1], 5, temperature), sampler


SLOW = {"Llama", "Qwen3", "Qwen3-MoE", "Mistral", "GPT-NeoX"}
FUSED = dict.fromkeys(("Llama", "Qwen2, mixed windows", "Qwen3", "Qwen3-MoE", "MiniMind 2 MoE"), True)
FUSED |= dict.fromkeys(("Mistral", "Gemma 3", "GPT-2", "GPT-NeoX", "GPT-J"), False)
KINDS = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FUSED]


@pytest.mark.parametrize("name", KINDS)
def test_families_sample_the_same(name, forced, monkeypatch):
    """With fused layers, which leave their last sum to the next one, and with masks where a model has its
    own."""
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
    monkeypatch.setattr(SamplerCopy, "_lay_out", lambda copy, on_cpu: LAY_OUT(copy, False))
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
    attention = sampler.copy.model.model.layers[1].self_attn
    own, names = other.model.layers[1].self_attn, ("q_proj", "k_proj", "v_proj")
    assert attention.qkv.weight.equal(torch.cat([getattr(own, x).weight for x in names]).to(dtype))
    assert attention.qkv.bias.equal(torch.cat([getattr(own, x).bias for x in names]).to(dtype))
    stored = [x.untyped_storage() for places in sampler.copy.places.values() for x in places]
    stored = {x.data_ptr(): x.nbytes() for x in stored}
    assert sum(stored.values()) == sum(p.numel() for p in model.parameters()) * dtype.itemsize
