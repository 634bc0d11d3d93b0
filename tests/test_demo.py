"""The bundled demo: a policy that is often wrong, a reward model that ranks right answers over wrong ones."""

import re

import pytest
import torch
from tiny import ROOT, flags, read_jsonl, user
from transformers.utils import get_json_schema

from dataset.answers import is_correct
from dataset.demo.calculator import calculate
from dataset.lm_dataset import RLAIFDataset
from model.loading import load_policy, load_tokenizer
from trainer import train_ppo
from trainer.environments.tool_calls import Call, read_turn
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import response_texts
from trainer.rewards.reward_models import load_reward_model
from trainer.rewards.rules import format_reward

DEMO, DATA = ROOT / "model" / "demo", ROOT / "dataset" / "demo"


def test_the_reward_model_ranks_right_over_wrong():
    pairs = read_jsonl(DATA / "preferences_eval.jsonl")
    assert len(pairs) >= 400
    pairs = pairs[::4]
    sides = ("chosen", "rejected")
    conversations = [([user(pair["prompt"])], pair[side]) for side in sides for pair in pairs]
    reward_model = load_reward_model(str(DEMO / "reward"), torch.device("cpu"))
    chosen, rejected = reward_model(conversations).chunk(2)
    assert (chosen > rejected).float().mean() >= 0.90


def test_the_policy_is_often_wrong_and_often_misformatted():
    tokenizer = load_tokenizer(str(DEMO / "policy"))
    policy = load_policy(str(DEMO / "policy"))
    prompts = RLAIFDataset(DATA / "eval.jsonl", tokenizer, 128)
    assert len(prompts) >= 400
    prompts = [prompts[n] for n in range(0, len(prompts), 3)]
    keys = noise_keys(42, 0, range(len(prompts)))
    rollout = Sampler(policy).sample([p.prompt_ids for p in prompts], keys, [tokenizer.eos_token_id], 64, 1.0)
    texts = response_texts(rollout, tokenizer)
    right = [is_correct(text, p.answer, reasoning=True) for text, p in zip(texts, prompts, strict=True)]
    form = [format_reward(text) > 0 for text in texts]
    assert 0.4 < sum(right) / len(right) <= 0.60
    assert 0.6 < sum(form) / len(form) < 0.9


def test_the_policy_with_a_tool_often_guesses():
    tokenizer = load_tokenizer(str(DEMO / "tools_policy"))
    policy = load_policy(str(DEMO / "tools_policy"))
    prompts = RLAIFDataset(DATA / "tools_eval.jsonl", tokenizer, 128, tools=[get_json_schema(calculate)])
    assert prompts[0].text.startswith("<|im_start|>system\nTools: calculate<|im_end|>")
    prompts = [prompts[n] for n in range(0, len(prompts), 2)]
    keys = noise_keys(42, 0, range(len(prompts)))
    rollout = Sampler(policy).sample([p.prompt_ids for p in prompts], keys, [tokenizer.eos_token_id], 64, 1.0)
    calls = []
    for text in response_texts(rollout, tokenizer):
        calls += [call.arguments for call in read_turn(tokenizer, text).calls if isinstance(call, Call)]
    assert 0.35 < len(calls) / len(prompts) < 0.6
    assert all([*arguments] == ["expression"] for arguments in calls)


@pytest.mark.slow
def test_it_learns_to_use_the_tool(tmp_path, monkeypatch):
    """The first steps of ``make train-tools``; all 36 end at 0.88 (docs/environments.md)."""
    monkeypatch.chdir(ROOT)
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (given,) = re.findall(r"^train-tools:.*\n.*train_ppo.py (.*) --out_dir", makefile, re.MULTILINE)
    more = {"out_dir": tmp_path, "run_name": "tools", "device": "cpu", "max_steps": 14}
    train_ppo.main([*given.split(), *flags(**more)])
    evaluations = [row for row in read_jsonl(tmp_path / "tools" / "metrics.jsonl") if "eval/accuracy" in row]
    assert evaluations[0]["eval/accuracy"] < 0.2 and evaluations[-1]["eval/accuracy"] > 0.65


def test_what_is_bundled_is_small():
    for folder, most in ((DEMO, 6e6), (DATA, 8e6)):
        assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) < most
