"""The package model/: parity with MiniMind's own code, loading and saving, the critic, bad input."""

import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import tiny
import torch
import transformers as T
from huggingface_hub import constants
from tiny import ROOT, values_of
from tokenizers import Tokenizer, models
from torch import nn
from transformers.utils import logging as hf_logging

from model import loading
from model.critic import CriticModel
from model.loading import (
    check_tokenizer,
    eos_ids,
    load_policy,
    load_tokenizer,
    minimind_config_of,
    tokenizer_source,
)
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.saving import save_directory, save_policy
from model.weights import all_finite
from trainer.rewards.reward_models import load_reward_model

KINDS = ["minimind2_dense", "minimind2_moe", "minimind3_dense", "minimind3_moe"]


def golden(name):
    """-> path of the ``.pth``, its state-dict, input ids and the logits of MiniMind's own code."""
    path = ROOT / "tests" / "fixtures" / "minimind" / f"{name}.pth"
    expected = torch.load(path.with_suffix(".expected.pt"), weights_only=True)
    return path, torch.load(path, weights_only=True), expected["input_ids"], expected["logits"]


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50}


def tiny_minimind(**changes):
    torch.manual_seed(0)
    return MiniMindForCausalLM(MiniMindConfig(**{**SMALL, **changes})).eval()


SIZES = {**SMALL, "num_attention_heads": 4}


def tiny_llama(kind=T.LlamaForCausalLM, **changes):
    torch.manual_seed(0)
    return kind(T.LlamaConfig(**{**SIZES, "intermediate_size": 48, "pad_token_id": 0, **changes})).eval()


def tiny_tokenizer(size=50, **special):
    vocabulary = {f"w{i}": i for i in range(size)}
    return T.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")),
        **{"eos_token": "w2", **special},
    )


def random_tokens(*shape, seed=0):
    return torch.randint(3, 50, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_same_logits_keys_and_default_shapes_as_minimind_and_saved_as_it_was(name, tmp_path):
    path, state, input_ids, logits = golden(name)
    model = load_policy(path)
    version, kind = int(name[len("minimind")]), name.split("_")[1]
    own = MiniMindForCausalLM(minimind_config_of(state)).eval()
    own.load_state_dict(state, strict=True)
    own.save_pretrained(tmp_path / "own")
    again = T.AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    assert type(again) is MiniMindForCausalLM
    assert own.config.minimind_version == version
    assert own.config.router_aux_loss_coef == {2: 0.1, 3: 5e-4}[version]
    plain = {"minimind2_dense": T.LlamaForCausalLM, "minimind3_dense": T.Qwen3ForCausalLM}
    assert type(model) is plain.get(name, MiniMindForCausalLM)
    assert model.dtype == torch.float32
    found = model(input_ids).logits
    assert (found - logits).abs().max() <= 1e-5
    assert own(input_ids).logits.equal(found)
    assert again(input_ids).logits.equal(found)
    assert model.state_dict().keys() == own.state_dict().keys() == state.keys()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 160}
    config = MiniMindConfig(**sizes, use_moe=kind == "moe", minimind_version=version)
    MiniMindForCausalLM(config).load_state_dict(state, strict=True)

    written = tmp_path / "out" / "ppo_actor_64.pth"
    save_policy(model, tiny_tokenizer(160), written)
    saved = torch.load(written, weights_only=True)
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[key], state[key]) for key in state)  # the golden weights are fp16 already
    tied = saved["lm_head.weight"], saved["model.embed_tokens.weight"]
    assert tied[0].data_ptr() == tied[1].data_ptr()  # stored once
    assert sorted(file.name for file in written.parent.iterdir()) == ["ppo_actor_64", "ppo_actor_64.pth"]
    assert load_policy(written)(input_ids).logits.equal(found)
    shutil.rmtree(written.with_suffix(""))
    assert load_policy(written)(input_ids).logits.equal(found)


def test_default_config_is_minimind2_small():
    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1408, "vocab_size": 6400}
    config = MiniMindConfig()
    assert {name: getattr(config, name) for name in sizes} == sizes
    tiny.refused("hidden_size 100", MiniMindConfig, hidden_size=100)


def test_one_moe_layer_by_hand():
    layer, hidden = tiny_minimind(use_moe=True, num_hidden_layers=1).model.layers[0].mlp, torch.randn(32)
    probs = torch.softmax(layer.gate.weight @ hidden, dim=0)
    first, second = probs.argsort(descending=True)[:2].tolist()
    visited = probs[first] * layer.experts[first](hidden) + probs[second] * layer.experts[second](hidden)
    expected = visited / (probs[first] + probs[second]) + layer.shared_experts[0](hidden)
    for layer.all_in_steps in (False, True):
        torch.testing.assert_close(layer(hidden.view(1, 1, -1)).flatten(), expected)


def test_one_token_gives_every_expert_a_gradient_and_the_router_one_of_its_logits():
    model, tokens = tiny_minimind(use_moe=True), random_tokens(3, 7)
    model.train()(tokens[:1, :1]).logits.square().sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
    model.zero_grad()
    logits = model.model(tokens, output_router_logits=True).router_logits
    assert [tuple(x.shape) for x in logits] == [(21, 4), (21, 4)]
    sum(x.square().sum() for x in logits).backward()
    assert model.model.layers[1].mlp.gate.weight.grad.abs().sum() > 0
    assert model.model(tokens).get("router_logits") is None
    assert tiny_minimind().model(tokens, output_router_logits=True).router_logits == ()


@pytest.mark.parametrize("kind", ["default", "linear"])
@pytest.mark.filterwarnings("error::FutureWarning")
def test_what_is_saved_is_what_transformers_4_and_5_read(tmp_path, kind, capfd):
    """transformers 5 reads rope_parameters and warns of nothing; 4 reads the names of before (tried by hand
    with 4.57.1: the same logits). Loading says nothing and leaves the verbosity."""
    more = {"factor": 4.0} if kind != "default" else {}
    rope = {"rope_type": kind, "rope_theta": 5e5, "partial_rotary_factor": 1.0, **more}
    model = tiny.tiny_llama(10, rope_parameters=rope)
    model.config.num_local_experts = 4
    tokenizer = tiny.word_tokenizer(list("abcdefgh"), chat=True)
    tokenizer.add_special_tokens({"extra_special_tokens": ["a"]})
    save_policy(model, tokenizer, tmp_path / "x.pth")
    save_directory(model, tokenizer, tmp_path / "folder", dtype=torch.float32)
    for folder in (tmp_path / "x", tmp_path / "folder"):
        config = json.loads((folder / "config.json").read_text())
        assert config["rope_parameters"] == rope
        assert config["rope_theta"] == 5e5
        assert config["partial_rotary_factor"] == config["rotary_pct"] == 1
        assert config["num_experts"] == 4
        assert config.get("rope_scaling") == ({"rope_type": kind, **more} if more else None)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert settings["additional_special_tokens"] == ["a"] and "extra_special_tokens" not in settings
        assert load_tokenizer(folder).extra_special_tokens == ["a"]
    tokens = torch.arange(8)[None]
    capfd.readouterr()
    before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    assert load_policy(str(tmp_path / "folder"))(tokens).logits.equal(model(tokens).logits)
    assert load_policy(str(tmp_path / "x.pth")).config.rope_parameters == rope
    load_tokenizer(tmp_path / "x")
    assert capfd.readouterr() == ("", "")
    assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == before
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "folder").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]  # for all users who may read the others


def test_save_policy_refuses_what_fp16_cannot_hold(tmp_path):
    path, model = tmp_path / "actor.pth", tiny_minimind()
    save_policy(model, tiny_tokenizer(), path)
    before = path.read_bytes()
    for value, remedy in ((1e6, "; write float32"), (float("nan"), "")):
        says = rf"model\.norm\.weight has values that are NaN or too large for torch.float16{remedy}$"
        model.model.norm.weight.data[3] = value
        tiny.refused(says, save_policy, model, tiny_tokenizer(), path)
        tiny.refused(says, save_directory, model, tiny_tokenizer(), tmp_path / "folder")
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_number_that_is_not_finite_is_found_wherever_it_stands(dtype):
    for shape in ((), (1,), (3, 35)):
        x = torch.ones(shape, dtype=dtype)
        assert all_finite(x) and all_finite(-x)
        for bad in (torch.nan, torch.inf, -torch.inf):
            for place in {0, x.numel() // 2, x.numel() - 1}:
                spoiled = x.clone()
                spoiled.view(-1)[place] = bad
                assert not all_finite(spoiled)
    assert all_finite(torch.zeros(0, dtype=dtype)) and all_finite(torch.arange(3))


def test_a_disk_that_is_full_anywhere_in_a_pth_is_one_line(tmp_path):
    resource = pytest.importorskip("resource", reason="Windows has no limit on the size of files")
    path, model = tmp_path / "actor.pth", tiny_minimind()
    save_policy(model, tiny_tokenizer(), path)
    before = path.read_bytes()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in range(8_000, len(before), 5_000):  # its first files fit
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))
            tiny.refused("File too large.*make room", save_policy, model, tiny_tokenizer(), path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert path.read_bytes() == before
    save_policy(model, tiny_tokenizer(), path)
    assert path.read_bytes() == before


def test_lm_head_absent_when_tied_and_apart_when_not(tmp_path):
    model, path = tiny_minimind(), tmp_path / "head.pth"
    state = model.state_dict()
    tokens = random_tokens(1, 5)
    del state["lm_head.weight"]
    torch.save(state, path)
    loaded = load_policy(path)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    state["lm_head.weight"] = torch.zeros(50, 32)
    torch.save(state, path)
    assert load_policy(path)(tokens).logits.abs().max() == 0
    save_policy(model, tiny_tokenizer(), path)  # with a config that ties them
    torch.save(state, path)
    tiny.refused("ties the two", load_policy, path)


@torch.no_grad()
def test_dropout_is_off_in_what_is_loaded_and_in_its_critic(tmp_path):
    dropping = {"dropout": 0.1, "layerdrop": 0.5, "attention_dropout": 0.1}
    model = T.OPTForCausalLM(T.OPTConfig(ffn_dim=48, word_embed_proj_dim=16, **dropping, **SIZES))
    tokens = random_tokens(4, 8)
    assert not torch.equal(model.train()(tokens).logits, model.eval()(tokens).logits)
    model.save_pretrained(tmp_path)
    model = load_policy(tmp_path)
    assert torch.equal(model.train()(tokens).logits, model.eval()(tokens).logits)
    critic = CriticModel.from_model(model).train()
    nn.init.normal_(critic.value_head.weight)
    assert torch.equal(values_of(critic, tokens), values_of(critic.eval(), tokens))


def tiny_reward():
    return tiny_llama(T.LlamaForSequenceClassification, num_labels=1)


@pytest.mark.parametrize("make", [tiny_minimind, tiny_reward])
def test_a_critic_reads_the_last_states_and_starts_at_0_or_with_its_reward_models_opinion(make):
    model, tokens = make().requires_grad_(False), random_tokens(2, 7)
    critic = CriticModel.from_model(model)
    values = values_of(critic, tokens)
    assert values.shape == (2, 7) and values.dtype == torch.float32
    if make is tiny_reward:
        torch.testing.assert_close(values[:, -1:], model(tokens).logits)
    else:
        assert not values.any()
    assert all(weight.requires_grad for weight in critic.parameters())
    shared = {weight.data_ptr() for weight in model.parameters()}
    assert not shared & {weight.data_ptr() for weight in critic.parameters()}

    nn.init.normal_(critic.value_head.weight)
    nn.init.constant_(critic.value_head.bias, 0.5)
    with torch.no_grad():
        hidden = model.base_model(tokens).last_hidden_state
        torch.testing.assert_close(values_of(critic, tokens), hidden @ critic.value_head.weight[0] + 0.5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert values_of(critic, tokens).dtype == torch.float32


def test_ends_and_a_tokenizer_that_fits():
    model = tiny_llama()
    ends = {151_645: [2, 151_645], None: [2], (7, 2, 3): [2, 3, 7], (None, 3): [2, 3], (): [2]}
    for configured, wanted in ends.items():
        model.generation_config.eos_token_id = [*configured] if isinstance(configured, tuple) else configured
        assert eos_ids(tiny_tokenizer(), model) == wanted
    for configured in ("2", -1, ["2", 3], 2.0, [2.0], True, 10**20, {"id": 2}, [[2]]):
        model.generation_config.eos_token_id = configured
        says = re.escape(
            f"eos_token_id {configured!r} in generation_config.json (without that file: in config"
        )
        tiny.refused(says, eos_ids, tiny_tokenizer(), model)
    for configured in (None, [], 151_645):  # no model has that id
        model.generation_config.eos_token_id = configured
        tiny.refused("names an EOS token of this model", eos_ids, tiny_tokenizer(eos_token=None), model)
    for size in (25, 40, 50):
        check_tokenizer(tiny_tokenizer(size), model)
    for size in (24, 51):
        message = f"it has {size} ids, the largest is {size - 1}, but the model has 50 embeddings"
        tiny.refused(message, check_tokenizer, tiny_tokenizer(size), model)


def test_tokenizer_source(tmp_path, monkeypatch):
    """The folder beside a .pth, else the repository's; what is no file is its own."""
    own, repository, empty = (tmp_path / name for name in ("a", "repo_model", "empty"))
    monkeypatch.setattr(loading, "MINIMIND_FOLDER", repository)
    tiny.refused(r"a\.pth: no such file", tokenizer_source, tmp_path / "a.pth")
    (tmp_path / "a.pth").touch()
    empty.mkdir()
    for folder in (repository, own):
        tiny_tokenizer().save_pretrained(folder)
        assert tokenizer_source(tmp_path / "a.pth") == str(folder)
    assert tokenizer_source(own) == str(own)
    assert tokenizer_source("HuggingFaceTB/SmolLM2-135M") == "HuggingFaceTB/SmolLM2-135M"
    messages = {"empty": "pass --tokenizer", "a.pth": "no such directory"}
    for name, message in messages.items():
        tiny.refused(message, load_tokenizer, tmp_path / name)
    monkeypatch.setattr(loading, "MINIMIND_FOLDER", empty)
    (tmp_path / "b.pth").touch()
    tiny.refused("pass --tokenizer", tokenizer_source, tmp_path / "b.pth")


def minimind_with(**changes):
    """The state-dict of a tiny MiniMind, with tensors of its layer 0 added, replaced or (None) removed."""
    state = tiny_minimind().state_dict()
    for name, value in changes.items():
        state[f"model.layers.0.{name.replace('__', '.')}.weight"] = value
    return {name: value for name, value in state.items() if value is not None}


NO_FILE = "not a readable torch file"
NO_MINIMIND = "not the state-dict of a MiniMind"


BAD_PTH = [
    (None, "no such file"),
    (b"", NO_FILE),
    ({"weights": torch.zeros(1), "code": ROOT}, NO_FILE),  # unpickling it would run code
    ({"model": {"w": torch.zeros(1)}, "step": 1}, NO_MINIMIND),
    ({"optimizer": {}, "step": 1}, "holds optimizer, step, and no model with weights"),
    ({"model": torch.zeros(1), "step": 1}, "holds model, step, and no model with weights"),
    (minimind_with(self_attn__q_proj=torch.zeros(7, 32)), NO_MINIMIND),
    (minimind_with(mlp__up_proj=None), r'Missing key\(s\) in state_dict: "model.layers.0.mlp.up'),
    (minimind_with(mlp__up_proj=torch.zeros(3, 32)), "size mismatch for model.layers.0.mlp.up_proj"),
    ('{"model_type": "no_such_type"}', "no_such_type"),  # in the config of the folder beside a MiniMind
    ('{"intermediate_size": 96}', "size mismatch"),
]


@pytest.mark.parametrize(("content", "message"), BAD_PTH)
def test_bad_pth(tmp_path, content, message):
    path = tmp_path / "bad.pth"
    if isinstance(content, str):
        save_policy(tiny_minimind(), tiny_tokenizer(), path)
        config = tmp_path / "bad" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | json.loads(content)))
        message = f"is not the state-dict of {config}: .*{message}"
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    assert str(path) in tiny.refused(message, load_policy, path)


# ---------------------------------------------------------------- MiniMind's adapters and checkpoints


def adapter_of(state, rank=3, hidden=32):
    """A LoRA adapter as MiniMind's ``save_lora`` writes it: A and B of every square matrix of the layers."""
    adapter = {}
    for name, x in state.items():
        if x.shape == (hidden, hidden):
            name = name.removesuffix("weight")
            adapter[f"{name}lora.A.weight"] = torch.randn(rank, hidden).half() / 4
            adapter[f"{name}lora.B.weight"] = torch.randn(hidden, rank).half() / 4
    return adapter


def with_adapter(model, adapter):
    """The model, whose matrices compute W x + B (A x), as MiniMind's ``apply_lora`` has it."""
    for name, module in model.named_modules():
        if f"{name}.lora.A.weight" in adapter:
            a, b = (adapter[f"{name}.lora.{end}.weight"].float() for end in "AB")
            module.register_forward_hook(lambda _, x, out, a=a, b=b: out + x[0] @ a.T @ b.T)
    return model


@pytest.mark.parametrize("kind", ["dense", "moe", "module", "own", "resume"])
def test_an_adapter_of_minimind_is_merged_into_the_model_beside_it(tmp_path, recwarn, kind):
    """own: the weights beside it in the file, as a checkpoint of train_lora.py has them; resume: in a
    _resume.pth; module: with the names of DDP."""
    moe = kind == "moe"
    model = tiny_minimind(use_moe=moe)
    tokens = random_tokens(2, 7)
    state = {name: x.half() for name, x in model.state_dict().items()}
    adapter = adapter_of(state)
    assert len(adapter) == 2 * 2 * 2  # A and B of q and o, in two layers
    path = tmp_path / f"lora_identity_32{'_moe' * moe}.pth"
    base = tmp_path / f"full_sft_32{'_moe' * moe}.pth"
    said = f"{path}: a LoRA adapter, merged into {base}"
    if kind in ("own", "resume"):
        whole = state | adapter
        torch.save({"model": whole, "step": 3, "scaler": {}} if kind == "resume" else whole, path)
        said = (
            f"{path}: a checkpoint, of which only the weights are read"
            if kind == "resume"
            else f"{path}: its LoRA adapters are merged"
        )
    else:
        torch.save({f"module.{name}" if kind == "module" else name: x for name, x in adapter.items()}, path)
        assert tiny.refused("a LoRA adapter; put the model that", load_policy, path).endswith(str(base))
        torch.save(state, base)
    recwarn.clear()
    loaded = load_policy(path)
    assert any(said in str(w.message) for w in recwarn)
    plain = tiny_minimind(use_moe=moe)
    plain.load_state_dict(state)
    before = plain(tokens).logits
    wanted = with_adapter(plain, adapter)(tokens).logits
    assert (wanted - before).abs().max() > 0.1
    torch.testing.assert_close(loaded(tokens).logits, wanted, rtol=1e-4, atol=1e-4)


def test_an_adapter_takes_tokenizer_and_config_of_the_folder_beside_its_base(tmp_path):
    base = tmp_path / "full_sft_32.pth"
    save_policy(tiny_llama(), tiny_tokenizer(), base)
    for name in ("lora_a_32", "other_32"):
        state = torch.load(base, weights_only=True)
        torch.save(adapter_of(state) if "lora" in name else state, tmp_path / f"{name}.pth")
    assert tokenizer_source(tmp_path / "lora_a_32.pth") == str(base.with_suffix(""))
    assert load_policy(tmp_path / "lora_a_32.pth").config.num_attention_heads == SIZES["num_attention_heads"]
    tiny.refused(f"no tokenizer in {tmp_path}/other_32 nor in", tokenizer_source, tmp_path / "other_32.pth")


WRONG_ADAPTERS = {
    "it has nothing for model.layers.1.self_attn.": lambda a: {k: x for k, x in a.items() if ".0." in k},
    "KeyError: 'model.layers.7.": lambda a: a | {k.replace(".1.", ".7."): x for k, x in a.items()},
    "KeyError: 'model.layers.0.self_attn.q_proj.lora.B": lambda a: {
        k: x for k, x in a.items() if "0.self_attn.q_proj.lora.B" not in k
    },
    "RuntimeError: The size of tensor": lambda a: {k: x[:16] if "B" in k else x for k, x in a.items()},
    "put the model that it was trained on there as": None,  # an adapter under the name of a model
}


@pytest.mark.parametrize(("message", "change"), WRONG_ADAPTERS.items())
def test_an_adapter_of_another_model_is_one_line(tmp_path, message, change):
    state = tiny_minimind().state_dict()
    path = tmp_path / f"{'lora_x' if change else 'full_sft'}_32.pth"
    torch.save(state, tmp_path / "full_sft_32.pth")
    adapter = adapter_of(state)
    torch.save(change(adapter) if change else adapter, path)
    line = tiny.refused(message, load_policy, path)
    assert line.startswith(f"{path} is no LoRA adapter of" if change else f"{path}: a LoRA adapter")


def test_a_checkpoint_of_minimind_gives_its_weights(tmp_path):
    """As ``lm_checkpoint`` writes it, optimizer, scheduler and critic with it."""
    model = tiny_minimind()
    optimizer = torch.optim.AdamW(model.parameters())
    model(random_tokens(1, 3)).logits.sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)
    state = {name: x.half() for name, x in model.state_dict().items()}
    more = {"epoch": 0, "step": 7, "world_size": 1, "wandb_id": None, "scheduler": schedule.state_dict()}
    path = tmp_path / "ppo_actor_32_resume.pth"
    content = {"model": state, "optimizer": optimizer.state_dict(), **more, "critic_model": state}
    torch.save(content, path)
    with pytest.warns(UserWarning, match=f"{path}: a checkpoint, of which only the weights are read"):
        loaded = load_policy(path)
    assert all(x.equal(state[name].float()) for name, x in loaded.state_dict().items())


def save(folder, model, **config):
    """A folder with this model, or none, and the config of another one, or these fields."""
    folder.mkdir()
    if model:
        model.save_pretrained(folder)
    if "of" in config:
        config["of"].save_pretrained(folder)
    elif config:
        (folder / "config.json").write_text(json.dumps(config))


AUTO_MAP = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
WIDER = tiny_llama(intermediate_size=64)
FOLDERS = {  # what the line says: how to make such a folder
    "no such directory": lambda folder: None,
    "classifier or reward model": lambda folder: save(folder, tiny_reward()),
    "no file named": lambda folder: save(folder, None, of=tiny_llama().config),
    "its weights lack": lambda folder: save(folder, tiny_llama(num_hidden_layers=1), of=tiny_llama().config),
    "its config.json describes": lambda folder: save(folder, tiny_llama(), of=WIDER.config),
    "--trust_remote_code": lambda folder: save(folder, None, model_type="own", auto_map=AUTO_MAP),
    "its weights are quantized": lambda folder: save(
        folder, None, model_type="llama", quantization_config={"quant_method": "fp8"}
    ),
    "it holds a LoRA adapter only": lambda folder: (folder.mkdir(), (folder / "adapter_config.json").touch()),
}


def test_weights_that_the_config_does_not_have_are_named(tmp_path):
    save(tmp_path / "more", tiny_llama(attention_bias=True), of=tiny_llama().config)
    with pytest.warns(UserWarning, match=r"config.json has no place .* model\.layers\.0\.self_attn\.k_"):
        load_policy(tmp_path / "more")


def test_a_lone_pth_of_another_vocabulary_says_that_it_is_taken_for_a_minimind(tmp_path, recwarn):
    for vocab, warned in ((160, True), (6400, False)):
        sizes = {"vocab_size": vocab, "hidden_size": 64, "num_attention_heads": 8}
        torch.save(tiny_llama(**sizes).state_dict(), tmp_path / f"{vocab}.pth")
        load_policy(tmp_path / f"{vocab}.pth")
        said = [str(w.message) for w in recwarn if "taken for a MiniMind with 8 heads" in str(w.message)]
        assert [f"{vocab}/config.json" in line for line in said] == [True] * warned
        recwarn.clear()


def test_a_head_of_its_own_stays_one_whatever_the_config_says(tmp_path):
    """transformers does not tie what differs in the file; the result must say so, to be loaded again."""
    model = tiny_llama(tie_word_embeddings=False)
    save(tmp_path / "apart", model, of=tiny_llama(tie_word_embeddings=True).config)
    policy = load_policy(tmp_path / "apart")
    save_policy(policy, tiny_tokenizer(160), tmp_path / "saved.pth")
    saved = load_policy(tmp_path / "saved.pth")
    assert not saved.config.tie_word_embeddings
    assert saved.lm_head.weight.equal(model.lm_head.weight.half().float())


def test_a_result_keeps_nothing_of_an_earlier_ones_tokenizer(tmp_path):
    tokenizer = tiny_tokenizer(160)
    for template in ("{{ messages }}", None):
        tokenizer.chat_template = template
        save_policy(tiny_llama(), tokenizer, tmp_path / "a.pth")
        (tmp_path / "a/mine.txt").write_text("")
        assert load_tokenizer(tmp_path / "a").chat_template == template
    assert (tmp_path / "a/mine.txt").exists()


@pytest.mark.parametrize("says", FOLDERS)
def test_bad_model_folder(tmp_path, says):
    FOLDERS[says](tmp_path / "model")
    assert str(tmp_path / "model") in tiny.refused(says, load_policy, tmp_path / "model")


def test_a_hub_that_cannot_be_reached_is_said_at_once(monkeypatch, tmp_path):
    """Folders, models in the cache and offline mode need none; one that answers with an error is there."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # 501 to whatever it is asked
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        with monkeypatch.context() as patch:  # it hangs
            patch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
            tiny.refused("cannot be reached", loading.check_hub, "nobody/no-such-model")
        server.handle_request()
        threading.Thread(target=server.handle_request, daemon=True).start()
        loading.check_hub("nobody/no-such-model")
    message = rf"nobody/no-such-model.*: {constants.ENDPOINT} cannot be reached; give a directory: .*refused"
    for load in (load_policy, load_tokenizer, lambda name: load_reward_model(name, torch.device("cpu"))):
        tiny.refused(message, load, "nobody/no-such-model")  # nobody listens there now
    loading.check_hub(tmp_path)
    model = tmp_path / "models--some--model"
    (model / "snapshots" / "1").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("1")
    tiny.refused("cannot be reached", loading.check_hub, "some/model")
    (model / "snapshots" / "1" / "config.json").write_text("{}")
    loading.check_hub("some/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    loading.check_hub("other/model")
