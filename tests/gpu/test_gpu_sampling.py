"""Sampling on a GPU: captured steps beside plain ones, engines rebuilt, captures that fail, endings."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from on_gpu import (
    HALVES,
    MODELS,
    MOE,
    PROMPTS,
    changed,
    made,
    needs_gpu,
    needs_real_gpu,
    no_graphs,
    waits,
)
from tiny import llama_config, word_tokenizer
from transformers import LlamaForCausalLM

from trainer.compute.scoring import PolicyScorer, score_all
from trainer.generation.engine import Sampler, sample
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import StopStrings, early_ends

pytestmark = needs_gpu
FAMILIES = [*MODELS, *MOE]


def drawn(sampler, prompts=PROMPTS, max_gen_len=10, temperature=1.0, eos=(0,), least=0, stops=None):
    keys = noise_keys(7, 3, range(len(prompts)))
    return sampler.sample(prompts, keys, list(eos), max_gen_len, temperature, least, stops)


def share_of_equals(one, other):
    """The share of equal responses in two rollouts of the same prompts."""
    pairs = list(zip(one.responses(), other.responses(), strict=True))
    return sum(a == b for a, b in pairs) / len(pairs)


@pytest.fixture(scope="module")
def model():
    return made("Llama, tied").cuda()


@pytest.fixture(scope="module")
def stops(model):
    words = [chr(ord("a") + i % 26) * (1 + i // 26) for i in range(model.config.vocab_size - 2)]
    return StopStrings(["b c", "d", "f a"], word_tokenizer(words))


def test_captured_steps_are_greedy_as_generate(model):
    sampler = Sampler(model, slots=7)
    rollout = drawn(sampler, temperature=0.0)
    assert sampler.engine.graphs.captured
    for prompt, response in zip(PROMPTS, rollout.responses(), strict=True):
        ids = torch.tensor([prompt], device="cuda")
        options = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": 0}
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert response == answer[0, len(prompt) :].tolist()


@pytest.mark.parametrize("slots", [1, 7, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_samples_depend_neither_on_slots_nor_on_the_device(name, slots):
    """In fp32 only a draw within rounding of a boundary may differ."""
    model = made(name)
    here = sample(model, PROMPTS, noise_keys(7, 3, range(24)), [0], 10, 1.0)
    there = drawn(Sampler(model.cuda(), slots=slots))
    assert share_of_equals(here, there) > 0.95


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("name", FAMILIES)
def test_captured_steps_sample_what_plain_steps_sample(name, dtype):
    """In the same shapes, so bit for bit, the log-probs too."""
    model = made(name).cuda()
    sampler = Sampler(model, dtype, slots=7)
    captured = drawn(sampler)
    assert sampler.engine.graphs.captured, "no step was captured"
    with no_graphs():
        plain = drawn(Sampler(model, dtype, slots=7))
    assert captured.responses() == plain.responses()
    assert captured.sampler_logprobs.equal(plain.sampler_logprobs)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_what_is_sampled_is_what_is_scored(model, dtype, temperature):
    rollout = drawn(Sampler(model, dtype), temperature=temperature)
    scorer = PolicyScorer(model)
    scored = score_all(rollout, lambda rows: scorer(*rows.sequences, temperature)[0])
    gaps = (scored - rollout.sampler_logprobs).abs()
    assert gaps.sum() / rollout.mask.sum() < 0.02, "the sampler's mean error"
    assert dtype != torch.float32 or gaps.max() < 1e-3


def test_long_responses_in_several_shapes():
    """Rows and columns pass through several sizes of captured steps; sequences end at different times."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(40, layers=1)).eval()
    prompts = [[1 + (i + j) % 39 for j in range(3 + 2 * i)] for i in range(20)]
    here = drawn(Sampler(model), prompts, max_gen_len=160)
    sampler = Sampler(model.cuda(), slots=16)
    there = drawn(sampler, prompts, max_gen_len=160)
    assert len({len(r) for r in there.responses()}) > 5
    assert len(sampler.engine.graphs.captured) > 2
    assert share_of_equals(here, there) >= 0.9


def test_the_vocabulary_of_qwen():
    model = made("wide")
    here = sample(model, PROMPTS[:6], noise_keys(7, 3, range(6)), [0], 6, 1.0)
    there = drawn(Sampler(model.cuda()), PROMPTS[:6], max_gen_len=6)
    assert share_of_equals(here, there) > 0.8  # a token's share of the CDF is small here


def test_one_engine_for_newer_weights_two_temperatures_and_two_eos(model):
    model = copy.deepcopy(model)
    sampler = Sampler(model, slots=7)
    cases = [(t, eos) for t in (1.0, 0.0, 0.5, 1.0) for eos in ((0,), (0, 3))]
    for temperature, eos in cases:
        mixed = drawn(sampler, temperature=temperature, eos=eos)
        fresh = drawn(Sampler(model, slots=7), temperature=temperature, eos=eos)
        assert mixed.responses() == fresh.responses()
    graphs = dict(sampler.engine.graphs.captured)
    again = drawn(sampler.load(changed(model)), temperature=temperature, eos=eos)
    kept = sampler.engine.graphs.captured
    assert all(kept[key] is graph for key, graph in graphs.items()), "the same graphs read the new weights"
    assert again.responses() == drawn(Sampler(model, slots=7), eos=eos).responses()


def test_an_engine_that_is_rebuilt_leaves_no_cache_behind(model):
    """By the count of references alone: Python's garbage collector may be off during a run."""
    sampler = Sampler(model, slots=7)
    drawn(sampler, [p[:2] for p in PROMPTS])
    old = weakref.ref(sampler.engine.cache)
    gc.disable()
    try:
        longer = [[3] * 40, *PROMPTS]
        again = drawn(sampler, longer, max_gen_len=12)
        assert old() is None, "the old KV cache is still in memory"
    finally:
        gc.enable()
    assert again.responses() == drawn(Sampler(model, slots=7), longer, max_gen_len=12).responses()


def test_a_step_that_waits_for_the_gpu_is_not_captured_and_one_line_says_so(model):
    waiting = made("Llama, tied").cuda()
    mlp = waiting.base_model.layers[0].mlp
    mlp.register_forward_pre_hook(lambda _, x: (x[0] * (x[0].sum().item() > -1e9),))
    sampler = Sampler(waiting, slots=7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rollouts = [drawn(sampler), drawn(sampler)]
    assert len([w for w in caught if "CUDA graphs" in str(w.message)]) == 1
    assert not sampler.engine.graphs.captured
    plain = drawn(Sampler(model, slots=7)).responses()
    assert [r.responses() for r in rollouts] == [plain, plain]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    other = Sampler(model, slots=7)  # a model that can be captured still is
    assert drawn(other).responses() == plain
    assert other.engine.graphs.captured


@pytest.mark.parametrize("stopped", [False, True])
def test_decoding_hardly_waits_for_the_gpu(model, stops, stopped):
    """Once steps are captured: a bounded number of waits for a whole rollout of 64 tokens a prompt."""
    sampler, ends = Sampler(model, slots=24), {"eos": (99,)}
    if stopped:
        ends = {"eos": (39,), "least": 60, "stops": stops}
    with torch.inference_mode():
        for _ in range(2):
            with waits() as found:
                drawn(sampler, max_gen_len=64, **ends)
    assert len(found) <= 64 // 8 + (14 if stopped else 12), [f"{w.filename}:{w.lineno}" for w in found]


@pytest.mark.parametrize("slots", [5, 64])
def test_endings_are_those_of_a_cpu(stops, slots):
    on_cpu, on_gpu = Sampler(made("Llama, tied")), Sampler(made("Llama, tied").cuda(), slots=slots)
    for least, strings in ((0, stops), (4, None), (4, stops), (2, stops)):
        one, other = (drawn(sampler, least=least, stops=strings) for sampler in (on_cpu, on_gpu))
        assert share_of_equals(one, other) > 0.9  # rounding may choose another token
        assert other.response_len.min() >= least
    assert on_gpu.engine.graphs.captured


def test_the_scorer_forbids_the_same(model):
    rollout, found = drawn(Sampler(model), least=5), []
    for early in (None, early_ends(5, [0])):
        scorer = PolicyScorer(model.requires_grad_(), early_ends=early)
        scorer(*rollout.sequences, 1.0)  # ids and places are sent
        with waits() as here:
            logprobs, _, _ = scorer(*rollout.sequences, 1.0)
            logprobs.sum().backward()
        found.append(len(here))
    assert found[1] == found[0]
    assert (logprobs - rollout.sampler_logprobs).abs().max() < 1e-3


@needs_real_gpu
def test_where_the_cache_does_not_fit_slots_are_halved():
    """32 MiB a sequence and 256 MiB of memory."""
    config = llama_config(40, hidden=512, layers=8, num_key_value_heads=8, num_attention_heads=8)
    config.max_position_embeddings = 1024
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).cuda().eval()
    prompts, keys = [[3] * 900] * 16, noise_keys(7, 3, range(16))
    wanted = sample(model, prompts, keys, [0], 4, 1.0).responses()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (320 << 20)) / total)
    try:
        sampler = Sampler(model, slots=16)
        assert sampler.sample(prompts, keys, [0], 4, 1.0).responses() == wanted
        assert sampler.engine.slots < 16
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
