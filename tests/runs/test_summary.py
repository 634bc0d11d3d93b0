"""What a run says of itself: the verdict, the tables, the curves, its first lines, and what it leaves."""

import re
import shlex
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure
from tiny import ROOT, flags, health_of, read_jsonl, refused

from progress_bar import process_seconds
from trainer import train_ppo
from trainer.run import PpoRun
from trainer.runs import base, displays, report
from trainer.runs.base import Run
from trainer.runs.displays import PPO, SFT, as_line
from trainer.runs.distributed import World
from trainer.runs.plots import draw_panel
from trainer.runs.resume import RunFolder
from trainer.runs.run_logger import RunLogger, spent

NOISY = [0.1 * (-1) ** n for n in range(40)]  # s = 0.1772


def verdict(records, display=PPO, batch_size=8, held_out=0, **facts):
    config = {"batch_size": batch_size, "processes": 1, "facts": {"held_out": held_out, **facts}}
    return report.in_words(SimpleNamespace(display=display), health_of(records, config).history, "ended")


def steps_of(rise=0.0, name="reward/score"):
    """40 noisy steps that rise by ``rise`` in the middle."""
    return [{"step": n + 1, name: 1.0 + x + rise * (n >= 20)} for n, x in enumerate(NOISY)]


def with_evaluations(steps, before, after):
    """These steps with what an evaluation found before them and at the last one."""
    evaluations = [{f"eval/{name}": x for name, x in values.items()} for values in (before, after)]
    return [{"step": 0} | evaluations[0], *steps[:-1], steps[-1] | evaluations[1]]


TESTED_BY = {"eval/score": 2, "eval/accuracy": 0.5, "eval/accuracy_greedy": 0.75, "eval/finished": 1}
LINES = [
    (PPO.line, {"reward/score": 0.5, "value/explained_variance": float("nan")}, "score 0.500 | ev nan"),
    (SFT.line, {"train/loss": 1, "train/learning_rate": 1e-3}, "loss 1.0000 | lr 1.0e-03"),
    (PPO.evaluation, TESTED_BY, "accuracy 0.500 | greedy 0.750 | score 2.000"),
    (SFT.evaluation, {"train/loss": 1.0}, ""),
    (PPO.line, {"reward/score": -0.0, "kl/k1": -1e-6}, "score 0.000 | kl 0.0000"),
]


def test_a_printed_line_has_what_is_known():
    for display, given, line in LINES:
        assert as_line(display, given) == line


WORSE = " The run made it worse."

# What 40 noisy steps show that rise by so much in the middle. Two standard errors of a difference of two
# means of 4 steps are 2 * 0.18 * sqrt(2 / 4) = 0.256.
TRAINED = {
    -0.5: "fell from 1.000 to 0.500 in training (first and last tenth of 40 steps). The run made it worse.",
    0.24: "did not clearly change: from 1.000 to 1.240 in training",
    0.29: "rose from 1.000 to 1.290 in training",
}

# Display, records held out, metric before, after. Two standard errors of 32 records with 8 a step are
# 2 * 0.1772 * sqrt(2 * 8 / 32) = 0.2506. More about them: test_health.py.
TESTED = """
PPO      32 score                1  1.28  rose from 1.000 to 1.280 on 32 held-out prompts.
PPO      32 score                1  1.22  did not clearly change: from 1.000 to 1.220 on 32 held
PPO      32 score            -1.26 -1.98  fell from -1.260 to -1.980 on 32 held-out prompts. The
SFT      32 loss               1.5   1.0  fell from 1.500 to 1.000 on 32 held-out conversations. L
RATINGS  32 loss               1.0   1.5  rose from 1.000 to 1.500 on 32 held-out rated answers. L
PAIRS    32 accuracy           0.5   0.0  fell from 0.500 to 0.000 on 32 held-out pairs. The run
OFFLINE 200 chosen_preferred   0.5  0.61  rose from 0.500 to 0.610 on 200 held-out pairs.
PROMPTS 200 length             5.0   9.0  went from 5.000 to 9.000 on 200 held-out prompts: too f
"""


def test_without_evaluations_the_steps_are_compared():
    for rise, text in TRAINED.items():
        first, nothing_held_out = verdict(steps_of(rise))
        assert first.startswith(f"The score {text}")
        assert "--eval_data_path" in nothing_held_out


@pytest.mark.parametrize("row", TESTED.strip().splitlines())
def test_the_verdict_tells_a_change_of_what_is_held_out_from_chance(row):
    display, held_out, name, before, after, text = row.split(maxsplit=5)
    group = "reward" if display in ("PPO", "OFFLINE", "PROMPTS") else "train"
    steps = steps_of(name=f"{group}/{name}") if group == "train" or name == "score" else steps_of()
    records = with_evaluations(steps, {name: float(before)}, {name: float(after)})
    prompts = replace(displays.OFFLINE, tested="prompts", best=name)
    shown = prompts if display == "PROMPTS" else getattr(displays, display)
    first = verdict(records, shown, held_out=int(held_out))[0]
    assert first.startswith(f"The {name} {text}")
    worse = float(before) > float(after) if name != "loss" else float(before) < float(after)
    assert first.endswith(WORSE) is worse
    assert ("Lower is better." in first) is (name == "loss")


def test_what_cannot_be_told_is_said():
    assert "too few steps" in verdict(steps_of()[:2])[0]
    assert "Nothing was measured that says" in verdict([{"step": 0}])[0]
    records = with_evaluations(steps_of(), {"length": 5.0}, {"length": 9.0})
    assert "Nothing was measured" in verdict(records, displays.OFFLINE, held_out=9)[0]


NOT_REWARDED = "The accuracy, which is never rewarded,"
PLACE = "on 32 held-out prompts"


def test_what_else_was_evaluated_is_said_as_well():
    """Two standard errors of a share of 0.1 of 32 are 2 sqrt(2) 0.3 / sqrt(32) = 0.15, of 0.25 0.2165; of
    judge's scores with a deviation of 1 0.5."""
    for name, before, after, text in (
        ("accuracy", 0.0, 0.0, "No held-out answer was right, before or after (accuracy 0 on 32 prompts)."),
        (
            "accuracy",
            0.0,
            0.1,
            f"{NOT_REWARDED} did not clearly change: from 0.000 to 0.100 {PLACE}; up to 0.15 can be chance.",
        ),
        ("accuracy", 0.0, 0.25, f"{NOT_REWARDED} rose from 0.000 to 0.250 {PLACE}."),
        ("accuracy", 0.5, 0.5, f"{NOT_REWARDED} stayed at 0.500 {PLACE}."),
        ("judge", 0.5, -1.5, f"The judge, which only evaluates, fell from 0.500 to -1.500 {PLACE}.{WORSE}"),
        ("score_greedy", 2, 1, f"The greedy score fell from 2.000 to 1.000 {PLACE}.{WORSE}"),
    ):
        also = {"judge_std": 1.0}
        records = with_evaluations(steps_of(), {name: before, "score": 1}, {name: after, "score": 2} | also)
        assert text in verdict(records, held_out=32)


def test_an_accuracy_whose_answers_the_reward_gets_is_not_called_never_rewarded():
    records = with_evaluations(steps_of(), {"accuracy": 0.0, "score": 1}, {"accuracy": 0.25, "score": 2})
    words = verdict(records, held_out=32, answers_go_to="reward function")
    assert (
        f"The accuracy, whose answers the reward function gets too, rose from 0.000 to 0.250 {PLACE}."
        in words
    )
    assert "never rewarded" not in " ".join(words)


@pytest.mark.parametrize(
    ("function", "server", "environment", "answered", "offline", "text"),
    [
        (lambda prompts, responses, answers: 0, None, False, 3, "", "reward function"),
        (lambda prompts, responses, answers: 0, None, False, 0, "", ""),
        (lambda prompts, responses, answers, gold: 0, None, False, 0, "", "reward function"),
        (None, "a server", False, 3, "", "reward server"),
        (None, "a server", False, 0, "", ""),
        (lambda prompts, responses, answers: 0, "a server", False, 3, "", "reward function and server"),
        (lambda prompts, responses, answers: 0, None, True, 3, "", "reward environment and function"),
        (None, None, True, 0, "", "reward environment"),
        (None, None, False, 3, "", ""),
        (None, None, False, None, "logged.jsonl", ""),
    ],
)
def test_who_gets_the_answers(function, server, environment, answered, offline, text):
    """A reward model never does; a function also by a field of the records that it asks for."""
    functions = {"function": (function, 1.0)} if function else {}
    run = SimpleNamespace(
        reward=SimpleNamespace(functions=functions, server=server, environment=environment),
        data=SimpleNamespace(with_answer=answered, columns={"prompt": None, "gold": None}),
        args=SimpleNamespace(offline_data_path=offline),
    )
    assert PpoRun.answers_go_to(run) == text


def test_equal_scores_of_all_steps_do_not_make_every_change_clear():
    """Nothing has shown how much scores vary; what did not change is said to stay."""
    steps = [{"step": n + 1, "reward/score": -0.5} for n in range(9)]
    for after, text in (
        (-0.469, f"went from -0.500 to -0.469 {PLACE}: too few steps, or no known spread, to tell"),
        (-0.5, f"stayed at -0.500 {PLACE}."),
    ):
        words = verdict(with_evaluations(steps, {"score": -0.5}, {"score": after}), held_out=32)
        assert words[0].startswith(f"The score {text}")


def test_normalised_scores_are_not_compared_but_the_raw_ones():
    """The scale of the score moves: here it falls, although the raw score rises."""
    steps = steps_of()
    for n, step in enumerate(steps):
        step |= {"reward/model_raw": -4.0, "reward/score_raw": 5.0 + NOISY[n % 2], "reward/model": 0.0}
    records = with_evaluations(steps, {"score": 3, "score_raw": 5}, {"score": 1, "score_raw": 6})
    words = verdict(records, held_out=32)
    assert words[0] == "The raw score rose from 5.000 to 6.000 on 32 held-out prompts."
    assert any("--normalize_reward" in text for text in words)
    assert ["reward/score_raw", "5", "5"] in report.table(PPO, health_of(records).history)


def test_the_table_has_first_and_last():
    """Of steps the means of a tenth of them, of evaluations the first and the last one."""
    same = {"reward/format": 0.5}
    records = [{"step": n, "reward/score": float(n), "eval/score": n, **same} for n in range(1, 21)]
    records[11]["reward/score"] = 99.0
    records[0]["eval/format_rate_greedy"] = records[19]["eval/format_rate_greedy"] = 0.25
    assert report.table(PPO, health_of(records).history) == [
        ["", "first", "last"],
        ["eval/format_rate_greedy (share of the answers)", "0.25", "0.25"],
        ["eval/score", "1", "20"],
        ["reward/score", "1.5", "19.5"],
        ["reward/format (reward units)", "0.5", "0.5"],
    ]
    assert report.table(PPO, health_of(records[:1]).history)[1:] == []  # nothing to compare


def test_every_part_of_the_reward_has_a_curve_and_evaluations_and_single_steps_have_markers():
    parts = {"reward/function": 1.0, "reward/missing_eos": 0.0, "reward/score": 2.0, "rollout/finished": 1.0}
    records = [{"step": 0, "eval/score": 1.0}, *({"step": n, **parts} for n in (1, 2))]
    for steps, marker in ((1, "o"), (2, "None")):
        history = health_of(records[: 1 + steps]).history
        axes = [Figure().subplots() for _ in range(3)]
        for axis, panel in zip(axes, PPO.panels, strict=False):
            draw_panel(axis, panel, history)
        assert [panel.title for panel in PPO.panels[:2]] == ["score", "parts of the reward (training)"]
        assert [[(line.get_label(), line.get_marker()) for line in axis.lines] for axis in axes] == [
            [("training", marker), ("held out, sampled", "o")],
            [("function", marker), ("missing_eos", marker)],
            [("ended (training)", marker)],
        ]
    trained, tested = (line.get_xydata().tolist() for line in axes[0].lines)
    assert (trained, tested) == ([[1, 2], [2, 2]], [[0, 1]])


def logger_of(out_dir, total_steps, log_interval=9, trackers=()):
    """The logger of a run "r" of PPO."""
    folder = RunFolder(out_dir, "r", "")
    folder.config = {"run_id": "0123abcd", "script": "train_ppo.py"}
    args = SimpleNamespace(log_interval=log_interval, use_wandb=False, tracker=trackers, wandb_project="p")
    progress = SimpleNamespace(step=0)
    run = SimpleNamespace(display=PPO, args=args, progress=progress, total_steps=total_steps)
    return RunLogger(folder, run)


@pytest.mark.parametrize(("total", "given", "printed"), [(46, 0, 46), (300, 0, 100), (46, 20, 3)])
def test_short_runs_print_every_step_and_long_ones_about_a_hundred(tmp_path, capsys, total, given, printed):
    """And what is found at any step, once."""
    logger = logger_of(tmp_path, total, given)
    for step in range(1, total + 1):
        metrics = {"reward/score": 1.0, "kl/k1": 4.0 * (step > 1)}
        logger.show(step, metrics, {})
        logger.log(step, metrics, {})
    logger.finish()
    said = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert sum(line.startswith("step ") for line in said) == printed
    assert said.count("health") == 1


def test_the_line_of_a_step_comes_before_its_evaluation_and_its_row_after_it(files, tmp_path, monkeypatch):
    """Each file keeps one row a step, with the evaluation."""
    seen = []

    def evaluate(run):
        rows = (run.folder / "metrics.jsonl").read_text() if run.progress.step else ""
        seen.append((len(rows.splitlines()), said()))
        return {"eval/score": 1.0}, {}

    def said():
        return [line.split(" | ")[0] for line in lines if line.startswith(("step ", "  held out at"))]

    lines = []
    monkeypatch.setattr(RunLogger, "say", lambda self, text: lines.extend(text.splitlines()))
    monkeypatch.setattr(PpoRun, "evaluate", evaluate)
    train_ppo.main(argv_of(files, tmp_path, run_name="r", eval_interval=2))
    before = "  held out at step 0: score 1.000"
    at_two = [before, "step 1/4", "step 2/4"]
    after = [*at_two, "  held out at step 2: score 1.000", "step 3/4", "step 4/4"]
    assert seen == [(0, []), (2, at_two), (4, after)]
    rows = read_jsonl(tmp_path / "r" / "metrics.jsonl")
    assert [(row["step"], "eval/score" in row) for row in rows] == [(n, n % 2 == 0) for n in range(5)]


def test_the_times_say_what_they_count(files, tmp_path, monkeypatch, capsys):
    """330.4 s, of which 41.4 until the first evaluation and 79.2 in evaluations."""
    assert spent(330.4, 41.4, 79.2) == "330 s: start 41, training 210, evaluation 79"
    assert spent(10.4, 5.6, 4.9) == "10 s: start 6, training 0, evaluation 5"  # never below 0
    since = process_seconds()
    assert since > 1.0  # of this process, whose imports took longer
    time.sleep(0.2)
    assert 0.15 < process_seconds() - since < 20
    runs = []
    monkeypatch.setattr(PpoRun, "evaluate", lambda run: (runs.append(run), time.sleep(0.6), ({}, {}))[2])
    train_ppo.main(argv_of(files, tmp_path, max_steps=1))
    run = runs[0]
    assert since < run.start_seconds < process_seconds()
    assert 1.2 <= run.evaluation_seconds < 2.5  # of two
    (line,) = (line for line in capsys.readouterr().out.splitlines() if " s: start " in line)
    total, start, training, evaluation = map(int, re.findall(r"\d+", line.partition(";")[0]))
    assert total == start + training + evaluation
    assert (start, evaluation) == (round(run.start_seconds), round(run.evaluation_seconds))


def test_epochs_that_end_before_max_steps_are_said(tmp_path, capsys):
    logger = logger_of(tmp_path, total_steps=4)
    vars(logger.run.args).update(max_steps=9, epochs=1, batch_size=2)
    vars(logger.run).update(world=World(0, 1, torch.device("cpu")), dtype=torch.float32)
    logger.introduce("about")
    logger.finish()
    assert "note: --max_steps 9: --epochs 1 ends after 4 steps; raise it too\n" in capsys.readouterr().out


def test_a_line_to_copy_works_from_any_folder_and_with_spaces(tmp_path, monkeypatch):
    run = SimpleNamespace(args=SimpleNamespace(trust_remote_code=False))
    words = shlex.split(Run.command(run, "chat.py", "--model", tmp_path / "a b's.pth"))
    assert words == [sys.executable, str(ROOT / "chat.py"), "--model", str(tmp_path / "a b's.pth")]
    monkeypatch.setattr(base, "sys", SimpleNamespace(platform="win32", executable="python"))
    assert Run.command(run, "chat.py", "--model", "a b.pth").endswith('--model "a b.pth"')


SIZES = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "max_steps": 4, "epochs": 9}


def argv_of(files, out_dir, **more):
    return flags(device="cpu", out_dir=out_dir, **{**SIZES, **files, **more})


def test_a_run_says_its_rewards_its_warm_up_and_what_came_of_it(files, tmp_path, capsys):
    more = {"reasoning": 1, "repetition_penalty": 0.25, "normalize_reward": 1, "critic_warmup_steps": 2}
    out = tmp_path / "with a space"
    train_ppo.main(argv_of(files, out, run_name="r", length_reward=0.5, **more))
    said = capsys.readouterr().out
    assert "\nwarm-up  at first only the critic trains: --critic_warmup_steps 2\n" in said
    assert "run      4 steps of 8 responses, 1 x cpu in torch." in said
    assert f"critic   starts from {files['reward_model']} (--critic_init)" in said
    history = health_of(read_jsonl(out / "r" / "metrics.jsonl")).history
    parts = displays.metric_names(displays.PARTS, history.values)
    (named,) = (line for line in said.splitlines() if line.startswith("reward   "))
    assert {*named.removeprefix("reward   ").split(" + ")} == {name.removeprefix("reward/") for name in parts}
    actor = ["clip" in line for line in said.splitlines() if line.startswith("step ")]
    assert actor == [False, False, True, True]  # it does not train in the first steps
    summary = (out / "r" / "summary.md").read_text()
    assert summary in said
    for name in (*parts, "reward/score_raw", "rollout/length", "rollout/finished", "kl/k1"):
        assert f"| {name} " in summary
    assert "Files: ppo_actor_32.pth has the weights after step 4." in summary
    assert f"--model '{out}/ppo_actor_32.pth'\n" in said


def fail_at_once(files, out_dir, monkeypatch, call=1, **more):
    monkeypatch.setenv("FAULT", "raise ValueError('at once')")
    monkeypatch.setenv("FAULT_AT", str(call))
    refused("at once", train_ppo.main, argv_of(files, out_dir, **more))
    monkeypatch.delenv("FAULT_AT")


def test_a_run_that_has_learned_nothing_leaves_no_new_folder(files, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    out.mkdir()
    result = out / "ppo_actor_32.pth"
    result.write_bytes(b"of an earlier run")
    fail_at_once(files, out, monkeypatch)
    assert [path.read_bytes() for path in out.iterdir()] == [b"of an earlier run"]
    assert f"nothing was learned, so {out / 'run_1'} was removed" in capsys.readouterr().out
    fail_at_once(files, out, monkeypatch, resume="auto")
    assert list(out.iterdir()) == [result]
    fail_at_once(files, out, monkeypatch, call=2, critic_warmup_steps=0, resume="auto")
    said = capsys.readouterr().out
    assert f"note: --resume: no checkpoint in {out / 'run_1'}, so it begins at step 1\n" in said
    assert (out / "run_1" / "checkpoints" / "step_1").exists()  # the number was free
    assert "The run was stopped, after step 1 of 4." in (out / "run_1" / "summary.md").read_text()
    (tmp_path / "mine").mkdir()
    fail_at_once(files, tmp_path, monkeypatch, run_name="mine")
    assert (tmp_path / "mine" / "config.json").exists()
