"""Least lengths and stop strings on a GPU: as on a CPU, captured, and without waiting for it."""

import pytest
import torch
from on_gpu import PROMPTS, made, needs_gpu, waits
from tiny import word_tokenizer

from trainer.compute.scoring import PolicyScorer
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import StopStrings, early_ends

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def model():
    return made("Llama, tied")


@pytest.fixture(scope="module")
def stops(model):
    words = [chr(ord("a") + i % 26) * (1 + i // 26) for i in range(model.config.vocab_size - 2)]
    return StopStrings(["b c", "d", "f a"], word_tokenizer(words))


def drawn(sampler, length, least, stops, eos=0):
    return sampler.sample(PROMPTS, noise_keys(7, 3, range(len(PROMPTS))), [eos], length, 1.0, least, stops)


@pytest.mark.parametrize("slots", [5, 64])
def test_responses_are_those_of_a_cpu(model, stops, slots):
    on_cpu, on_gpu = Sampler(model), Sampler(made("Llama, tied").cuda(), slots=slots)
    for least, strings in ((0, stops), (4, None), (4, stops), (2, stops)):
        one, other = drawn(on_cpu, 10, least, strings), drawn(on_gpu, 10, least, strings)
        pairs = list(zip(one.responses(), other.responses(), strict=True))
        assert sum(a == b for a, b in pairs) >= len(pairs) - 2  # rounding may choose another token
        assert other.response_len.min() >= least
    assert on_gpu.engine.graphs.captured


def test_the_scorer_forbids_the_same(model):
    rollout = drawn(Sampler(made("Llama, tied").cuda()), 10, 5, None)
    on_gpu, found = made("Llama, tied").cuda(), []
    for early in (None, early_ends(5, [0])):
        scorer = PolicyScorer(on_gpu, early_ends=early)
        scorer(*rollout.sequences, 1.0)  # ids and places are sent
        with waits() as here:
            logprobs, _, _ = scorer(*rollout.sequences, 1.0)
            logprobs.sum().backward()
        found.append(len(here))
    assert found[1] == found[0]
    assert (logprobs - rollout.sampler_logprobs).abs().max() < 1e-3


def test_stop_strings_make_the_host_wait_no_more_often(model, stops):
    sampler, least = Sampler(made("Llama, tied").cuda(), slots=24), 60
    with torch.inference_mode():
        for _ in range(2):
            with waits() as found:
                drawn(sampler, 64, least, stops, eos=39)
    assert len(found) <= 64 // 8 + 14, [f"{w.filename}:{w.lineno}" for w in found]
