"""Sampling on a GPU: captured steps beside plain ones and a CPU's, waits, endings, too little memory."""

import warnings

import on_gpu
import pytest
import torch
from on_gpu import HALVES, MODELS, MOE, PROMPTS, changed, made, memory_of, no_graphs, waits
from tiny import llama_config, word_tokenizer
from transformers import LlamaForCausalLM

from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import StopStrings

pytestmark = on_gpu.needs_gpu
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


@pytest.mark.parametrize("name", [*FAMILIES, "wide"])
def test_samples_are_those_of_a_cpu(name):
    """In fp32 only a draw within rounding of a boundary may differ; of a large vocabulary more do."""
    model = made(name)
    here = drawn(Sampler(model))
    there = drawn(Sampler(model.cuda(), slots=7))
    assert share_of_equals(here, there) > (0.8 if name == "wide" else 0.95)


def test_a_later_turn_goes_on_where_the_response_stands(model):
    """A response that is sampled in two parts is the one that is sampled at once."""
    responses = drawn(Sampler(model)).responses()
    first = [min(row % 6, len(ids) - 1) for row, ids in enumerate(responses)]
    begun = [[*PROMPTS[row], *ids[: first[row]]] for row, ids in enumerate(responses)]
    keys = noise_keys(7, 3, range(len(PROMPTS)))
    rest = Sampler(model, slots=7).sample(begun, keys, [0], 10, 1.0, first_places=first)
    whole = [
        [*ids[:place], *more] for ids, place, more in zip(responses, first, rest.responses(), strict=True)
    ]
    assert sum(a == b for a, b in zip(responses, whole, strict=True)) / len(whole) > 0.95


@pytest.mark.parametrize("name", FAMILIES)
def test_a_later_turn_goes_on_from_the_cache(name):
    """It computes its new tokens only, and samples what a turn samples that is computed anew."""
    model = made(name).cuda()
    keys = noise_keys(7, 3, range(16))
    prompts = [[2 + (row + i) % 5 for i in range(20 + row)] for row in range(16)]
    sampler = Sampler(model)
    turn = sampler.sample(prompts, keys, [0], 30, 1.0, first_places=[0] * 16)
    new = [[*ids, 2, 3][:20] for ids in turn.responses()]
    prompts = [ids + more for ids, more in zip(prompts, new, strict=True)]
    first = [len(more) for more in new]
    found = sampler.sample(prompts, keys, [0], 30, 1.0, first_places=first)
    assert any(key[-1] == "_feed" for key in sampler.graphs.captured)
    anew = Sampler(model).sample(prompts, keys, [0], 30, 1.0, first_places=first)
    assert share_of_equals(found, anew) > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("name", FAMILIES)
def test_captured_steps_sample_what_plain_steps_sample(name, dtype):
    """In the same shapes, so bit for bit, the log-probs too; newer weights as well."""
    model = made(name).cuda()
    sampler = Sampler(model, dtype, slots=7)
    for _ in range(2):
        captured = drawn(sampler.load(model))
        assert sampler.engine.graphs.captured, "no step was captured"
        with no_graphs():
            plain = drawn(Sampler(model, dtype, slots=7))
        assert captured.responses() == plain.responses()
        assert captured.sampler_logprobs.equal(plain.sampler_logprobs)
        changed(model)


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


def test_decoding_hardly_waits_for_the_gpu(model, stops):
    """Once steps are captured: a bounded number of waits for a whole rollout of 64 tokens a prompt."""
    for most, ends in ((12, {"eos": (99,)}), (14, {"eos": (39,), "least": 60, "stops": stops})):
        sampler = Sampler(model, slots=24)
        with torch.inference_mode():
            for _ in range(2):
                with waits() as found:
                    drawn(sampler, max_gen_len=64, **ends)
        assert len(found) <= 64 // 8 + most, [f"{w.filename}:{w.lineno}" for w in found]


def test_endings_are_those_of_a_cpu(stops):
    on_cpu = Sampler(made("Llama, tied"))
    on_gpu = Sampler(made("Llama, tied").cuda(), slots=5)
    for least, strings in ((0, stops), (4, None), (4, stops), (2, stops)):
        one, other = (drawn(sampler, least=least, stops=strings) for sampler in (on_cpu, on_gpu))
        assert share_of_equals(one, other) > 0.9  # rounding may choose another token
        assert other.response_len.min() >= least
    assert on_gpu.engine.graphs.captured


@on_gpu.needs_real_gpu
def test_where_the_cache_does_not_fit_slots_are_halved():
    """32 MiB a sequence and 256 MiB of memory."""
    config = llama_config(40, hidden=512, layers=8, num_key_value_heads=8, num_attention_heads=8)
    config.max_position_embeddings = 1024
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).cuda().eval()
    prompts, keys = [[3] * 900] * 16, noise_keys(7, 3, range(16))
    wanted = Sampler(model).sample(prompts, keys, [0], 4, 1.0).responses()
    torch.cuda.empty_cache()
    with memory_of(torch.cuda.memory_reserved() + (320 << 20)):
        sampler = Sampler(model, slots=16)
        assert sampler.sample(prompts, keys, [0], 4, 1.0).responses() == wanted
        assert sampler.engine.slots < 16
