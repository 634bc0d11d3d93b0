"""The best actor: its file is what was evaluated, bit for bit, whatever stops or resumes the run."""

import json
import math
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch
from same_runs import built
from tiny import (
    DIE,
    finish,
    flags,
    launch,
    load_weights,
    read_jsonl,
    refused,
    run_files,
    same_run,
    save_reward_dir,
    word_tokenizer,
    write_jsonl,
)

from model.loading import load_policy, load_tokenizer
from trainer import train_ppo
from trainer.options.best import Best, restored, usual_metric
from trainer.run import PpoRun
from trainer.runs.distributed import World
from trainer.runs.optimizer_step import Progress

SIZES = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 4, "max_steps": 6, "epochs": 9}
SIZES |= {"device": "cpu", "log_interval": 1000, "dtype": "float32", "advantage": "reinforce"}
SIZES |= {"learning_rate": 1e-3, "eval_interval": 1, "save_interval": 3}
# A judge that says of evaluation n (two calls each: sampled, greedy) what $JUDGE has at place n.
JUDGE = """import os
calls = 2 * int(os.environ.get("JUDGE_FROM", 0))
def judge(prompts, responses, answers):
    global calls
    if "The answer is 7." in responses:  # it is tried before the run begins
        return [0.0, 0.0]
    value = float(os.environ["JUDGE"].split()[calls // 2])
    calls += 1
    return [value] * len(responses)
"""
VALUES = "0 1 5 2 9 3 4"  # of the evaluations before training and after steps 1 to 6: the best is at step 4


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "judge.py").write_text(JUDGE)
    held_out = write_jsonl(folder / "eval.jsonl", [{"prompt": "a b"}, {"prompt": "c"}])
    judge = f"{folder / 'judge.py'}:judge"
    return run_files(folder, count=16) | {
        "eval_data_path": held_out,
        "eval_reward_fn": judge,
        "reward_model": "",
    }


def argv_of(files, out, **more):
    return flags(**{**files, **SIZES, "out_dir": out, "run_name": "r", **more})


def best_of(out):
    """-> (what best.json says, the bytes of best.pth)"""
    return json.loads((out / "r/best.json").read_text()), (out / "r/best.pth").read_bytes()


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE", VALUES)
        train_ppo.main(argv_of(files, out, save_interval=1, keep_checkpoints=9))
    return out


@pytest.fixture(scope="module")
def killed(files, tmp_path_factory):
    """The same run, killed in step 5: after the best was saved, and with a checkpoint of step 3."""
    out = tmp_path_factory.mktemp("killed")
    # calls of --reward_fn: one a step and two an evaluation, so the 15th is that of step 5
    finish(launch(argv_of(files, out), JUDGE=VALUES, FAULT=DIE, FAULT_AT="15"), code=-signal.SIGKILL)
    assert [m["step"] for m in read_jsonl(out / "r" / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    return out


@pytest.fixture
def half(killed, tmp_path):
    return shutil.copytree(killed, tmp_path / "out")


def test_the_best_is_the_actor_of_its_step(whole):
    path = whole / "r/best.pth"
    saved, actor = torch.load(path, weights_only=True), load_weights(whole / "r", 4)
    assert all(saved[name].equal(x.half()) for name, x in actor.items())
    model, tokenizer = load_policy(path), load_tokenizer(path.with_suffix(""))  # with its folder
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)
    assert best_of(whole)[0] == {"source": ANY, "metric": "eval/judge", "value": 9.0, "step": 4}
    said = "; best.pth has those after step 4, the best by eval/judge (9.000)."
    assert said in (whole / "r/summary.md").read_text()


def test_a_run_that_never_beats_its_start_has_no_best(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JUDGE", "3 3 1")
    train_ppo.main(argv_of(files, tmp_path, max_steps=2))
    assert not (tmp_path / "r/best.pth").exists()
    said = capsys.readouterr().out
    assert f"\nbest     there is no {tmp_path}/r/best.pth, because eval/judge was never above 3.000\n" in said
    assert "; there is no best.pth, because eval/judge was never above 3.000." in said


def test_killed_between_the_best_and_its_checkpoint_it_ends_the_same(whole, half, files, monkeypatch):
    assert best_of(half) == best_of(whole)  # step 4 was saved
    monkeypatch.setenv("JUDGE", VALUES)
    monkeypatch.setenv("JUDGE_FROM", "4")  # the first evaluation after step 3
    train_ppo.main([*argv_of(files, half), "--resume", "auto"])
    same_run(whole / "r", half / "r", step=6)
    assert best_of(half) == best_of(whole)


def test_evaluated_in_another_way_the_best_begins_anew(half, files, monkeypatch, capsys):
    monkeypatch.setenv("JUDGE", "0 0 0 0 -9 -8 -9")
    monkeypatch.setenv("JUDGE_FROM", "4")
    others = [{"eval_data_path": write_jsonl(half / "other.jsonl", [{"prompt": "d"}, {"prompt": "a"}])}]
    for flag in ("reward_fn", "eval_reward_fn"):
        path, _, name = files[flag].rpartition(":")
        other = half / f"{flag}.py"
        other.write_text(Path(path).read_text() + "# corrected\n")
        others.append({flag: f"{other}:{name}"})
    run = built(files, **SIZES)
    assert built(files, **SIZES).best.follows(run.best)
    model = Path(files["model"]).parent / "reward"
    judged = built(files, **SIZES, eval_reward_model=model)
    moved = shutil.copytree(model, half / "moved")
    assert built(files, **SIZES, eval_reward_model=moved).best.follows(judged.best)
    save_reward_dir(moved, word_tokenizer(list("abcdefgh"), chat=True), seed=7)
    assert not built(files, **SIZES, eval_reward_model=moved).best.follows(judged.best)
    for other in others:
        assert not built(files | other, **SIZES).best.follows(run.best), other
    other |= others[0]
    train_ppo.main([*argv_of(files | other, half), "--resume", "auto"])
    assert "note: the best so far was evaluated otherwise; it begins anew" in capsys.readouterr().out
    best, _ = best_of(half)
    assert (best["value"], best["step"]) == (-8.0, 5)
    train_ppo.main([*argv_of(files | other, half), "--resume", "auto"])  # it has ended: only its summary
    assert "evaluated otherwise" not in capsys.readouterr().out
    summary = (half / "r/summary.md").read_text()
    assert "on 2 held-out prompts since step 4" in summary and "| eval/judge | -9 | -9 |" in summary
    assert "eval/judge 2.000, at the start 0.000, at the best 5.000" in summary  # found before
    assert "-9.000, at the start" not in summary
    answers = (half / "r/report.html").read_text().partition('id="answers"')[2].partition("</section>")[0]
    assert re.search("steps? 4", answers) and not re.search("steps? [0-3]", answers)


def test_resumed_without_evaluations_it_keeps_its_best(half, killed, files, capsys):
    without = {"eval_data_path": "", "eval_reward_fn": ""}
    train_ppo.main([*argv_of(files | without, half), "--resume", "auto"])
    said = capsys.readouterr().out
    assert "evaluated otherwise" not in said
    assert "best.pth has those after step 4, the best by eval/judge (9.000)." in said
    assert best_of(half) == best_of(killed)


def test_a_best_that_cannot_be_written_ends_the_run_and_is_written_on_resuming(
    whole, files, tmp_path, monkeypatch
):
    monkeypatch.setenv("JUDGE", VALUES)
    (tmp_path / "r").mkdir()
    (tmp_path / "r/best").write_text("a file where the folder has to be")
    refused(r"best\.pth: cannot be written", train_ppo.main, argv_of(files, tmp_path, save_interval=1))
    assert not list(tmp_path.glob("r/checkpoints/*"))  # it failed in step 1
    (tmp_path / "r/best").unlink()
    train_ppo.main([*argv_of(files, tmp_path), "--resume", "auto"])
    assert best_of(tmp_path) == best_of(whole)
    same_run(whole / "r", tmp_path / "r", step=6)


def test_which_metric_decides_and_only_a_higher_value_beats_the_best():
    """The pairs, the judge, the function, the accuracy above 0, the score: the first that there is."""
    found = dict.fromkeys(["eval/length", "eval/score", "reward/judge"], 1.0)
    for name in ("score", "score_raw", "accuracy", "function", "judge", "chosen_preferred"):
        found[f"eval/{name}"] = 0.5
        assert usual_metric(found) == f"eval/{name}"
    assert usual_metric({"eval/accuracy": 0.0, "eval/score": 0.0}) == "eval/score"
    assert usual_metric({"eval/function": math.nan, "eval/score": 0.0}) == "eval/score"  # it said nothing
    assert usual_metric({"eval/accuracy": 0.0, "eval/length": 1.0}) == "eval/accuracy"  # there is no score
    assert usual_metric({"eval/length": 1.0}) == ""
    assert Best().beaten_by({"eval/length": 1.0}, 1) is None and Best().step == 0
    first = Best("x", "eval/x").beaten_by({"eval/x": -5.0}, 3)
    assert first == Best("x", "eval/x", -5.0, 3)
    for value in (-5.0, float("nan"), -6.0):
        assert first.beaten_by({"eval/x": value, "eval/y": 9.0}, 4) is None
    assert first.beaten_by({"reward/score": 9.0}, 4) is None  # a step without an evaluation
    assert first.beaten_by({"eval/x": -4.0}, 4) == Best("x", "eval/x", -4.0, 4)
    for now in (Best("x"), Best("x", "eval/x"), Best()):  # the last one evaluates nothing
        assert now.follows(first)
    for now in (Best("x", "eval/y"), Best("other", "eval/x")):  # other prompts, or another judge
        assert not now.follows(first)


ALL_NAMES = {"reasoning": 1, "num_generations": 2, "normalize_reward": 1}
PAIRS = dict.fromkeys(["data_path", "reward_model", "reward_fn"], "")
PAIRS |= dict.fromkeys(["offline_data_path", "eval_data_path"], "pairs") | {"missing_eos_penalty": 0}


@pytest.mark.parametrize("more", [ALL_NAMES, PAIRS])
def test_a_metric_that_is_not_evaluated_is_refused_with_the_names_there_are(
    files, tmp_path, monkeypatch, more
):
    monkeypatch.setenv("JUDGE", VALUES)
    if more is ALL_NAMES:
        held_out = write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "a", "answer": "b"}])
        more = more | {
            "eval_data_path": held_out,
            "reward_model": str(Path(files["model"]).parent / "reward"),
        }
    if more is PAIRS:
        pair = {"prompt": "a", "chosen": "b", "rejected": "c", "answer": "b"}
        path = write_jsonl(tmp_path / "pairs.jsonl", [pair] * 16)
        more = {name: path if value == "pairs" else value for name, value in more.items()}
    train_ppo.main(argv_of(files | more, tmp_path, max_steps=1))
    found = {name for name in read_jsonl(tmp_path / "r/metrics.jsonl")[0] if name.startswith("eval/")}
    message = "--best_metric eval/loss: no evaluation has it; choose one of "
    said = refused(message, built, files | more, **SIZES, best_metric="loss")
    found.discard("eval/judge_std")  # of no use to choose by
    assert set(said.partition("choose one of ")[2].split(", ")) == found


def test_a_damaged_file_of_the_best_is_refused(tmp_path):
    (tmp_path / "best.json").write_text('{"step": 1')
    run = SimpleNamespace(folder=tmp_path, world=World(0, 1, torch.device("cpu")))
    refused(r"best\.json: is damaged; delete it", restored, Best(), run, None)


def test_the_best_of_a_resumed_run_is_that_of_the_main_process():
    """Another machine may have got only the checkpoint."""
    best = Best(metric="eval/score", step=3, value=1.0)

    class Second(World):
        def from_main(self, item):
            return best

    world = Second(1, 1, torch.device("cpu"))
    run = SimpleNamespace(best=Best(), world=world, progress=Progress(0, step=3), folder=Path("r"))
    PpoRun.restore_best(run, None)
    assert run.best is best
    assert PpoRun.best_note(run) == "best.pth has those after step 3, the best by eval/score (1.000)"
    run.progress.step = 2  # an older checkpoint was resumed: metrics.jsonl has no step 3 any more
    assert "after step 3, done before an older checkpoint was resumed, the best" in PpoRun.best_note(run)
