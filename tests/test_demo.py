"""The bundled demo: a policy that is often wrong, a reward model that ranks right answers over wrong ones."""

import torch
from tiny import ROOT, read_jsonl, user

from dataset.answers import is_correct
from dataset.lm_dataset import RLAIFDataset
from model.loading import load_policy, load_tokenizer
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


def test_what_is_bundled_is_small():
    for folder, most in ((DEMO, 6e6), (DATA, 8e6)):
        assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) < most
