"""The script of Slurm, docs/scale/slurm.sh, in bash."""

import os
import subprocess
import sys

import pytest
from tiny import ROOT, flags, read_jsonl, run_files

SLURM = ROOT / "docs" / "scale" / "slurm.sh"


@pytest.mark.slow
def test_the_script_of_slurm_trains(tmp_path):
    """In bash, with commands of Slurm that say what they say in a job on one machine."""
    assert subprocess.run(["bash", "-n", SLURM], check=False).returncode == 0
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames one" ] && echo localhost\n')
    (tmp_path / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    for name in ("scontrol", "srun", "torchrun"):
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "one", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "PORT": "0"}
    sizes = {"batch_size": 4, "mini_batch_size": 2, "max_gen_len": 4, "max_steps": 2}
    more = {"device": "cpu", "eval_interval": 0, "critic_warmup_steps": 0, "out_dir": tmp_path / "out"}
    argv = flags(**run_files(tmp_path), **sizes, **more)
    where = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", SLURM, *argv], cwd=ROOT, env={**os.environ, **slurm, **where}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [m["step"] for m in read_jsonl(tmp_path / "out" / "ppo" / "metrics.jsonl")] == [0, 1, 2]
