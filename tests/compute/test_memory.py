"""Memory: how much is free, what gives it back to the system, and frozen models that wait in the host's.

On a CPU "the device" of these is another copy in the same memory."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from steps import take_step
from test_invariants import make_run, same, weights
from tiny import PYTHON, finish, run_files, start_script, tiny_llama

from model.lora import frozen_copy
from trainer import run as ppo_run
from trainer.compute import memory, threads
from trainer.compute.memory import HostMemory, free_in_groups, free_memory

CPU = torch.device("cpu")
UNLIMITED = float("inf")


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """A folder of control groups."""
    monkeypatch.setattr(threads, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(threads, "OWN", tmp_path / "own")
    return tmp_path / "groups"


def test_a_container(groups):
    """The tightest of its own group and those above it; pages of files can be taken back."""
    threads.OWN.write_text("1:name=systemd:/x\n0::/a/b\n")
    assert free_in_groups() == UNLIMITED  # there are no files
    write(groups, memory__max="lots", memory__current=1)
    write(groups / "a/b", memory__max="max", memory__current=5)
    assert free_in_groups() == UNLIMITED
    stat = "anon 7\nactive_file 100\ninactive_file 20"
    write(groups / "a", memory__max=1000, memory__current=600, memory__stat=stat)
    assert free_in_groups() == 1000 - 600 + 120
    write(groups / "a/b", memory__max=800, memory__current=500, memory__stat="active_file 0\ninactive_file 0")
    assert free_in_groups() == 300
    for content in ("0::\n", "", "what\n"):  # of another system
        threads.OWN.write_text(content)
        assert free_in_groups() == UNLIMITED


def test_the_free_memory_of_the_machine_is_shared_by_processes(monkeypatch):
    monkeypatch.setattr(memory, "free_in_groups", lambda: UNLIMITED)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8_000_000))
    assert free_memory(CPU) == 8_000_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(CPU) == 2_000_000
    monkeypatch.setattr(memory, "free_in_groups", lambda: 4_000_000)  # a smaller container
    assert free_memory(CPU) == 1_000_000


def test_the_memory_of_a_gpu(monkeypatch):
    facts = {"mem_get_info": (60, 100), "memory_allocated": 10, "memory_reserved": 25}
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_memory(torch.device("cuda", 0)) == 60 + 15  # what torch holds and does not use is free for it


def test_where_there_are_no_limits_of_unix_the_peak_is_what_the_system_says(monkeypatch):
    used = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=5, peak_wset=7))
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(psutil, "Process", lambda: used)
    assert memory.peak_memory() == 7
    monkeypatch.undo()
    assert memory.peak_memory() >= psutil.Process().memory_info().rss * 0.9  # bytes on every system


FREED = """
import psutil, torch
from trainer.compute.memory import free_unused_memory, keep_freed_memory

keep_freed_memory()
rss = lambda: psutil.Process().memory_info().rss
tensors = [torch.ones(1 << 19) for _ in range(100)]  # 2 MiB each
full = rss()
del tensors
freed = full - rss()
free_unused_memory()
print(freed, full - rss())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_freed_memory_is_kept_for_speed_and_given_back_where_it_is_short(tmp_path):
    (tmp_path / "freed.py").write_text(FREED)
    out, _ = finish(start_script([PYTHON, str(tmp_path / "freed.py")], {}))
    at_once, asked = (int(size) / 100 / (1 << 21) for size in out.split())
    assert at_once < 0.1
    assert asked > 0.9


@pytest.fixture
def pinned(monkeypatch):
    """A CPU has no memory to pin."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)


def pointers(model):
    return [p.data_ptr() for p in model.parameters()]


def test_a_model_is_on_the_device_in_the_block_and_nowhere_else(pinned):
    """What is copied into a waiting model, as into the old actor, is there on the device."""
    model, other, newer = (tiny_llama(10, seed=seed) for seed in range(3))
    ids, host = torch.tensor([[1, 2, 3]]), HostMemory(CPU)
    host.take([model], [])
    waiting = pointers(model)
    model.load_state_dict(newer.state_dict())
    with pytest.raises(KeyError), host.on_device(model, other):  # the other one was not taken
        assert not set(waiting) & set(pointers(model))
        assert model(ids).logits.equal(newer(ids).logits)
        assert model.lm_head.weight is model.model.embed_tokens.weight  # tied as before
        raise KeyError
    assert pointers(model) == waiting
    assert same(newer.parameters(), model.parameters())


def test_what_a_trained_model_shares_stays(pinned):
    trained, host = tiny_llama(10), HostMemory(CPU)
    for p in list(trained.parameters())[:3]:
        p.requires_grad_(False)
    copy = frozen_copy(trained)
    host.take([copy], [trained])
    with host.on_device(copy):
        shared = set(pointers(copy)) & set(pointers(trained))
    assert len(shared) == 3


@pytest.mark.parametrize("lora_r", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_with_offload_is_the_same_and_scores_with_models_on_the_device(
    tmp_path, lora_r, pinned, monkeypatch
):
    """A phase that forgot to fetch its model would compute with the waiting copy, which is made wrong."""
    files, results = run_files(tmp_path, count=16), []
    judge = {"eval_data_path": files["data_path"], "eval_reward_model": files["reward_model"]}
    plan = ppo_run.check_memory

    def planned(case, *more):  # which refuses the flag on a CPU
        return plan(replace(case, args=case.args.completed(offload_frozen=0)), *more)

    monkeypatch.setattr(ppo_run, "check_memory", planned)
    for offload in (0, 1):
        more = {"lora_r": lora_r, "update_old_actor_freq": 2, "learning_rate": 1e-2}
        run, prompts = make_run(files | judge, {"offload_frozen": offload}, **more)
        assert bool(run.models.host.waiting) == offload
        for pairs in list(run.models.host.waiting.values())[:3]:  # not the old actor,
            for i, (p, numbers) in enumerate(pairs):  # from which is sampled
                p.data = torch.full_like(numbers, torch.nan)
                pairs[i] = (p, numbers)
        scores = []
        for step in range(3):
            _, batch = take_step(run, step, [prompts[i] for i in range(16)])
            scores.append(batch.parts["model"])
        scores.append(torch.tensor(list(run.evaluate()[0].values())))
        results.append([*scores, *weights(run)])
    assert same(*results)
