"""The files of docs/scale/: the manifest against the schemas of Kubernetes, the script of Slurm in bash."""

import os
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from tiny import ROOT, flags, read_jsonl, run_files

from trainer import train_ppo

SLURM, KUBERNETES = (ROOT / "docs" / "scale" / name for name in ("slurm.sh", "kubernetes.yaml"))


@pytest.fixture(scope="module")
def manifests():
    return list(yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8")))


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_the_manifest_fits_the_schemas_of_kubernetes(manifests, version):
    assert [manifest["kind"] for manifest in manifests] == ["Service", "Job"]
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)
    manifests[1]["spec"]["completionmode"] = manifests[1]["spec"].pop("completionMode")  # misspelt
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifests[1], version, strict=True)
    manifests[1]["spec"]["completionMode"] = manifests[1]["spec"].pop("completionmode")


def test_the_names_in_the_manifest_fit_each_other(manifests):
    """A pod of an indexed job is called <job>-<index>.<subdomain>, and the service gives it that name."""
    service, job = manifests
    pod, name = job["spec"]["template"]["spec"], job["metadata"]["name"]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": name}
    trainer = pod["containers"][0]
    port = service["spec"]["ports"][0]["port"]
    assert f"--rdzv_endpoint={name}-0.{pod['subdomain']}:{port}" in trainer["command"]
    most = trainer["command"][1].split(":")[1]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(most)
    mounted = {mount["name"] for mount in trainer["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    train_ppo.parse_args(trainer["args"])


def torchrun_flags(words):
    """The words between torchrun and the script, as torchrun itself reads them."""
    from torch.distributed.run import get_args_parser

    start, end = words.index("torchrun") + 1, next(i for i, word in enumerate(words) if word.endswith(".py"))
    return get_args_parser().parse_args([*words[start:end], words[end]])


def test_torchrun_takes_the_flags_of_the_manifest(manifests):
    read = torchrun_flags(manifests[1]["spec"]["template"]["spec"]["containers"][0]["command"])
    assert (read.nnodes, read.max_restarts, read.rdzv_backend) == ("1:4", 10, "c10d")
    assert read.training_script == "trainer/train_ppo.py"


@pytest.mark.slow
def test_the_script_of_slurm_trains(tmp_path):
    """In bash, with commands of Slurm that say what they say in a job on one machine."""
    assert subprocess.run(["bash", "-n", SLURM], check=False).returncode == 0
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames one" ] && echo localhost\n')
    (tmp_path / "srun").write_text('#!/bin/sh\n[ "$1" = --kill-on-bad-exit=0 ] && shift && exec "$@"\n')
    (tmp_path / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    for name in ("scontrol", "srun", "torchrun"):
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "one", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "PORT": "0", "WAIT": "1"}
    sizes = {"batch_size": 4, "mini_batch_size": 2, "max_gen_len": 4, "max_steps": 2}
    more = {"device": "cpu", "eval_interval": 0, "critic_warmup_steps": 0, "out_dir": tmp_path / "out"}
    argv = flags(**run_files(tmp_path), **sizes, **more)
    where = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", SLURM, *argv], cwd=ROOT, env={**os.environ, **slurm, **where}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [m["step"] for m in read_jsonl(tmp_path / "out" / "ppo" / "metrics.jsonl")] == [0, 1, 2]
    assert Path(tmp_path / "out" / "ppo" / "torchrun.json").is_file()
