"""Packed rows and fused layers: the values and gradients of padded rows and of transformers' own layers."""

import copy
from itertools import product

import pytest
import torch
import transformers as T
from test_attention import by_definition
from torch.nn.attention import varlen

from trainer.compute import attention, fused_layers
from trainer.compute.batching import Layout
from trainer.compute.cpu import kernels
from trainer.compute.fused_layers import attention_forward, fuse_layers, is_fused, layer_forward, mlp_forward
from trainer.compute.precision import PRODUCT_ROW_MULTIPLE
from trainer.compute.scoring import pack_sequences, packed_states, prepare_training
from trainer.inputs import check_sampling

SIZES = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
KNOWN = {
    "llama": T.LlamaConfig(**SIZES),
    "qwen2": T.Qwen2Config(**SIZES),
    "qwen3": T.Qwen3Config(**SIZES, head_dim=16),
}
OTHERS = {
    "mistral": T.MistralConfig(**SIZES, sliding_window=4),
    "gemma": T.GemmaConfig(**SIZES, head_dim=16),
    "cohere": T.CohereConfig(**SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2),
}


def build(config):
    """A model none of whose weights is as it was initialised, biases and norms included."""
    torch.manual_seed(0)
    model = T.AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    return model


def states_and_gradients(net, dtype=torch.float32, lengths=(40, 39, 31, 17, 2)):
    tokens = torch.randint(32, (len(lengths), 40), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor(lengths)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        states = packed_states(net, tokens, Layout(lengths))[0]
    return [states.detach(), *torch.autograd.grad(states.float().sin().sum(), net.parameters())]


def assert_as_near(exact, theirs, ours):
    """ours, in half precision, are as near to fp32 as transformers' are."""
    for a, b, c in zip(exact, theirs, ours, strict=True):
        error, wanted = ((x.float() - a).norm() / a.norm() for x in (c, b))
        assert error < 2 * wanted + 0.01


def assert_same(plain, fused):
    for a, b in zip(plain, fused, strict=True):
        assert (a - b).abs().max() < 2e-5 * max(1, a.abs().max())


WAYS = ["compiled", "padded attention", "flash attention", "torch"]
CASES = [*product(["llama", "qwen3"], WAYS), ("qwen2", WAYS[0]), *product(OTHERS, WAYS[1:3])]


@pytest.fixture
def way(request, monkeypatch):
    """How a CPU computes here. Flash attention is its definition, which only computes in half precision."""
    if "attention" in request.param:
        monkeypatch.setattr(attention, "MAX_COMPILED_SIZE", 0)
    if request.param == "torch":
        monkeypatch.setattr(kernels, "library", lambda: None)
    attention._flash_works.cache_clear()
    if request.param == "flash attention":
        monkeypatch.setattr(attention, "FLASH_DEVICE", "cpu")
    called = []
    monkeypatch.setattr(
        varlen, "varlen_attn", lambda *args, **more: called.append(1) or by_definition(*args, **more)
    )
    yield request.param
    attention._flash_works.cache_clear()
    assert bool(called) == (request.param == "flash attention")


@pytest.mark.parametrize(("name", "way"), CASES, indirect=["way"])
def test_values_and_gradients_are_those_of_padded_rows_and_of_transformers(name, way):
    """Only real tokens are computed; in bf16 on a CPU in few shapes: oneDNN compiles code for each."""
    plain, packed = (build((KNOWN | OTHERS)[name]).base_model for _ in range(2))
    assert pack_sequences(packed)
    layer, rows = packed.layers[0], []
    fused = name in KNOWN
    assert is_fused(layer, layer_forward) == is_fused(layer.self_attn, attention_forward) == fused
    assert is_fused(layer.mlp, mlp_forward) == ("forward" in vars(layer.input_layernorm)) == fused
    assert fused or not any("forward" in vars(module) for module in packed.modules())
    for net in (plain, packed):
        net.layers[0].mlp.register_forward_hook(lambda *given: rows.append(given[2].shape[:-1]))
    exact = states_and_gradients(plain)
    assert_same(exact, states_and_gradients(packed))
    assert rows == [(5, 40), (1, 129)]
    for dtype in (torch.bfloat16, torch.float16):
        assert_as_near(exact, *(states_and_gradients(net, dtype) for net in (plain, packed)))
    assert rows[2:] == [(5, 40), (1, 3 * PRODUCT_ROW_MULTIPLE), (5, 40), (1, 129)]
    # The trial of flash attention in a checkpointed forward: what it keeps must not count as the layer's.
    attention._flash_works.cache_clear()
    wanted = states_and_gradients(packed, torch.bfloat16)
    attention._flash_works.cache_clear()
    prepare_training(packed, gradient_checkpointing=1)
    found = states_and_gradients(packed, torch.bfloat16)
    assert all(a.equal(b) for a, b in zip(wanted, found, strict=True))


def states_of(net):
    return packed_states(net, torch.arange(18).view(2, 9), Layout([9, 7]))[0]


def test_a_model_with_a_layer_of_a_known_name_that_computes_something_else_is_left_alone():
    class LlamaRMSNorm(torch.nn.Module):
        """Gemma's norm under another name."""

        def __init__(self, norm):
            super().__init__()
            self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

        def forward(self, x):
            return torch.nn.functional.rms_norm(x, x.shape[-1:], 1 + self.weight, self.variance_epsilon)

    net = build(KNOWN["llama"]).base_model
    net.norm = LlamaRMSNorm(net.norm)
    before = states_of(net)
    with pytest.warns(UserWarning, match=r"^LlamaModel: not fused, which is slower: its results differ$"):
        fuse_layers(net, lambda: states_of(net))
    assert not any("forward" in vars(module) for module in net.modules())
    assert states_of(net).equal(before)


MIXED = T.Qwen2Config(**SIZES | {"num_hidden_layers": 6}, use_sliding_window=True, max_window_layers=3)


@pytest.mark.parametrize(
    ("config", "tried"),
    [
        (T.LlamaConfig(**SIZES | {"num_hidden_layers": 6}), 2),
        (T.LlamaConfig(**SIZES | {"num_hidden_layers": 1}), 1),
        (MIXED, 4),  # the first layer with a sliding window is the fourth
    ],
)
def test_trials_compute_a_layer_of_each_kind_and_no_more(config, tried):
    model = build(config)
    layers, seen = list(model.model.layers), set()
    for number, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, number=number: seen.add(number))
    check_sampling(model, model.device)
    assert pack_sequences(model.base_model)
    assert seen == set(range(tried))
    assert list(model.model.layers) == layers and model.config.num_hidden_layers == len(layers)
    assert all(is_fused(layer, layer_forward) for layer in layers)


def test_a_layer_deep_down_that_computes_something_else_is_in_the_trial():
    class LlamaRMSNorm(T.models.llama.modeling_llama.LlamaRMSNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    net = build(T.LlamaConfig(**SIZES | {"num_hidden_layers": 6})).base_model
    net.layers[4].input_layernorm.__class__ = LlamaRMSNorm
    with pytest.warns(UserWarning, match="not fused"):
        fuse_layers(net, lambda: states_of(net))


def test_a_gradient_that_is_wrong_is_found_in_frozen_models_too(monkeypatch):
    """Adapters learn in a frozen model, through the gradients of its layers."""
    net = build(KNOWN["llama"]).base_model.requires_grad_(False)
    norm = fused_layers._add_norm
    monkeypatch.setattr(fused_layers, "_add_norm", lambda *x: tuple(y * 2 - y.detach() for y in norm(*x)))
    with pytest.warns(UserWarning, match="not fused"):
        fuse_layers(net, lambda: states_of(net))
    assert not any(p.requires_grad for p in net.parameters())


def test_the_trial_keeps_little_and_leaves_what_trains_as_it_was():
    """The layers below the last one keep nothing for its backward: it could be as much as all weights."""
    net, seen = build(KNOWN["llama"]).base_model.requires_grad_(False), []
    hook = net.layers[0].register_forward_hook(lambda *given: seen.append(given[-1].requires_grad))
    for i, p in enumerate(net.layers[-1].parameters()):
        p.requires_grad = i % 2 == 0
    wanted = {name: p.requires_grad for name, p in net.named_parameters()}
    fuse_layers(net, lambda: states_of(net))
    hook.remove()
    assert seen and not any(seen)
    assert {name: p.requires_grad for name, p in net.named_parameters()} == wanted
