"""--kl_target, --entropy_coef, --entropy_top and --ema_beta together: two processes, resuming."""

import shutil

import pytest
from same_runs import CRITIC, EXACT, run_in_two_processes, same_metrics, same_weights, sizes
from test_processes import RUN, TOLERANCE
from tiny import flags, load_weights, read_jsonl, run_files, same_run, write_jsonl

from trainer import train_ppo

OPTIONS = {"kl_target": 0.05, "kl_horizon": 32, "entropy_coef": 0.05, "entropy_top": 0.4, "ema_beta": 0.7}
SAME = {"kl/coef", "kl/sequence", "policy/entropy", "policy/loss", "ema/score"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    held_out = write_jsonl(folder / "eval.jsonl", [{"prompt": f"{word} b"} for word in "abcde"])
    texts = write_jsonl(folder / "texts.jsonl", [{"text": f"{word} b c"} for word in "abcde"])
    return run_files(folder) | {"eval_data_path": held_out, "ptx_data_path": texts}


def argv_of(files, out_dir, responses):
    more = {"max_steps": 4, "critic_warmup_steps": 1, "eval_interval": 2, "out_dir": out_dir}
    return flags(**{**files, **RUN, **OPTIONS, **sizes(responses), **more})


def test_two_processes_equal_one(files, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train_ppo.main(argv_of(files, one, 16))
    run_in_two_processes(argv_of(files, two, 8))
    assert len({line["kl/coef"] for line in read_jsonl(one / "r" / "metrics.jsonl")[1:]}) > 2
    same_metrics(one / "r", two / "r", SAME, rel=1e-4, abs=2e-5)
    same_weights(one / "r", two / "r", 4, ("actor", "critic", "ema"), TOLERANCE)


@pytest.mark.parametrize(
    "more",
    [
        {"update_old_actor_freq": 2, "kl_in": "reward"},
        {"lora_r": 2, "gradient_checkpointing": 1, "dtype": "float16", "replay_batches": 0},
    ],
    ids=["old actor", "adapters in fp16"],
)
def test_from_a_checkpoint_a_run_goes_on_bit_for_bit(files, tmp_path, more):
    run = {**files, **EXACT, **CRITIC, **sizes(8), "max_gen_len": 6, "ppo_epochs": 2, "max_steps": 5}
    run |= {"save_interval": 3, "eval_interval": 0, "replay_batches": 1, **OPTIONS, **more}
    train_ppo.main(flags(**run, out_dir=tmp_path / "whole"))
    half = shutil.copytree(tmp_path / "whole", tmp_path / "half") / "r"
    train_ppo.main(flags(**run, out_dir=tmp_path / "half", resume=half / "checkpoints" / "step_3"))
    whole = tmp_path / "whole" / "r"
    same_run(whole, half, 5)
    mine, theirs = (load_weights(folder, 5, "ema") for folder in (whole, half))
    assert all(mine[key].equal(theirs[key]) for key in mine)
    steps = read_jsonl(half / "metrics.jsonl")
    assert "ema/score" in steps[-1]
    assert len({step["kl/coef"] for step in steps[-2:]}) == 2
