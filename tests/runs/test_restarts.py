"""torchrun --max_restarts with --run_name and --resume auto: after a kill the run goes on."""

import os
import random
import time

import psutil
import pytest
import torch
from same_runs import same_weights
from tiny import finish, flags, launch_torchrun, read_jsonl, run_files

from errors import InputError
from trainer import train_ppo
from trainer.runs.distributed import store_of_attempt

RUN = {"max_gen_len": 4, "max_steps": 40, "epochs": 99, "ppo_epochs": 1, "seed": 1, "dtype": "float32"}
RUN |= {"learning_rate": 1e-3, "critic_learning_rate": 1e-3, "critic_warmup_steps": 1, "device": "cpu"}
RUN |= {"log_interval": 1000, "save_interval": 4, "eval_interval": 0, "run_name": "r", "keep_checkpoints": 99}
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
    with pytest.raises(InputError, match="--max_restarts: works on one machine"):
        store_of_attempt(store)
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

    def argv_of(out, size, **more):
        return flags(
            **RUN, **files, batch_size=size, mini_batch_size=size // 2, out_dir=tmp_path / out, **more
        )

    pause.write_text("0")
    train_ppo.main(argv_of("one", 8))
    pause.write_text("1.5")  # so the run goes on until the last of them
    options = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--max_restarts", "99"]
    argv = argv_of("many", 8 // processes, shard=shard, resume="auto")
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
