"""Tests that need a GPU (skipped without one); generation/test_engine.py runs the same logic on a CPU.

All code that runs only on a GPU is listed at the top of trainer/generation/cuda_graphs.py.
"""

import pytest
import torch
from tiny import flags, read_jsonl, save_policy_dir, save_reward_dir, tiny_llama, word_tokenizer, write_jsonl

from trainer import train_ppo
from trainer.compute.packing import pack_sequences
from trainer.compute.scoring import PolicyScorer
from trainer.generation.engine import Sampler, sample
from trainer.generation.sampling_noise import noise_keys

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PROMPTS = [[2 + i % 5] * (1 + i % 6) for i in range(24)]


@pytest.fixture(scope="module")
def model():
    policy = tiny_llama(12, layers=2, spread=3.0).cuda()
    pack_sequences(policy.base_model)
    return policy


def test_captured_steps_are_greedy_as_generate(model):
    sampler = Sampler(model, slots=7)
    rollout = sampler.sample(PROMPTS, noise_keys(7, 3, range(24)), [0], 10, 0.0)
    assert sampler.engine.graphs.captured
    for prompt, response in zip(PROMPTS, rollout.responses(), strict=True):
        ids = torch.tensor([prompt], device="cuda")
        options = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": 0}
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert response == answer[0, len(prompt) :].tolist()


@pytest.mark.parametrize("slots", [1, 7, 64])
def test_samples_depend_neither_on_slots_nor_on_the_device(model, slots):
    keys = noise_keys(7, 3, range(24))
    here = sample(model, PROMPTS, keys, [0], 10, 1.0, slots).responses()
    assert here == sample(tiny_llama(12, layers=2, spread=3.0), PROMPTS, keys, [0], 10, 1.0).responses()


def test_what_is_sampled_is_what_is_scored(model):
    rollout = sample(model, PROMPTS, noise_keys(7, 3, range(24)), [0], 10, 0.9)
    scored = PolicyScorer(model)(*rollout.sequences, 0.9)[0]
    assert (scored - rollout.sampler_logprobs).abs().max() < 1e-3
    scored = PolicyScorer(model, torch.bfloat16)(*rollout.sequences, 0.9)[0]
    assert (scored - rollout.sampler_logprobs).abs().sum() / rollout.mask.sum() < 0.1


def test_a_run_in_bf16(tmp_path):
    tokenizer = word_tokenizer(list("abcdefgh"), chat=True)
    files = {
        "model": save_policy_dir(tmp_path / "policy", tokenizer, layers=2),
        "reward_model": save_reward_dir(tmp_path / "reward", tokenizer),
        "data_path": write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "a b c"}] * 32),
    }
    sizes = {
        "batch_size": 8,
        "mini_batch_size": 8,
        "max_gen_len": 8,
        "max_steps": 3,
        "critic_warmup_steps": 0,
    }
    train_ppo.main(flags(**files, **sizes, device="cuda", out_dir=tmp_path / "out"))
    steps = read_jsonl(tmp_path / "out" / "run_1" / "metrics.jsonl")
    assert [step["policy/ratio"] for step in steps[1:]] == [pytest.approx(1.0, abs=1e-3)] * 3
    assert steps[1]["rollout/sampler_gap"] < 0.1
