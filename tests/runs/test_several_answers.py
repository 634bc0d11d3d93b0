"""Runs with several answers a prompt and without a critic: processes, resuming, answers sampled again."""

import json

import pytest
import torch
from same_runs import (
    EXACT,
    built,
    resumed_is_the_same,
    run_in_two_processes,
    same_metrics,
    same_weights,
    sizes,
)
from test_processes import ALONE
from tiny import WORDS, flags, read_jsonl, run_files, write_jsonl

from trainer import train_ppo
from trainer.generation.stops import response_texts
from trainer.options.filter_groups import rows_of_equal_groups, scores_to_compare
from trainer.rewards.combine import RawScores, Reward

# Many answers to a prompt score the same.
FEW_SCORES = """def score(prompts, responses, answers):
    return [float({"a", "c"} <= set(r.split())) for r in responses]
"""
RUN = {"advantage": "rloo", "num_generations": 4, "filter_groups": 2, "replay_batches": 1, "ppo_epochs": 2}
RUN |= EXACT | {"max_gen_len": 6, "max_steps": 4, "eval_interval": 2, "seed": 1, "kl_in": "reward"}
RUN |= {"update_old_actor_freq": 2, "missing_eos_penalty": 0, "temperature": 0.8}
ONE, TWO = sizes(32), sizes(16)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    found = run_files(folder)
    del found["reward_model"]
    (folder / "few.py").write_text(FEW_SCORES)
    held_out = [{"prompt": f"{a} b", "answer": "a"} for a in WORDS[:5]]
    held_out = write_jsonl(folder / "eval.jsonl", held_out)
    return found | {"reward_fn": f"{folder / 'few.py'}:score", "eval_data_path": held_out}


def argv_of(files, out_dir, **more):
    return flags(**{**files, **RUN, **ONE, "out_dir": out_dir, **more})


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    train_ppo.main(argv_of(files, out))
    return out / "r"


def test_there_is_no_critic(whole):
    names = {path.name for path in (whole / "checkpoints" / "step_4").iterdir()}
    assert "actor.safetensors" in names
    assert not any("critic" in name for name in names)
    lines = read_jsonl(whole / "metrics.jsonl")
    assert not any(name.startswith("value/") for line in lines for name in line)
    assert "policy/loss" in lines[1]  # the actor trains from the first step on
    assert lines[1]["rollout/sampled_again"] > 0
    assert lines[1]["rollout/equal_groups"] < 0.8
    assert "eval/pass@4" in lines[0]
    facts = json.loads((whole / "config.json").read_text())["facts"]
    assert list(facts["suited"]) == ["learning_rate"]
    state = json.loads((whole / "checkpoints" / "step_4" / "state.json").read_text())
    assert state["advantage_scale"]["batches"] > 0


def test_two_processes_equal_one(files, whole, tmp_path):
    run_in_two_processes(argv_of(files, tmp_path, **TWO))
    same_weights(whole, tmp_path / "r", 4)
    same_metrics(whole, tmp_path / "r", but=("perf/", "policy/"), rel=1e-4, abs=2e-5)


def test_a_resumed_run_is_the_same(files, whole, tmp_path):
    resumed_is_the_same(whole, argv_of(files, tmp_path), tmp_path, last=4)


def test_rows_of_equal_groups():
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5, 0.5, 0.0, 0.0])
    assert rows_of_equal_groups(scores, 2) == [0, 1, 4, 5, 6, 7]
    assert rows_of_equal_groups(scores, 4) == []


def test_the_first_batchs_scores_are_compared_as_they_are_before_they_are_normalised():
    """Without a mean and standard deviation the clip would make 5 and 9 equal."""
    reward, raw = (
        Reward(reasoning=False, normalize=True),
        RawScores({"server": torch.tensor([5.0, 9.0, 5.0])}),
    )
    assert scores_to_compare(reward, raw).tolist() == [5, 9, 5]
    learned = reward.combine(raw, ALONE)["score"]
    assert scores_to_compare(reward, raw).equal(learned)
    plain = Reward(reasoning=False, function=len)
    assert scores_to_compare(plain, RawScores({"function": torch.tensor([1.0])})).tolist() == [1]


def test_scores_are_compared_without_what_is_taken_off_for_length():
    """Two wrong answers, one of them cut and the other long: nothing to compare."""
    parts = {"function": [0.3, 0.3], "missing_eos": [-1.0, 0.0], "overlong": [0.0, -0.5]}
    raw = RawScores({name: torch.tensor(scores) for name, scores in parts.items()})
    scores = scores_to_compare(Reward(reasoning=False, function=len), raw)
    assert rows_of_equal_groups(scores, 2) == [0, 1]


class Coarse:
    """A reward model that finds nothing in most answers"""

    def __init__(self, judge):
        self.judge, self.model = judge, judge.model

    def __call__(self, conversations):
        return (self.judge(conversations) > 0.3).float()


@pytest.mark.parametrize("model", [False, True], ids=["function", "reward model"])
def test_prompts_whose_answers_score_the_same_are_sampled_again(files, tmp_path, model):
    """All others keep their answers; what is kept of the new ones is what a fresh score of them is."""
    more = {"reward_model": run_files(tmp_path)["reward_model"], "reasoning": 1} if model else {}
    batches = {}
    for times in (0, 1, 9):
        run = built(files, **{**RUN, **ONE, **more, "filter_groups": times, "out_dir": tmp_path / "out"})
        if model:
            judge, weight = run.reward.models["model"]
            run.reward.models["model"] = Coarse(judge), weight
        asked = [run.data[i] for i in range(8)]
        batches[times] = train_ppo.collect(run, 0, iter([asked]))
        batch = batches[times]
        assert response_texts(batch.rollout, run.tokenizer) == batch.texts
        fresh = run.raw_scores(run.reward, batch)
        assert fresh.parts.keys() == batch.raw.parts.keys()
        assert all(fresh.parts[name].equal(batch.raw.parts[name]) for name in fresh.parts)
        assert fresh.blocks.keys() == batch.raw.blocks.keys()
        assert all(
            x.allclose(batch.raw.blocks[name], 0, 0, equal_nan=True) for name, x in fresh.blocks.items()
        )
    again = rows_of_equal_groups(batches[0].scores["score"], 4)
    assert 0 < len(again) < 32
    assert batches[1].again == len(again)
    left = len(rows_of_equal_groups(batches[1].scores["score"], 4))
    assert 0 < left < len(again) or model
    assert batches[9].again >= len(again) + left
    for times in (1, 9):
        assert len(rows_of_equal_groups(batches[times].scores["score"], 4)) <= left
        for row, (one, other) in enumerate(
            zip(*(batches[n].rollout.responses() for n in (0, times)), strict=True)
        ):
            assert row in again or one == other
            assert batches[times].texts[row] == batches[0].texts[row] or row in again
