"""sampling.py: the noise in plain integers, and tokens from the CDF, in C, in Triton and in torch alike."""

from itertools import product

import pytest
import torch

from trainer.generation import sampling
from trainer.generation.sampling import GREEDY, noise_keys, running_sum, sample_tokens, uniform

WORD = 2**64
LAST = 1 - 2**-53  # the largest u


@pytest.fixture(params=["C", "torch", "Triton"])
def draw(request, monkeypatch):
    """``sample_tokens``, or the same by the kernel that samples on a GPU, in its interpreter or on a GPU."""
    if request.param == "torch":
        monkeypatch.setattr(sampling, "kernels_for", lambda *_, **more: None)
    if request.param != "Triton":
        return sample_tokens
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    import triton_interpreter  # noqa: F401

    from trainer.compute.cuda import kernels

    def drawn(logits, temperature, u):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        zeros = torch.zeros(len(u), dtype=torch.int64, device=device)
        state = zeros + torch.arange(len(u), device=device), zeros.clone(), zeros.clone(), zeros.clone()
        results = zeros[:, None].clone(), torch.zeros(len(u), 1, device=device)
        noise = u[:, None].contiguous().to(device)
        kernels.sample_and_store(logits.to(device), temperature, noise, zeros[:1] - 2, 1, state, results)
        return [x[:, 0].cpu() for x in results]

    return drawn


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
    assert (keys.item() % WORD, keys.dtype) == (state, torch.int64)
    tokens = [(token + 0x9E3779B97F4A7C15) % WORD for token in range(3)]
    bits = [mix(((state ^ mix(token)) * 3 + 0xD1B54A32D192ED03) % WORD) >> 32 for token in tokens]
    assert uniform(keys, 3).tolist() == [[x / 2**32 for x in bits]]
    assert noise_keys(-1, 2, [3]).equal(noise_keys(-1, 2, [3], 0))
    several = noise_keys(-1, 2, [5, 4, 3], 4)
    assert several[2] == keys and uniform(several, 3)[2:].equal(uniform(keys, 3))  # whatever stands beside


VOCABULARIES = [1, 63, 64, 65, 300, 5000, 9001, 300, 65]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [(*case, size) for case, size in zip(product([0.3, 1.0, 2.0], DTYPES), VOCABULARIES, strict=True)]


@pytest.mark.parametrize(("temperature", "dtype", "vocabulary"), CASES)
def test_tokens_are_those_of_one_cumulative_sum_in_fp64(draw, temperature, dtype, vocabulary):
    rows = 500 if draw is sample_tokens else 6
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator).to(dtype)
    logits[:, :-1:5] = -torch.inf
    logits[:, : vocabulary // 4] = -torch.inf  # a whole block of the CDF
    u = torch.rand(rows, generator=generator, dtype=torch.float64)
    u[:2] = torch.tensor([0.0, 1 - 2**-32])
    exact = (logits.double() / temperature).log_softmax(-1)
    cdf = exact.exp().cumsum(-1)
    plain = torch.searchsorted(cdf, u[:, None], right=True).squeeze(1).clamp(max=vocabulary - 1)
    tokens, logprobs = draw(logits, temperature, u)
    for place in (tokens != plain).nonzero().flatten().tolist():  # u is within rounding of a border
        assert abs(u[place] - cdf[place, min(tokens[place], plain[place])]) < 2e-6
    assert (tokens != plain).sum() <= (1 if vocabulary <= 300 else 2)
    assert logprobs.dtype == torch.float32
    assert logprobs.tolist() == pytest.approx(exact.gather(1, tokens[:, None])[:, 0].tolist(), abs=1e-5)
    assert logprobs.isfinite().all()


def test_greedy_rows_get_the_first_of_the_largest_and_the_others_stay(draw):
    """In one block of the vocabulary, and in a later one that has more than one block before it."""
    for size, place in ((3, 1), (9001, 8500)):
        logits = torch.full((4, size), -20.0)
        logits[:, 0] = 1.0
        logits[:, [place, place + 1]] = 2.0
        u = torch.tensor([GREEDY, 0.0, GREEDY, 0.1], dtype=torch.float64)
        tokens, logprobs = draw(logits, 0.7, u)
        assert tokens.tolist() == [place, 0, place, 0]
        exact = (logits / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert logprobs.tolist() == pytest.approx(exact.tolist(), abs=1e-5)


def test_a_whole_vocabulary_is_drawn_in_order(draw):
    """Equal logits: u picks the token at the same place, on both sides of the blocks' borders."""
    wanted = torch.tensor([0, 1, 4095, 4096, 8191, 8192, 9999])
    for shift in (0.001, 0.999):
        assert draw(torch.ones(7, 10_000), 1.0, (wanted.double() + shift) / 10_000)[0].equal(wanted)


@pytest.mark.parametrize(("size", "columns"), [(200, [70, 130]), (13_000, [5000, 9000])])
def test_no_token_of_probability_0_is_drawn(draw, size, columns):
    """Whole blocks of them before, between and after; logits far below 0; u at both ends."""
    logits = torch.full((4, size), -torch.inf)
    logits[:, columns] = -3e4
    u = torch.tensor([0.0, 0.49999, 0.5, LAST], dtype=torch.float64)
    tokens, logprobs = draw(logits, 1.0, u)
    assert tokens.tolist() == [columns[0]] * 2 + [columns[1]] * 2
    assert logprobs.tolist() == pytest.approx([-0.6931472] * 4)


def test_the_last_draw_of_many_rows_has_a_probability(draw):
    """Sums over blocks and inside one round differently; u at its end asks for a token behind the last."""
    rows = 50 if draw is sample_tokens else 12
    logits = 8 * torch.randn(rows, 5000, generator=torch.Generator().manual_seed(0))
    logits[:, 4990:] = -torch.inf
    tokens, logprobs = draw(logits, 1.0, torch.full((rows,), LAST, dtype=torch.float64))
    assert tokens.max() < 4990
    assert logprobs.isfinite().all()


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_logits_that_are_no_numbers_give_some_token_and_no_log_prob(draw):
    """A GPU that reads behind a table takes the whole process down, before anything can be said."""
    ours = draw is sample_tokens
    for size in (10, 64, 65) if ours else (10, 3 * 4096):  # three full blocks of a GPU's kernel
        logits = torch.randn(8, size)
        bad = [torch.nan, torch.inf]
        logits[[0, 1], 0] = logits[[2, 3], size // 2] = logits[[4, 5], -1] = torch.tensor(bad)
        logits[6] = torch.nan
        for temperature, u in product(
            (0.7, 1.0) if ours else (0.7,), (GREEDY, 0.0, 0.5, LAST) if ours else (GREEDY, 0.5)
        ):
            tokens, logprobs = draw(logits, temperature, torch.full((8,), u, dtype=torch.float64))
            assert ((tokens >= 0) & (tokens < size)).all()
            assert logprobs.isfinite().tolist() == [False] * 7 + [True]


def test_running_sums_are_exact_to_two_to_the_minus_52_and_never_fall():
    """They are sums of whole numbers: --deterministic 1 refuses a GPU's sums of floats."""
    x = torch.tensor([[0.5, 2.0**-52, 2.0**-53, 0.25]])
    assert running_sum(x).tolist() == [[0.5, 0.5 + 2.0**-52, 0.5 + 2.0**-52, 0.75 + 2.0**-52]]
    x = torch.rand(5, 300) / 300
    x[:, 100:150] = 0
    sums = running_sum(x)
    assert sums.sub(x.double().cumsum(-1)).abs().max() < 1e-12
    assert (sums.diff() >= 0).all() and sums[:, 100:150].diff().eq(0).all()
