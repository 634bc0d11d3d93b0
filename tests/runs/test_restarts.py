"""Runs that another program starts, again and again: torchrun --max_restarts, the script of Slurm
(docs/scale/slurm.sh), and benchmarks/chaos.py, which kills and damages a run."""

import os
import random
import subprocess
import time

import psutil
import pytest
import torch
from same_runs import CRITIC, EXACT, same_weights, sizes
from tiny import PYTHON, ROOT, finish, flags, launch_torchrun, read_jsonl, refused, run_files

from trainer import train_ppo
from trainer.runs.distributed import store_of_attempt

RUN = EXACT | CRITIC | {"max_gen_len": 4, "max_steps": 40, "ppo_epochs": 1, "seed": 1, "eval_interval": 0}
RUN |= {"save_interval": 4, "keep_checkpoints": 99}
PAUSING_REWARD = """import pathlib, time
def score(prompts, responses, answers):
    time.sleep(float(pathlib.Path(__file__).with_name("pause.txt").read_text()))
    return [r.split().count("a") - 0.1 * len(r) for r in responses]
"""


def test_each_attempt_has_a_part_of_the_store_of_its_own(monkeypatch):
    """What an earlier attempt has left there would be read by the next one, which would wait for ever."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    store = torch.distributed.HashStore()
    for attempt in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        mine = store_of_attempt(store)
        assert not mine.check(["address"])
        mine.set("address", attempt)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    refused("--max_restarts: works on one machine", store_of_attempt, store)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert store_of_attempt(store) is store


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "shard"), [(2, 0), (4, 1)], ids=["two", "four sharded"])
def test_processes_that_are_killed_at_random_moments_cost_no_step(tmp_path, processes, shard):
    """kill -9 of one process, six times ($KILLS), while it loads, samples, learns or saves."""
    (tmp_path / "combine").mkdir()
    (tmp_path / "combine" / "combine.py").write_text(PAUSING_REWARD)
    pause = tmp_path / "combine" / "pause.txt"
    files = run_files(tmp_path) | {"reward_fn": f"{tmp_path / 'combine' / 'combine.py'}:score"}

    def argv_of(out, processes, **more):
        return flags(**RUN, **files, **sizes(8 // processes), out_dir=tmp_path / out, **more)

    pause.write_text("0")
    train_ppo.main(argv_of("one", 1))
    pause.write_text("1.5")  # so the run goes on until the last of them
    options = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--max_restarts", "99"]
    argv = argv_of("many", processes, shard=shard, resume="auto")
    agent = launch_torchrun(processes, argv, *options)
    chance, killed = random.Random(5), 0
    for _ in range(int(os.environ.get("KILLS", 6))):
        time.sleep(chance.uniform(1, 16))
        if agent.poll() is None and (workers := psutil.Process(agent.pid).children()):
            chance.choice(workers).kill()
            killed += 1
    pause.write_text("0")
    finish(agent, seconds=300)
    assert killed > 2
    one, many = (tmp_path / name / "r" for name in ("one", "many"))
    assert [m["step"] for m in read_jsonl(many / "metrics.jsonl")] == list(range(41))
    same_weights(one, many, 40, names=("actor", "critic"))


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_where_the_other_does(tmp_path):
    files = run_files(tmp_path)
    values = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "max_steps": 60, "epochs": 22}
    values |= {"eval_data_path": files["data_path"], "eval_interval": 5, "update_old_actor_freq": 3}
    folder = tmp_path / "chaos"
    command = [PYTHON, str(ROOT / "benchmarks" / "chaos.py"), "--kills", "3", "--seed", "1", "--folder"]
    command += [str(folder), "--", *flags(**files, **values, device="cpu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr + (folder / "log.txt").read_text()[-2000:]
    assert "differences |" in done.stdout
    assert "| none |" in done.stdout
    steps = [m["step"] for m in read_jsonl(folder / "storm" / "run" / "metrics.jsonl")]
    assert steps == list(range(61))


@pytest.mark.slow
def test_the_script_of_slurm_trains(tmp_path):
    """In bash, with commands of Slurm that say what they say in a job on one machine; then with a torchrun,
    that of torch 2.11, whose help does not name --shutdown_timeout."""
    commands = {"scontrol": '[ "$*" = "show hostnames one" ] && echo localhost', "srun": 'exec "$@"'}
    commands["torchrun"] = f'exec {PYTHON} -m torch.distributed.run "$@"'
    for name, command in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "one", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "PORT": "0"}
    job["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    short = {**sizes(4), "max_gen_len": 4, "max_steps": 2}
    more = {"device": "cpu", "eval_interval": 0, "critic_warmup_steps": 0, "out_dir": tmp_path / "out"}
    script = ["bash", ROOT / "docs" / "scale" / "slurm.sh", *flags(**run_files(tmp_path), **short, **more)]
    done = subprocess.run(script, cwd=ROOT, env={**os.environ, **job}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [m["step"] for m in read_jsonl(tmp_path / "out" / "ppo" / "metrics.jsonl")] == [0, 1, 2]
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@"\n')
    done = subprocess.run(script, env={**os.environ, **job}, capture_output=True, text=True, check=True)
    assert "--rdzv_id 7 " in done.stdout and "--shutdown" not in done.stdout
