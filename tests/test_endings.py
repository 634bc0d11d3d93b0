"""Stop strings, a least length, the penalty of length and step rewards together, in runs that are resumed and
in two processes."""

import shutil

import pytest
from tiny import finish, flags, launch_torchrun, load_weights, read_jsonl, run_files, same_run, without_time

from trainer import train_ppo

STEPS = """
def score(prompts, responses, answers):
    places = [[i for i, c in enumerate(r) if c in "be"] for r in responses]
    return [[(i, 0.5) for i in mine] if len(r) % 4 else 0.1 * len(r) for r, mine in zip(responses, places)]
"""
RUN = {"max_gen_len": 8, "min_gen_len": 3, "overlong_buffer": 3, "overlong_penalty": 0.5, "max_steps": 4}
RUN |= {"replay_batches": 1, "update_old_actor_freq": 2, "critic_warmup_steps": 1, "epochs": 9}
RUN |= {"learning_rate": 1e-3, "critic_learning_rate": 1e-3, "device": "cpu", "dtype": "float32"}
RUN |= {"run_name": "r", "log_interval": 1000, "save_interval": 2, "eval_interval": 4, "critic_init": "actor"}
ENDS = ["--stop", "b ", "d", "--stop_token_ids", "9"]
SAME = {"reward/score", "reward/function", "reward/overlong", "rollout/length", "rollout/finished", "kl/k1"}
SAME |= {"policy/entropy", "policy/first_ratio", "eval/score", "eval/length", "value/return"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    found = run_files(folder, count=64)
    (folder / "steps.py").write_text(STEPS)
    return found | {"reward_fn": f"{folder / 'steps.py'}:score", "eval_data_path": found["data_path"]}


def argv_of(files, out, batch_size=16, **more):
    sizes = {"batch_size": batch_size, "mini_batch_size": batch_size // 2, "out_dir": out}
    return [*flags(**files, **RUN, **sizes, **more), *ENDS]


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    train_ppo.main(argv_of(files, out))
    return out / "r"


def test_every_ending_occurs(whole):
    rows = [row for name in ("samples", "eval_samples") for row in read_jsonl(whole / f"{name}.jsonl")]
    assert all(3 <= row["length"] <= 8 for row in rows)
    assert {row["finished"] for row in rows} == {True, False}
    assert {row["parts"]["overlong"] < 0 for row in rows} == {True, False}
    words = [(len(row["response"].split()), row["length"]) for row in rows if row["finished"]]
    assert {length - count for count, length in words} >= {1, 2}  # an EOS or "d", and "b "


def test_resuming_equals_never_having_stopped_bit_for_bit(whole, files, tmp_path):
    run = shutil.copytree(whole, tmp_path / "r")
    shutil.rmtree(run / "checkpoints" / "step_4")
    train_ppo.main([*argv_of(files, tmp_path), "--resume", "auto"])
    same_run(whole, run, step=4)


def test_two_processes_equal_one(whole, files, tmp_path):
    finish(launch_torchrun(2, [*argv_of(files, tmp_path, batch_size=8), "--ddp"]))
    for name in ("actor", "critic"):
        one, two = (load_weights(folder, 4, name) for folder in (whole, tmp_path / "r"))
        assert max((one[key] - two[key]).abs().max().item() for key in one) < 2e-5
    lines = [without_time(read_jsonl(folder / "metrics.jsonl")) for folder in (whole, tmp_path / "r")]
    for here, there in zip(*lines, strict=True):
        for name in SAME & here.keys():
            assert there[name] == pytest.approx(here[name], rel=1e-4, abs=1e-5), name
