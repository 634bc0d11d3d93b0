"""Checkpoints and resuming: stopped and killed runs, damaged checkpoints, full disks, folders in use."""

import json
import os
import shlex
import shutil
import signal
import subprocess

import pytest
import torch
from same_runs import resumed_is_the_same
from tiny import (
    DIE,
    FAULTY_REWARD,
    PYTHON,
    ROOT,
    WORDS,
    finish,
    flags,
    launch,
    load_weights,
    read_jsonl,
    run_files,
    same_run,
    save_policy_dir,
    save_reward_dir,
    train,
    wait_for,
    without_time,
    word_tokenizer,
    write_jsonl,
)

from errors import InputError
from model.loading import load_policy
from trainer import train_ppo
from trainer.runs import base, checkpoints, displays
from trainer.runs.distributed import World
from trainer.runs.resume import RunFolder

SIZES = {
    "batch_size": 8,
    "mini_batch_size": 4,
    "max_gen_len": 6,
    "max_steps": 6,
    "ppo_epochs": 2,
    "epochs": 9,
}
SIZES |= {"learning_rate": 1e-3, "critic_learning_rate": 1e-3, "run_name": "r"}
SIZES |= {"normalize_reward": 1, "critic_warmup_steps": 1}  # checkpoints must keep their states too
SIZES |= {
    "replay_batches": 2,
    "lr_warmup_steps": 1,
    "critic_lam": 0.97,
    "dual_clip": 3.0,
    "clip_epsilon_high": 0.3,
}
QUIET = {"device": "cpu", "log_interval": 1000}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    held_out = [{"prompt": f"{a} b", "answer": "a"} for a in WORDS[:5]]
    texts = write_jsonl(folder / "texts.jsonl", [{"text": f"{a} b {a}"} for a in WORDS[:7]])
    more = {"eval_data_path": write_jsonl(folder / "eval.jsonl", held_out), "ptx_data_path": texts}
    return run_files(folder) | more


def argv_of(files, out_dir, **more):
    return flags(
        **{**files, **SIZES, **QUIET, "out_dir": out_dir, "save_interval": 2, "eval_interval": 4, **more}
    )


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """A run without interruption, whose old actor differs from the actor -> its folder."""
    out = tmp_path_factory.mktemp("whole")
    train_ppo.main(argv_of(files, out, update_old_actor_freq=3, keep_checkpoints=9))
    return out / "r"


@pytest.fixture(scope="module")
def killed(files, tmp_path_factory):
    """The same run, saved after steps 2 and 4 and killed in step 6 -> its folder."""
    out = tmp_path_factory.mktemp("killed")
    argv = argv_of(files, out, update_old_actor_freq=3)
    finish(launch(argv, FAULT=DIE, FAULT_AT="10"), code=-signal.SIGKILL)  # two evaluations: two calls each
    assert names(out / "r") == ["step_2", "step_4"]
    return out / "r"


@pytest.fixture
def half(killed, files, tmp_path):
    """A copy of the killed run -> (its folder, its command line)."""
    run = shutil.copytree(killed, tmp_path / "r")
    return run, argv_of(files, tmp_path, update_old_actor_freq=3)


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


# -------------------------------------------------------------------------------------- killed and resumed


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_small_batches_resume_bit_for_bit_though_an_evaluation_takes_more_slots(files, tmp_path, batch):
    """The first evaluation samples 40 prompts at once; the resumed run begins with ``batch`` of them."""
    sizes = {"batch_size": batch, "mini_batch_size": batch, "dtype": "float32"}
    sizes |= {"normalize_reward": 0, "critic_warmup_steps": 0, "save_interval": 3, "eval_interval": 99}
    argv = argv_of({**files, "eval_data_path": files["data_path"]}, tmp_path / "whole", **sizes)
    train_ppo.main(argv)
    resumed_is_the_same(tmp_path / "whole" / "r", [*argv, "--out_dir", str(tmp_path)], tmp_path, last=6)


def test_resuming_equals_never_having_stopped_bit_for_bit(whole, half):
    run, argv = half
    assert [m["step"] for m in read_jsonl(run / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]  # 5 is after step_4
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "torn')  # what a kill in the middle of a line leaves
    train_ppo.main([*argv, "--resume", "auto"])
    same_run(whole, run, step=6)
    assert [m["step"] for m in read_jsonl(run / "metrics.jsonl")] == list(range(7))
    kept = [s["step"] for s in read_jsonl(run / "samples.jsonl") if s["kind"] == "first"]
    assert kept == list(range(1, 7))
    state = json.loads((run / "checkpoints" / "step_6" / "state.json").read_text())
    assert state == json.loads((whole / "checkpoints" / "step_6" / "state.json").read_text())
    assert state["step"] == 6
    assert state["raw_scores"]["model"]["count"] == 6 * SIZES["batch_size"]  # without evaluations
    assert (run / "summary.md").read_text() == (whole / "summary.md").read_text()


def test_a_run_that_died_before_its_first_checkpoint_begins_anew(whole, files, tmp_path):
    argv = argv_of(files, tmp_path, update_old_actor_freq=3)
    finish(launch(argv, FAULT=DIE, FAULT_AT="4"), code=-signal.SIGKILL)  # two calls are the first evaluation
    assert not (tmp_path / "r" / "checkpoints").exists()
    assert len(read_jsonl(tmp_path / "r" / "metrics.jsonl")) == 2
    with pytest.raises(InputError, match="holds a run"):
        train_ppo.main(argv)  # not without --resume
    with pytest.raises(InputError, match=r"--kl_coef was 0\.02 and is now 0\.5"):
        train_ppo.main([*argv, "--resume", "auto", "--kl_coef", "0.5"])
    train_ppo.main([*argv, "--resume", "auto"])
    same_run(whole, tmp_path / "r", step=6)


def test_a_kill_in_the_middle_of_a_save_loses_nothing(whole, files, tmp_path):
    """The process is killed twice, each time as soon as the temporary folder of a save appears."""
    argv = [*argv_of(files, tmp_path, update_old_actor_freq=3, save_interval=1), "--resume", "auto"]
    folder, shot = tmp_path / "r" / "checkpoints", 0
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
    same_run(whole, tmp_path / "r", step=6)
    assert names(tmp_path / "r") == ["step_5", "step_6"]  # and no temporary folder
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(files, tmp_path, number):
    argv = argv_of(files, tmp_path, max_steps=500, epochs=1000, save_interval=1000, eval_interval=0)
    process = launch(argv)
    metrics = tmp_path / "r" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, process)
    process.send_signal(number)
    out, err = finish(process, code=128 + number)
    assert "Traceback" not in err
    assert "stopping after this step" in err
    done = read_jsonl(metrics)[-1]["step"]
    assert (tmp_path / "r" / "checkpoints" / f"step_{done}" / "SHA256SUMS").is_file()
    if number == signal.SIGTERM:
        return
    command = out.split("to go on: ")[1].splitlines()[0]
    assert f"{ROOT}/trainer/train_ppo.py --model" in command
    process = subprocess.Popen(
        f"exec {command}",
        shell=True,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: len(read_jsonl(metrics)) > done + 2, process)
    os.killpg(process.pid, signal.SIGTERM)
    finish(process, code=128 + signal.SIGTERM)
    assert [m["step"] for m in read_jsonl(metrics)] == list(range(len(read_jsonl(metrics))))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_loaders_workers_too_and_does_no_harm(number, files, tmp_path):
    argv = argv_of(
        files, tmp_path, max_steps=500, epochs=1000, save_interval=1000, eval_interval=0, num_workers=2
    )
    process = launch(argv)
    metrics = tmp_path / "r" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, process)
    os.killpg(process.pid, number)  # as a terminal or Slurm does
    _, err = finish(process, code=128 + number)
    assert err == "\nstopping after this step; a second signal stops at once\n"
    assert (tmp_path / "r" / "checkpoints" / f"step_{read_jsonl(metrics)[-1]['step']}").is_dir()


def test_a_second_signal_ends_at_once(files, tmp_path):
    process = launch(argv_of(files, tmp_path), FAULT="time.sleep(60)", FAULT_AT="3")
    wait_for(lambda: (tmp_path / "r" / "metrics.jsonl").exists(), process)
    wait_for(lambda: (tmp_path / "r" / "metrics.jsonl").read_text().count("\n") > 0, process)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3)  # it waits for the reward function
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    process.communicate()


# ------------------------------------------------------------------------------------- damaged checkpoints


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove_line(path, word):
    path.write_text("".join(line for line in path.open() if word not in line))


DAMAGE = {
    "a flipped bit in the weights": lambda p: flip_a_bit(p / "actor.safetensors"),
    "a flipped bit in the moments": lambda p: flip_a_bit(p / "critic_optimizer.safetensors"),
    "truncated": lambda p: os.truncate(p / "critic.safetensors", 500),
    "another step": lambda p: (p / "state.json").write_text('{"step": 5, "token_budget": 2048}'),
    "a file missing": lambda p: (p / "old_actor.safetensors").unlink(),
    "no checksums": lambda p: (p / "SHA256SUMS").unlink(),
    "checksums of noise": lambda p: (p / "SHA256SUMS").write_bytes(os.urandom(999)),
    "an empty list of checksums": lambda p: (p / "SHA256SUMS").write_bytes(b""),
    "not the state's checksum": lambda p: remove_line(p / "SHA256SUMS", "state.json"),
    "empty": lambda p: [file.unlink() for file in p.iterdir()],
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_noticed(whole, tmp_path, what):
    path = tmp_path / "checkpoints" / "step_4"
    for step in (2, 4):
        shutil.copytree(whole / "checkpoints" / f"step_{step}", path.with_name(f"step_{step}"))
    (path / ".DS_Store").write_bytes(b"x")  # a file of another program is no damage
    everything = checkpoints.list_checkpoints(tmp_path)
    assert checkpoints.newest_intact(everything) == (path, [])
    DAMAGE[what](path)
    assert checkpoints.damage(path)
    found, notes = checkpoints.newest_intact(everything)
    assert found.name == "step_2"
    assert len(notes) == 1
    assert "step_4 is damaged" in notes[0]


def test_the_one_before_a_damaged_checkpoint_is_taken_and_said(whole, half, capsys):
    run, argv = half
    flip_a_bit(run / "checkpoints" / "step_4" / "actor.safetensors")
    with pytest.raises(InputError, match=r"step_4 is damaged \(actor.safetensors is damaged\)"):
        train_ppo.main([*argv, "--resume", str(run / "checkpoints" / "step_4")])  # no other one is taken
    train_ppo.main([*argv, "--resume", str(run)])
    out = capsys.readouterr().out
    assert out.count("note:") == 1
    assert "step_4 is damaged (actor.safetensors is damaged)" in out
    assert "resumed  after step 2" in out
    same_run(whole, run, step=6)
    assert names(run) == ["step_4", "step_6"]  # step 4 has been written again
    assert not checkpoints.damage(run / "checkpoints" / "step_4")


def test_where_every_checkpoint_is_damaged_nothing_is_touched(half):
    run, argv = half
    for name in ("step_2", "step_4"):
        os.truncate(run / "checkpoints" / name / "actor.safetensors", 0)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(InputError, match=r"step_2 is damaged .*, and there is no other"):
        train_ppo.main([*argv, "--resume", "auto"])
    assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}


def test_the_checksums_are_those_of_sha256sum(whole):
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=whole / "checkpoints" / "step_6")
    assert done.returncode == 0


def test_resume_writes_the_pth_of_a_run_killed_before_its_last_pth(whole, files, tmp_path):
    """The last checkpoint is there, the .pth is not: no step is left to train, but the .pth is written."""
    shutil.copytree(whole, tmp_path / "r")
    (tmp_path / "r" / "checkpoints" / ".step_6.tmp").mkdir()
    train_ppo.main(argv_of(files, tmp_path, update_old_actor_freq=3, resume="auto"))
    state = torch.load(tmp_path / "ppo_actor_32.pth", weights_only=True)
    actor = load_weights(tmp_path / "r", 6)
    assert all(state[name].equal(x.half()) for name, x in actor.items())
    assert not list((tmp_path / "r" / "checkpoints").glob(".*"))


def test_an_earlier_checkpoint_that_is_named_begins_another_branch(whole, half):
    """Killed before its first save, it must not resume from a later checkpoint of the branch before it."""
    run, argv = half
    step_2 = str(run / "checkpoints" / "step_2")
    finish(launch([*argv, "--resume", step_2], FAULT=DIE, FAULT_AT="2"), code=-signal.SIGKILL)
    assert names(run) == ["step_2"]
    train_ppo.main([*argv, "--resume", "auto"])
    same_run(whole, run, step=6)


def test_a_run_goes_on_without_metrics_that_are_missing(half):
    run, argv = half
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines[:2], "noise\n", *lines[3:]]))
    train_ppo.main([*argv, "--resume", "auto"])
    assert [m["step"] for m in read_jsonl(run / "metrics.jsonl")] == [0, 1, 3, 4, 5, 6]
    (run / "metrics.jsonl").unlink()
    train_ppo.main([*argv, "--resume", "auto"])  # the run is complete: no metrics are needed


def test_a_folder_whose_config_was_deleted_is_not_overwritten_unasked(half):
    run, argv = half
    (run / "config.json").unlink()
    with pytest.raises(InputError, match="holds a run"):
        train_ppo.main(argv)
    with pytest.raises(InputError, match=r"config\.json does not fit: FileNotFoundError"):
        train_ppo.main([*argv, "--resume", "auto"])
    assert names(run) == ["step_2", "step_4"]


def test_resuming_from_an_older_checkpoint_leaves_the_later_branch(whole, files, tmp_path):
    train_ppo.main(argv_of(files, tmp_path, update_old_actor_freq=3, keep_checkpoints=3))
    argv = argv_of(files, tmp_path, update_old_actor_freq=3, keep_checkpoints=3)
    train_ppo.main([*argv, "--resume", str(tmp_path / "r" / "checkpoints" / "step_2")])
    same_run(whole, tmp_path / "r", step=6)
    assert names(tmp_path / "r") == ["step_2", "step_4", "step_6"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_never_replace_good_ones(files, tmp_path, value, monkeypatch):
    check = World.check_identical

    def spoil(world, actor, critic):
        """Called once a step: after step 4 a weight is not finite, as after a broken optimizer or memory."""
        spoil.calls += 1
        if spoil.calls == 4:
            with torch.no_grad():
                next(critic.parameters())[0, 0] = value
        check(world, actor=actor, critic=critic)

    spoil.calls = 0
    monkeypatch.setattr(World, "check_identical", spoil)
    with pytest.raises(InputError, match="critic has weights that are not finite"):
        train_ppo.main(argv_of(files, tmp_path))
    saved = checkpoints.list_checkpoints(tmp_path / "r")
    assert [path.name for path in saved] == ["step_2"]
    assert not checkpoints.damage(saved[0])


def test_old_checkpoints_are_deleted(files, tmp_path):
    train_ppo.main(argv_of(files, tmp_path, save_interval=1, keep_checkpoints=3))
    assert names(tmp_path / "r") == ["step_4", "step_5", "step_6"]


# ----------------------------------------------------------------------------------------------- full disks


CRAMPED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"


def test_a_disk_that_refuses_is_one_line_and_the_last_checkpoint_stays(whole, files, tmp_path):
    """From the third step on the system lets no file grow beyond 20 kB."""
    argv = argv_of(files, tmp_path, update_old_actor_freq=3)
    out, err = finish(launch(argv, FAULT=CRAMPED, FAULT_AT="5"), code=2)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "cannot be written" in err
    assert "File too large" in err
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
    argv = argv_of(files, disk, update_old_actor_freq=3)
    environment = {**os.environ, "PYTHON": PYTHON, "SCRIPT": str(ROOT / "trainer" / "train_ppo.py")}
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", FULL, "bash", "600k", disk, *argv],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    error = (tmp_path / "disk.err").read_text()
    assert (tmp_path / "disk.rc").read_text() == "2\n", error
    assert error.count("\n") == 1, error
    assert "No space left on device" in error
    assert done.returncode == 0, done.stderr
    same_run(whole, tmp_path / "disk.copy", step=6)


# --------------------------------------------------------------------------------- the same run, or another


def test_runs_do_not_overwrite_each_other(files, tmp_path):
    sizes = {**files, **SIZES, "run_name": "", "max_steps": 2, "lr_warmup_steps": 0}
    for _ in range(2):
        train(**sizes, out_dir=tmp_path)
    assert sorted(p.name for p in tmp_path.glob("run_*")) == ["run_1", "run_2"]
    before = (tmp_path / "run_1" / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="holds a run"):
        train(**sizes | {"run_name": "run_1"}, out_dir=tmp_path)
    assert (tmp_path / "run_1" / "metrics.jsonl").read_bytes() == before


def test_no_run_folder_is_named_like_a_result(tmp_path):
    """``--resume auto`` takes the run folder of the highest number: it must never be a model's folder."""
    for display in (displays.PPO, displays.SFT, displays.PAIRS, displays.RATINGS):
        for result in ("ppo_actor_512", "full_sft_512", "reward_512"):
            (tmp_path / result).mkdir(exist_ok=True)
        folder = RunFolder(tmp_path, "", "", display.folder)
        assert folder.path.name == f"{display.folder}_1"
        folder.close()
        shutil.rmtree(folder.path)


def test_runs_that_begin_together_get_folders_of_their_own(files, tmp_path):
    argv = argv_of(files, tmp_path, max_steps=2, run_name="", lr_warmup_steps=0)
    processes = [launch(argv) for _ in range(2)]
    for process in processes:
        finish(process)
    assert sorted(p.name for p in tmp_path.glob("run_*")) == ["run_1", "run_2"]
    lines = [without_time(read_jsonl(tmp_path / f"run_{n}" / "metrics.jsonl")) for n in (1, 2)]
    assert lines[0] == lines[1]
    assert not list(tmp_path.glob(".*.tmp"))  # they all wrote the same .pth, one after the other
    load_policy(str(tmp_path / "ppo_actor_32.pth"))


def test_a_place_that_is_not_mounted_is_one_line(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nothing" / "there")
    for name in ("", "r"):
        with pytest.raises(InputError, match=r"--out_dir .*out: cannot be written"):
            RunFolder(tmp_path / "out", name, "")


def test_what_a_checkpoint_of_before_does_not_have_stays_as_it_begins():
    class Option(base.Kept):
        kept = ("old", "new")
        old = 1
        new = 2

    option = Option()
    option.load_state_dict({"old": 5})
    assert option.state_dict() == {"old": 5, "new": 2}


def test_a_folder_in_use_is_refused(files, tmp_path):
    argv = argv_of(files, tmp_path, max_steps=500, epochs=1000)
    process = launch(argv)
    wait_for(lambda: (tmp_path / "r" / "metrics.jsonl").exists(), process)
    for resume in ("auto", ""):
        with pytest.raises(InputError, match="in use by another process"):
            train_ppo.main([*argv, "--resume", resume])
    process.kill()  # the lock ends with its process
    process.communicate()
    finish(launch([*argv, "--resume", "auto"], FAULT="raise OSError('stop')", FAULT_AT="2"), code=2)


def test_a_worker_that_outlives_the_run_does_not_hold_its_lock(files, tmp_path):
    argv = argv_of(files, tmp_path, max_steps=500, epochs=1000, num_workers=2, save_interval=1)
    process = launch(argv)
    wait_for(lambda: (tmp_path / "r" / "checkpoints" / "step_2").exists(), process)
    process.kill()
    process.wait()
    RunFolder(tmp_path, "r", "auto").close()
    process.communicate()


def test_a_closed_output_pipe_does_not_stop_the_run(files, tmp_path):
    argv = argv_of(files, tmp_path, log_interval=1)
    command = f"{shlex.join([PYTHON, str(ROOT / 'trainer' / 'train_ppo.py'), *argv])} | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert names(tmp_path / "r") == ["step_4", "step_6"]


def test_resume_refuses_a_flag_that_changes_the_result(files, half):
    _, argv = half
    for flag, old, new in (
        ("kl_coef", "0.02", "0.3"),
        ("seed", "42", "7"),
        ("batch_size", "8", "4"),
        ("ppo_epochs", "2", "1"),
        ("learning_rate", "0.001", "0.002"),
        ("max_steps", "6", "7"),
    ):
        with pytest.raises(InputError, match=rf"--{flag} was {old} and is now {new}"):
            train_ppo.main([*argv, f"--{flag}", new, "--resume", "auto"])


def test_with_a_constant_rate_a_run_can_be_made_longer(files, tmp_path):
    """Six steps, then resumed with --max_steps 8: the weights of a run of eight steps. With a cosine, whose
    rates depend on the length, it is refused (above)."""
    argv = argv_of(files, tmp_path / "longer", lr_schedule="constant", critic_warmup_steps=1)
    train_ppo.main(argv)
    train_ppo.main([*argv, "--max_steps", "8", "--resume", "auto"])
    train_ppo.main([*argv, "--max_steps", "8", "--out_dir", str(tmp_path / "whole")])
    for name in ("actor", "critic"):
        left, right = (load_weights(tmp_path / kind / "r", 8, name) for kind in ("longer", "whole"))
        assert all(left[key].equal(right[key]) for key in left)
    with pytest.raises(InputError, match="step 8 of 7"):
        train_ppo.main([*argv, "--max_steps", "7", "--resume", "auto"])


def test_resume_accepts_what_changes_nothing(whole, files, half, tmp_path):
    run, argv = half
    moved = shutil.copytree(files["model"], tmp_path / "the same policy elsewhere")
    more = {"log_interval": 1, "save_interval": 5, "keep_checkpoints": 7, "model": moved, "num_workers": 1}
    train_ppo.main([*argv, *flags(**more), "--resume", "auto"])
    same_run(whole, run, step=6)


def test_resume_compares_what_files_hold(files, half, tmp_path):
    """The flags may name other paths, but no files with other contents."""
    _, argv = half
    tokenizer = word_tokenizer(WORDS, chat=True)
    prompts = [{"prompt": "a b", "answer": "b"}] * 40
    for flag, other in (
        ("model", save_policy_dir(tmp_path / "policy", tokenizer, layers=2, spread=2.0, seed=5)),
        ("reward_model", save_reward_dir(tmp_path / "reward", tokenizer, seed=5)),
        ("data_path", write_jsonl(tmp_path / "prompts.jsonl", prompts)),
    ):
        with pytest.raises(InputError, match=rf"--{flag} .* does not hold what the run began with"):
            train_ppo.main([*argv, f"--{flag}", other, "--resume", "auto"])


def test_resume_notices_another_reward_offset(files, half, tmp_path):
    _, argv = half
    reward = shutil.copytree(files["reward_model"], tmp_path / "reward")
    config = json.loads((reward / "config.json").read_text())
    (reward / "config.json").write_text(json.dumps(config | {"reward_offset": 0.5}))
    with pytest.raises(InputError, match=r"--reward_model .* does not hold what the run began with"):
        train_ppo.main([*argv, "--reward_model", str(reward), "--resume", "auto"])


def test_resume_notices_another_end_of_response(files, half, tmp_path):
    _, argv = half
    model = shutil.copytree(files["model"], tmp_path / "policy")
    (model / "generation_config.json").write_text('{"eos_token_id": [0, 3]}')
    with pytest.raises(InputError, match=r"--model .* does not hold what the run began with"):
        train_ppo.main([*argv, "--model", str(model), "--resume", "auto"])


def test_a_reward_function_may_be_mended(files, half, tmp_path, capsys):
    _, argv = half
    mended = tmp_path / "mended.py"
    mended.write_text(FAULTY_REWARD + "# mended\n")
    train_ppo.main([*argv, "--reward_fn", f"{mended}:score", "--resume", "auto"])
    assert "note: the code of --reward_fn" in capsys.readouterr().out


def test_resume_of_a_run_that_is_done_changes_nothing(files, tmp_path):
    train(**files, **SIZES, out_dir=tmp_path)
    before = (tmp_path / "r" / "metrics.jsonl").read_bytes()
    train(**files, **SIZES, out_dir=tmp_path, resume="auto")
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == before


def test_resume_of_nothing(files, tmp_path):
    train(**files, **SIZES, out_dir=tmp_path, resume="auto")
    assert names(tmp_path / "r") == ["step_6"]
    alone = shutil.copytree(tmp_path / "r" / "checkpoints" / "step_6", tmp_path / "step_6")
    for path in (alone, "/", tmp_path / "nowhere", tmp_path, tmp_path / "r" / "checkpoints" / "step_5"):
        with pytest.raises(InputError, match="no checkpoint there"):
            train(**files, **SIZES, out_dir=tmp_path, resume=str(path))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"batch_size": "x"}', '{"fingerprints": 3}'])
def test_a_config_that_is_not_ours_is_one_line(files, tmp_path, text):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.json").write_text(text)
    with pytest.raises(InputError, match="--resume"):
        train(**files, **SIZES, out_dir=tmp_path, resume="auto")


def test_a_folder_goes_only_where_it_holds_nothing_but_its_own(tmp_path):
    """Not with an evaluation, a tracker's folder or a file of the user, and not if it was there before."""
    held = {
        "nothing": (),
        "an evaluation": ("metrics.jsonl",),
        "a tracker": ("tensorboard",),
        "a file": ("notes.txt",),
    }
    for name, files in held.items():
        folder = RunFolder(tmp_path, name, "")
        (folder.path / "config.json").write_text("{}")
        (folder.path / "samples.jsonl").write_text("")
        for file in files:
            (folder.path / file).write_text('{"step": 0, "eval/score": 1.0}\n')
        assert folder.remove_if_unused() == (not files), name
    (tmp_path / "before").mkdir()
    assert not RunFolder(tmp_path, "before", "").remove_if_unused()
