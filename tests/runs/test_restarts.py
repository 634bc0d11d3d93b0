"""torchrun --max_restarts with --run_name and --resume auto: after a kill the run goes on."""

import os
import random
import time

import psutil
import pytest
import torch
from tiny import DIE, finish, flags, launch_torchrun, load_weights, read_jsonl, run_files

from errors import InputError
from trainer import train_ppo
from trainer.runs.distributed import store_of_attempt

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
    pairs = [[load_weights(folder, step, n) for folder in (left, right)] for n in ("actor", "critic")]
    assert all(a.keys() == b.keys() for a, b in pairs)
    return max((a[k] - b[k]).abs().max().item() for a, b in pairs for k in a)


def test_each_attempt_has_a_part_of_the_store_of_its_own(monkeypatch):
    """What an earlier attempt has left there would be read by the next one, which would wait for ever."""
    for name, value in {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    store = torch.distributed.HashStore()
    for attempt in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        mine = store_of_attempt(store)
        assert not mine.check(["address"])
        mine.set("address", attempt)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(InputError, match="--max_restarts: works on one machine"):
        store_of_attempt(store)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert store_of_attempt(store) is store


@pytest.mark.slow
def test_a_killed_process_is_started_again_and_the_run_goes_on(files, one, tmp_path):
    """torchrun starts both again, with the same command. The sixth call of its reward kills process 1; after
    that there are only four."""
    start = time.monotonic()
    argv = argv_of(files, tmp_path, TWO, run_name="r", resume="auto")
    environment = {"FAULT": DIE, "FAULT_RANK": "1", "FAULT_AT": "6"}
    options = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--max_restarts", "3"]
    out, _ = finish(launch_torchrun(2, argv, *options, **environment), seconds=100)
    print(f"{time.monotonic() - start:.0f} s")
    assert out.count("resumed  after step ") == 1
    assert furthest(one, tmp_path / "r") < TOLERANCE
    assert [m["step"] for m in read_jsonl(tmp_path / "r" / "metrics.jsonl")] == list(range(9))


SLOW_REWARD = """import pathlib, time
def score(prompts, responses, answers):
    time.sleep(float(pathlib.Path(__file__).with_name("pause.txt").read_text()))
    return [r.split().count("a") - 0.1 * len(r) for r in responses]
"""


@pytest.fixture
def slow(files, tmp_path):
    """The flags of a run whose steps take as long as ``pause.txt`` says, and that file."""
    (tmp_path / "combine.py").write_text(SLOW_REWARD)
    (tmp_path / "pause.txt").write_text("0")
    sizes = {"max_steps": 40, "lr_schedule": "constant", "keep_checkpoints": 99, "save_interval": 4}
    return files | sizes | {"reward_fn": f"{tmp_path / 'combine.py'}:score"}, tmp_path / "pause.txt"


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "shard"), [(2, 0), (4, 1)], ids=["two", "four sharded"])
def test_processes_that_are_killed_at_random_moments_cost_no_step(slow, tmp_path, processes, shard):
    """kill -9 of one process, six times ($KILLS), while it loads, samples, learns or saves."""
    files, pause = slow
    train_ppo.main(argv_of(files, tmp_path / "one", ONE, run_name="r"))
    pause.write_text("1.5")  # so the run goes on until the last of them
    options = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--max_restarts", "99"]
    argv = argv_of(files, tmp_path, {2: TWO, 4: FOUR}[processes], shard=shard, run_name="r", resume="auto")
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
    assert [m["step"] for m in read_jsonl(tmp_path / "r" / "metrics.jsonl")] == list(range(41))
    difference = furthest(tmp_path / "one" / "r", tmp_path / "r", step=40)
    print(f"largest weight difference: {difference:.1e}")
    assert difference < TOLERANCE
