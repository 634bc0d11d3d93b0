"""Too little memory, and two processes, on a real GPU."""

import gc

import pytest
import torch
from on_gpu import assert_near, needs_real_gpu, run_files, train
from tiny import (
    SCRIPT,
    WORDS,
    finish,
    flags,
    launch,
    launch_torchrun,
    load_weights,
    read_jsonl,
    save_policy_dir,
    save_reward_dir,
    word_tokenizer,
)

pytestmark = needs_real_gpu

# Two processes share one GPU: nccl refuses that, so they take gloo, and both are told that theirs is the
# first GPU.
SHARED = """import os, runpy, sys
os.environ["LOCAL_RANK"] = "0"
import torch.distributed as dist
plain = dist.init_process_group
dist.init_process_group = lambda backend, **more: plain("gloo", **more)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SIZES = {"epochs": 9, "max_steps": 4, "save_interval": 4, "dtype": "float32", "learning_rate": 1e-3}


def argv_of(files, out, batch):
    more = {"batch_size": batch, "mini_batch_size": batch // 2, "run_name": "r", "device": "cuda"}
    return flags(**{**files, **SIZES, **more}, out_dir=out)


@pytest.mark.parametrize("gpus", [1, 2])
def test_two_processes_equal_one(tmp_path, gpus):
    if torch.cuda.device_count() < gpus:
        pytest.skip("needs two GPUs")
    files = run_files(tmp_path / "files")
    finish(launch(argv_of(files, tmp_path / "one", 16)), seconds=120)
    argv = argv_of(files, tmp_path / "two", 8)
    if gpus == 1:
        driver = tmp_path / "shared.py"
        driver.write_text(SHARED)
        finish(launch_torchrun(2, [str(SCRIPT), *argv], script=driver), seconds=180)
    else:
        finish(launch_torchrun(2, argv), seconds=180)
    one, two = tmp_path / "one/r", tmp_path / "two/r"
    assert_near(read_jsonl(one / "metrics.jsonl"), read_jsonl(two / "metrics.jsonl"), 1e-3)
    for name in ("actor", "critic"):
        left, right = (load_weights(folder, 4, name) for folder in (one, two))
        assert max((left[key] - right[key]).abs().max().item() for key in left) < 1e-4, name


def test_a_run_with_too_little_memory_takes_smaller_pieces(tmp_path):
    """The pieces change no result. Memory for about half of the first micro-batch is given."""
    tokenizer = word_tokenizer([*WORDS, *(f"w{i}" for i in range(30_000))], chat=True)
    policy = save_policy_dir(tmp_path / "policy", tokenizer, hidden=256, layers=4)
    sizes = {"batch_size": 32, "mini_batch_size": 32, "max_gen_len": 100, "max_steps": 2, "ppo_epochs": 1}
    files = run_files(tmp_path / "files", dtype="float32", epochs=9, critic_warmup_steps=0, **sizes)
    files |= {"model": policy, "reward_model": save_reward_dir(tmp_path / "reward", tokenizer)}
    torch.cuda.reset_peak_memory_stats()
    wanted = train(tmp_path / "whole", **files)
    peak = torch.cuda.max_memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.7 * peak / total)
    try:
        found = train(tmp_path / "less", **files)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_near(wanted, found, 2e-2)
    assert max(step.get("perf/out_of_memory", 0) for step in found) > 0
