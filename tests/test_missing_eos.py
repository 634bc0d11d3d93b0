"""--missing_eos_penalty where it is not given: it follows the scores, is chosen once, and is kept."""

import json
import os

import pytest
from tiny import finish, flags, launch_two, read_jsonl, run_files, same_run

from errors import InputError
from trainer import train_ppo

# Counts the letter a, and keeps the scores of each call in a file of this process.
COUNTING = """import json, os
def score(prompts, responses, answers):
    scores = [float(r.split().count("a")) * float(os.environ.get("UNIT", 1)) for r in responses]
    with open(f"{os.environ['SCORES']}_{os.environ.get('RANK', '0')}", "a") as file:
        file.write(json.dumps(scores) + "\\n")
    return scores
"""
SIZES = {"batch_size": 32, "mini_batch_size": 8, "max_gen_len": 6, "critic_warmup_steps": 0, "epochs": 9}
SIZES |= {"dtype": "float32", "reasoning": 0, "device": "cpu", "eval_interval": 0, "log_interval": 1000}


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "count.py").write_text(COUNTING)
    monkeypatch.setenv("SCORES", str(tmp_path / "scores"))
    files = run_files(tmp_path) | {"reward_fn": f"{tmp_path / 'count.py'}:score"}
    return {n: x for n, x in files.items() if n not in ("missing_eos_penalty", "reward_model")}


def calls(tmp_path, rank=0):
    return read_jsonl(tmp_path / f"scores_{rank}")


def spread(scores):
    mean = sum(scores) / len(scores)
    return (sum((x - mean) ** 2 for x in scores) / len(scores)) ** 0.5


def penalty_of(folder):
    return json.loads((folder / "config.json").read_text())["missing_eos_penalty"]


def test_it_is_the_standard_deviation_of_the_first_scores(files, tmp_path, monkeypatch, capsys):
    train_ppo.main(flags(**files, **SIZES, max_steps=2, out_dir=tmp_path, run_name="r"))
    probe, *trained = calls(tmp_path)
    assert (len(probe), len(trained)) == (32, 2)
    assert 0.3 < spread(probe) < 3
    penalty = penalty_of(tmp_path / "r")
    assert penalty == float(f"{spread(probe):.2g}")
    assert f"penalty  {penalty:g} for a response that does not end" in capsys.readouterr().out
    for record in read_jsonl(tmp_path / "r/metrics.jsonl")[1:]:
        assert 0.05 < record["rollout/finished"] < 0.95
        lost = penalty * (1 - record["rollout/finished"])
        assert record["reward/missing_eos"] == pytest.approx(-lost, rel=1e-6)
    monkeypatch.setenv("UNIT", "100")  # the same answers: it follows the scale
    train_ppo.main(flags(**files, **SIZES, max_steps=1, out_dir=tmp_path, run_name="s"))
    assert penalty_of(tmp_path / "s") == float(f"{100 * spread(probe):.2g}")


@pytest.mark.parametrize(("unit", "given", "chosen"), [("0", "", 0.5), ("1", 0.3, 0.3), ("1", 0, 0)])
def test_where_all_scores_are_alike_and_where_it_is_given(unit, given, chosen, files, tmp_path, monkeypatch):
    monkeypatch.setenv("UNIT", unit)
    flag = {} if given == "" else {"missing_eos_penalty": given}
    train_ppo.main(flags(**files, **SIZES, **flag, max_steps=1, out_dir=tmp_path, run_name="r"))
    assert penalty_of(tmp_path / "r") == chosen
    assert len(calls(tmp_path)) == (2 if given == "" else 1)


def test_normalised_scores_are_of_one_scale_and_their_statistics_begin_with_the_first_batch(tmp_path):
    """The model's normalised score has a standard deviation of 1, and here a weight of 2."""
    files = run_files(tmp_path)
    del files["missing_eos_penalty"], files["reward_fn"]
    files["reward_model"] += "=2"
    more = {"normalize_reward": 1, "max_steps": 1, "out_dir": tmp_path, "run_name": "r"}
    train_ppo.main(flags(**files, **SIZES, **more))
    assert penalty_of(tmp_path / "r") == 2.0
    state = json.loads((tmp_path / "r/checkpoints/step_1/state.json").read_text())["raw_scores"]
    assert (state["model"]["count"], state["missing_eos_penalty"]) == (32, 2.0)


def test_two_processes_choose_the_same_as_one(files, tmp_path):
    train_ppo.main(flags(**files, **SIZES, max_steps=1, out_dir=tmp_path / "one", run_name="r"))
    half = SIZES | {"batch_size": 16, "mini_batch_size": 4}
    for process in launch_two(flags(**files, **half, max_steps=1, out_dir=tmp_path / "two", run_name="r")):
        finish(process)
    assert penalty_of(tmp_path / "two/r") == penalty_of(tmp_path / "one/r")
    assert len(calls(tmp_path, 1)[0]) == 16


def test_a_resumed_run_keeps_it_and_chooses_no_other(files, tmp_path):
    argv = flags(**files, **SIZES, max_steps=3, save_interval=1, run_name="r")
    for name in ("whole", "parts"):
        train_ppo.main([*argv, "--out_dir", str(tmp_path / name)])
    os.remove(tmp_path / "scores_0")
    checkpoint = str(tmp_path / "parts/r/checkpoints/step_2")
    resumed = [*argv, "--out_dir", str(tmp_path / "parts"), "--resume", checkpoint]
    with pytest.raises(InputError, match=r"--missing_eos_penalty was 0\.\d+ and is now 9\.0; set it back"):
        train_ppo.main([*resumed, "--missing_eos_penalty", "9"])
    train_ppo.main(resumed)
    assert len(calls(tmp_path)) == 1  # step 3
    same_run(tmp_path / "whole/r", tmp_path / "parts/r", 3)
    assert penalty_of(tmp_path / "parts/r") == penalty_of(tmp_path / "whole/r")
