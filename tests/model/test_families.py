"""Model families through the whole PPO trainer: loaded from a directory, trained, saved, loaded again."""

import pytest
import torch
import transformers as T
from huggingface_hub import constants
from packaging.version import Version
from safetensors.torch import load_model
from tiny import ROOT, WORDS, read_jsonl, refused, train, word_tokenizer, write_jsonl

from model.loading import eos_ids, load_policy, load_tokenizer, quiet, tokenizer_source
from model.model_minimind import MiniMindConfig
from model.saving import kept_update
from trainer.compute.scoring import pack_sequences, shares_beginnings

VOCAB = len(WORDS) + 2  # of tiny.word_tokenizer
IDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 0}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, **IDS}
OPT = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "num_key_value_heads")}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **IDS}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

# family -> a config like those of its models on the hub, but tiny
FAMILIES = {
    "Llama": lambda: T.LlamaConfig(**SIZES),
    "Llama, tied": lambda: T.LlamaConfig(tie_word_embeddings=True, **SIZES),
    "Mistral": lambda: T.MistralConfig(sliding_window=6, **SIZES),
    "Mixtral": lambda: T.MixtralConfig(num_local_experts=4, **SIZES),
    "Qwen2": lambda: T.Qwen2Config(tie_word_embeddings=True, **SIZES),
    "Qwen2, mixed windows": lambda: T.Qwen2Config(
        use_sliding_window=True, sliding_window=6, max_window_layers=1, **SIZES
    ),
    "Qwen3": lambda: T.Qwen3Config(head_dim=16, tie_word_embeddings=True, **SIZES),
    "Qwen3-MoE": lambda: T.Qwen3MoeConfig(head_dim=16, **MOE, **SIZES),
    "Qwen3-MoE, dense too": lambda: T.Qwen3MoeConfig(head_dim=16, mlp_only_layers=[0], **MOE, **SIZES),
    "SmolLM3": lambda: T.SmolLM3Config(no_rope_layers=[1, 0], **SIZES),
    "Phi-3": lambda: T.Phi3Config(**SIZES),
    "Phi": lambda: T.PhiConfig(**SIZES),
    "PhiMoE": lambda: T.PhimoeConfig(num_local_experts=4, sliding_window=10, **SIZES),
    "OLMo 2": lambda: T.Olmo2Config(**SIZES),
    "StableLM": lambda: T.StableLmConfig(**SIZES),
    "Gemma": lambda: T.GemmaConfig(head_dim=16, **SIZES),
    "Gemma 3": lambda: T.Gemma3TextConfig(head_dim=16, **SLIDING, **SIZES),
    "GPT-2": lambda: T.GPT2Config(**GPT2),
    "GPT-J": lambda: T.GPTJConfig(rotary_dim=8, **GPT2),
    "GPT-Neo": lambda: gpt_neo(window_size=32),
    "Falcon": lambda: T.FalconConfig(**OPT),
    "GPT-NeoX": lambda: T.GPTNeoXConfig(**{**SIZES, "num_key_value_heads": None}),
    "OPT": lambda: T.OPTConfig(ffn_dim=48, word_embed_proj_dim=32, **OPT),
    "OPT-350m": lambda: T.OPTConfig(ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False, **OPT),
    "MiniMind 2": lambda: minimind(2, False),
    "MiniMind 2 MoE": lambda: minimind(2, True),
    "MiniMind 3": lambda: minimind(3, False),
    "MiniMind 3 MoE": lambda: minimind(3, True),
}

PADDED = {"StableLM", "GPT-Neo", "Falcon", "PhiMoE"}  # computed with padding
if Version(T.__version__) < Version("5.24"):
    PADDED.add("GPT-J")
# Those on whose way something differs in this program: what is tied, packed or fused, windows, experts, a
# Conv1D, widths, MiniMind's classes. The others show the same of further classes of transformers.
FAST = ["Llama", "Mixtral", "Qwen2, mixed windows", "Qwen3-MoE, dense too", "Gemma 3", "GPT-2", "GPT-Neo"]
FAST += ["PhiMoE", "OPT-350m", "MiniMind 2 MoE", "MiniMind 3"]
SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family not in FAST]

MORE, CACHE = "logits are more than", "KV cache"  # why
REFUSED = {
    "Gemma 2": (lambda: T.Gemma2Config(head_dim=16, **SIZES), f"type gemma2 .* {MORE}"),
    "BERT": (lambda: T.BertConfig(**{**SIZES, "num_key_value_heads": None}), f"type bert .* {MORE}"),
    "Mamba": (lambda: T.MambaConfig(**SIZES), f"type mamba .* {CACHE}"),
    "LFM2": (lambda: T.Lfm2Config(layer_types=["conv", "full_attention"], **SIZES), f"type lfm2 .* {CACHE}"),
    "BLOOM": (lambda: T.BloomConfig(n_layer=2, n_head=4, **OPT), f"type bloom .* {CACHE}"),
    "GPT-Neo, window smaller than an answer": (lambda: gpt_neo(window_size=16), "exceeds the 16 positions"),
    "Phi-3, long positions": (lambda: phi3_long(), "exceeds the 16 positions"),
}


def gpt_neo(**more):
    layers = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
    return T.GPTNeoConfig(attention_types=[[["global", "local"], 1]], **layers, **more, **IDS)


def phi3_long():
    first = {"original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    return T.Phi3Config(rope_parameters=rope | first, **first, **SIZES)


def minimind(version, use_moe):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
    return MiniMindConfig(minimind_version=version, use_moe=use_moe, **sizes, **IDS)


REWARD = """
from pathlib import Path

def score(prompts, responses, answers):
    with open(Path(__file__).with_name("responses"), "a") as file:
        file.writelines(f"{response}\\n" for response in responses)
    return [len(response.split()) for response in responses]
"""


def build(config, spread=4.0):
    """A random model whose next token is far from uniform and whose norms and biases are not all alike."""
    torch.manual_seed(0)
    model = T.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(spread) if p.dim() > 1 else p.add_(0.1 * torch.randn_like(p))
    return model


def files(folder, model, tokenizer=None):
    """The flags of a run of two steps."""
    with quiet():
        model.save_pretrained(folder / "policy")
    (tokenizer or word_tokenizer(WORDS, chat=True)).save_pretrained(folder / "policy")
    (folder / "combine.py").write_text(REWARD)
    prompts = [{"prompt": " ".join(WORDS[(n + i) % 8] for i in range(1 + n % 5))} for n in range(8)]
    data = write_jsonl(folder / "prompts.jsonl", prompts)
    places = {"model": folder / "policy", "data_path": data, "out_dir": folder / "out"}
    places["reward_fn"] = f"{folder / 'combine.py'}:score"
    sizes = {"batch_size": 4, "mini_batch_size": 4, "max_steps": 2, "max_gen_len": 12}
    more = {"critic_warmup_steps": 0, "reasoning": 0, "missing_eos_penalty": 1, "dtype": "float32"}
    return places | sizes | more


def logits(model):
    tokens = torch.randint(VOCAB, (4, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("family", [*FAST, *SLOW])
def test_family(family, tmp_path):
    """After two steps the .pth equals the trained actor bit for bit, rounded to fp16 where that keeps the
    update."""
    start = build(FAMILIES[family]())
    train(**files(tmp_path, start))
    run = tmp_path / "out" / "run_1"
    trained = load_policy(tmp_path / "policy")
    load_model(trained, run / "checkpoints" / "step_2" / "actor.safetensors")  # strict, tied weights once
    expected, before = trained.state_dict(), start.state_dict()
    assert any(not expected[name].equal(before[name]) for name in before)  # it did learn something

    (path,) = (tmp_path / "out").glob("ppo_actor_32*.pth")
    reloaded = load_policy(path)
    assert type(reloaded) is type(trained)
    assert type(trained) is type(start) or family in ("MiniMind 2", "MiniMind 3")  # Llama, Qwen3
    assert load_tokenizer(tokenizer_source(path)).get_vocab() == word_tokenizer(WORDS).get_vocab()
    state = reloaded.state_dict()
    assert state.keys() == expected.keys()
    (dtype,) = {x.dtype for x in torch.load(path, weights_only=True).values()}
    assert all(state[name].equal(x.to(dtype).float()) for name, x in expected.items())
    tied = trained.all_tied_weights_keys
    once = {name: x for name, x in expected.items() if name not in tied}
    cosine, norm = kept_update(once, before, torch.float16)
    assert (dtype == torch.float16) == (cosine >= 0.999 and abs(norm - 1) <= 0.01)
    assert dtype in (torch.float16, torch.float32)

    trained.load_state_dict(state)
    assert logits(trained).equal(logits(reloaded))  # the same config
    gap = max(row.get("rollout/sampler_gap", 0.0) for row in read_jsonl(run / "metrics.jsonl") if row["step"])
    assert gap < 1e-5
    assert pack_sequences(trained.base_model) == (family not in PADDED)
    whole = "MoE" in family or family == "Mixtral"  # of experts
    assert shares_beginnings(trained.base_model) == (family not in PADDED and not whole)
    fused = any("forward" in vars(module) for module in trained.base_model.modules())
    assert fused == family.startswith(("Llama", "Qwen", "MiniMind"))


@pytest.mark.parametrize("family", REFUSED)
def test_refused_family(family, tmp_path):
    config, line = REFUSED[family]
    refused(line, train, **files(tmp_path, build(config())))
    assert not (tmp_path / "out").exists()


TOKENIZERS = {  # what of it is set, and the ids at which an answer ends: "b" and "c" are 3 and 4
    "a pad token and a BOS of its own": ({"pad_token": "<unk>", "bos_token": "a"}, [0, 3, 4]),
    "no pad token, no chat template": ({"pad_token": None, "chat_template": None}, [0]),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizer(kind, tmp_path):
    """A run reads the tokenizer, ends responses at the right ids, and saves both beside the actor."""
    changes, ends = TOKENIZERS[kind]
    tokenizer, model = word_tokenizer(WORDS, chat=True), build(FAMILIES["Llama"](), spread=1.0)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    model.generation_config.eos_token_id = ends if len(ends) > 1 else 0
    train(**files(tmp_path, model, tokenizer))
    responses = (tmp_path / "responses").read_text().splitlines()
    assert responses[:2] == ["7", "The answer is 7."]  # those that try the function
    responses = responses[2:]
    assert len(responses) == 8
    assert all({"b", "c"}.isdisjoint(response.split()) for response in responses) == (len(ends) > 1)
    path = tmp_path / "out" / "ppo_actor_32.pth"
    again, actor = load_tokenizer(tokenizer_source(path)), load_policy(path)
    assert eos_ids(again, actor) == ends
    assert again.pad_token_id == (1 if changes["pad_token"] else 0)
    assert (again.bos_token, again.chat_template) == (tokenizer.bos_token, tokenizer.chat_template)
    assert again("a b </s> h")["input_ids"] == tokenizer("a b </s> h")["input_ids"]


def test_a_tokenizer_that_is_not_of_its_models_family(tmp_path, monkeypatch):
    """It is read as its own file says, in a folder as from the hub. AutoTokenizer would read any tokenizer
    beside a Qwen2 as Qwen2's."""
    model = tmp_path / "models--some--model"
    folder = model / "snapshots" / ("1" * 40)
    FAMILIES["Qwen2"]().save_pretrained(folder)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("1" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    demo = T.PreTrainedTokenizerFast.from_pretrained(ROOT / "model" / "demo" / "policy")
    text = "What is 12 plus  seven?\n\n<think> It's 好 </think>"
    for tokenizer in (demo, word_tokenizer(WORDS)):
        tokenizer.save_pretrained(folder)
        for again in (load_tokenizer(folder), load_tokenizer("some/model")):
            assert again.get_vocab() == tokenizer.get_vocab()
            assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
            assert again.decode(again(text)["input_ids"]) == tokenizer.decode(tokenizer(text)["input_ids"])
