"""Memory of the host and of a GPU: how much is free, and what gives it back to the system."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
from tiny import ROOT

from trainer.compute import memory, threads
from trainer.compute.memory import free_in_groups, free_memory, peak_memory

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
    assert free_in_groups() == UNLIMITED
    write(groups / "a/b", memory__max="max", memory__current=5)
    assert free_in_groups() == UNLIMITED
    stat = "anon 7\nactive_file 100\ninactive_file 20"
    write(groups / "a", memory__max=1000, memory__current=600, memory__stat=stat)
    assert free_in_groups() == 1000 - 600 + 120
    write(groups / "a/b", memory__max=800, memory__current=500, memory__stat="active_file 0\ninactive_file 0")
    assert free_in_groups() == 300


@pytest.mark.parametrize("content", ["0::\n", "", "what\n"])
def test_files_that_say_something_else_set_no_limit(groups, content):
    assert free_in_groups() == UNLIMITED  # there are no files
    threads.OWN.write_text(content)
    write(groups, memory__max="lots", memory__current=1)
    assert free_in_groups() == UNLIMITED


def test_the_free_memory_of_the_machine_is_shared_by_processes(monkeypatch):
    monkeypatch.setattr(memory, "free_in_groups", lambda: UNLIMITED)
    assert free_memory(torch.device("cpu")) == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8_000_000))
    assert free_memory(torch.device("cpu")) == 8_000_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(torch.device("cpu")) == 2_000_000
    monkeypatch.setattr(memory, "free_in_groups", lambda: 4_000_000)  # a smaller container
    assert free_memory(torch.device("cpu")) == 1_000_000


def test_the_memory_of_a_gpu(monkeypatch):
    facts = {"mem_get_info": (60, 100), "memory_allocated": 10, "memory_reserved": 25}
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_memory(torch.device("cuda", 0)) == 60 + 15  # what torch holds and does not use is free for it


def test_the_memory_of_a_run_without_the_module_resource(monkeypatch):
    """What psutil says is of this moment (on Windows it has the peak too), and in bytes as well."""
    peak = peak_memory()
    monkeypatch.setitem(sys.modules, "resource", None)
    assert 0.01 * peak < peak_memory() <= 1.1 * peak


FREED = """
import psutil, torch
from trainer.compute.memory import free_unused_memory, keep_freed_memory

keep_freed_memory()
rss = lambda: psutil.Process().memory_info().rss
tensors = [torch.ones(1 << 19) for _ in range(100)]  # 2 MiB each
full = rss()
del tensors[:-1]  # the last lies above the others
freed = full - rss()
free_unused_memory()
print(freed, full - rss())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_freed_memory_is_kept_for_speed_and_given_back_where_it_is_short():
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, cwd=ROOT)
    at_once, asked = (int(size) / 99 / (1 << 21) for size in done.stdout.split())
    assert at_once < 0.1
    assert asked > 0.9
