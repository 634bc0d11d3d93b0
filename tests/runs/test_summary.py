"""What a run says of itself: the verdict, the tables, the curves, its first lines, and what it leaves."""

import json
import shlex
import sys
from types import SimpleNamespace

import pytest
from tiny import ROOT, flags, read_jsonl, run_files, train

from errors import InputError
from trainer import train_ppo, train_reward, train_sft
from trainer.runs import base, displays, plots, report
from trainer.runs.base import command_line
from trainer.runs.displays import as_line
from trainer.runs.resume import RunFolder
from trainer.runs.run_logger import RunLogger

PICTURES = True  # see pictures.py

DEMO = read_jsonl(ROOT / "tests" / "fixtures" / "demo_metrics.jsonl")
SIZES = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "epochs": 9, "device": "cpu"}


def verdict(records, display, batch_size, held_out):
    """The verdict on a run that has ended, in sentences."""
    run = SimpleNamespace(display=display, world=SimpleNamespace(size=1))
    run.args = SimpleNamespace(batch_size=batch_size)
    run.held_out = range(held_out)
    run.held_out_pairs = None
    return report.in_words(run, records, "ended")


NOISY = [0.1 * (-1) ** n for n in range(40)]  # s = 0.1772


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return run_files(tmp_path_factory.mktemp("files"))


def argv_of(files, out_dir, **more):
    return flags(**{**SIZES, **files, "out_dir": out_dir, **more})


def records_of(rise, before=None, after=None, name="reward/score"):
    """40 noisy steps that rise by ``rise`` in the middle, and the evaluations before and after, if given."""
    records = [{"step": n + 1, name: 1.0 + x + rise * (n >= 20)} for n, x in enumerate(NOISY)]
    evaluated = "eval/" + name.split("/")[1]
    if before is not None:
        records = [{"step": 0, evaluated: before}, *records]
        records[-1][evaluated] = after
    return records


def test_the_line_of_a_step():
    metrics = dict.fromkeys(("reward/score", "kl/k1", "rollout/length", "rollout/finished"), 0.5)
    metrics |= dict.fromkeys(("policy/entropy", "value/explained_variance", "perf/samples_per_second"), 0.25)
    line = "score 0.500 | kl 0.5000 | len 0.5 | ended 0.50 | entropy 0.250 | ev 0.25 | 0.2 samples/s"
    assert as_line(displays.PPO.line, metrics) == line
    stage = {"train/loss": 1, "train/learning_rate": 1e-3, "train/grad_norm": 2, "train/accuracy": 0.5}
    assert as_line(displays.SFT.line, stage) == "loss 1.0000 | lr 1.0e-03 | norm 2.00"
    assert as_line(displays.PAIRS.line, stage) == "loss 1.0000 | accuracy 0.500 | norm 2.00"


def test_a_number_that_cannot_be_is_shown():
    nan = float("nan")
    assert as_line(displays.PPO.line, {"value/explained_variance": nan}) == "ev nan"
    assert as_line(displays.SFT.line, {"train/loss": nan}) == "loss nan"


def test_the_line_of_an_evaluation():
    metrics = {"eval/score": 2.0, "eval/accuracy": 0.5, "eval/accuracy_greedy": 0.75, "eval/finished": 1.0}
    line = as_line(displays.PPO.evaluation, metrics)
    assert line == "accuracy 0.500 | greedy 0.750 | score 2.000"
    assert as_line(displays.SFT.evaluation, {"train/loss": 1.0}) == ""


# ------------------------------------------------------------------------------------------------ the verdict


def test_the_verdict_tells_a_rise_from_chance():
    """By hand: s = sqrt(pi) / 2 * 0.2 = 0.1772 (0.1901 with the jump of 0.5 in the middle)."""
    (text, nothing_held_out) = verdict(records_of(0.5), displays.PPO, 8, 0)
    assert text == "The score rose from 1.000 to 1.500 in training (first and last tenth of 40 steps)."
    assert "--eval_data_path" in nothing_held_out
    assert "fell from 1.000 to 0.500" in verdict(records_of(-0.5), displays.PPO, 8, 0)[0]
    assert "The run made it worse." in verdict(records_of(-0.5), displays.PPO, 8, 0)[0]
    # two standard errors of the difference of two means of 4 steps: 2 * 0.18 * sqrt(2 / 4) = 0.256
    assert "did not clearly change" in verdict(records_of(0.24), displays.PPO, 8, 0)[0]
    assert "rose" in verdict(records_of(0.29), displays.PPO, 8, 0)[0]


def test_the_verdict_is_on_the_evaluation_where_there_is_one():
    """Two standard errors of 32 held-out records with 8 a step: 2 * 0.1772 * sqrt(2 * 8 / 32) = 0.2506."""
    (text,) = verdict(records_of(0.0, 1.0, 1.28), displays.PPO, 8, 32)
    assert text == "The score rose from 1.000 to 1.280 on 32 held-out prompts."
    (text,) = verdict(records_of(0.0, 1.0, 1.22), displays.PPO, 8, 32)
    assert text.startswith("The score did not clearly change: from 1.000 to 1.220 on 32 held-out prompts")
    assert "0.25 can be chance" in text


def test_an_accuracy_of_0_is_said_in_words():
    records = records_of(0.0, 1.0, 2.0)
    records[0]["eval/accuracy"] = records[-1]["eval/accuracy"] = 0.0
    text = "No held-out answer was right, before or after (accuracy 0)."
    assert text in verdict(records, displays.PPO, 8, 32)
    records[-1]["eval/accuracy"] = 0.1
    text = "The accuracy, which is never rewarded: 0.000 before, 0.100 after."
    assert text in verdict(records, displays.PPO, 8, 32)


def test_a_run_that_got_worse_is_said_to():
    (text,) = verdict(records_of(0.0, -1.26, -1.98), displays.PPO, 8, 32)
    assert text == "The score fell from -1.260 to -1.980 on 32 held-out prompts. The run made it worse."


def test_a_judge_that_falls_while_the_score_rises_is_said():
    records = records_of(0.0, 1.0, 2.0)
    records[0]["eval/judge"], records[-1]["eval/judge"] = 0.5, -1.5
    text = "The judge, which is never rewarded: 0.500 before, -1.500 after."
    assert text in verdict(records, displays.PPO, 8, 32)
    assert as_line(displays.PPO.evaluation, records[-1]) == "judge -1.500 | score 2.000"


def test_the_verdict_of_losses_and_of_accuracies():
    text = verdict(records_of(0.0, 1.5, 1.0, "train/loss"), displays.SFT, 8, 32)[0]
    assert text == "The loss fell from 1.500 to 1.000 on 32 held-out conversations. Lower is better."
    text = verdict(records_of(0.0, 0.5, 0.0, "train/accuracy"), displays.PAIRS, 8, 32)[0]
    assert text == "The accuracy fell from 0.500 to 0.000 on 32 held-out pairs. The run made it worse."
    text = verdict(records_of(0.0, 1.0, 1.5, "train/loss"), displays.RATINGS, 8, 32)[0]
    assert text.endswith("on 32 held-out rated answers. Lower is better. The run made it worse.")


def test_the_chance_of_an_accuracy_is_that_of_the_held_out_pairs():
    """Two standard errors of a difference of 18 pairs: 2 * 0.4875 * sqrt(2 / 18) = 0.325, whatever little the
    accuracy varies on pairs that are learned already; of 200 pairs 0.0975."""
    records = [{"step": n, "train/accuracy": 1.0} for n in range(1, 9)]
    records = [{"step": 0, "eval/accuracy": 0.389}, *records]
    records[-1]["eval/accuracy"] = 0.667
    text = verdict(records, displays.PAIRS, 32, 18)[0]
    assert text.startswith("The accuracy did not clearly change: from 0.389 to 0.667 on 18 held-out pairs")
    assert "up to 0.33 can be chance" in text
    assert "rose" in verdict(records, displays.PAIRS, 32, 200)[0]


def test_greedy_and_accuracy_are_said_as_well():
    records = records_of(0.0, 1.0, 1.0)
    records[0] |= {"eval/score_greedy": 2.0, "eval/accuracy": 0.5}
    records[-1] |= {"eval/score_greedy": 1.0, "eval/accuracy": 0.75}
    words = verdict(records, displays.PPO, 8, 32)
    assert words[1].startswith("The greedy score fell from 2.000 to 1.000")
    assert words[2] == "The accuracy, which is never rewarded: 0.500 before, 0.750 after."


def test_the_verdict_of_offline_ppo_takes_its_spread_from_the_evaluations():
    """Two standard errors of a difference: of 200 pairs with a spread of 0.1, 2 sqrt(2) 0.1 / sqrt(200) =
    0.02; of a share of a half, where no spread is logged, 2 sqrt(2) 0.5 / sqrt(200) = 0.1."""

    def words(name, before, after, best=(True, ""), **more):
        ends = [{"step": n, f"eval/{name}": x, **more} for n, x in ((0, before), (9, after))]
        steps = [{"step": n, "reward/score": 0.0} for n in range(1, 9)]
        return verdict([ends[0], *steps, ends[1]], displays.offline(*best), 8, 200)[0]

    std = {"eval/chosen_share_std": 0.1}
    assert words("chosen_share", 0.5, 0.521, **std) == (
        "The chosen_share rose from 0.500 to 0.521 on 200 held-out pairs."
    )
    assert "did not clearly change" in words("chosen_share", 0.5, 0.519, **std)
    std |= {"eval/chosen_share_change_std": 0.02}  # pair by pair: 2 * 0.02 / sqrt(200) = 0.0028
    assert "rose" in words("chosen_share", 0.5, 0.503, **std)
    assert "did not clearly change" in words("chosen_share", 0.5, 0.5027, **std)
    accuracy = False, "eval/accuracy"
    assert words("accuracy", 0.5, 0.61, accuracy) == (
        "The accuracy rose from 0.500 to 0.610 on 200 held-out prompts."
    )
    assert "did not clearly change" in words("accuracy", 0.5, 0.59, accuracy)
    judge = False, "eval/judge"
    assert "rose" in words("judge", 5.0, 5.021, judge, **{"eval/judge_std": 0.1})
    assert "did not clearly" in words("judge", 5.0, 5.019, judge, **{"eval/judge_std": 0.1})
    assert "no known spread" in words("length", 5.0, 9.0, (False, "eval/length"))
    assert "Nothing was measured" in words("length", 5.0, 9.0, (False, ""))


def test_too_few_steps_are_said_to_be_too_few():
    records = [{"step": 1, "reward/score": 1.0}, {"step": 2, "reward/score": 9.0}]
    assert "too few steps" in verdict(records, displays.PPO, 8, 0)[0]
    assert "Nothing was measured that says" in verdict([{"step": 0}], displays.PPO, 8, 0)[0]
    without = [*records_of(0.5), {"step": 41}]  # the score of the last step was not finite
    assert "rose from 1.000 to 1.500" in verdict(without, displays.PPO, 8, 0)[0]


def test_normalised_scores_are_not_compared_but_the_raw_ones():
    """The scale of the score moves: here it falls, although the raw score rises."""
    records = records_of(0.0, 3.0, 1.0)
    for n, record in enumerate(records):
        record |= {"reward/model_raw": -4.0, "reward/score_raw": 5.0 + NOISY[n % 2], "reward/model": 0.0}
    records[0] |= {"eval/model_raw": -3.0, "eval/score_raw": 5.0}
    records[-1] |= {"eval/model_raw": -4.0, "eval/score_raw": 6.0}
    words = verdict(records, displays.PPO, 8, 32)
    assert words[0] == "The raw score rose from 5.000 to 6.000 on 32 held-out prompts."
    assert any("--normalize_reward" in text for text in words)
    assert ["reward/score_raw", "5", "5"] in report.table(displays.PPO, records)


def test_the_verdict_on_the_demo():
    words = verdict(DEMO, displays.PPO, 128, 500)
    assert words[0] == "The score rose from 1.392 to 2.846 on 500 held-out prompts."


# ------------------------------------------------------------------------------------- tables, curves, lines


def test_the_table_has_first_and_last():
    """Of steps the means of a tenth of them, of evaluations the first and the last one."""
    records = [
        {"step": n, "reward/score": float(n), "reward/format": 0.5, "kl/k1": 0.001 * n} for n in range(1, 21)
    ]
    records[11]["reward/score"] = 99.0
    for n, record in enumerate(records):
        record |= {"eval/score": 1.0 + n, "eval/score_greedy": -1.0}
    assert report.table(displays.PPO, records) == [
        ["", "first", "last"],
        ["eval/score", "1", "20"],
        ["eval/score_greedy", "-1", "-1"],
        ["reward/score", "1.5", "19.5"],
        ["reward/format", "0.5", "0.5"],
        ["kl/k1", "0.0015", "0.0195"],
    ]
    losses = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 1.0}]
    assert report.table(displays.SFT, losses)[1:] == [["train/loss", "2", "1"]]
    assert report.table(displays.PPO, records[:1])[1:] == []  # nothing to compare


def drawn(records, display, tmp_path, monkeypatch):
    """{title of a panel: its labels} of the curves of these records."""
    from matplotlib.axes import Axes

    labels, titles = [], []
    plot, title = Axes.plot, Axes.set_title
    monkeypatch.setattr(
        Axes, "plot", lambda axis, *a, label, **k: (labels.append(label), plot(axis, *a, label=label, **k))[1]
    )
    monkeypatch.setattr(
        Axes,
        "set_title",
        lambda axis, text, **k: (titles.append((text, labels[:])), labels.clear(), title(axis, text, **k))[2],
    )
    plots.draw_png(records, display.panels[: report.DRAWN], tmp_path / "curves.png")
    monkeypatch.undo()
    return dict(titles)


def test_every_part_of_the_reward_and_the_evaluations_score_have_a_curve(tmp_path, monkeypatch):
    records = [{"step": 0, "eval/score": 1.0}]
    parts = {"reward/function": 1.0, "reward/missing_eos": 0.0, "reward/model_mean": 0.0, "reward/score": 2.0}
    records += [{"step": n, **parts, "rollout/finished": 1.0} for n in (1, 2)]
    panels = drawn(records, displays.PPO, tmp_path, monkeypatch)
    assert panels["score"] == ["training", "held out, sampled"]
    assert panels["parts of the reward (training)"] == ["function", "missing_eos"]
    assert panels["shares: right (never rewarded), ended"] == ["ended (training)"]


def logger_of(total_steps, tmp_path, log_interval=0, display=displays.PPO):
    """A RunLogger of a run of so many steps."""
    folder = RunFolder(tmp_path, f"r{total_steps}_{log_interval}", "")
    folder.config = {"run_id": ""}
    args = SimpleNamespace(log_interval=log_interval, use_wandb=False, tracker=[])
    progress = SimpleNamespace(step=0)
    run = SimpleNamespace(display=display, args=args, progress=progress, total_steps=total_steps)
    return RunLogger(folder, run)


def test_short_runs_print_every_step_and_long_ones_about_a_hundred(tmp_path, capsys):
    for total, given, printed in ((4, 0, 4), (46, 0, 46), (300, 0, 100), (46, 20, 3), (46, 1, 46)):
        logger = logger_of(total, tmp_path, given)
        for step in range(1, total + 1):
            logger.log(step, {"reward/score": 1.0}, {})
        logger.finish()
        assert capsys.readouterr().out.count("step ") == printed, (total, given)


def test_help_says_what_the_default_log_interval_does():
    for script in (train_ppo, train_sft, train_reward):
        assert "0: 100 lines or more" in script.flag_parser().format_help()


def test_findings_are_printed_at_any_step_and_once(tmp_path, capsys):
    logger = logger_of(100, tmp_path, log_interval=50)
    for step in (1, 2, 3):
        logger.log(step, {"reward/score": 1.0, "kl/k1": 4.0 * (step > 1)}, {})
    logger.finish()
    assert capsys.readouterr().out.count("health: wrong, since step 2: the policy is far from its start") == 1


# -------------------------------------------------------------------------------------------- a whole run


def test_a_run_says_its_rewards_its_warm_up_and_what_came_of_it(files, tmp_path, capsys):
    more = {
        "reasoning": 1,
        "repetition_penalty": 0.25,
        "normalize_reward": 1,
        "critic_warmup_steps": 2,
        "length_reward": 0.5,
    }
    out = tmp_path / "with a space"
    train_ppo.main(argv_of(files, out, max_steps=4, run_name="r", **more))
    said = capsys.readouterr().out
    for line in (
        f"model          --reward_model {files['reward_model']}",
        "format         --reasoning 1",
        "marks          --reasoning 1",
        f"function       --reward_fn {files['reward_fn']}",
        "repetition     --repetition_penalty 0.25",
        "length_reward  --length_reward 0.5",
        "missing_eos    --missing_eos_penalty 1.0",
        "warm-up  at first only the critic trains: --critic_warmup_steps 2",
    ):
        assert f"{line}\n" in said
    assert "run      4 steps of 8 responses, 1 x cpu in torch." in said
    named = {line.split()[0] for line in said[said.index("the sum of:") :].splitlines()[1:8]}
    metrics = read_jsonl(out / "r" / "metrics.jsonl")
    parts = displays.metric_names(displays.PARTS, metrics)
    assert named == {name.removeprefix("reward/") for name in parts}
    actor = ["clip" in line for line in said.splitlines() if line.startswith("step ")]
    assert actor == [False, False, True, True]  # it does not train in the first steps
    summary = (out / "r" / "summary.md").read_text()
    assert summary in said
    for name in (*parts, "reward/score_raw", "rollout/length", "rollout/finished", "kl/k1"):
        assert f"| {name} | " in summary
    assert "Files: ppo_actor_32.pth has the weights after step 4." in summary
    assert f"--model '{out}/ppo_actor_32.pth'\n" in said


def test_a_line_to_copy_works_from_any_folder_and_with_spaces(tmp_path, monkeypatch):
    words = shlex.split(command_line("chat.py", "--model", tmp_path / "a b's.pth"))
    assert words == [sys.executable, str(ROOT / "chat.py"), "--model", str(tmp_path / "a b's.pth")]
    monkeypatch.setattr(base, "sys", SimpleNamespace(platform="win32", executable="python"))
    assert command_line("chat.py", "--model", "a b.pth").endswith('--model "a b.pth"')


def test_a_stopped_run_has_curves_and_a_summary(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAULT", "os.kill(os.getpid(), 15)")  # SIGTERM, while the third batch is scored
    monkeypatch.setenv("FAULT_AT", "3")
    with pytest.raises(SystemExit) as end:
        train_ppo.main(argv_of(files, tmp_path, run_name="r", max_steps=9))
    assert end.value.code == 128 + 15
    summary = (tmp_path / "r" / "summary.md").read_text()
    assert "- The run was stopped, after step 3 of 9." in summary
    assert "Files: ppo_actor_32.pth has the weights after step 3." in summary
    assert (tmp_path / "r" / "curves.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    assert summary in said
    assert f"report   {tmp_path / 'r' / 'report.html'}, summary.md and curves.png\n" in said


# ----------------------------------------------------------------------- a run that has learned nothing


def fail_at_once(files, out_dir, monkeypatch, call=1, **more):
    monkeypatch.setenv("FAULT", "raise ValueError('at once')")
    monkeypatch.setenv("FAULT_AT", str(call))
    with pytest.raises(InputError, match="at once"):
        train_ppo.main(argv_of(files, out_dir, max_steps=4, **more))
    monkeypatch.delenv("FAULT_AT")


def test_a_failure_in_the_first_step_leaves_no_folder(files, tmp_path, monkeypatch, capsys):
    fail_at_once(files, tmp_path, monkeypatch)
    assert list(tmp_path.iterdir()) == []
    assert f"nothing was learned, so {tmp_path / 'run_1'} was removed" in capsys.readouterr().out
    fail_at_once(files, tmp_path, monkeypatch, resume="auto")
    assert list(tmp_path.iterdir()) == []
    train_ppo.main(argv_of(files, tmp_path, max_steps=3, resume="auto"))
    assert (tmp_path / "run_1" / "summary.md").exists()  # the number was free
    out = capsys.readouterr().out
    assert f"note: --resume: no checkpoint in {tmp_path / 'run_1'}, so it begins at step 1\n" in out


def test_a_folder_that_was_there_is_never_removed(files, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    fail_at_once(files, tmp_path, monkeypatch, run_name="mine")
    assert (tmp_path / "mine" / "config.json").exists()


def test_a_failure_in_a_later_step_keeps_the_run(files, tmp_path, monkeypatch):
    fail_at_once(files, tmp_path, monkeypatch, call=2, critic_warmup_steps=0)
    assert (tmp_path / "run_1" / "checkpoints" / "step_1").exists()
    assert "The run was stopped, after step 1 of 4." in (tmp_path / "run_1" / "summary.md").read_text()


def test_stages_say_their_verdict_too(tmp_path, capsys):
    records = [{"prompt": "a b", "chosen": "a", "rejected": f"b {'c' * (n % 3)}"} for n in range(12)]
    files = run_files(tmp_path)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    sizes = {"device": "cpu", "batch_size": 4, "eval_size": 4, "max_steps": 4}
    more = {"out_dir": tmp_path / "out", "epochs": 9}
    train_reward.main(flags(model=files["model"], data_path=tmp_path / "pairs.jsonl", **sizes, **more))
    said = capsys.readouterr().out
    assert "on 4 held-out pairs" in said
    assert "Files: reward_32 has the weights after step 4." in said


def test_a_fault_in_the_curves_does_not_end_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "draw_panel", lambda *more: 1 / 0)
    sizes = {"batch_size": 4, "mini_batch_size": 4, "max_gen_len": 4, "max_steps": 1, "reasoning": 0}
    train(**run_files(tmp_path), **sizes, out_dir=tmp_path / "out", run_name="r")
    said = capsys.readouterr().out
    assert said.count("note: report.html cannot be made (ZeroDivisionError: division by zero); ") == 1
    assert (tmp_path / "out/r/summary.md").exists()
