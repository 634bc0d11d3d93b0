"""Packing sequences into one row: the same states and gradients as padded sequences, and little padding."""

import copy
import random

import pytest
import torch
from tiny import tiny_llama
from transformers import MistralConfig, MistralForCausalLM

from trainer.compute import attention
from trainer.compute.batching import Layout
from trainer.compute.scoring import pack_sequences, packed_states

LENGTHS = [13, 12, 12, 9, 5, 5, 1]


def padded_batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(20, (len(LENGTHS), max(LENGTHS)), generator=generator), torch.tensor(LENGTHS)


def sliding():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MistralForCausalLM(
        MistralConfig(vocab_size=20, num_key_value_heads=2, sliding_window=4, **sizes)
    ).eval()


@pytest.mark.parametrize("kernel", ["products", "fused"])
@pytest.mark.parametrize("make", [lambda: tiny_llama(20, layers=2, spread=2.0), sliding])
def test_states_and_gradients_are_those_of_padded_sequences(make, kernel, monkeypatch):
    if kernel == "fused":
        monkeypatch.setattr(attention, "SDPA_LENGTH", 0)
    tokens, lengths = padded_batch()
    model = make()
    results = []
    for packed in (False, True):
        net = copy.deepcopy(model).base_model
        assert not packed or pack_sequences(net)
        states = packed_states(net, tokens, Layout(lengths)).last_hidden_state
        states.square().sin().sum().backward()
        results.append([states, *(p.grad for p in net.parameters())])
    assert results[0][0].shape == (sum(LENGTHS), 32)
    for padded, packed in zip(*results, strict=True):
        assert (padded - packed).abs().max() < 2e-5 * max(1, padded.abs().max())


def test_one_sequence_does_not_see_another():
    tokens, lengths = padded_batch()
    net = tiny_llama(20, layers=2, spread=2.0).base_model
    pack_sequences(net)
    before = packed_states(net, tokens, Layout(lengths)).last_hidden_state
    tokens[0] += 1
    tokens[0] %= 20
    after = packed_states(net, tokens, Layout(lengths)).last_hidden_state
    assert before[13:].equal(after[13:])
    assert not before[:13].equal(after[:13])


def test_padding_wastes_little():
    """Nothing that is computed per token is padded, and attention is padded by at most a tenth."""
    rng = random.Random(0)
    for _ in range(20):
        lengths = sorted((rng.randint(1, 300) for _ in range(rng.randint(1, 60))), reverse=True)
        packing = Layout(lengths)
        longest, padded = [], 0
        for count, most in packing.groups:
            assert max(lengths[len(longest) : len(longest) + count]) == most
            longest += [most] * count
            padded += count * most
        assert len(longest) == len(lengths)
        assert sum(lengths) <= padded <= 1.1 * sum(lengths)


def test_sequences_of_one_length_need_no_padding():
    packing = Layout([8] * 5)
    assert packing.groups == [(5, 8)]


def test_the_model_computes_real_tokens_only():
    tokens, lengths = padded_batch()
    net = tiny_llama(20, layers=2).base_model
    pack_sequences(net)
    seen = []
    net.layers[0].mlp.register_forward_hook(
        lambda module, args, output: seen.append(output.shape[:-1].numel())
    )
    packed_states(net, tokens, Layout(lengths))
    assert seen == [sum(LENGTHS)]


def test_masks_that_sampling_made_can_be_trained_with():
    """Masks are cached, and tensors made in inference mode cannot take part in a backward pass."""
    attention.MASKS.clear()
    with torch.inference_mode():
        mask = attention._causal_mask(5, 2, torch.float32, torch.device("cpu"))
    assert not mask.is_inference()
    assert mask[0, 0].isfinite().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    smaller = attention._causal_mask(3, 2, torch.float32, torch.device("cpu"))
    assert smaller.equal(mask[:, :, :3, :3])
    assert len(attention.MASKS) == 1  # the largest one, of which the others are parts
