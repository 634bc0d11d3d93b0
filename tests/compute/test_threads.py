"""CPU threads: a container's quota, and threads that sleep while others use the CPUs."""

import os
import subprocess
import sys
import threading
from argparse import Namespace
from pathlib import Path
from threading import Event

import psutil
import pytest
import torch
from tiny import LINUX, ROOT

from trainer.compute import threads
from trainer.compute.threads import BUSY, QUIET, cpu_quota, hold_spare_teams

pytestmark = pytest.mark.skipif(not LINUX, reason="other systems' threads are left as they are")


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),  # in a container
        ("0::/\n", {"cpu.max": "max 100000\n"}, float("inf")),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1.5),  # a group above
        ("0::/a\n", {"cpu.max": "400000 100000", "a/cpu.max": "300000 100000"}, 3.0),  # the smallest counts
        ("1:name=systemd:/\n0::/a\n", {"a/cpu.max": "50000 100000"}, 0.5),
        ("nonsense\n", {"cpu.max": "nonsense"}, float("inf")),
    ],
)
def test_the_quota_of_a_container(monkeypatch, own, files, quota, tmp_path):
    monkeypatch.setattr(threads, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(threads, "OWN", tmp_path / "own")
    assert cpu_quota() == float("inf")  # there are no files
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    (tmp_path / "own").write_text(own)
    assert cpu_quota() == quota


@pytest.mark.parametrize("spare_cpus", [0, 1])
def test_when_threads_sleep(spare_cpus, monkeypatch):
    """While others take BUSY of the CPUs that the threads need, until it is below QUIET; at the end no spare
    team is left. What a CPU more than there are threads does, disturbs nobody."""
    cpus = [0, 2, 9][: 2 + spare_cpus]  # psutil's list has no CPUs that are offline
    looks, spare, asleep = [0.1, 0.2, 0.4, 0.2, 0.1, 0.2, 0.5], [], []
    others, own = iter(looks), 130.0
    process = Namespace(cpu_percent=lambda: own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    monkeypatch.setattr(
        psutil,
        "cpu_percent",
        lambda percpu: [own + 100 * (next(others) + spare_cpus), 0.0, 0.0, 99],
    )
    monkeypatch.setattr(threads, "hold_spare_teams", lambda *_: spare.append(Event()) or spare[-1])

    def wait(_):
        asleep.append(any(not event.is_set() for event in spare))
        return len(asleep) > len(looks)

    threads._watch(2, Namespace(wait=wait))
    assert asleep[1:] == [False, False, True, True, False, False, True]
    assert len(spare) == 2 and all(event.is_set() for event in spare)
    assert BUSY > QUIET > 0


def tasks():
    return len(list(Path("/proc/self/task").iterdir()))


CODE = """
import time
from trainer.compute.threads import set_up_threads
set_up_threads()
import os, sys, torch
from pathlib import Path
from trainer.compute.threads import hold_spare_teams

def tasks(wanted):  # how many threads this process has, once there are as many as wanted, or after a while
    for _ in range(200):
        if (n := len(list(Path("/proc/self/task").iterdir()))) == wanted:
            break
        time.sleep(0.02)
    return n

torch.set_num_threads(2)
x = torch.ones(1 << 20)
before = (x * 3).sum()
quiet = len(list(Path("/proc/self/task").iterdir()))
count = len(os.sched_getaffinity(0)) - 1
end = hold_spare_teams(2, count + 1)
busy = tasks(quiet + 2 * count)
same = bool((x * 3).sum() == before)
end.set()
after = tasks(quiet)
print(os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"], quiet, count, busy, after, same)
"""


def run_code(code=CODE, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=clean | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_spare_teams_exist_while_the_machine_is_busy_and_no_longer():
    """Each holder and its one worker are two threads of the process."""
    policy, spins, quiet, count, busy, after, same = run_code()
    assert (policy, spins) == ("passive", "300000")
    assert int(busy) == int(quiet) + 2 * int(count)
    assert int(after) == int(quiet)
    assert same == "True"


WHOLE = """
import time
from trainer.compute.threads import set_up_threads
set_up_threads()
import os, subprocess, sys, torch
from pathlib import Path
from trainer.compute.threads import sleep_when_busy

torch.set_num_threads(2)
(torch.ones(1 << 20) * 3).sum()
tasks = lambda: len(list(Path("/proc/self/task").iterdir()))
quiet, most = tasks(), 0
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
with sleep_when_busy("cpu"):
    end = time.monotonic() + 20
    while most < quiet + 3 and time.monotonic() < end:  # the watcher, and a holder with its worker
        most = max(most, tasks())
        time.sleep(0.05)
for other in others:
    other.kill()
while tasks() > quiet and time.monotonic() < end:
    time.sleep(0.05)
print(most - quiet >= 3, tasks() - quiet)
"""


def test_a_busy_machine_is_noticed_and_nothing_is_left():
    """On every CPU another program computes."""
    assert run_code(WHOLE) == ["True", "0"]


def test_what_the_user_has_set_stays():
    assert run_code(OMP_WAIT_POLICY="active", GOMP_SPINCOUNT="7")[:2] == ["active", "7"]


def test_enough_teams_to_have_more_threads_than_cpus(monkeypatch):
    started = []
    monkeypatch.setattr(threading, "Thread", lambda **more: Namespace(start=lambda: started.append(more)))
    for cpus in range(2, 20):
        for count in range(2, cpus + 1):
            started.clear()
            hold_spare_teams(count, cpus)
            assert count + len(started) * (count - 1) > cpus
            assert count + (len(started) - 1) * (count - 1) <= cpus
    assert torch.get_num_threads() == 1
