"""A short benchmarks/chaos.py: a run that is killed and damaged a few times equals an undisturbed run."""

import subprocess

import pytest
from tiny import PYTHON, ROOT, flags, read_jsonl, run_files


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_where_the_other_does(tmp_path):
    files = run_files(tmp_path)
    values = {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 6, "max_steps": 24, "epochs": 9}
    values |= {"eval_data_path": files["data_path"], "eval_interval": 5, "update_old_actor_freq": 3}
    folder = tmp_path / "chaos"
    command = [PYTHON, str(ROOT / "benchmarks" / "chaos.py"), "--kills", "3", "--seed", "1", "--folder"]
    command += [str(folder), "--", *flags(**files, **values, device="cpu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr + (folder / "log.txt").read_text()[-2000:]
    assert "differences |" in done.stdout
    assert "| none |" in done.stdout
    steps = [m["step"] for m in read_jsonl(folder / "storm" / "run" / "metrics.jsonl")]
    assert steps == list(range(25))
