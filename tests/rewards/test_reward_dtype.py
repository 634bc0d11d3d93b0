"""Reward models at their own precision: what is kept in 16 bits, what is fp32; scores stay the same."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import run_files, save_reward_dir, train, word_tokenizer
from transformers import AutoModelForSequenceClassification

from dataset.chat_template import conversation_ids
from errors import InputError
from model.critic import CriticModel
from model.loading import load_policy, load_tokenizer
from model.weights import HalfEmbedding, HalfLinear, ScoreHead
from trainer.compute.precision import round_frozen
from trainer.inputs import DEMO
from trainer.models import critic_start
from trainer.rewards.reward_models import load_reward_model
from trainer.runs.resume import weights_hash

CPU = torch.device("cpu")
WORDS = ["user", "assistant", "one", "two", "three", "four", "five"]
PAIRS = [("one two", "three " * n + "four") for n in range(1, 9)]


def saved_in(folder, dtype, offset=0.0):
    path = save_reward_dir(folder, word_tokenizer(WORDS, chat=True), layers=2)
    model = AutoModelForSequenceClassification.from_pretrained(path).to(dtype)
    model.config.reward_offset = offset
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_a_16_bit_checkpoint_stays_in_16_bits_and_scores_the_same(tmp_path, stored, products):
    path = saved_in(tmp_path, stored)
    kept = load_reward_model(path, CPU, dtype=products, weights=stored)
    wide = load_reward_model(path, CPU, dtype=products, weights=torch.float32)
    assert kept.packs and wide.packs
    types = {name: p.dtype for name, p in kept.model.named_parameters()}
    assert types["model.embed_tokens.weight"] == types["model.layers.1.mlp.up_proj.weight"] == stored
    assert types["score.weight"] == types["model.norm.weight"] == torch.float32
    assert {p.dtype for p in wide.model.parameters()} == {torch.float32}
    assert kept(PAIRS).equal(wide(PAIRS))  # bit for bit
    assert weights_hash(kept.model) == weights_hash(wide.model)
    kept.packs = False  # as a model that cannot read packed rows
    assert kept(PAIRS).allclose(wide(PAIRS), atol=1e-5 if products == torch.float32 else 2e-2)


@pytest.mark.parametrize(
    ("stored", "products", "asked", "dtype"),
    [
        (torch.float16, torch.float32, "auto", torch.float32),  # a CPU computes in fp32
        (torch.float16, torch.bfloat16, "auto", torch.float16),
        (torch.float32, torch.bfloat16, "auto", torch.float32),
        (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_weights_have_the_dtype_of_the_checkpoint_or_what_is_asked_for(
    tmp_path, stored, products, asked, dtype
):
    """The head computes in fp32, under autocast too: scores are finer than bf16."""
    model = load_reward_model(saved_in(tmp_path, stored), CPU, dtype=products, weights=asked)
    inner = model.model.model
    assert inner.embed_tokens.weight.dtype == inner.layers[0].mlp.up_proj.weight.dtype == dtype
    if dtype == torch.bfloat16:
        kinds = inner.layers[0].mlp.up_proj, inner.embed_tokens, model.model.score
        assert [type(kind) for kind in kinds] == [HalfLinear, HalfEmbedding, ScoreHead]
    for model.packs in (True, False):
        scores = model(PAIRS)
        assert not scores.equal(scores.bfloat16().float())


def test_rounding_keeps_16_bits_in_a_run_of_fp32_and_never_rounds_the_head(tmp_path):
    path = saved_in(tmp_path, torch.float16)
    model = load_reward_model(path, CPU, dtype=torch.bfloat16)
    layer, scores = model.model.model.layers[0].mlp.up_proj, model(PAIRS)
    round_frozen([model.model], torch.float32)
    assert layer.weight.dtype == torch.float16
    round_frozen([model.model], torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert model.model.score.weight.dtype == torch.float32
    assert model(PAIRS).equal(scores)


@pytest.mark.parametrize("share", [False, True])
def test_a_critic_from_a_16_bit_reward_model_is_fp32(tmp_path, share):
    path = saved_in(tmp_path, torch.float16, offset=0.25)
    reward = load_reward_model(path, CPU, weights=torch.float16)
    scores = reward(PAIRS)
    critic = CriticModel.from_model(reward.model, share, weight=-2.0)
    assert {p.dtype for p in critic.parameters()} == {torch.float32}
    assert reward(PAIRS).equal(scores)  # the reward model stays what it was
    assert critic.value_head.bias.item() == 0.5


def test_the_critic_starts_with_weight_and_sign_on_the_demo():
    """Its first values are weight * (score - offset), from the model with the largest weight."""
    folder, tokenizer = str(DEMO["reward_model"]), load_tokenizer(DEMO["model"])
    reward = load_reward_model(folder, CPU)
    small = load_reward_model(folder, CPU)
    policy = load_policy(DEMO["model"])
    start, weight = critic_start("auto", {"a": (small, 0.5), "b": (reward, -0.7)}, policy, tokenizer)
    assert (start, weight) == (reward.model, -0.7)
    critic = CriticModel.from_model(start, weight=weight)
    pair = ("What is two plus two?", "<answer>\nfour\n</answer>")
    (ids,) = conversation_ids(reward.tokenizer, [pair])
    place = max(i for i, token in enumerate(ids) if token != reward.pad_id)
    with torch.no_grad():
        value = critic(torch.tensor([ids]))[0, place].item()
    assert value == pytest.approx(-0.7 * reward([pair]).item(), abs=1e-4)
    assert critic_start("actor", {"b": (reward, -0.7)}, policy, tokenizer) == (policy, 1.0)


def test_a_run_refuses_another_reward_dtype(tmp_path):
    files = run_files(tmp_path)
    sizes = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 4, "critic_warmup_steps": 0}
    named = files | sizes | {"out_dir": tmp_path / "out", "run_name": "r"}
    train(**named, max_steps=2, reward_dtype="bfloat16")
    with pytest.raises(InputError, match="--reward_dtype was 'bfloat16' and is now 'auto'"):
        train(**named, max_steps=2, resume="auto")


def test_what_the_file_says_decides_where_the_config_does_not(tmp_path):
    path = saved_in(tmp_path, torch.float16)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = load_file(tmp_path / "model.safetensors")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_reward_model(path, CPU, dtype=torch.bfloat16)
    assert model.model.model.embed_tokens.weight.dtype == torch.float16
