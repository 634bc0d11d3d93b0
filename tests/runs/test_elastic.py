"""Elastic torchrun: processes and machines that are lost, and the run that goes on by itself."""

import json
import os
import random
import socket
import time
from argparse import Namespace
from threading import Thread, Timer

import psutil
import pytest
import torch
from tiny import DIE, finish, flags, launch_torchrun, load_weights, read_jsonl, run_files, same_run, wait_for

from errors import InputError
from trainer import train_ppo
from trainer.runs import checkpoints
from trainer.runs.elastic import JOB, check_launcher, check_shared, find_job, fit_sizes, note_end, note_job
from trainer.runs.heartbeat import Heartbeat
from trainer.runs.run_folder import RunFolder

RUN = {"max_gen_len": 4, "max_steps": 8, "epochs": 99, "ppo_epochs": 1, "seed": 1, "dtype": "float32"}
RUN |= {"learning_rate": 1e-3, "critic_learning_rate": 1e-3, "critic_warmup_steps": 1, "device": "cpu"}
RUN |= {"log_interval": 1000, "save_interval": 2, "eval_interval": 0}
ONE, TWO, FOUR = ({"batch_size": n, "mini_batch_size": n // 2} for n in (8, 4, 2))
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return run_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def one(files, tmp_path_factory):
    """The run in one process, never stopped -> its run folder."""
    out = tmp_path_factory.mktemp("one")
    train_ppo.main(argv_of(files, out, ONE, run_name="r"))
    return out / "r"


def argv_of(files, out_dir, sizes, **more):
    return flags(**{**RUN, **files, **sizes, "out_dir": out_dir, **more})


def furthest(left, right, step=8):
    """The largest difference between the weights of two runs."""
    pairs = [
        [by_name(load_weights(folder, step, n)) for folder in (left, right)] for n in ("actor", "critic")
    ]
    assert all(a.keys() == b.keys() for a, b in pairs)
    return max((a[k] - b[k]).abs().max().item() for a, b in pairs for k in a)


def by_name(weights):
    """The same; a weight that embeddings and head share is kept under either name."""
    return {name.replace("lm_head", "model.embed_tokens"): x for name, x in weights.items()}


def config_of(processes, batch_size, mini_batch_size):
    return {"processes": processes, "batch_size": batch_size, "mini_batch_size": mini_batch_size}


@pytest.mark.parametrize(
    ("before", "now", "sizes"),
    [(4, 2, (32, 8)), (2, 8, (4, 1)), (4, 1, (64, 16)), (1, 16, (1, 1))],
)
def test_the_whole_batch_stays_what_it_was(before, now, sizes):
    config = {4: config_of(4, 16, 4), 2: config_of(2, 16, 4), 1: config_of(1, 16, 16)}[before]
    args = Namespace(batch_size=7, mini_batch_size=7, num_generations=1)
    note = fit_sizes(args, now, config)
    assert (args.batch_size, args.mini_batch_size) == sizes
    assert note.startswith(f"note: {now} in place of {before} processes: --batch_size {sizes[0]} ")


def test_as_many_processes_as_before_change_nothing():
    args = Namespace(batch_size=7, mini_batch_size=7, num_generations=1)
    assert fit_sizes(args, 4, config_of(4, 16, 4)) == ""
    assert fit_sizes(args, 4, {}) == ""
    assert vars(args) == {"batch_size": 7, "mini_batch_size": 7, "num_generations": 1}


def test_a_number_of_processes_that_does_not_fit_is_said_with_those_that_do():
    args = Namespace(batch_size=12, mini_batch_size=6, num_generations=1)
    with pytest.raises(InputError, match=r"3 processes cannot .* of 16 in minibatches of 8; 1, 2, 4, 8 can:"):
        fit_sizes(args, 3, config_of(2, 8, 4))
    args.num_generations = 4  # each process has all four answers to its prompts
    with pytest.raises(InputError, match=r"8 processes cannot .*; 1, 2, 4 can"):
        fit_sizes(args, 8, config_of(2, 8, 4))
    with pytest.raises(InputError, match=r"3 processes cannot .* of 12 in minibatches of 4; 1, 2, 4 can:"):
        fit_sizes(Namespace(num_generations=1), 3, config_of(2, 6, 2))  # the batch could be shared
    stage = Namespace(batch_size=8)  # without minibatches
    with pytest.raises(InputError, match=r"3 processes cannot share the batch of 16; 1, 2, 4, 8, 16 can"):
        fit_sizes(stage, 3, {"processes": 2, "batch_size": 8})


def test_a_job_finds_its_own_run_and_no_other(tmp_path):
    for name, agents in (("run_1", ["a/1/0"]), ("run_2", ["b/1/0", "b/2/0"]), ("sft_1", ["c/1/0"])):
        (tmp_path / name).mkdir()
        note_job(tmp_path / name, name.split("_")[0], agents)
    (tmp_path / "run_3").mkdir()
    (tmp_path / "run_3" / JOB).write_text("[]")
    find = [tmp_path, "run", ""]
    assert find_job(*find, ["a/1/0"]) == tmp_path / "run_1"
    assert find_job(*find, ["x/9/0", "b/2/0"]) == tmp_path / "run_2"  # a machine has come, one has gone
    assert find_job(*find, ["x/9/0"]) is None
    assert find_job(*find, ["c/1/0"]) is None  # of another script
    assert find_job(tmp_path, "run", "mine", ["a/1/0"]) is None
    error = InputError("--strict_health 1: ended")
    error.code = 3
    note_end(tmp_path / "run_1", error)
    with pytest.raises(InputError, match="not started again: --strict_health 1: ended") as again:
        find_job(*find, ["a/1/0"])
    assert again.value.code == 3
    (tmp_path / "run_4").mkdir()
    note_job(tmp_path / "run_4", "run", ["", ""])  # without torchrun
    assert not (tmp_path / "run_4" / JOB).exists()


@pytest.mark.parametrize(
    ("nodes", "restarts", "refused"),
    [("1:4", "0", True), ("2", "3", True), ("2", "0", False), ("1", "3", False), ("", "", False)],
)
def test_processes_that_would_not_find_each_other_are_refused(monkeypatch, nodes, restarts, refused):
    monkeypatch.setenv("PET_NNODES", nodes)
    monkeypatch.setenv("PET_MAX_RESTARTS", restarts)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    if refused:
        with pytest.raises(InputError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
            check_launcher()
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    check_launcher()


def test_a_folder_that_another_machine_does_not_see_is_refused(tmp_path):
    check_shared(tmp_path, tmp_path, ["a/1/0", "b/1/0"])
    check_shared(tmp_path, tmp_path / "none", ["a/1/0", "a/1/0"])
    with pytest.raises(InputError, match=r"does not see .*none; name a folder on a disk that all machines"):
        check_shared(tmp_path, tmp_path / "none", ["a/1/0", "b/1/0"])


def test_a_run_that_was_started_again_waits_for_the_lock(tmp_path):
    held = RunFolder(tmp_path, "r", "")
    with pytest.raises(InputError, match="in use"):
        RunFolder(tmp_path, "r", "auto")
    Timer(0.7, held.close).start()
    RunFolder(tmp_path, "r", "auto", patience=20.0).close()


def test_the_process_that_has_the_store_ends_last(monkeypatch):
    monkeypatch.setattr("trainer.runs.heartbeat.BEAT", 0.05)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    store = torch.distributed.HashStore()
    first, second = (Heartbeat(store, rank, 2) for rank in range(2))
    ending = Thread(target=first.end)
    ending.start()
    time.sleep(0.5)
    assert ending.is_alive()
    second.end()
    ending.join(5)
    assert not ending.is_alive()


# ------------------------------------------------------------------------------- whole runs


def test_started_by_the_same_agent_a_run_goes_on_and_by_another_a_new_one_begins(
    files, one, tmp_path, monkeypatch, capsys
):
    """The agent is the parent of the process, here that of pytest. No --resume and no --run_name. When the
    run stops, its config says what it would of two processes: so one must take twice as much from then on."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("FAULT", "raise ValueError")
    monkeypatch.setenv("FAULT_AT", "6")
    with pytest.raises(InputError, match="ValueError"):
        train_ppo.main(argv_of(files, tmp_path, ONE))
    monkeypatch.delenv("FAULT_AT")
    newest = checkpoints.list_checkpoints(tmp_path / "run_1")[-1]
    for folder in (tmp_path / "run_1", newest):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **TWO, "processes": 2}))
    (newest / checkpoints.SUMS).unlink()
    checkpoints._seal(newest)
    train_ppo.main(argv_of(files, tmp_path, TWO))
    assert "resumed  after step 5" in (said := capsys.readouterr().out)
    assert "note: 1 in place of 2 processes: --batch_size 8 and --mini_batch_size 4 for each" in said
    assert [path.name for path in tmp_path.glob("run_*")] == ["run_1"]
    same_run(one, tmp_path / "run_1", 8)
    note_job(tmp_path / "run_1", "run", ["another/1/0"])
    train_ppo.main(argv_of(files, tmp_path, ONE, max_steps=2))
    assert len(read_jsonl(tmp_path / "run_2" / "metrics.jsonl")) == 3


@pytest.mark.slow
def test_a_killed_process_is_started_again_and_the_run_goes_on(files, one, tmp_path):
    """No --resume and no --run_name: torchrun starts both again, and they find the run that they began. The
    sixth call of its reward kills process 1; after that there are only four."""
    start = time.monotonic()
    argv = argv_of(files, tmp_path, TWO)
    environment = {"FAULT": DIE, "FAULT_RANK": "1", "FAULT_AT": "6"}
    options = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--max_restarts", "3"]
    out, _ = finish(launch_torchrun(2, argv, *options, **environment), seconds=100)
    print(f"{time.monotonic() - start:.0f} s")
    assert out.count("resumed  after step ") == 1
    assert [path.name for path in tmp_path.glob("run_*")] == ["run_1"]
    assert furthest(one, tmp_path / "run_1") < TOLERANCE
    assert [m["step"] for m in read_jsonl(tmp_path / "run_1" / "metrics.jsonl")] == list(range(9))


SLOW_REWARD = """import pathlib, time
def score(prompts, responses, answers):
    time.sleep(float(pathlib.Path(__file__).with_name("pause.txt").read_text()))
    return [r.split().count("a") - 0.1 * len(r) for r in responses]
"""


@pytest.fixture
def slow(files, tmp_path):
    """The flags of a run whose steps take as long as ``pause.txt`` says, and that file."""
    (tmp_path / "reward.py").write_text(SLOW_REWARD)
    (tmp_path / "pause.txt").write_text("0")
    sizes = {"max_steps": 40, "lr_schedule": "constant", "keep_checkpoints": 99, "save_interval": 4}
    return files | sizes | {"reward_fn": f"{tmp_path / 'reward.py'}:score"}, tmp_path / "pause.txt"


def launch_node(argv, port, **environment):
    """A torchrun agent, as on a machine of its own, of a job of one or two machines."""
    options = ["--nnodes", "1:2", "--max_restarts", "3", "--rdzv_id", "7", "--rdzv_backend", "c10d"]
    options += ["--rdzv_endpoint", f"localhost:{port}", "--rdzv_conf", "last_call_timeout=1"]
    return launch_torchrun(1, argv, *options, **environment)


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def has_rows(run, count):
    path = run / "metrics.jsonl"
    return path.is_file() and path.read_text().count("\n") > count


def processes_of(run):
    path = run / "config.json"
    return json.loads(path.read_text())["processes"] if path.is_file() else 0


@pytest.mark.slow
def test_a_machine_that_comes_and_one_that_is_lost(slow, tmp_path):
    """One machine begins, a second one joins it and is lost with kill -9: the batch is always the same, and
    the end is that of a run that was never stopped."""
    files, pause = slow
    train_ppo.main(argv_of(files, tmp_path / "one", ONE, run_name="r"))
    pause.write_text("0.6")
    argv = argv_of(files, tmp_path, ONE)
    port, fresh = free_port(), {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run, nodes = tmp_path / "run_1", [launch_node(argv, port, **fresh)]
    wait_for(lambda: has_rows(run, 2), nodes[0])
    nodes.append(launch_node(argv, port, **fresh))
    wait_for(lambda: processes_of(run) == 2, nodes[0])
    alone = len(read_jsonl(run / "metrics.jsonl")) - 1
    wait_for(lambda: has_rows(run, alone + 5), nodes[0])
    nodes[1].kill()  # the agent; its process notices and ends
    killed = time.monotonic()
    wait_for(lambda: processes_of(run) == 1, nodes[0])
    print(f"{alone} steps on one machine, then on two; on one again {time.monotonic() - killed:.0f} s after")
    pause.write_text("0")
    out, _ = finish(nodes[0])
    nodes[1].communicate(timeout=60)
    again = json.loads((run / "config.json").read_text())["resume_command"]
    assert "torchrun --nnodes 1:2 --nproc_per_node 1 --max_restarts 3 " in again
    assert "note: 2 in place of 1 processes: --batch_size 4 and --mini_batch_size 2 for each" in out
    assert "note: 1 in place of 2 processes: --batch_size 8 and --mini_batch_size 4 for each" in out
    assert [m["step"] for m in read_jsonl(run / "metrics.jsonl")] == list(range(41))
    difference = furthest(tmp_path / "one" / "r", run, step=40)
    print(f"largest weight difference: {difference:.1e}")
    assert difference < TOLERANCE


@pytest.mark.slow
def test_a_run_that_strict_health_has_ended_is_not_started_again(files, tmp_path):
    """Nor is one whose input is wrong started more often than --max_restarts says."""
    argv = argv_of(files, tmp_path, ONE, strict_health=1, max_steps=40, learning_rate=0.5, kl_coef=0)
    options = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--max_restarts", "2"]
    out, err = finish(launch_torchrun(1, argv, *options), code=1)
    assert err.count("error: not started again: --strict_health 1: ended by ") == 2
    assert out.count("resumed  after step ") == 0
    steps = [m["step"] for m in read_jsonl(tmp_path / "run_1" / "metrics.jsonl")]
    assert steps == list(range(len(steps)))
    assert len(steps) < 40
    _, err = finish(launch_torchrun(1, [*argv, "--data_path", "/nowhere.jsonl"], *options), code=1)
    assert err.count("error: /nowhere.jsonl") == 3


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "shard"), [(2, 0), (4, 1)], ids=["two", "four sharded"])
def test_processes_that_are_killed_at_random_moments_cost_no_step(slow, tmp_path, processes, shard):
    """kill -9 of one process, six times ($KILLS), while it loads, samples, learns or saves."""
    files, pause = slow
    train_ppo.main(argv_of(files, tmp_path / "one", ONE, run_name="r"))
    pause.write_text("1.5")  # so the run goes on until the last of them
    options = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--max_restarts", "99"]
    argv = argv_of(files, tmp_path, {2: TWO, 4: FOUR}[processes], shard=shard)
    agent = launch_torchrun(processes, argv, *options)
    chance, killed = random.Random(5), []
    for _ in range(int(os.environ.get("KILLS", 6))):
        time.sleep(chance.uniform(1, 16))
        if agent.poll() is None and (workers := psutil.Process(agent.pid).children()):
            (victim := chance.choice(workers)).kill()
            killed.append(victim.pid)
    pause.write_text("0")
    finish(agent, seconds=300)
    print(f"{len(killed)} processes were killed")
    assert len(killed) > 2
    assert [path.name for path in tmp_path.glob("run_*")] == ["run_1"]
    assert [m["step"] for m in read_jsonl(tmp_path / "run_1" / "metrics.jsonl")] == list(range(41))
    difference = furthest(tmp_path / "one" / "r", tmp_path / "run_1", step=40)
    print(f"largest weight difference: {difference:.1e}")
    assert difference < TOLERANCE
