"""--normalize_reward: mean and std of all raw scores so far, by hand, over processes and in a run."""

import json
import math

import pytest
import torch
from tiny import read_jsonl, request_of, run_files, train

from errors import InputError
from trainer.rewards.combine import Reward, RunningStats
from trainer.runs.distributed import World

ALONE = World(0, 1, torch.device("cpu"))
SCORES = torch.tensor([3.0, -1.0, 4.0, 1.0, 5.0, -9.0, 2.0, 6.0])
BLOCK = "<answer>{}</answer>"


def close(one, other):
    assert one.count == other.count
    assert (one.mean, one.squares) == pytest.approx((other.mean, other.squares), rel=1e-12)


def reward_of(table, **more):
    return Reward({"model": (lambda asked: torch.tensor([table[text] for _, text in asked]), 1.0)}, **more)


def ask(reward, responses):
    return reward.raw_scores(request_of(["p"] * len(responses), responses))


def test_running_stats_by_hand():
    seen = RunningStats.of(torch.tensor([1.0, 2.0, 6.0]))
    assert (seen.count, seen.mean, seen.squares) == (3, 3.0, 14.0)
    both = seen + RunningStats.of(torch.tensor([7.0]))
    assert (both.count, both.mean, both.squares) == (4, 4.0, 26.0)  # 9 + 4 + 4 + 9
    assert both.std == pytest.approx(math.sqrt(6.5))
    assert both.scale(torch.tensor([4.0, 10.5])).tolist() == pytest.approx([0.0, 6.5 / math.sqrt(6.5)])
    for scores in (torch.full((5,), 0.1), torch.tensor([7.0])):  # without spread
        seen = RunningStats.of(scores) + RunningStats.of(scores)
        assert seen.scale(scores).tolist() == [0.0] * len(scores)


def test_running_stats_are_the_same_however_the_numbers_are_split():
    for cuts in ([8], [1] * 8, [5, 3]):
        close(sum(map(RunningStats.of, SCORES.split(cuts)), RunningStats()), RunningStats.of(SCORES))
    close(
        RunningStats.of(SCORES + 1e4) + RunningStats(),
        RunningStats(8, 10001.375, RunningStats.of(SCORES).squares),
    )
    assert RunningStats() + RunningStats() == RunningStats()


def test_normalised_scores_by_hand():
    """The statistics are of whole responses; answer blocks are scaled with the same; weights come last."""
    table = {f"a{BLOCK.format('x')}": 10.0, "x": 30.0, "b": 20.0, "c": 30.0, "d": 100.0}
    reward = reward_of(table, normalize=True)
    reward.models["model"] = (reward.models["model"][0], 2.0)
    first = [f"a{BLOCK.format('x')}", "b", "c"]
    parts = reward.combine(ask(reward, first), ALONE)
    close(reward.running["model"], RunningStats(3, 20.0, 200.0))
    unit = math.sqrt(200 / 3)
    assert parts["model"].tolist() == pytest.approx([2 * (-4 + 6) / unit, 0.0, 20 / unit])
    assert parts["score"].equal(parts["format"] + parts["marks"] + parts["model"])
    assert not reward.at_limit(ask(reward, ["a" + BLOCK.format("x"), "b", "c"])).any()  # -1.2 to 1.2
    assert reward.at_limit(ask(reward, ["d"])).tolist() == [True]  # 9.8
    again = reward.combine(ask(reward, ["d"]))  # as in evaluation
    assert again["model"].tolist() == [6.0]  # 9.8 is clipped to 3, then weighted by 2
    close(reward.running["model"], RunningStats(3, 20.0, 200.0))
    reward.combine(ask(reward, ["d"]), ALONE)
    close(reward.running["model"], RunningStats(4, 40.0, 5000.0))


def test_with_the_flag_reward_models_and_the_server_are_normalised_and_nothing_else():
    more = {"function": lambda *_: [50.0, 70.0], "server": lambda *_: torch.tensor([50.0, 70.0])}
    reward = reward_of({"a": 1.0, "b": 5.0}, normalize=True, reasoning=False, length_reward=0.5, **more)
    parts = reward.combine(ask(reward, ["a", "b"]), ALONE)
    assert {name: x.tolist() for name, x in parts.items()} == {
        "model": [-1.0, 1.0],
        "function": [50.0, 70.0],
        "server": [-1.0, 1.0],
        "length_reward": [-0.5, -0.5],
        "score": [47.5, 71.5],
        "score_raw": [100.5, 144.5],  # 1 + 50 + 50 - 0.5 and 5 + 70 + 70 - 0.5
    }
    assert reward.running.keys() == {"model", "server"}
    reward = reward_of({"a": 2.0, "b": 7.0}, reasoning=False)
    parts = reward.combine(ask(reward, ["a", "b"]), ALONE)
    assert {name: x.tolist() for name, x in parts.items()} == {"model": [2.0, 3.0], "score": [2.0, 3.0]}
    assert reward.running == {}


def test_the_raw_score_has_weights_and_no_clip():
    """A judge of weight -0.5 gives 8, which is neither clipped nor normalised: -4; and the rest as it is."""
    more = {"function": lambda *_: [1.0, 1.0], "missing_eos_penalty": 0.25, "reasoning": False}
    reward = Reward({"model": (lambda c: torch.tensor([8.0, 0.0][: len(c)]), -0.5)}, normalize=True, **more)
    parts = reward(request_of(["p"] * 2, ["a", "b"], finished=[True, False]))
    assert parts["score_raw"].tolist() == [-3.0, 0.75]
    assert reward.names == list(parts)


def test_a_run_counts_each_response_once_and_shows_the_raw_scale(tmp_path):
    """A batch whose reward function fails does not count: the resumed run equals one without failure."""
    files = run_files(tmp_path, count=8)
    files |= {"out_dir": tmp_path / "out", "run_name": "r", "batch_size": 4, "mini_batch_size": 4}
    files |= {"max_gen_len": 4, "epochs": 9, "max_steps": 3, "critic_warmup_steps": 0, "normalize_reward": 1}
    whole, failing = tmp_path / "combine.py", tmp_path / "failing.py"
    failing.write_text(whole.read_text().replace("due = ", "assert calls < 3; due = "))
    train(**files)
    with pytest.raises(InputError, match="--reward_fn"):
        train(**files | {"reward_fn": f"{failing}:score", "run_name": "f"})
    train(**files | {"run_name": "f"}, resume="auto")
    states = [
        json.loads((tmp_path / "out" / name / "checkpoints" / "step_3" / "state.json").read_text())
        for name in ("r", "f")
    ]
    assert states[0] == states[1]
    lines = read_jsonl(tmp_path / "out/r/metrics.jsonl")[1:]
    assert states[0]["raw_scores"]["model"]["count"] == 12
    assert all("reward/score_raw" in line for line in lines)
