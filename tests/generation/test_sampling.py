"""sampling.py: the noise in plain integers, and tokens from the CDF, compiled and in torch alike."""

import pytest
import torch

from trainer.generation import sampling
from trainer.generation.sampling import noise_keys, running_sum, sample_tokens, uniform

WORD = 2**64


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(sampling, "kernels_for", lambda *_, **more: None)


def mix(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def test_the_noise_in_plain_integers():
    """Of seed -1, step 2, prompt 3, sample 4: each is mixed in, and after them the token's place."""
    state = WORD - 1
    for value in (2, 3, 4):
        state = mix(((state ^ mix((value + 0x9E3779B97F4A7C15) % WORD)) * 3 + 0xD1B54A32D192ED03) % WORD)
    keys = noise_keys(-1, 2, [3], 4)
    assert keys.item() % WORD == state
    tokens = [(token + 0x9E3779B97F4A7C15) % WORD for token in range(3)]
    bits = [mix(((state ^ mix(token)) * 3 + 0xD1B54A32D192ED03) % WORD) >> 32 for token in tokens]
    assert uniform(keys, 3).tolist() == [[x / 2**32 for x in bits]]
    assert noise_keys(-1, 2, [3]).equal(noise_keys(-1, 2, [3], 0))


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_one_cumulative_sum_in_fp64(vocabulary, temperature, dtype):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(500, vocabulary, generator=generator).to(dtype)
    logits[:, :-1:5] = -torch.inf
    logits[:, : max(vocabulary - 220, 0)] = -torch.inf  # a whole block of the CDF
    u = torch.rand(500, generator=generator, dtype=torch.float64)
    u[:2] = torch.tensor([0.0, 1 - 2**-32])
    exact = (logits.double() / temperature).log_softmax(-1)
    plain = torch.searchsorted(exact.exp().cumsum(-1), u[:, None], right=True).squeeze(1)
    tokens, logprobs = sample_tokens(logits, temperature, u)
    assert (tokens != plain.clamp(max=vocabulary - 1)).sum() <= 1  # u within the rounding of a boundary
    assert logprobs.dtype == torch.float32
    assert logprobs.tolist() == pytest.approx(exact.gather(1, tokens[:, None])[:, 0].tolist(), abs=1e-5)
    assert logprobs.isfinite().all()


@pytest.mark.parametrize("count", [1, 3])
def test_greedy_takes_the_first_of_the_largest_with_its_log_prob_at_temperature_1(count):
    logits = torch.tensor([[0.2, 0.4, 0.4]]).log().repeat(count, 1)
    tokens, logprobs = sample_tokens(logits, 0.0, torch.full((count,), 0.99, dtype=torch.float64))
    assert tokens.tolist() == [1] * count
    assert logprobs.tolist() == pytest.approx([torch.tensor(0.4).log().item()] * count)


def test_no_token_of_probability_0_is_drawn():
    """Whole blocks of them before, between and after; u at both ends."""
    logits = torch.full((4, 200), -torch.inf)
    logits[:, [70, 130]] = 0.0
    u = torch.tensor([0.0, 0.49999, 0.5, 1 - 2**-33], dtype=torch.float64)
    assert sample_tokens(logits, 1.0, u)[0].tolist() == [70, 70, 130, 130]


def test_running_sums_are_exact_to_two_to_the_minus_52():
    x = torch.tensor([[0.5, 2.0**-52, 2.0**-53, 0.25]])
    assert running_sum(x).tolist() == [[0.5, 0.5 + 2.0**-52, 0.5 + 2.0**-52, 0.75 + 2.0**-52]]
