"""The sampler: right lengths, right distribution, noise that depends on nothing but its indices."""

import pytest
import torch
from tiny import tiny_llama, word_tokenizer
from transformers import DynamicCache

from trainer.rollout import noise_keys, pick_tokens, response_texts, sample, uniform
from trainer.scoring import PolicyScorer, score_all

PROMPTS = [[2 + i % 5] * (1 + i % 6) for i in range(24)]
VOCABULARY = 12


@pytest.fixture(scope="module")
def model():
    return tiny_llama(VOCABULARY, layers=2, spread=3.0)


def draw(model, rows, max_gen_len=10, temperature=1.0, eos=(0,), seed=7):
    keys = noise_keys(seed, 3, rows)
    return sample(model, [PROMPTS[i] for i in rows], keys, list(eos), max_gen_len, temperature)


def test_noise_is_uniform_and_uncorrelated():
    keys = noise_keys(1, 0, list(range(20_000)))
    u = torch.stack([uniform(keys, t) for t in range(8)])  # [8, 20000]
    assert (u >= 0).all()
    assert (u < 1).all()
    assert (u.mean(1) - 0.5).abs().max() < 0.01  # five standard errors
    assert (u.var(1) - 1 / 12).abs().max() < 0.003
    counts = torch.stack([torch.histc(row.float(), 20, 0, 1) for row in u])
    chi2 = ((counts - 1000) ** 2 / 1000).sum(1)  # 19 degrees of freedom
    assert chi2.max() < 50
    assert torch.corrcoef(u).fill_diagonal_(0).abs().max() < 0.03


def test_noise_depends_on_every_index_and_on_nothing_else():
    u = uniform(noise_keys(1, 2, [3, 4], 5), 6)
    assert u.equal(uniform(noise_keys(1, 2, [3, 4], 5), 6))
    assert u[1] == uniform(noise_keys(1, 2, [4], 5), 6)[0]  # the row does not matter
    others = [
        uniform(noise_keys(9, 2, [3], 5), 6),
        uniform(noise_keys(1, 9, [3], 5), 6),
        uniform(noise_keys(1, 2, [9], 5), 6),
        uniform(noise_keys(1, 2, [3], 9), 6),
        uniform(noise_keys(1, 2, [3], 5), 9),
        uniform(noise_keys(2, 1, [3], 5), 6),  # nor do indices commute
    ]
    assert len({x.item() for x in others} | {u[0].item()}) == 7


def test_inverse_cdf_by_hand():
    logits = torch.tensor([[0.2, 0.3, 0.5]]).log().repeat(5, 1)
    u = torch.tensor([0.0, 0.19, 0.21, 0.499, 0.9999], dtype=torch.float64)
    assert pick_tokens(logits, 1.0, u).tolist() == [0, 0, 1, 1, 2]


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).repeat(2, 1)
    u = torch.tensor([0.0, 1 - 2**-32], dtype=torch.float64)
    assert pick_tokens(logits, 1.0, u).tolist() == [1, 2]


def test_samples_follow_the_softmax_at_the_temperature():
    logits, draws = torch.tensor([1.0, 0.0, -1.0]), 20_000
    u = uniform(noise_keys(0, 0, list(range(draws))), 0)
    tokens = pick_tokens(logits.expand(draws, -1), 0.7, u)
    shares = torch.bincount(tokens, minlength=3) / draws
    assert (shares - (logits / 0.7).softmax(-1)).abs().max() < 0.015


def test_greedy_equals_transformers_generate(model):
    rollout = draw(model, range(24), temperature=0.0)
    for row, prompt in enumerate(PROMPTS):
        reference = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=10,
            eos_token_id=0,
        )
        assert rollout.responses()[row] == reference[0, len(prompt) :].tolist()


def test_samples_do_not_depend_on_the_batch(model):
    together = draw(model, range(24)).responses()
    alone = [draw(model, [i]).responses()[0] for i in range(24)]
    mixed = draw(model, [20, 3, 11]).responses()
    assert together == alone
    assert mixed == [alone[20], alone[3], alone[11]]


def test_different_steps_and_seeds_sample_differently(model):
    assert draw(model, range(24)).responses() != draw(model, range(24), seed=8).responses()


def test_the_record(model):
    rollout = draw(model, range(24))
    for row, response in enumerate(rollout.responses()):
        assert rollout.tokens[row, : len(PROMPTS[row])].tolist() == PROMPTS[row]
        assert 0 not in response[:-1]  # nothing after the first EOS
        assert rollout.finished[row].item() == (response[-1] == 0)
        assert rollout.finished[row] or len(response) == 10
    assert rollout.finished.any()
    assert not rollout.finished.all()


def test_several_eos_ids(model):
    for row in draw(model, range(24), eos=(0, 3)).responses():
        assert not set(row[:-1]) & {0, 3}
    assert any(row[-1] == 3 for row in draw(model, range(24), eos=(0, 3)).responses())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_what_is_sampled_is_what_is_scored(model, temperature):
    """The sampler's log-probs (KV cache, padded prompts) equal those of the training forward (no cache)."""
    rollout = draw(model, range(24), temperature=temperature)
    scorer = PolicyScorer(model)
    scored = score_all(rollout, lambda r: scorer(*r.sequences, temperature)[0])
    assert (scored - rollout.sampler_logprobs).abs().max() < 2e-5


def test_an_empty_response_has_length_one():
    """A model that only says EOS: one token, the EOS, and an empty text."""
    tokenizer, model = word_tokenizer(["a", "b"]), tiny_llama(4)

    class Head(torch.nn.Linear):
        def forward(self, hidden):
            return torch.tensor([50.0, 0, 0, 0]).expand(*hidden.shape[:-1], 4)

    model.lm_head = Head(32, 4)
    rollout = sample(model, [[2], [2, 3]], noise_keys(0, 0, [0, 1]), [0], 5, 1.0)
    assert rollout.responses() == [[0], [0]]
    assert rollout.finished.all()
    assert response_texts(rollout, tokenizer) == ["", ""]


def test_texts_leave_out_the_eos_and_keep_the_rest():
    tokenizer, model = word_tokenizer(["a", "b", "c"]), tiny_llama(5, spread=3.0)
    rollout = sample(model, [[2]] * 16, noise_keys(0, 0, list(range(16))), [0], 6, 1.0)
    for ids, text in zip(rollout.responses(), response_texts(rollout, tokenizer), strict=True):
        assert text.split() == [tokenizer.convert_ids_to_tokens(i) for i in ids if i != 0]


def test_the_cache_is_used(model):
    """Each step after the prompt feeds one column only: generation is linear, not quadratic."""
    widths, forward = [], model.model.forward

    def spy(*args, **kwargs):
        widths.append(kwargs["input_ids"].shape[1])
        assert isinstance(kwargs["past_key_values"], DynamicCache)
        return forward(*args, **kwargs)

    model.model.forward = spy
    try:
        draw(model, range(24))
    finally:
        model.model.forward = forward
    assert widths[0] == 6
    assert set(widths[1:]) == {1}
