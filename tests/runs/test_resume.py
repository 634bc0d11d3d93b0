"""Checkpoints and resuming: stopped and killed runs, damaged checkpoints, full disks, folders in use."""

import gc
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest
import tiny
import torch
from safetensors.torch import save_file
from same_runs import resumed_is_the_same, same_weights
from tiny import finish, flags, launch, load_weights, read_jsonl, same_run, wait_for, write_jsonl

from errors import run_script
from model.loading import load_policy
from trainer import train_ppo
from trainer.runs import base, checkpoints, displays
from trainer.runs.distributed import World
from trainer.runs.resume import RunFolder, evaluated_since
from trainer.runs.run_logger import RunLogger

RUN = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "max_steps": 6, "ppo_epochs": 2, "epochs": 9}
RUN |= {"learning_rate": 1e-3, "critic_learning_rate": 1e-3, "run_name": "r", "update_old_actor_freq": 3}
# checkpoints must keep their states too
RUN |= {"normalize_reward": 1, "critic_warmup_steps": 1, "replay_batches": 2, "lr_warmup_steps": 1}
RUN |= {"critic_lam": 0.97, "dual_clip": 3.0, "clip_epsilon_high": 0.3}
RUN |= {"device": "cpu", "log_interval": 1000, "save_interval": 2, "eval_interval": 4}
ENDLESS = {"max_steps": 500, "epochs": 1000, "save_interval": 1000, "eval_interval": 0}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    held_out = [{"prompt": f"{a} b", "answer": "a"} for a in tiny.WORDS[:5]]
    texts = write_jsonl(folder / "texts.jsonl", [{"text": f"{a} b {a}"} for a in tiny.WORDS[:7]])
    more = {"eval_data_path": write_jsonl(folder / "eval.jsonl", held_out), "ptx_data_path": texts}
    return tiny.run_files(folder) | more


def argv_of(files, out_dir, **more):
    return flags(**{**files, **RUN, "out_dir": out_dir, **more})


def refused(argv, error):
    return tiny.refused(error, train_ppo.main, argv)


def die_at(call, argv):
    """A run that is killed at this call of its reward function."""
    finish(launch(argv, FAULT=tiny.DIE, FAULT_AT=str(call)), code=-signal.SIGKILL)


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """A run without interruption, whose old actor differs from the actor -> its folder."""
    out = tmp_path_factory.mktemp("whole")
    train_ppo.main(argv_of(files, out, keep_checkpoints=9))
    return out / "r"


@pytest.fixture(scope="module")
def killed(files, tmp_path_factory):
    """The same run, saved after steps 2 and 4 and killed in step 6 -> its folder."""
    out = tmp_path_factory.mktemp("killed")
    die_at(10, argv_of(files, out))  # two evaluations: two calls each
    assert names(out / "r") == ["step_2", "step_4"]
    return out / "r"


@pytest.fixture
def half(killed, files, tmp_path):
    """A copy of the killed run -> (its folder, its command line)."""
    return shutil.copytree(killed, tmp_path / "r"), argv_of(files, tmp_path)


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def steps_in(run):
    return [m["step"] for m in read_jsonl(run / "metrics.jsonl")]


def contents(run):
    files = [path for path in run.rglob("*") if path.is_file() and not path.name.startswith(".lock")]
    return {path: path.read_bytes() for path in files}


def wait_for_steps(run, count, process):
    metrics = run / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > count, process)


def test_a_small_batch_resumes_bit_for_bit_though_an_evaluation_takes_more_slots(files, tmp_path):
    """The first evaluation samples 40 prompts at once; the resumed run begins with one of them."""
    sizes = {"batch_size": 1, "mini_batch_size": 1, "dtype": "float32", "update_old_actor_freq": 1}
    sizes |= {"normalize_reward": 0, "critic_warmup_steps": 0, "eval_interval": 99, "max_steps": 4}
    argv = argv_of({**files, "eval_data_path": files["data_path"]}, tmp_path / "whole", **sizes)
    train_ppo.main(argv)
    resumed_is_the_same(tmp_path / "whole" / "r", [*argv, "--out_dir", str(tmp_path)], tmp_path, last=4)


def test_resuming_equals_never_having_stopped_bit_for_bit(whole, files, half, capsys, tmp_path):
    """Also where flags have changed that change nothing, and a reward function that was mended."""
    run, argv = half
    assert steps_in(run) == [0, 1, 2, 3, 4, 5]  # 5 is after step_4
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "torn')  # what a kill in the middle of a line leaves
    moved = shutil.copytree(files["model"], tmp_path / "the same policy elsewhere")
    (tmp_path / "mended.py").write_text(tiny.FAULTY_REWARD + "# mended\n")
    more = {"log_interval": 1, "save_interval": 5, "keep_checkpoints": 7, "model": moved, "num_workers": 1}
    mended = [*argv]
    mended[argv.index("--reward_fn") + 1] = f"{tmp_path / 'mended.py'}:score"
    train_ppo.main([*mended, *flags(**more), "--resume", "auto"])
    assert "note: the code of --reward_fn" in capsys.readouterr().out
    same_run(whole, run, step=6)
    assert steps_in(run) == list(range(7))
    assert [s["step"] for s in read_jsonl(run / "samples.jsonl") if s["kind"] == "first"] == list(range(1, 7))
    last = [folder / "checkpoints" / "step_6" for folder in (run, whole)]
    states = [json.loads((path / "state.json").read_text()) for path in last]
    assert states[0] == states[1]
    assert states[0]["raw_scores"]["model"]["count"] == 6 * 8  # without evaluations
    assert (run / "summary.md").read_text() == (whole / "summary.md").read_text()
    subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=last[0], check=True)


def test_a_kill_before_the_first_checkpoint_and_in_the_middle_of_a_save_loses_nothing(whole, files, tmp_path):
    argv = argv_of(files, tmp_path, save_interval=1)
    run, shot = tmp_path / "r", 0
    folder = run / "checkpoints"
    die_at(3, argv)  # two calls are the first evaluation
    assert not folder.exists()
    assert steps_in(run) == [0]
    refused(argv, "holds a run")  # not without --resume
    refused([*argv, "--resume", "auto", "--kl_coef", "0.5"], r"--kl_coef was 0\.02 and is now 0\.5")
    gc.collect()  # what was refused held the run's lock
    argv += ["--resume", str(run)]
    for _ in range(2):
        process = launch(argv)
        while process.poll() is None:
            if folder.exists() and any(name.endswith(".tmp") for name in os.listdir(folder)):
                process.kill()
                break
        shot += process.wait() == -signal.SIGKILL
        process.communicate()
    assert shot > 0
    finish(launch(argv))
    same_run(whole, run, step=6)
    assert names(run) == ["step_5", "step_6"]  # the newest two, and no temporary folder
    assert not list(tmp_path.glob(".*.tmp"))


def test_ctrl_c_saves_and_says_how_to_go_on_and_so_does_sigterm(files, tmp_path):
    """A terminal or Slurm sends them to the whole group of processes."""
    run, commands, done = tmp_path / "r", [], 0
    process = launch(argv_of(files, tmp_path, **ENDLESS))
    for number in (signal.SIGINT, signal.SIGTERM):
        wait_for_steps(run, done + 1, process)
        os.killpg(process.pid, number)
        out, err = finish(process, code=128 + number)
        assert err == "\nstopping after this step; a second signal stops at once\n"
        done = steps_in(run)[-1]
        assert steps_in(run) == list(range(done + 1))
        assert (run / "checkpoints" / f"step_{done}" / "SHA256SUMS").is_file()
        commands.append(out.split("to go on: ")[1].splitlines()[0])
        _, script, *argv = shlex.split(commands[-1])
        if number == signal.SIGINT:
            process = launch(argv, script=script)
    assert script == f"{tiny.ROOT}/trainer/train_ppo.py"
    assert commands[0] == commands[1]  # it has one --resume


def test_a_second_signal_ends_at_once(files, tmp_path):
    process = launch(argv_of(files, tmp_path), FAULT="time.sleep(600)", FAULT_AT="3")
    wait_for_steps(tmp_path / "r", 0, process)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.3)  # it waits for the reward function
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    process.communicate()


def leave_out(path, word):
    path.write_text("".join(line for line in path.open() if word not in line))


DAMAGE = {  # wrong bytes in a file: test_fuzz.py
    "a file missing": lambda p: (p / "old_actor.safetensors").unlink(),
    "no checksums": lambda p: (p / "SHA256SUMS").unlink(),
    "an empty list of checksums": lambda p: (p / "SHA256SUMS").write_bytes(b""),
    "not the state's checksum": lambda p: leave_out(p / "SHA256SUMS", "state.json"),
    "empty": lambda p: [file.unlink() for file in p.iterdir()],
}


def test_damage_is_noticed(whole, tmp_path):
    step_2, step_4 = (tmp_path / "checkpoints" / f"step_{step}" for step in (2, 4))
    shutil.copytree(whole / "checkpoints" / "step_2", step_2)
    for what, damage in DAMAGE.items():
        shutil.copytree(whole / "checkpoints" / "step_4", step_4)
        (step_4 / ".DS_Store").write_bytes(b"x")  # a file of another program is no damage
        everything = checkpoints.list_checkpoints(tmp_path)
        assert checkpoints.newest_intact(everything) == (step_4, [])
        damage(step_4)
        found, (note,) = checkpoints.newest_intact(everything)
        assert found == step_2, what
        assert "step_4 is damaged" in note
        shutil.rmtree(step_4)


def test_a_damaged_checkpoint_that_is_named_and_only_damaged_ones_are_refused_and_nothing_is_touched(half):
    """Else the one before it is taken (test_stages.py). So are checkpoints that somebody has deleted."""
    run, argv = half
    step_4 = run / "checkpoints" / "step_4"
    os.truncate(step_4 / "actor.safetensors", 500)
    refused([*argv, "--resume", str(step_4)], r"step_4 is damaged \(actor.safetensors is damaged\)")
    for name in names(run):
        os.truncate(run / "checkpoints" / name / "actor.safetensors", 0)
    before = contents(run)
    refused([*argv, "--resume", "auto"], r"step_2 is damaged .*, and there is no other")
    assert contents(run) == before
    shutil.rmtree(run / "checkpoints")
    before = contents(run)
    refused([*argv, "--resume", "auto"], "--resume: .*/r has lost its checkpoints")
    assert contents(run) == before


def test_a_run_that_is_done_gets_its_pth_again_and_nothing_else_changes(whole, files, tmp_path):
    """As one that was killed between its last checkpoint and its .pth. Other folders are no run."""
    run = shutil.copytree(whole, tmp_path / "r")
    (run / "checkpoints" / ".step_6.tmp").mkdir()
    train_ppo.main(argv_of(files, tmp_path, resume="auto"))
    state = torch.load(tmp_path / "ppo_actor_32.pth", weights_only=True)
    assert all(state[name].equal(x.half()) for name, x in load_weights(run, 6).items())
    assert not list((run / "checkpoints").glob(".*"))
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    alone = shutil.copytree(run / "checkpoints" / "step_6", tmp_path / "step_6")
    for path in (alone, "/", tmp_path / "nowhere", tmp_path, run / "checkpoints" / "step_5"):
        refused(argv_of(files, tmp_path, resume=path), "no checkpoint there")


def test_an_earlier_checkpoint_that_is_named_begins_another_branch(whole, half):
    """Killed before its first save, it must not resume from a later checkpoint of the branch before it."""
    run, argv = half
    die_at(2, [*argv, "--resume", str(run / "checkpoints" / "step_2")])
    assert names(run) == ["step_2"]
    assert json.loads((run / "config.json").read_text())["saved"]  # though not by this process
    train_ppo.main([*argv, "--resume", "auto", "--keep_checkpoints", "3"])
    same_run(whole, run, step=6)
    assert names(run) == ["step_2", "step_4", "step_6"]


def test_a_run_goes_on_without_metrics_that_are_missing(half):
    run, argv = half
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines[:2], "noise\n", *lines[3:]]))
    train_ppo.main([*argv, "--resume", "auto"])
    assert steps_in(run) == [0, 1, 3, 4, 5, 6]
    (run / "metrics.jsonl").unlink()
    train_ppo.main([*argv, "--resume", "auto"])  # the run is complete: no metrics are needed


def test_a_checkpoint_of_an_older_version_lacks_moments_that_are_still_0_and_states(files, tmp_path):
    argv = argv_of(files, tmp_path, critic_warmup_steps=3, max_steps=4, eval_interval=0)
    train_ppo.main(argv)
    whole = shutil.copytree(tmp_path / "r", tmp_path / "whole")
    older, newest = (tmp_path / "r" / "checkpoints" / name for name in ("step_2", "step_4"))
    shutil.rmtree(newest)
    save_file({}, older / "actor_optimizer.safetensors")
    (older / checkpoints.SUMS).write_text("\n".join(checkpoints._checksums(older)))
    train_ppo.main([*argv, "--resume", "auto"])
    same_run(whole, tmp_path / "r", 4)
    option = base.SavedAttributes()
    option.saved = ("old", "new")
    option.old, option.new = 1, 2
    option.load_state_dict({"old": 5})
    assert option.state_dict() == {"old": 5, "new": 2}  # what it does not have stays as it begins


def test_weights_that_are_not_finite_never_replace_good_ones(files, tmp_path, monkeypatch):
    """After step 4 a weight is not finite, as after a broken optimizer or memory."""
    calls = []

    def spoil(world, critic, **others):
        calls.append(1)
        if len(calls) == 4:
            with torch.no_grad():
                next(critic.parameters())[0, 0] = float("inf")

    monkeypatch.setattr(World, "check_identical", spoil)
    refused(argv_of(files, tmp_path), "critic has weights that are not finite")
    assert names(tmp_path / "r") == ["step_2"]
    assert not checkpoints.damage(tmp_path / "r" / "checkpoints" / "step_2")


CRAMPED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"


def test_a_disk_that_refuses_is_one_line_and_the_last_checkpoint_stays(whole, files, tmp_path):
    """From the third step on the system lets no file grow beyond 20 kB."""
    argv = argv_of(files, tmp_path)
    out, err = finish(launch(argv, FAULT=CRAMPED, FAULT_AT="5"), code=2)
    assert re.fullmatch(r"error: .*cannot be written.*File too large.*\n", err)
    assert "to go on: " in out
    assert names(tmp_path / "r") == ["step_2"]  # no temporary folder either
    train_ppo.main([*argv, "--resume", "auto"])
    same_run(whole, tmp_path / "r", step=6)


FULL = """
mount -t tmpfs -o size=$1 none "$2" && shift
"$PYTHON" "$SCRIPT" "${@:2}" 2> "$1.err"; echo $? > "$1.rc"
mount -o remount,size=64m "$1" && "$PYTHON" "$SCRIPT" "${@:2}" --resume auto && cp -r "$1/r" "$1.copy"
"""


@pytest.mark.slow
def test_a_full_disk(whole, files, tmp_path):
    """A real file system of 600 kB, mounted in a namespace where the machine allows that without root."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("no user name spaces here; the test above runs everywhere")
    disk = tmp_path / "disk"
    disk.mkdir()
    environment = {**os.environ, "PYTHON": tiny.PYTHON, "SCRIPT": str(tiny.ROOT / "trainer" / "train_ppo.py")}
    command = ["unshare", "-rm", "bash", "-c", FULL, "bash", "600k", disk, *argv_of(files, disk)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    error = (tmp_path / "disk.err").read_text()
    assert (tmp_path / "disk.rc").read_text() == "2\n", error
    assert re.fullmatch(".*No space left on device.*\n", error)
    assert done.returncode == 0, done.stderr
    same_run(whole, tmp_path / "disk.copy", step=6)


def test_runs_that_begin_together_get_folders_of_their_own_and_keep_them(files, tmp_path):
    argv = argv_of(files, tmp_path, max_steps=2, run_name="", lr_warmup_steps=0)
    for process in [launch(argv) for _ in range(2)]:
        finish(process)
    runs = [tmp_path / "run_1", tmp_path / "run_2"]
    assert sorted(tmp_path.glob("run_*")) == runs
    lines = [tiny.without_time(read_jsonl(run / "metrics.jsonl")) for run in runs]
    assert lines[0] == lines[1]
    assert not list(tmp_path.glob(".*.tmp"))  # they all wrote the same .pth, one after the other
    load_policy(str(tmp_path / "ppo_actor_32.pth"))
    (runs[0] / "config.json").unlink()
    argv += ["--run_name", "run_1"]
    refused(argv, "holds a run")
    refused([*argv, "--resume", "auto"], r"config\.json does not fit: FileNotFoundError")


def test_no_run_folder_is_named_like_a_result_and_it_goes_only_where_it_holds_nothing_else(tmp_path):
    """``--resume auto`` takes the run folder of the highest number: it must never be a model's folder.
    One with an evaluation, a tracker's folder or a file of the user stays, and one that was there before."""
    for result in ("ppo_actor_512", "full_sft_512", "reward_512"):
        (tmp_path / result).mkdir()
    for display in (displays.PPO, displays.SFT, displays.PAIRS, displays.RATINGS):
        for file in ("metrics.jsonl", "tensorboard", "a.txt", ""):
            folder = RunFolder(tmp_path, file, "", display.folder)
            (folder.path / "config.json").write_text("{}")
            (folder.path / "samples.jsonl").write_text("")
            if file:
                (folder.path / file).write_text('{"step": 0, "eval/score": 1.0}\n')
            assert folder.path.name == (file or f"{display.folder}_1")
            assert folder.remove_if_unused() is not bool(file), file
            folder.close()
            shutil.rmtree(folder.path, ignore_errors=True)
    (tmp_path / "before").mkdir()
    assert not RunFolder(tmp_path, "before", "").remove_if_unused()
    before = tmp_path / "before"
    given = tmp_path, "b", "", "run", [before, before / "config.json"]
    RunFolder(*given)  # a start that was refused has left a lock there
    (before / "config.json").write_text('{"run_id": "ab"}')
    tiny.refused("before: is a run folder", RunFolder, *given)


def test_what_evaluations_depended_on_is_known_for_the_steps_that_the_run_keeps():
    facts = {"evaluated_by": {"eval/": [[0, "a"]]}}  # of a run of before, which did not say since when
    for first, now, since in (
        (4, "a", 0),
        (5, "b", 5),
        (7, "b", 5),
        (3, "b", 3),  # an older checkpoint
        (9, "c", 9),
        (9, "", 9),  # nothing is evaluated
        (0, "b", 0),
    ):
        facts = {"evaluated_by": now, "evaluated_since": evaluated_since(facts, now, first)}
        assert facts["evaluated_since"] == since
    assert evaluated_since({}, "a", 4) == 0


def test_a_folder_in_use_is_refused_until_its_process_has_ended(files, tmp_path):
    argv = argv_of(files, tmp_path, **ENDLESS | {"save_interval": 1})
    process = launch(argv)
    wait_for(lambda: (tmp_path / "r" / "checkpoints" / "step_1").exists(), process)
    refused([*argv, "--resume", "auto"], f"in use by process {process.pid} on ")
    process.kill()
    process.wait()
    RunFolder(tmp_path, "r", "auto").close()
    process.communicate()


def test_a_closed_output_pipe_does_not_stop_the_run_nor_does_an_output_on_a_full_disk(
    files, tmp_path, monkeypatch
):
    process = launch(argv_of(files, tmp_path, log_interval=1))
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=600) == 0
    assert names(tmp_path / "r") == ["step_4", "step_6"]
    with open(os.open("/dev/full", os.O_WRONLY), "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        for line in ("a line", "another one"):
            RunLogger.say(None, line)


def test_a_script_ends_silently_where_its_reader_has_ended_and_other_broken_pipes_are_faults(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    code = "from errors import run_script; run_script(lambda: print('x'))"
    command = [tiny.PYTHON, "-c", code]
    done = subprocess.run(command, cwd=tiny.ROOT, stdout=writer, stderr=subprocess.PIPE, timeout=600)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
    line = f"{shlex.join(command)} > /dev/full"
    done = subprocess.run(line, shell=True, cwd=tiny.ROOT, stderr=subprocess.PIPE, timeout=600)
    assert (done.returncode, done.stderr) == (1, b"error: the output: No space left on device\n")
    with pytest.raises(BrokenPipeError):
        run_script(Mock(side_effect=BrokenPipeError))
    monkeypatch.setattr(sys, "stdout", None)  # closed, as with >&-
    run_script(lambda: print("x", flush=True))


@pytest.mark.parametrize(
    ("raised", "last"), [("KeyboardInterrupt", "interrupted"), ("OSError(3)", "OSError: 3")]
)
def test_ctrl_c_while_a_script_imports_is_one_line(raised, last):
    """Behind the first ``run_script``, which looks at the flags only."""
    code = f"from errors import run_script; run_script(int); raise {raised}"
    done = subprocess.run(
        [tiny.PYTHON, "-c", code], cwd=tiny.ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode
    *before, said = done.stderr.splitlines()
    assert (said, bool(before)) == (last, raised != "KeyboardInterrupt")


def test_resume_refuses_what_changes_the_result_and_leaves_the_run_alone(files, half, tmp_path):
    """Flags by their values (test_flags.py), files by what they hold, whatever their path is."""
    run, argv = half
    tokenizer = tiny.word_tokenizer(tiny.WORDS, chat=True)
    policy = tiny.save_policy_dir(tmp_path / "policy", tokenizer, layers=2, spread=2.0, seed=5)
    reward = tiny.save_reward_dir(tmp_path / "reward", tokenizer, seed=5)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "a b", "answer": "b"}] * 40)
    offset = shutil.copytree(files["reward_model"], tmp_path / "offset")
    config = json.loads((offset / "config.json").read_text())
    (offset / "config.json").write_text(json.dumps(config | {"reward_offset": 0.5}))
    ends = shutil.copytree(files["model"], tmp_path / "ends")
    (ends / "generation_config.json").write_text('{"eos_token_id": [0, 3]}')
    before, other = contents(run), "does not hold what the run began with"
    for flag, value, says in (
        ("max_steps", "7", "was 6 and is now 7"),
        *(("model", path, other) for path in (policy, ends)),
        *(("reward_model", path, other) for path in (reward, offset, f"{files['reward_model']}=3")),
        ("data_path", prompts, other),
    ):
        assert says in refused([*argv, f"--{flag}", str(value), "--resume", "auto"], f"--{flag} ")
    assert contents(run) == before


def test_with_a_constant_rate_a_run_can_be_made_longer(files, tmp_path):
    """With a cosine, whose rates depend on the length, it is refused (above)."""
    more = {"lr_schedule": "constant", "eval_interval": 0}
    longer, whole = (argv_of(files, tmp_path / x, **more) for x in ("longer", "whole"))
    train_ppo.main([*longer, "--max_steps", "2"])
    train_ppo.main([*longer, "--max_steps", "3", "--resume", "auto"])
    train_ppo.main([*whole, "--max_steps", "3"])
    same_weights(tmp_path / "longer" / "r", tmp_path / "whole" / "r", 3, ("actor", "critic"), most=0)
    refused([*longer, "--max_steps", "2", "--resume", "auto"], "step 3 of 2")


def test_a_config_that_is_not_ours_is_one_line(files, tmp_path):
    (tmp_path / "r").mkdir()
    for text in ("{", "[]", '{"fingerprints": 3}'):
        (tmp_path / "r" / "config.json").write_text(text)
        refused(argv_of(files, tmp_path, resume="auto"), "--resume")
    (tmp_path / "r" / "config.json").rename(tmp_path / "r" / "samples.jsonl")
    for resume in ("", "auto"):
        refused(argv_of(files, tmp_path, resume=resume), r"r/samples\.jsonl: is of no run; give another")
    assert (tmp_path / "r" / "samples.jsonl").read_text() == text
