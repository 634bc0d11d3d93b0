"""The best actor: its file is what was evaluated, bit for bit, whatever stops or resumes the run."""

import json
import shutil
import signal
from unittest.mock import ANY

import pytest
from tiny import (
    DIE,
    finish,
    flags,
    launch,
    read_jsonl,
    run_files,
    same_run,
    write_jsonl,
)

from errors import InputError
from model.loading import load_policy, load_tokenizer
from trainer import train_ppo
from trainer.options.best import Best, usual_metric

SIZES = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 4, "max_steps": 6, "epochs": 9}
SIZES |= {"device": "cpu", "log_interval": 1000, "critic_warmup_steps": 0, "dtype": "float32"}
SIZES |= {"learning_rate": 1e-3, "critic_learning_rate": 1e-3, "eval_interval": 1, "save_interval": 3}
# A judge that says of evaluation n (two calls each: sampled, greedy) what $JUDGE has at place n.
JUDGE = """import os
calls = 2 * int(os.environ.get("JUDGE_FROM", 0))
def judge(prompts, responses, answers):
    global calls
    value = float(os.environ["JUDGE"].split()[calls // 2])
    calls += 1
    return [value] * len(responses)
"""
NAME, KEPT = "ppo_actor_32_best.pth", "best.pth"
PLACES = NAME, f"r/{KEPT}"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "judge.py").write_text(JUDGE)
    held_out = write_jsonl(folder / "eval.jsonl", [{"prompt": "a b"}, {"prompt": "c"}])
    return run_files(folder, count=16) | {
        "eval_data_path": held_out,
        "eval_reward_fn": f"{folder / 'judge.py'}:judge",
    }


def argv_of(files, out, **more):
    return flags(**{**files, **SIZES, "out_dir": out, "run_name": "r", **more})


def result(out, name="ppo_actor_32.pth"):
    return (out / name).read_bytes()


def best_of(out):
    return json.loads((out / "r" / "best.json").read_text())


VALUES = "0 1 5 2 9 3 4"  # of the evaluations before training and after steps 1 to 6: the best is at step 4


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """A run of 6 steps, checkpoints after 3 and 6 -> (its out folder, what it printed)."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE", VALUES)
        train_ppo.main(argv_of(files, out))
    return out


@pytest.fixture(scope="module")
def killed(files, tmp_path_factory):
    """The same run, killed in step 5: after the best was saved, and before a checkpoint knew of it."""
    out = tmp_path_factory.mktemp("killed")
    # calls of --reward_fn: one a step and two an evaluation, so the 15th is that of step 5
    finish(launch(argv_of(files, out), JUDGE=VALUES, FAULT=DIE, FAULT_AT="15"), code=-signal.SIGKILL)
    assert [m["step"] for m in read_jsonl(out / "r" / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    return out


@pytest.fixture
def half(killed, tmp_path):
    """A copy of the killed run -> its out folder."""
    return shutil.copytree(killed, tmp_path / "out")


def stopped_after(step, files, out, monkeypatch):
    """The same run, ended in the step behind this one by a failing reward -> the bytes of its result."""
    monkeypatch.setenv("JUDGE", VALUES)
    monkeypatch.setenv("FAULT", "raise ValueError('stop')")
    monkeypatch.setenv("FAULT_AT", str(2 + 3 * step + 1))
    with pytest.raises(InputError, match="stop"):
        train_ppo.main(argv_of(files, out))
    monkeypatch.delenv("FAULT_AT")
    return result(out)


# ------------------------------------------------------------------------------------------- what is written


def test_the_best_is_what_a_run_that_ended_there_saves(whole, files, tmp_path, monkeypatch):
    ended = stopped_after(4, files, tmp_path, monkeypatch)
    assert result(whole, NAME) == ended
    assert result(whole, "r/best.pth") == ended
    assert result(whole) != ended  # the result is the last step's
    assert (
        f"; {NAME} has those after step 4, the best by eval/judge (9.000)."
        in (whole / "r" / "summary.md").read_text()
    )
    assert best_of(whole) == {"source": ANY, "metric": "eval/judge", "value": 9.0, "step": 4}
    for path in (whole / NAME, whole / "r" / KEPT):  # both can be loaded, each with its folder
        model, tokenizer = load_policy(path), load_tokenizer(path.with_suffix(""))
        assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)


def test_a_run_that_never_beats_its_start_has_no_best(files, tmp_path, monkeypatch, capsys):
    """That of an earlier run stays until this run's first result, and goes with the earlier result: the
    folder beside it too, on which chat.py --model would fail."""
    (tmp_path / NAME).write_text("an earlier run's")
    (tmp_path / "ppo_actor_32_best").mkdir()
    (tmp_path / "ppo_actor_32_best" / "config.json").write_text("{}")
    monkeypatch.setenv("JUDGE", "3 3 1")
    train_ppo.main(argv_of(files, tmp_path, max_steps=2))
    assert not (tmp_path / NAME).exists()
    assert not (tmp_path / "ppo_actor_32_best").exists()
    assert not (tmp_path / "r" / KEPT).exists()
    said = capsys.readouterr().out
    assert f"\nbest     there is no {tmp_path / NAME}, because eval/judge was never above 3.000\n" in said
    assert f"; there is no {NAME}, because eval/judge was never above 3.000." in said


def test_a_run_that_fails_before_it_learns_leaves_an_earlier_best_alone(files, tmp_path, monkeypatch):
    (tmp_path / NAME).write_text("an earlier run's")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / KEPT).write_text("the user's")
    monkeypatch.setenv("JUDGE", VALUES)
    monkeypatch.setenv("FAULT", "raise ValueError('stop')")
    monkeypatch.setenv("FAULT_AT", "3")
    with pytest.raises(InputError, match="stop"):
        train_ppo.main(argv_of(files, tmp_path))
    assert (tmp_path / NAME).read_text() == "an earlier run's"
    assert (tmp_path / "r" / KEPT).read_text() == "the user's"


def test_without_evaluations_nothing_is_kept_and_nothing_old_stays(files, tmp_path, capsys):
    (tmp_path / NAME).write_text("an earlier run's")
    without = {"eval_data_path": "", "eval_reward_fn": ""}
    train_ppo.main(argv_of(files | without, tmp_path, max_steps=1))
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["ppo_actor_32", "ppo_actor_32.pth", "r"]
    assert "best     " not in capsys.readouterr().out


def test_a_model_that_is_the_best_file_is_refused(whole, files, tmp_path):
    out = shutil.copytree(whole, tmp_path / "out")
    with pytest.raises(InputError, match=f"{NAME}: this run would write its result there"):
        train_ppo.main(argv_of(files, out, model=out / NAME, run_name="s"))


# -------------------------------------------------------------------------------------- killed and resumed


def test_killed_between_the_best_and_its_checkpoint_it_ends_the_same(whole, half, files, monkeypatch):
    """Another run wrote its own best to --out_dir in between."""
    assert result(half, NAME) == result(whole, NAME)  # step 4 was saved
    (half / NAME).write_text("another run's")
    monkeypatch.setenv("JUDGE", VALUES)
    monkeypatch.setenv("JUDGE_FROM", "4")  # the first evaluation after step 3
    train_ppo.main([*argv_of(files, half), "--resume", "auto"])
    same_run(whole / "r", half / "r", step=6)
    assert best_of(half) == best_of(whole)
    for name in (*PLACES, "ppo_actor_32.pth"):
        assert result(half, name) == result(whole, name)


def test_evaluated_in_another_way_the_best_begins_anew(half, files, monkeypatch, capsys):
    monkeypatch.setenv("JUDGE", "0 0 0 0 -9 -8 -9")
    monkeypatch.setenv("JUDGE_FROM", "4")
    prompts = write_jsonl(half / "other.jsonl", [{"prompt": "d"}])
    old = result(half, PLACES[1])
    train_ppo.main([*argv_of(files | {"eval_data_path": prompts}, half), "--resume", "auto"])
    assert "note: the best so far was evaluated otherwise; it begins anew" in capsys.readouterr().out
    assert (best_of(half)["value"], best_of(half)["step"]) == (-8.0, 5)
    assert result(half, NAME) == result(half, PLACES[1]) != old


def test_resumed_without_evaluations_it_keeps_its_best(half, files, capsys):
    kept, best = result(half, NAME), best_of(half)
    without = {"eval_data_path": "", "eval_reward_fn": ""}
    train_ppo.main([*argv_of(files | without, half), "--resume", "auto"])
    said = capsys.readouterr().out
    assert "evaluated otherwise" not in said
    assert f"{NAME} has those after step 4, the best by eval/judge (9.000)." in said
    assert best_of(half) == best
    assert [result(half, name) for name in PLACES] == [kept, kept]


def test_a_best_that_cannot_be_written_ends_the_run_and_is_written_on_resuming(
    whole, files, tmp_path, monkeypatch
):
    monkeypatch.setenv("JUDGE", VALUES)
    tmp_path.joinpath("ppo_actor_32_best").write_text("a file where the folder has to be")
    with pytest.raises(InputError, match=f"{NAME}: cannot be written"):
        train_ppo.main(argv_of(files, tmp_path, save_interval=1))
    assert not list(tmp_path.glob("r/checkpoints/*"))  # it failed in step 1
    tmp_path.joinpath("ppo_actor_32_best").unlink()
    train_ppo.main([*argv_of(files, tmp_path), "--resume", "auto"])
    assert result(tmp_path, NAME) == result(whole, NAME)
    same_run(whole / "r", tmp_path / "r", step=6)


# ---------------------------------------------------------------------------------------------- the metric


def test_which_metric_decides():
    """The pairs, the judge, the function, the accuracy above 0, the score: the first that there is."""
    found = dict.fromkeys(["eval/length", "eval/score", "reward/judge"], 1.0)
    for name in ("score", "score_raw", "accuracy", "function", "judge", "chosen_preferred"):
        found[f"eval/{name}"] = 0.5
        assert usual_metric(found) == f"eval/{name}"
    assert usual_metric({"eval/accuracy": 0.0, "eval/score": 0.0}) == "eval/score"
    assert usual_metric({"eval/accuracy": 0.0, "eval/length": 1.0}) == "eval/accuracy"  # there is no score
    assert usual_metric({"eval/length": 1.0}) == ""
    assert Best().beaten_by({"eval/length": 1.0}, 1) is None


def test_a_metric_that_is_not_evaluated_is_refused_with_the_names_there_are(files, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE", VALUES)
    message = "--best_metric eval/loss: no evaluation has it; choose one of .*eval/judge, .*eval/score_greedy"
    with pytest.raises(InputError, match=message):
        train_ppo.main(argv_of(files, tmp_path, best_metric="loss"))


@pytest.mark.parametrize("flag", ["best_metric", "eval_reward_fn", "eval_reward_model"])
def test_flags_of_evaluations_need_held_out_prompts(files, flag):
    wanted = {"eval_data_path": "", "eval_reward_fn": "", flag: "x"}
    with pytest.raises(InputError, match=f"--{flag}: .*give --eval_data_path too"):
        train_ppo.parse_args(argv_of(files | wanted, "out"))


def test_only_a_higher_value_beats_the_best():
    first = Best("x", "eval/x").beaten_by({"eval/x": -5.0}, 3)
    assert first == Best("x", "eval/x", -5.0, 3)
    for value in (-5.0, float("nan"), -6.0):
        assert first.beaten_by({"eval/x": value, "eval/y": 9.0}, 4) is None
    assert first.beaten_by({"reward/score": 9.0}, 4) is None  # a step without an evaluation
    assert first.beaten_by({"eval/x": -4.0}, 4) == Best("x", "eval/x", -4.0, 4)


@pytest.mark.parametrize(
    ("now", "continues"),
    [
        (Best("x"), True),
        (Best("x", "eval/x"), True),
        (Best("x", "eval/y"), False),
        (Best("other", "eval/x"), False),  # other prompts, or another judge
        (Best(), True),  # nothing is evaluated
    ],
)
def test_what_can_be_compared_with_an_earlier_best(now, continues):
    assert now.follows(Best("x", "eval/x", 0.5, 3)) == continues
