"""The bundled demo: a policy that is often wrong, a reward model that ranks right answers over wrong ones."""

import pytest
import torch
from tiny import ROOT, read_jsonl, user

from dataset.lm_dataset import RLAIFDataset
from model.loading import load_policy, load_tokenizer
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import response_texts
from trainer.rewards.reward_models import load_reward_model
from trainer.rewards.rules import format_reward, is_correct

DEMO, DATA = ROOT / "model" / "demo", ROOT / "dataset" / "demo"


@pytest.fixture(scope="module")
def reward_model():
    return load_reward_model(str(DEMO / "reward"), torch.device("cpu"))


def test_the_reward_model_ranks_right_over_wrong(reward_model):
    pairs = read_jsonl(DATA / "preferences_eval.jsonl")
    sides = ("chosen", "rejected")
    conversations = [([user(pair["prompt"])], pair[side]) for side in sides for pair in pairs]
    chosen, rejected = reward_model(conversations).chunk(2)
    accuracy = (chosen > rejected).float().mean().item()
    print(f"the reward model ranks {accuracy:.3f} of {len(pairs)} held-out pairs as it should")
    assert len(pairs) >= 400
    assert accuracy >= 0.90


def test_the_policy_is_often_wrong_and_often_misformatted():
    tokenizer = load_tokenizer(str(DEMO / "policy"))
    policy = load_policy(str(DEMO / "policy"))
    prompts = RLAIFDataset(DATA / "eval.jsonl", tokenizer, 128)
    keys = noise_keys(42, 0, list(range(len(prompts))))
    rollout = Sampler(policy).sample([p.prompt_ids for p in prompts], keys, [tokenizer.eos_token_id], 64, 1.0)
    texts = response_texts(rollout, tokenizer)
    right = [is_correct(text, p.answer, reasoning=True) for text, p in zip(texts, prompts, strict=True)]
    form = [format_reward(text) > 0 for text in texts]
    assert len(prompts) >= 400
    assert 0.4 < sum(right) / len(right) <= 0.60
    assert 0.6 < sum(form) / len(form) < 0.9


def test_what_is_bundled_is_small():
    sizes = {p: p.stat().st_size for p in DEMO.rglob("*") if p.is_file()}
    assert sum(sizes.values()) < 6e6
    assert sum(p.stat().st_size for p in DATA.rglob("*") if p.is_file()) < 8e6
