"""The best actor: its file is what was evaluated, bit for bit, whatever stops or resumes the run."""

import json
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
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
from trainer.options.best import Best, choose_best
from trainer.rewards.combine import Judge, Reward

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


def state_of(out, step):
    return json.loads((out / "r" / "checkpoints" / f"step_{step}" / "state.json").read_text())["best"]


def summary_of(out):
    return (out / "r" / "summary.md").read_text()


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
    assert state_of(whole, 6) == {**state_of(whole, 3), "value": 9.0, "step": 4}
    assert (state_of(whole, 3)["step"], state_of(whole, 3)["metric"]) == (2, "eval/judge")
    for path in (whole / NAME, whole / "r" / KEPT):  # both can be loaded, each with its folder
        model, tokenizer = load_policy(path), load_tokenizer(path.with_suffix(""))
        assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)


def test_the_end_of_a_run_names_its_best(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JUDGE", "0 2 1 1")
    train_ppo.main(argv_of(files, tmp_path, max_steps=3))
    said, summary = capsys.readouterr().out, (tmp_path / "r" / "summary.md").read_text()
    assert f"\nbest     {tmp_path / NAME} has those after step 1, the best by eval/judge (2.000)\n" in said
    assert f"Files: ppo_actor_32.pth has the weights after step 3; {NAME} has those after step 1, " in summary
    assert "the best by eval/judge (2.000)." in summary


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


def test_with_adapters_the_best_is_merged_as_the_result_is(files, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE", "0 1 2")
    train_ppo.main(argv_of(files, tmp_path, max_steps=2, lora_r=2))
    assert result(tmp_path, NAME) == result(tmp_path)
    assert state_of(tmp_path, 2)["step"] == 2  # the checkpoint of the same step knows of it


def test_a_model_that_is_the_best_file_is_refused(whole, files, tmp_path):
    out = shutil.copytree(whole, tmp_path / "out")
    with pytest.raises(InputError, match=f"{NAME}: this run would write its result there"):
        train_ppo.main(argv_of(files, out, model=out / NAME, run_name="s"))


# -------------------------------------------------------------------------------------- killed and resumed


def test_killed_between_the_best_and_its_checkpoint_it_ends_the_same(whole, killed, half, files, monkeypatch):
    assert result(killed, NAME) == result(whole, NAME)  # step 4 was saved
    monkeypatch.setenv("JUDGE", VALUES)
    monkeypatch.setenv("JUDGE_FROM", "4")  # the first evaluation after step 3
    train_ppo.main([*argv_of(files, half), "--resume", "auto"])
    same_run(whole / "r", half / "r", step=6)
    assert state_of(half, 6) == state_of(whole, 6)
    for name in (NAME, "r/best.pth", "ppo_actor_32.pth", "r/checkpoints/step_6/best.pth"):
        assert result(half, name) == result(whole, name)


def test_a_resumed_run_has_the_best_of_its_checkpoint(killed, half, files, tmp_path, monkeypatch):
    """The file of step 4, which is done again and is not the best any more, goes; so does another run's."""
    (half / NAME).write_text("another run's")
    kept = result(half, "r/checkpoints/step_3/best.pth")
    assert result(killed, "r/best.pth") != kept
    monkeypatch.setenv("JUDGE", "0 1 5 2 4 3 4")
    monkeypatch.setenv("JUDGE_FROM", "4")
    train_ppo.main([*argv_of(files, half), "--resume", "auto"])
    assert state_of(half, 6)["step"] == 2
    for name in (NAME, "r/best.pth", "r/checkpoints/step_6/best.pth"):
        assert result(half, name) == kept
    assert kept == stopped_after(2, files, tmp_path / "two", monkeypatch)


def test_evaluated_in_another_way_the_best_begins_anew(half, files, monkeypatch, capsys):
    monkeypatch.setenv("JUDGE", "0 0 0 0 -9 -8 -9")
    monkeypatch.setenv("JUDGE_FROM", "4")
    prompts = write_jsonl(half / "other.jsonl", [{"prompt": "d"}])
    old = result(half, "r/checkpoints/step_3/best.pth")
    train_ppo.main([*argv_of(files | {"eval_data_path": prompts}, half), "--resume", "auto"])
    said = capsys.readouterr().out
    assert "note: the best so far was evaluated otherwise; it begins anew" in said
    state = state_of(half, 6)
    assert (state["value"], state["step"], state["since"]) == (-8.0, 5, 3)
    assert "the best by eval/judge (-8.000), of the evaluations after step 3" in summary_of(half)
    assert result(half, NAME) == result(half, "r/best.pth") != old


def test_resumed_once_without_evaluations_it_keeps_its_best(half, files, monkeypatch, capsys):
    """Step 2 has 5.0; steps 4 and 5 are not evaluated; then step 6, with 4.0, does not beat it."""
    kept, state = result(half, "r/checkpoints/step_3/best.pth"), state_of(half, 3)
    without = {"eval_data_path": "", "eval_reward_fn": ""}
    monkeypatch.setenv("FAULT", "raise ValueError('stop')")
    monkeypatch.setenv("FAULT_AT", "3")
    with pytest.raises(InputError, match="stop"):
        train_ppo.main([*argv_of(files | without, half), "--resume", "auto"])
    monkeypatch.delenv("FAULT_AT")
    assert "evaluated otherwise" not in capsys.readouterr().out
    assert state_of(half, 5) == state
    assert f"{NAME} has those after step 2, the best by eval/judge (5.000)." in summary_of(half)
    assert [result(half, name) for name in PLACES] == [kept, kept]
    monkeypatch.setenv("JUDGE", "4")
    train_ppo.main([*argv_of(files, half), "--resume", "auto"])
    assert state_of(half, 6) == state
    assert [result(half, name) for name in PLACES] == [kept, kept]


def test_a_later_best_than_that_of_the_checkpoint_goes(files, tmp_path, monkeypatch):
    """The start has 5.0, step 4 has 9.0. Resumed from step 3 there is none, until step 6, which has 2.0."""
    monkeypatch.setenv("JUDGE", "5 1 1 1 9 2 2")
    monkeypatch.setenv("FAULT", "raise ValueError('stop')")
    monkeypatch.setenv("FAULT_AT", "15")
    with pytest.raises(InputError, match="stop"):
        train_ppo.main(argv_of(files, tmp_path))
    assert (tmp_path / "r" / KEPT).exists()
    monkeypatch.delenv("FAULT_AT")
    monkeypatch.setenv("JUDGE_FROM", "6")
    checkpoint = tmp_path / "r" / "checkpoints" / "step_3"
    train_ppo.main([*argv_of(files, tmp_path, eval_interval=0), "--resume", str(checkpoint)])
    assert "never above 5.000" in summary_of(tmp_path)
    left = {path.name for path in (*tmp_path.iterdir(), *(tmp_path / "r").iterdir())}
    assert not left & {KEPT, "best", NAME, "ppo_actor_32_best"}


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


def chosen(metric="", answer=None, judge=None, fn="", reasoning=0, answers=1, pairs=None, **reward):
    args = SimpleNamespace(best_metric=metric, reasoning=reasoning, eval_reward_fn=fn, eval_reward_model=[])
    args.num_generations = answers
    held_out = Records()
    held_out.has_accuracy = answer is not None
    given = {
        "models": {"model": (lambda pairs: torch.zeros(len(pairs)), 1.0)},
        "reasoning": bool(reasoning),
        **reward,
    }
    return choose_best(args, held_out, Reward(**given), Judge(function=judge), pairs)


class Records(list):
    fingerprint = "1f"


def test_another_judge_is_another_source_where_it_decides():
    sources = {chosen("judge", judge=len, fn=fn).source for fn in ("one.py:f", "two.py:f")}
    assert len(sources) == 2
    assert len({chosen("score", judge=len, fn=fn).source for fn in ("one.py:f", "two.py:f")}) == 1


def test_which_metric_decides():
    """What the pairs say, the judge, the user's function, the accuracy, the score: the first there is."""
    given = {"answer": "a", "judge": len, "function": len, "normalize": True, "pairs": [1]}
    for without, metric in (
        ("", "chosen_share"),
        ("pairs", "judge"),
        ("judge", "function"),
        ("function", "score_raw"),
        ("normalize", "score"),
    ):
        given.pop(without, None)
        best = chosen(**given)
        assert best.metric == f"eval/{metric}"
        assert best.successor == ("eval/accuracy" if metric.startswith("score") else "")
    assert chosen().successor == chosen("score", answer="a").successor == ""
    assert chosen(answer="a", models={}).metric == "eval/accuracy"  # there is no score
    assert chosen("missing_eos", missing_eos_penalty=None).metric == "eval/missing_eos"  # not yet chosen
    for name in ("model", "eval/model", "length", "score_greedy", "eval/finished_greedy"):
        assert chosen(name).metric == f"eval/{name.removeprefix('eval/')}"
    assert chosen("format_rate", reasoning=1).metric == "eval/format_rate"


@pytest.mark.parametrize(
    "name", ["accuracy", "judge", "format_rate", "loss", "reward/score", "ema/score", "eval/"]
)
def test_a_metric_that_is_not_evaluated_is_refused_with_the_names_there_are(name):
    if name == "eval/":
        assert chosen(name).metric == "eval/score"  # as if it were not given
        return
    with pytest.raises(InputError, match=f"--best_metric {name}: no evaluation of this run says") as error:
        chosen(name)
    assert "choose one of model, score, length, finished, model_greedy, score_greedy" in str(error.value)


def test_what_has_no_greedy_twin_is_known_by_its_exact_name():
    """pass@k: k = 2, 4 … up to --num_generations, as evaluate in evaluation.py logs them."""
    for name in ("pass@2", "pass@4", "accuracy_greedy"):
        assert chosen(name, answer="a", answers=6).metric == f"eval/{name}"
    for name in ("pass@3", "pass@8", "pass@4_greedy"):
        with pytest.raises(InputError, match=r"accuracy_greedy, pass@2, pass@4$"):
            chosen(name, answer="a", answers=6)
    with pytest.raises(InputError, match="pass@2: no evaluation"):
        chosen("pass@2", answers=4)  # no answers in the records
    assert chosen("chosen_preferred", pairs=[1]).metric == "eval/chosen_preferred"
    with pytest.raises(InputError, match=r"share_greedy: no .*, chosen_share, chosen_preferred$"):
        chosen("chosen_share_greedy", pairs=[1])
    with pytest.raises(
        InputError, match="--best_metric eval/kl: no evaluation of this run says by it which actor is best"
    ):
        chosen("eval/kl", pairs=[1])


@pytest.mark.parametrize("flag", ["best_metric", "eval_reward_fn", "eval_reward_model"])
def test_flags_of_evaluations_need_held_out_prompts(files, flag):
    wanted = {"eval_data_path": "", "eval_reward_fn": "", flag: "x"}
    with pytest.raises(InputError, match=f"--{flag}: .*give --eval_data_path too"):
        train_ppo.parse_args(argv_of(files | wanted, "out"))


def test_the_accuracy_decides_from_its_first_value_above_0_on():
    """score, accuracy of each evaluation -> whether it is the best so far, and by which metric."""
    best = Best("eval/score", "x", "eval/accuracy")
    for step, (score, accuracy, better, metric) in enumerate(
        (
            (1.0, 0.0, True, "score"),
            (0.9, 0.0, False, "score"),
            (2.0, 0.0, True, "score"),
            (0.5, 0.1, True, "accuracy"),
            (9.0, 0.1, False, "accuracy"),
            (9.0, 0.0, False, "accuracy"),
            (0.0, 0.2, True, "accuracy"),
        )
    ):
        metrics = {"eval/score": score, "eval/accuracy": accuracy}
        assert best.beaten_by(metrics) is better
        if better:
            best.take(metrics, step)
        assert best.metric == f"eval/{metric}"
        resumed = Best("eval/score", "x", "eval/accuracy")
        resumed.load_state_dict(best.state_dict())
        assert resumed == best
        resumed.load_state_dict({})  # a checkpoint from before there was a best
        assert resumed == best and not resumed.forgotten
    assert (best.value, best.step) == (0.2, 6)
    assert best.describe("b.pth") == "b.pth has those after step 6, the best by eval/accuracy (0.200)"
    old = {
        "metric": "eval/accuracy",
        "source": "x",
        "value": 0.3,
        "step": 4,
        "since": 0,
    }  # an older version's
    resumed = Best("eval/score", "x", "eval/accuracy")
    resumed.load_state_dict(old)
    assert (resumed.metric, resumed.value, resumed.step) == ("eval/accuracy", 0.3, 4)
    by_function = Best("eval/function", "x")
    by_function.load_state_dict(old)
    assert (by_function.value, by_function.forgotten) == (None, True)


def test_only_a_higher_value_beats_the_best():
    best = Best("eval/x")
    assert best.beaten_by({"eval/x": -5.0})
    assert not best.beaten_by({"eval/x": float("nan")})
    best.take({"eval/x": -5.0}, 3)
    best.since = 2
    assert not best.beaten_by({"eval/x": -5.0})
    assert not best.beaten_by({"eval/y": 9.0})
    assert best.beaten_by({"eval/x": -4.0})
    other = Best("eval/x")
    other.load_state_dict(best.state_dict())
    assert other == best
    other = Best("eval/y")
    other.load_state_dict(best.state_dict())
    assert (other.value, other.step, other.forgotten) == (None, 0, True)
