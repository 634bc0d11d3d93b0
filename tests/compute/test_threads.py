"""CPU threads: a container's quota, and threads that sleep while others use the CPUs."""

import os
import threading
from argparse import Namespace
from threading import Event

import psutil
import pytest
from tiny import LINUX, PYTHON, finish, start_script

from trainer.compute import threads
from trainer.compute.threads import BUSY, QUIET, cpu_quota, hold_spare_teams

pytestmark = pytest.mark.skipif(not LINUX, reason="other systems' threads are left as they are")


def test_the_quota_of_a_container(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(threads, "OWN", tmp_path / "own")
    assert cpu_quota() == float("inf")  # there are no files
    (tmp_path / "groups/a").mkdir(parents=True)
    (tmp_path / "own").write_text("0::/\n")
    for limit, quota in (("250000 100000", 2.5), ("max 100000", float("inf")), ("400000 100000", 4.0)):
        (tmp_path / "groups/cpu.max").write_text(f"{limit}\n")
        assert cpu_quota() == quota
    (tmp_path / "groups/a/cpu.max").write_text("300000 100000")
    assert cpu_quota() == 4.0  # another group's
    (tmp_path / "own").write_text("0::/a\n")
    assert cpu_quota() == 3.0  # the smallest counts


@pytest.mark.parametrize("spare_cpus", [0, 1])
def test_when_threads_sleep(spare_cpus, monkeypatch):
    """While others take BUSY of the CPUs that the threads need, until it is below QUIET; at the end no spare
    team is left. What a CPU more than there are threads does, disturbs nobody."""
    cpus = [0, 2, 9][: 2 + spare_cpus]  # psutil's list has no CPUs that are offline
    looks, spare, asleep = [0.1, 0.2, 0.4, 0.2, 0.1, 0.2, 0.5], [], []
    others, own = iter([9.0, *looks]), 130.0  # what was before the watcher begins does not count
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))
    monkeypatch.setattr(psutil, "Process", lambda: Namespace(cpu_percent=lambda: own))
    shares = lambda percpu: [own + 100 * (next(others) + spare_cpus), 0.0, 0.0, 99]  # noqa: E731
    monkeypatch.setattr(psutil, "cpu_percent", shares)
    monkeypatch.setattr(threads, "hold_spare_teams", lambda *_: spare.append(Event()) or spare[-1])

    def wait(_):
        asleep.append(any(not event.is_set() for event in spare))
        return len(asleep) > len(looks)

    threads._watch(2, Namespace(wait=wait))
    assert asleep[1:] == [False, False, True, True, False, False, True]
    assert len(spare) == 2 and all(event.is_set() for event in spare)
    assert BUSY > QUIET > 0


CODE = """
import os, psutil, sys, threading, time, torch
from pathlib import Path
from trainer.compute import threads

def tasks(wanted):  # how many threads this process has, once there are as many as wanted, or after a while
    for _ in range(3000):
        if (n := len(list(Path("/proc/self/task").iterdir()))) == wanted:
            break
        time.sleep(0.02)
    return n

def set_up(**given):  # as at the start, when torch is not there yet
    os.environ |= given
    del sys.modules["torch"]
    threads.set_up_threads()
    sys.modules["torch"] = torch
    return [os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")]

threads.PERIOD = 0.05
psutil.cpu_percent = lambda percpu: [1000.0] * 99  # others compute on every CPU
torch.set_num_threads(2)
x = torch.ones(1 << 20)
before = (x * 3).sum()
assert set_up(OMP_WAIT_POLICY="active", GOMP_SPINCOUNT="7") == ["active", "7"]
with threads.sleep_when_busy("cpu"):
    assert threading.active_count() == 1
del os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"]
threads.set_up_threads()
assert "OMP_WAIT_POLICY" not in os.environ  # torch has read it already
assert set_up() == ["passive", "300000"]
quiet = len(list(Path("/proc/self/task").iterdir()))
count = len(os.sched_getaffinity(0)) - 1
with threads.sleep_when_busy("cpu"):
    assert tasks(quiet + 1 + 2 * count) == quiet + 1 + 2 * count
    assert (x * 3).sum() == before
assert tasks(quiet) == quiet
"""


def test_spare_teams_exist_while_the_machine_is_busy_and_no_longer(tmp_path):
    """The watcher, and each holder with its one worker, are threads of the process. What the user has set
    stays, and then nothing is watched."""
    (tmp_path / "spare.py").write_text(CODE)
    finish(start_script([PYTHON, str(tmp_path / "spare.py")], {}))


def test_enough_teams_to_have_more_threads_than_cpus(monkeypatch):
    started = []
    monkeypatch.setattr(threading, "Thread", lambda **more: Namespace(start=lambda: started.append(more)))
    for cpus in range(2, 20):
        for count in range(2, cpus + 1):
            started.clear()
            hold_spare_teams(count, cpus)
            assert count + len(started) * (count - 1) > cpus
            assert count + (len(started) - 1) * (count - 1) <= cpus
