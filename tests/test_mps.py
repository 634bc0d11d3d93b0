"""``--device mps``, a Mac's GPU, which nobody has tried: what is refused, and that nothing needs fp64 there.

What its numbers are, no test here can say; ``check_device`` compares them when a run begins.
"""

import os
import sys
from pathlib import Path

import pytest
import tiny
import torch
from test_families import FAMILIES, build
from torch.utils import backend_registration

from errors import InputError
from trainer import inputs
from trainer.compute import kernels, memory
from trainer.compute.batching import fp64_device, in_fp64
from trainer.compute.precision import fast_dtype
from trainer.compute.scoring import PolicyScorer
from trainer.flags import Flags
from trainer.inputs import check_device, trial_device
from trainer.runs.distributed import init_world

MPS = torch.device("mps")
CPU = torch.device("cpu")
SCRIPT = str(Path(__file__).with_name("device_without_fp64.py"))
SIZES = {"max_steps": 2, "batch_size": 8, "dtype": "float32", "run_name": "r", "device": "cpu"}
PPO = {"mini_batch_size": 4, "max_gen_len": 6, "critic_warmup_steps": 0, "kl_target": 5, "eval_interval": 0}


def data_of(script, files, folder):
    """Flags of a short run of this script."""
    if script == "train_ppo":
        few = tiny.write_jsonl(folder / "few.jsonl", tiny.read_jsonl(files["data_path"])[:6])
        return files | PPO | {"eval_data_path": few}
    pairs = [{"prompt": "a b", "chosen": "a c" * (1 + n % 3), "rejected": "b"} for n in range(20)]
    texts = [
        {"conversations": [{"content": "a b"}, {"content": f"{'c ' * (1 + n % 3)}d"}]} for n in range(20)
    ]
    path = tiny.write_jsonl(folder / f"{script}.jsonl", texts if script == "train_sft" else pairs)
    return {"model": files["model"], "data_path": path, "learning_rate": 1e-3}


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"), reason="needs a newer torch"
)
@pytest.mark.parametrize("script", ["train_ppo", "train_sft", "train_reward"])
def test_a_run_on_a_device_without_fp64_is_that_on_a_cpu(script, files, tmp_path):
    """It saves, evaluates and reports. See device_without_fp64.py."""
    argv = tiny.flags(**SIZES, **data_of(script, files, tmp_path))
    results = []
    processes = {
        kind: tiny.start_script(
            [sys.executable, SCRIPT, kind, script, *argv, "--out_dir", str(tmp_path / kind)], {}
        )
        for kind in ("cpu", "sim")
    }
    for kind, process in processes.items():
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, f"{out}\n{err}"
        results.append(tiny.read_jsonl(tmp_path / kind / "r" / "metrics.jsonl"))
    assert len(results[0]) == 3 and len(results[0][2]) > 5
    for rows in zip(*results, strict=True):
        assert rows[0].keys() <= rows[1].keys()  # the sampler's log-probs are compared there in every step
        names = [name for name in rows[0] if not name.startswith("perf/")]
        wanted, found = (torch.tensor([row[name] for name in names], dtype=torch.float64) for row in rows)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_what_is_in_fp64_is_on_the_cpu():
    assert fp64_device(MPS) == CPU and fp64_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    x = torch.ones(2)
    assert in_fp64(x).dtype == torch.float64 and in_fp64(x.double()).device == CPU


def test_it_computes_in_fp32_without_kernels(monkeypatch):
    assert fast_dtype("auto", MPS) == fast_dtype("float32", MPS) == torch.float32
    for name in ("bfloat16", "float16"):
        with pytest.raises(InputError, match=f"--dtype {name}: --device mps computes in float32 only"):
            fast_dtype(name, MPS)
    monkeypatch.setattr(kernels, "_cuda", lambda: pytest.fail("these are of a GPU of NVIDIA"))
    assert kernels.kernels_of("mps") is None


def test_its_memory_is_what_is_free_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 3000)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 1000)
    assert memory.free_memory(MPS) == 2000
    monkeypatch.setattr(memory, "free_in_groups", lambda: 500)
    assert memory.free_memory(MPS) == 500


def test_it_takes_one_process(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    tiny.refused("a Mac's GPU takes one process; start it without torchrun", init_world, "mps")


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "MiniMind 2 MoE"])
def test_a_model_that_computes_otherwise_there_is_refused(family, monkeypatch):
    model = build(FAMILIES[family]())
    check_device(model, CPU)

    class Off(PolicyScorer):
        """What is off when it is called a second time: there."""

        def forward(self, *given):
            found, *more = super().forward(*given)
            calls.append(0)
            return (changed(found) if len(calls) == 2 else found), *more

    monkeypatch.setattr(inputs, "PolicyScorer", Off)
    for change in (lambda x: x + 0.1, lambda x: x * torch.nan, lambda x: 1.1 * x - 0.1 * x.detach()):
        calls, changed = [], change
        line = tiny.refused(
            "otherwise than a CPU: its results differ; leave it out", check_device, model, CPU
        )
        assert line.startswith("--device cpu: computes this model ")


def test_only_a_macs_gpu_is_tried():
    names = {name: trial_device(Flags(device=name)).type for name in ("", "cpu", "cuda:1", "mps", "mps:0")}
    assert names == {"": "cpu", "cpu": "cpu", "cuda:1": "cpu", "mps": "mps", "mps:0": "mps"}
