"""The package model/: parity with MiniMind's own code, loading and saving, the critic, bad input."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import tiny
import torch
import transformers
from huggingface_hub import constants
from tiny import ROOT
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as hf_logging

from errors import InputError
from model import loading
from model.critic import CriticModel
from model.loading import (
    check_output_head,
    check_tokenizer,
    eos_ids,
    load_policy,
    load_tokenizer,
    tokenizer_source,
)
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM, minimind_config_of
from model.saving import save_directory, save_policy
from trainer.rewards.reward_models import load_reward_model

KINDS = ["minimind2_dense", "minimind2_moe", "minimind3_dense", "minimind3_moe"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """One thread: tensors this small gain nothing from a second one, and on a busy machine wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def golden(request):
    """name -> (path of the ``.pth``, its state-dict, the input ids and the logits of MiniMind's own code)."""
    folder = ROOT / "tests" / "fixtures" / "minimind"

    def load(name):
        expected = torch.load(folder / f"{name}.expected.pt", weights_only=True)
        path = folder / f"{name}.pth"
        return path, torch.load(path, weights_only=True), expected["input_ids"], expected["logits"]

    return load


def tiny_minimind(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
    return MiniMindForCausalLM(MiniMindConfig(**{**sizes, **changes})).eval()


def tiny_llama(kind=LlamaForCausalLM, **changes):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 50,
        "pad_token_id": 0,
    }
    return kind(LlamaConfig(**{**sizes, **changes})).eval()


def tiny_gpt2(**changes):
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=50, bos_token_id=1, eos_token_id=2, **changes
    )
    return GPT2LMHeadModel(config)


def tiny_tokenizer(size=50, **special):
    vocabulary = {f"w{i}": i for i in range(size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")),
        **{"eos_token": "w2", **special},
    )


def random_tokens(*shape, seed=0):
    return torch.randint(3, 50, shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- MiniMind's architecture


@pytest.mark.parametrize("name", KINDS)
def test_same_logits_and_keys_as_minimind(golden, name):
    path, state, input_ids, logits = golden(name)
    model = load_policy(path)
    assert model.dtype == torch.float32
    own = MiniMindForCausalLM(minimind_config_of(state)).eval()
    own.load_state_dict(state, strict=True)
    assert f"minimind{own.config.minimind_version}" == name.split("_")[0]
    kinds = {"minimind2_dense": LlamaForCausalLM, "minimind3_dense": Qwen3ForCausalLM}
    assert type(model) is kinds.get(name, MiniMindForCausalLM)
    with torch.no_grad():
        assert (model(input_ids).logits - logits).abs().max() <= 1e-5
        assert torch.equal(own(input_ids).logits, model(input_ids).logits)
    assert model.state_dict().keys() == own.state_dict().keys() == state.keys()


@pytest.mark.parametrize("name", KINDS)
def test_config_from_hidden_size_and_layers_alone(golden, name):
    """The defaults of each version give exactly the shapes of MiniMind's own models."""
    _, state, _, _ = golden(name)
    model = MiniMindForCausalLM(
        MiniMindConfig(
            hidden_size=64,
            num_hidden_layers=2,
            vocab_size=160,
            use_moe=name.endswith("moe"),
            minimind_version=int(name[len("minimind")]),
        )
    )
    model.load_state_dict(state, strict=True)


def test_default_config_is_minimind2_small():
    config = MiniMindConfig()
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (512, 8, 1408)
    assert (config.vocab_size, config.num_key_value_heads, config.head_dim) == (6400, 2, 64)
    assert (config.num_experts_per_tok, config.router_aux_loss_coef) == (2, 0.1)
    third = MiniMindConfig(hidden_size=768, minimind_version=3)
    assert (third.intermediate_size, third.num_key_value_heads, third.router_aux_loss_coef) == (2432, 4, 5e-4)


def test_bad_minimind_config():
    with pytest.raises(InputError, match="hidden_size 100"):
        MiniMindConfig(hidden_size=100)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("use_moe", [False, True])
@torch.no_grad()
def test_cached_decode_equals_full_forward(version, use_moe):
    """Each row has its own position, in a cache with holes."""
    model = tiny_minimind(minimind_version=version, use_moe=use_moe)
    tokens = random_tokens(2, 9)
    lengths = [6, 4]  # of the prompts; the cache of row 1 has a hole at columns 4 and 5
    full = [model(tokens[row : row + 1, : lengths[row] + 3]).logits[0] for row in range(2)]

    cache = DynamicCache(config=model.config)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    prompt = model(tokens[:, :6], attention_mask=mask, past_key_values=cache, use_cache=True).logits
    for row, length in enumerate(lengths):
        torch.testing.assert_close(prompt[row, :length], full[row][:length], rtol=0, atol=1e-5)
    for step in range(3):
        position = torch.tensor([[lengths[0] + step], [lengths[1] + step]])
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
        logits = model(
            tokens.gather(1, position), attention_mask=mask, position_ids=position, past_key_values=cache
        ).logits
        for row in range(2):
            torch.testing.assert_close(logits[row, 0], full[row][lengths[row] + step], rtol=0, atol=1e-5)


@pytest.mark.parametrize("version", [2, 3])
@torch.no_grad()
def test_padding_and_other_rows_do_not_reach_a_token(version):
    model = tiny_minimind(minimind_version=version, use_moe=True)
    tokens = random_tokens(3, 12)
    alone = model(tokens[1:2, :5]).logits
    tokens[1, 5:] = 0
    torch.testing.assert_close(model(tokens).logits[1:2, :5], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("version", [2, 3])
def test_one_token_gives_every_expert_a_gradient(version):
    model = tiny_minimind(minimind_version=version, use_moe=True).train()
    model(random_tokens(1, 1)).logits.square().sum().backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


def test_one_moe_layer_by_hand():
    model = tiny_minimind(use_moe=True, num_hidden_layers=1)
    layer = model.model.layers[0].mlp
    hidden = torch.randn(32)
    probs = torch.softmax(layer.gate.weight @ hidden, dim=0)
    first, second = probs.argsort(descending=True)[:2].tolist()
    visited = probs[first] * layer.experts[first](hidden) + probs[second] * layer.experts[second](hidden)
    expected = visited / (probs[first] + probs[second]) + layer.shared_experts[0](hidden)
    torch.testing.assert_close(layer(hidden.view(1, 1, -1)).flatten(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moe_in_mixed_precision(dtype):
    model, tokens = tiny_minimind(use_moe=True), random_tokens(2, 6)
    full = model(tokens).logits
    with torch.autocast("cpu", dtype=dtype):
        mixed = model(tokens).logits
    mixed.float().square().sum().backward()
    for logits in (mixed, model.to(dtype)(tokens).logits):
        assert logits.dtype == dtype
        torch.testing.assert_close(logits.float(), full, rtol=0, atol=5e-3)


def test_router_logits():
    model = tiny_minimind(use_moe=True)
    tokens = random_tokens(3, 7)
    backbone = model.model(tokens, output_router_logits=True)
    assert [tuple(logits.shape) for logits in backbone.router_logits] == [(21, 4), (21, 4)]
    model.zero_grad()
    sum(logits.square().sum() for logits in backbone.router_logits).backward()
    assert model.model.layers[1].mlp.gate.weight.grad.abs().sum() > 0
    assert model.model(tokens).get("router_logits") is None
    assert tiny_minimind().model(tokens, output_router_logits=True).router_logits == ()


@torch.no_grad()
def test_logits_to_keep_labels_and_generate():
    model = tiny_minimind(use_moe=True)
    tokens = random_tokens(2, 6)
    out = model(tokens, labels=tokens)
    torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, out.logits[:, -2:])
    by_hand = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(out.loss, by_hand)
    written = model.generate(tokens, max_new_tokens=3, do_sample=False, eos_token_id=None)
    greedy = tokens
    for _ in range(3):
        greedy = torch.cat([greedy, model(greedy).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(written, greedy)


@pytest.mark.parametrize("version", [2, 3])
@torch.no_grad()
def test_auto_classes_round_trip(tmp_path, version):
    model = tiny_minimind(minimind_version=version, use_moe=True)
    tokens = random_tokens(2, 6)
    model.save_pretrained(tmp_path)
    for again in (AutoModelForCausalLM.from_pretrained(tmp_path), load_policy(tmp_path)):
        assert type(again) is MiniMindForCausalLM
        assert torch.equal(again(tokens).logits, model(tokens).logits)


# ---------------------------------------------------------------- saving and loading


@pytest.mark.parametrize("sidecar", [True, False])
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_save_policy_round_trip(golden, tmp_path, name, sidecar):
    path, state, input_ids, _ = golden(name)
    model = load_policy(path)
    written = tmp_path / "out" / "ppo_actor_64.pth"
    save_policy(model, tiny_tokenizer(160), written)
    saved = torch.load(written, weights_only=True)
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[key], state[key]) for key in state)  # the golden weights are fp16 already
    tied = saved["lm_head.weight"], saved["model.embed_tokens.weight"]
    assert tied[0].data_ptr() == tied[1].data_ptr()  # stored once
    assert sorted(file.name for file in written.parent.iterdir()) == ["ppo_actor_64", "ppo_actor_64.pth"]
    if not sidecar:
        for file in written.with_suffix("").iterdir():
            file.unlink()
    assert torch.equal(load_policy(written)(input_ids).logits, model(input_ids).logits)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2], ids=["llama", "gpt2"])
@torch.no_grad()
def test_save_policy_of_any_family(tmp_path, make):
    model = make().eval()
    model.generation_config.eos_token_id = [2, 7]
    path = tmp_path / "actor.pth"
    for _ in range(2):  # the second time over the first
        save_policy(model, tiny_tokenizer(), path)
    again = load_policy(path)
    assert type(again) is type(model)
    assert again.generation_config.eos_token_id == [2, 7]
    assert tokenizer_source(path) == str(tmp_path / "actor")
    assert load_tokenizer(tokenizer_source(path)).get_vocab() == tiny_tokenizer().get_vocab()
    tokens = random_tokens(2, 6)
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=0, atol=5e-3)


@pytest.mark.parametrize("kind", ["default", "llama3", "linear"])
@pytest.mark.filterwarnings("error::FutureWarning")
def test_what_is_saved_is_what_transformers_4_and_5_read(tmp_path, kind):
    """transformers 5 reads rope_parameters and warns of nothing; 4 reads rope_theta and rope_scaling (tried
    by hand with 4.57.1: the same logits)."""
    more = {"factor": 4.0} if kind != "default" else {}
    if kind == "llama3":
        more |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    rope = {"rope_type": kind, "rope_theta": 5e5, **more}
    model = tiny.tiny_llama(10, rope_parameters=rope)
    tokenizer = tiny.word_tokenizer(list("abcdefgh"), chat=True)
    save_policy(model, tokenizer, tmp_path / "x.pth")
    save_directory(model, tokenizer, tmp_path / "folder", dtype=torch.float32)
    for folder in (tmp_path / "x", tmp_path / "folder"):
        config = json.loads((folder / "config.json").read_text())
        assert config["rope_parameters"] == rope
        assert config["rope_theta"] == 5e5
        assert config.get("rope_scaling") == ({"rope_type": kind, **more} if more else None)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    tokens = torch.arange(8)[None]
    again = load_policy(str(tmp_path / "folder"))
    assert again(tokens).logits.equal(model(tokens).logits)
    assert load_policy(str(tmp_path / "x.pth")).config.rope_parameters == rope
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "folder").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]  # for all users who may read the others


@pytest.mark.parametrize("value", [float("nan"), 1e6])
def test_save_policy_refuses_what_fp16_cannot_hold(tmp_path, value):
    path = tmp_path / "actor.pth"
    save_policy(tiny_minimind(), tiny_tokenizer(), path)
    before = path.read_bytes()
    broken = tiny_minimind()
    broken.model.norm.weight.data[3] = value
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        save_policy(broken, tiny_tokenizer(), path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_lm_head_absent_when_tied_and_apart_when_not(tmp_path):
    model = tiny_minimind()
    state = model.state_dict()
    tokens = random_tokens(1, 5)
    del state["lm_head.weight"]
    torch.save(state, tmp_path / "absent.pth")
    loaded = load_policy(tmp_path / "absent.pth")
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight

    state["lm_head.weight"] = torch.zeros(50, 32)
    torch.save(state, tmp_path / "apart.pth")
    assert load_policy(tmp_path / "apart.pth")(tokens).logits.abs().max() == 0

    save_policy(model, tiny_tokenizer(), tmp_path / "tied.pth")
    torch.save(state, tmp_path / "tied.pth")
    with pytest.raises(InputError, match="ties the two"):
        load_policy(tmp_path / "tied.pth")


def test_loading_says_nothing_and_leaves_the_verbosity(tmp_path, capfd):
    model = tiny_minimind()
    model.save_pretrained(tmp_path / "folder")
    save_policy(model, tiny_tokenizer(), tmp_path / "actor.pth")
    capfd.readouterr()
    before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    load_policy(tmp_path / "folder")
    load_policy(tmp_path / "actor.pth")
    load_tokenizer(tmp_path / "actor")
    assert capfd.readouterr() == ("", "")
    assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1),
        lambda: tiny_llama(attention_dropout=0.1),
        lambda: OPTForCausalLM(
            OPTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                ffn_dim=48,
                vocab_size=50,
                word_embed_proj_dim=16,
                layerdrop=0.5,
                attention_dropout=0.1,
            )
        ),
    ],
    ids=["gpt2", "llama", "opt"],
)
@torch.no_grad()
def test_dropout_off(make, tmp_path):
    model, tokens = make(), random_tokens(4, 8)
    assert not torch.equal(model.train()(tokens).logits, model.eval()(tokens).logits)
    model.save_pretrained(tmp_path)
    model = load_policy(tmp_path)
    assert torch.equal(model.train()(tokens).logits, model.eval()(tokens).logits)
    critic = CriticModel.from_model(model).train()
    nn.init.normal_(critic.value_head.weight)
    assert torch.equal(critic(tokens), critic.eval()(tokens))


# ---------------------------------------------------------------- the critic


@pytest.mark.parametrize(
    "make",
    [tiny_minimind, tiny_gpt2, lambda: tiny_llama(LlamaForSequenceClassification, num_labels=1)],
    ids=["minimind", "gpt2", "reward_model"],
)
def test_critic(make):
    model, tokens = make().eval().requires_grad_(False), random_tokens(2, 7)
    critic = CriticModel.from_model(model)
    values = critic(tokens)
    assert values.shape == (2, 7) and values.dtype == torch.float32
    assert bool(values.any()) == isinstance(model, LlamaForSequenceClassification)  # 0 from a language model
    assert all(weight.requires_grad for weight in critic.parameters())
    shared = {weight.data_ptr() for weight in model.parameters()}
    assert not shared & {weight.data_ptr() for weight in critic.parameters()}

    nn.init.normal_(critic.value_head.weight)
    nn.init.constant_(critic.value_head.bias, 0.5)
    with torch.no_grad():
        hidden = model.base_model(tokens).last_hidden_state
        torch.testing.assert_close(critic(tokens), hidden @ critic.value_head.weight[0] + 0.5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert critic(tokens).dtype == torch.float32


@torch.no_grad()
def test_a_critic_from_a_reward_model_starts_with_its_opinion():
    """Its value at the last token is the reward model's score; its weights are its own."""
    torch.manual_seed(0)
    reward = tiny_llama(LlamaForSequenceClassification, num_labels=1)
    tokens = torch.randint(1, 40, (3, 7))
    critic = CriticModel.from_model(reward)
    with torch.no_grad():
        torch.testing.assert_close(critic(tokens)[:, -1:], reward(tokens).logits)
        critic.value_head.weight.zero_()
        assert reward(tokens).logits.abs().max() > 0


def test_critic_reads_the_state_after_the_final_norm_once():
    model, tokens = tiny_llama(), random_tokens(1, 5)
    nn.init.uniform_(model.model.norm.weight, 0.5, 2)
    before_norm = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    model(tokens)
    handle.remove()
    (x,) = before_norm
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * model.model.norm.weight
    critic = CriticModel.from_model(model)
    nn.init.ones_(critic.value_head.weight)
    torch.testing.assert_close(critic(tokens), normed.sum(-1))


# ---------------------------------------------------------------- checks before training


def test_eos_ids():
    model = tiny_llama()
    model.generation_config.eos_token_id = [7, 2, 3]
    assert eos_ids(tiny_tokenizer(), model) == [2, 3, 7]
    model.generation_config.eos_token_id = 5
    assert eos_ids(tiny_tokenizer(), model) == [2, 5]
    model.generation_config.eos_token_id = None
    assert eos_ids(tiny_tokenizer(), model) == [2]
    with pytest.raises(InputError, match="EOS"):
        eos_ids(tiny_tokenizer(eos_token=None), model)


def test_check_tokenizer():
    check_tokenizer(tiny_tokenizer(50), tiny_llama())
    check_tokenizer(tiny_tokenizer(40), tiny_llama())
    with pytest.raises(InputError, match="the largest is 50, but the model has 50 embeddings"):
        check_tokenizer(tiny_tokenizer(51), tiny_llama())
    check_tokenizer(tiny_tokenizer(25), tiny_llama())
    with pytest.raises(InputError, match="it has 24 ids, the largest is 23, but the model has 50 embeddings"):
        check_tokenizer(tiny_tokenizer(24), tiny_llama())


def test_check_output_head():
    for model in (tiny_minimind(use_moe=True), tiny_llama(), tiny_gpt2().eval()):
        check_output_head(model)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "vocab_size": 50,
    }
    capped = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(head_dim=16, **sizes))
    scaled = transformers.GraniteForCausalLM(transformers.GraniteConfig(logits_scaling=8.0, **sizes))
    for model, family in ((capped, "gemma2"), (scaled, "granite")):
        model.get_input_embeddings().weight.data.normal_()  # logits as large as those of a trained model
        with pytest.raises(InputError, match=family):
            check_output_head(model.eval())


def test_pad_token_defaults_to_eos(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "without")
    tiny_tokenizer(pad_token="w1").save_pretrained(tmp_path / "with")
    assert load_tokenizer(tmp_path / "without").pad_token_id == 2
    assert load_tokenizer(tmp_path / "with").pad_token_id == 1


def test_tokenizer_source(tmp_path, monkeypatch):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "repo_model")
    monkeypatch.setattr(loading, "MINIMIND_FOLDER", tmp_path / "repo_model")
    with pytest.raises(InputError, match=r"a\.pth: no such file"):
        tokenizer_source(tmp_path / "a.pth")
    (tmp_path / "a.pth").touch()
    assert tokenizer_source(tmp_path / "a.pth") == str(tmp_path / "repo_model")
    tokenizer.save_pretrained(tmp_path / "a")
    assert tokenizer_source(tmp_path / "a.pth") == str(tmp_path / "a")
    assert tokenizer_source(tmp_path / "a") == str(tmp_path / "a")
    assert tokenizer_source("HuggingFaceTB/SmolLM2-135M") == "HuggingFaceTB/SmolLM2-135M"
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(loading, "MINIMIND_FOLDER", tmp_path / "empty")
    (tmp_path / "b.pth").touch()
    for path in (tmp_path / "b.pth", tmp_path / "empty"):
        with pytest.raises(InputError, match="pass --tokenizer"):
            load_tokenizer(tokenizer_source(path))


# ---------------------------------------------------------------- bad input


class Code:
    """An object of a class of our own: unpickling it would have to run code."""


def minimind_with(**changes):
    """The state-dict of a tiny MiniMind, with tensors of its layer 0 added, replaced or (None) removed."""
    state = tiny_minimind().state_dict()
    for name, value in changes.items():
        state[f"model.layers.0.{name.replace('__', '.')}.weight"] = value
    return {name: value for name, value in state.items() if value is not None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "not a readable torch file"),
        (b"hello world, this is text", "not a readable torch file"),
        ({"weights": torch.zeros(1), "code": Code()}, "not a readable torch file"),
        ({"model": {"w": torch.zeros(1)}, "step": 1}, "not the state-dict of a MiniMind"),
        ([torch.zeros(1)], "not a readable torch file"),
        ({}, "not the state-dict of a MiniMind"),
        ({0: torch.zeros(1)}, "not the state-dict of a MiniMind"),
        ({"tok_embeddings.weight": torch.zeros(4, 2)}, "not the state-dict of a MiniMind"),
        (
            minimind_with(mlp__up_proj=None),
            'Missing key(s) in state_dict: "model.layers.0.mlp.up',
        ),
        (
            minimind_with(extra=torch.zeros(2)),
            'Unexpected key(s) in state_dict: "model.layers.0.extra',
        ),
        (
            minimind_with(mlp__up_proj=torch.zeros(3, 32)),
            "size mismatch for model.layers.0.mlp.up_proj",
        ),
        (minimind_with(self_attn__q_proj=torch.zeros(7, 32)), "not the state-dict of a MiniMind"),
    ],
)
def test_bad_pth(tmp_path, content, message):
    path = tmp_path / "bad.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(InputError) as caught:
        load_policy(path)
    assert message in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("message", ["no_such_type", "Missing key", "size mismatch"])
def test_bad_sidecar(tmp_path, message):
    path, config = tmp_path / "actor.pth", tmp_path / "actor" / "config.json"
    save_policy(tiny_minimind(), tiny_tokenizer(), path)
    fields = json.loads(config.read_text())
    fields |= {
        "no_such_type": {"model_type": "no_such_type"},
        "Missing key": {"num_hidden_layers": 3, "layer_types": None},
        "size mismatch": {"intermediate_size": 96},
    }[message]
    config.write_text(json.dumps(fields))
    with pytest.raises(InputError, match=f"is not the state-dict of {config}: .*{message}"):
        load_policy(path)


def model_folder(folder, kind):
    if kind == "have a `model_type` key in its config.json":
        folder.mkdir()
    elif kind == "no such directory here":
        folder.write_text("{}")
    elif kind == "not a valid JSON":
        folder.mkdir()
        (folder / "config.json").write_text("{")
    elif kind == "Unrecognized configuration class":
        transformers.T5Config().save_pretrained(folder)
    elif kind == "classifier or reward model":
        tiny_llama(LlamaForSequenceClassification, num_labels=1).save_pretrained(folder)
    elif kind == "no file named":
        tiny_llama().config.save_pretrained(folder)
    elif kind == "Error while deserializing":
        tiny_llama().save_pretrained(folder)
        (folder / "model.safetensors").write_bytes(b"x" * 100)
    elif kind == "its weights lack":
        tiny_llama(num_hidden_layers=1).save_pretrained(folder)
        tiny_llama().config.save_pretrained(folder)
    elif kind == "lack what its config.json describes":
        tiny_llama().save_pretrained(folder)
        tiny_llama(intermediate_size=64).config.save_pretrained(folder)
    elif kind == "--trust_remote_code":
        folder.mkdir()
        auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
        (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))


@pytest.mark.parametrize(
    "kind",
    [
        "no such directory",
        "have a `model_type` key in its config.json",
        "no such directory here",
        "not a valid JSON",
        "Unrecognized configuration class",
        "classifier or reward model",
        "no file named",
        "Error while deserializing",
        "its weights lack",
        "lack what its config.json describes",
        "--trust_remote_code",
    ],
)
def test_bad_model_folder(tmp_path, kind):
    model_folder(tmp_path / "model", kind)
    with pytest.raises(InputError, match=kind) as caught:
        load_policy(tmp_path / "model")
    assert str(tmp_path / "model") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def nobody_there(monkeypatch):
    """HF_ENDPOINT names a port at which no server listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        yield constants.ENDPOINT


LOADERS = {
    "policy": load_policy,
    "tokenizer": load_tokenizer,
    "reward model": lambda name: load_reward_model(name, torch.device("cpu")),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_hub_that_cannot_be_reached_is_said_at_once(kind, nobody_there):
    start = time.monotonic()
    message = rf"nobody/no-such-model.*: {nobody_there} cannot be reached; give a directory: .*refused"
    with pytest.raises(InputError, match=message) as caught:
        LOADERS[kind]("nobody/no-such-model")
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 20  # huggingface_hub alone takes 46 s


def test_a_hub_that_hangs_is_given_up(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
        with pytest.raises(InputError, match="cannot be reached"):
            loading.check_hub("nobody/no-such-model")


def test_a_hub_that_answers_is_searched_for_the_model(monkeypatch):
    """Whatever it answers to the first request, even an error, the model is looked for as usual."""

    class NotFound(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_error(404)

        do_GET = do_HEAD

        def log_message(self, *_):
            pass

    asked, server = [], HTTPServer(("127.0.0.1", 0), NotFound)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    template = f"{constants.ENDPOINT}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(InputError, match="the hub as nobody/no-such-model"):
        load_policy("nobody/no-such-model")
    server.shutdown()
    server.server_close()
    assert any("nobody/no-such-model" in path for path in asked)


def test_folders_cached_models_and_offline_mode_need_no_hub(nobody_there, monkeypatch, tmp_path):
    loading.check_hub(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--some--model" / "snapshots" / "1").mkdir(parents=True)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("1")
    with pytest.raises(InputError, match="cannot be reached"):
        loading.check_hub("some/model")
    (tmp_path / "models--some--model" / "snapshots" / "1" / "config.json").write_text("{}")
    loading.check_hub("some/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    loading.check_hub("other/model")


def test_bad_tokenizer_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    (tmp_path / "file").write_text("")
    for name, message in {
        "empty": "pass --tokenizer",
        "broken": "no tokenizer could be loaded",
        "file": "no such directory",
        "missing": "no such directory",
    }.items():
        with pytest.raises(InputError, match=message):
            load_tokenizer(tmp_path / name)
