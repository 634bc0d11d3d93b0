"""Memory of the host: how much is free, in containers and for several processes; who keeps what tensors have
freed, and what gives it back to the system; how much of a GPU is free."""

import subprocess
import sys

import psutil
import pytest
import torch
from tiny import ROOT

from trainer.compute import memory, threads
from trainer.compute.memory import free_in_groups
from trainer.compute.memory import free_memory as free

UNLIMITED = float("inf")
CPU = torch.device("cpu")


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


def test_the_smaller_of_machine_and_container_is_shared_by_processes(monkeypatch):
    machine = psutil.virtual_memory().available
    monkeypatch.setattr(memory, "free_in_groups", lambda: UNLIMITED)
    assert free(CPU) == pytest.approx(machine, rel=0.2)
    monkeypatch.setattr(memory, "free_in_groups", lambda: 8_000_000)
    assert free(CPU) == 8_000_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free(CPU) == 2_000_000


def test_the_memory_of_a_gpu(monkeypatch):
    facts = {"mem_get_info": (60, 100), "memory_allocated": 10, "memory_reserved": 25}
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free(torch.device("cuda", 0)) == 60 + 15  # what torch holds and does not use is free for it


FREED = """
import sys, psutil, torch
from trainer.compute.memory import free_unused_memory, keep_freed_memory

keep_freed_memory(sharded=sys.argv[1] == "1")
rss = lambda: psutil.Process().memory_info().rss
tensors = [torch.ones(1 << 19) for _ in range(100)]  # 2 MiB each
full = rss()
del tensors[:-1]  # the last lies above the others
freed = full - rss()
free_unused_memory()
print(freed, full - rss())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_a_c_library_that_cannot_do_this_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())
    memory.keep_freed_memory()
    memory.free_unused_memory()


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
@pytest.mark.parametrize("sharded", [0, 1])
def test_freed_memory_is_kept_for_speed_and_given_back_where_it_is_short(sharded):
    """A sharded run gives it back at once, others when they ask for it."""
    command = [sys.executable, "-c", FREED, str(sharded)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    at_once, asked = (int(size) / 99 / (1 << 21) for size in done.stdout.split())
    assert at_once > 0.9 if sharded else at_once < 0.1
    assert asked > 0.9
