"""Packing sequences into one row: the same states and gradients as padded sequences."""

import copy

import pytest
import torch
from tiny import tiny_llama
from transformers import MistralConfig, MistralForCausalLM

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


@pytest.mark.parametrize("make", [lambda: tiny_llama(20, layers=2, spread=2.0), sliding])
def test_states_and_gradients_are_those_of_padded_sequences(make):
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
