"""--min_gen_len: no response is shorter, in the sampler and in the scorers."""

import pytest
import torch
from recorded_graphs import RecordedGraphs, without_kernels
from tiny import flags, read_jsonl, run_files, tiny_llama, train

from errors import InputError
from trainer import train_ppo
from trainer.compute.scoring import PolicyScorer
from trainer.generation import engine
from trainer.generation.engine import Sampler, sample
from trainer.generation.sampler_copy import SamplerCopy
from trainer.generation.sampling import noise_keys, uniform
from trainer.generation.stops import early_ends

LAY_OUT = SamplerCopy._lay_out
PROMPTS = [[2 + i % 5] * (1 + i % 6) for i in range(24)]
ENDS = [0, 7]


@pytest.fixture(scope="module")
def model():
    return tiny_llama(12, layers=2, spread=3.0)


def draw(model, least, slots=256, temperature=1.0):
    keys = noise_keys(7, 3, range(24))
    return Sampler(model, slots=slots).sample(PROMPTS, keys, ENDS, 8, temperature, least)


def by_hand(model, least):
    """The responses, token by token: the ends of a response get probability 0 where they are too early."""
    found = []
    for prompt, numbers in zip(PROMPTS, uniform(noise_keys(7, 3, range(24)), 8), strict=True):
        ids = list(prompt)
        for place, u in enumerate(numbers):
            p = torch.softmax(model(torch.tensor([ids])).logits[0, -1].double(), -1)
            if place + 1 < least:
                p[ENDS] = 0
            ids.append(int((p.cumsum(0) <= u * p.sum()).sum()))
            if ids[-1] in ENDS:
                break
        found.append(ids[len(prompt) :])
    return found


@torch.no_grad()
@pytest.mark.parametrize("least", [2, 5, 8])
def test_responses_are_those_of_the_renormalised_distribution(model, least):
    rollout = draw(model, least)
    responses = rollout.responses()
    assert responses == by_hand(model, least)
    assert min(map(len, responses)) == least
    assert rollout.finished.tolist() == [r[-1] in ENDS for r in responses]
    assert not any(set(r[: least - 1]) & set(ENDS) for r in responses)


@pytest.mark.parametrize("least", [0, 1])
def test_every_response_has_one_token_anyway(model, least):
    assert early_ends(least, ENDS) is None
    keys = noise_keys(7, 3, range(24))
    assert draw(model, least).responses() == sample(model, PROMPTS, keys, ENDS, 8, 1.0).responses()
    assert min(map(len, draw(model, least).responses())) == 1


def test_neither_slots_nor_captured_steps_change_a_token(model, monkeypatch):
    """On a GPU steps are captured: one of another least length must not be replayed."""
    wanted = {least: draw(model, least).responses() for least in (5, 3)}
    assert draw(model, 5, slots=5).responses() == wanted[5]
    without_kernels(monkeypatch)
    monkeypatch.setattr(SamplerCopy, "_lay_out", lambda copy, on_cpu: LAY_OUT(copy, False))
    monkeypatch.setattr(engine, "CudaGraphs", RecordedGraphs)
    sampler = Sampler(model, slots=7)
    for least in (5, 3, 5):
        got = sampler.sample(PROMPTS, noise_keys(7, 3, range(24)), ENDS, 8, 1.0, least)
        assert got.responses() == wanted[least]
    assert sampler.graphs.captured


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_half_precision_and_greedy_too(model, dtype, temperature):
    keys = noise_keys(7, 3, range(24))
    rollout = Sampler(model, dtype).sample(PROMPTS, keys, ENDS, 8, temperature, 5)
    assert rollout.response_len.min() >= 5
    assert rollout.sampler_logprobs.isfinite().all()


def test_the_scorer_gives_the_log_probs_of_the_sampler(model):
    rollout = draw(model, 5)
    scorer = PolicyScorer(model, early_ends=early_ends(5, ENDS))
    logprobs, entropy, _ = scorer(*rollout.sequences, 1.0)
    assert (logprobs - rollout.sampler_logprobs).abs().max() < 1e-5
    unmasked, more, _ = PolicyScorer(model)(*rollout.sequences, 1.0)
    gap = (unmasked - rollout.sampler_logprobs).abs()
    assert gap[:, :4].max() > 0.1
    assert (gap * rollout.mask)[:, 4:].max() < 1e-5
    assert (entropy[:, 4:] - more[:, 4:]).abs().max() < 1e-6


def test_a_run_with_adapters_replay_and_an_old_actor(tmp_path):
    """The ratio is 1 before the first update, and no response of training or evaluation is too short."""
    files = run_files(tmp_path, count=16)
    files["eval_data_path"] = files["data_path"]
    sizes = {"batch_size": 8, "mini_batch_size": 8, "max_gen_len": 6, "max_steps": 2, "lora_r": 2}
    sizes |= {"critic_warmup_steps": 0, "update_old_actor_freq": 2, "replay_batches": 1, "dtype": "float32"}
    train(**files, **sizes, min_gen_len=4, out_dir=tmp_path, run_name="r")
    lines = read_jsonl(tmp_path / "r" / "metrics.jsonl")
    assert lines[1]["policy/first_ratio"] == pytest.approx(1, abs=1e-5)
    assert lines[1]["rollout/sampler_gap"] < 1e-5
    assert lines[1]["kl/k1"] == pytest.approx(0, abs=1e-6)
    for name in ("samples.jsonl", "eval_samples.jsonl"):
        assert all(4 <= row["length"] <= 6 for row in read_jsonl(tmp_path / "r" / name))


def test_more_than_the_longest_response_is_refused():
    with pytest.raises(InputError, match="--min_gen_len 65: must be at most --max_gen_len 64"):
        train_ppo.parse_args(flags(min_gen_len=65))
