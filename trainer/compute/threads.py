"""CPU threads: how many there are, and how they wait for each other on a machine that others use too.

The threads of a CPU operation wait for the slowest of them, thousands of times a second. A thread that spins
while it waits goes on at once; one that sleeps has to be woken, which costs a small model a quarter of its
speed. But where another program has taken a CPU, a spinning thread takes the CPU from the very thread that it
waits for: the demo then runs at a tenth to a quarter of its speed, and with sleeping threads at two thirds.

So threads spin, and sleep as soon as others use the CPUs: ``sleep_when_busy`` watches this and switches. The
numbers that are computed do not depend on it, because the number of threads stays the same. The switch is a
rule of GNU OpenMP, which torch uses on Linux: while it manages more threads than there are CPUs, threads wait
as OMP_WAIT_POLICY says, and otherwise they spin GOMP_SPINCOUNT times first (its manual, "GOMP_SPINCOUNT").
A smaller GOMP_SPINCOUNT that is set once is not enough: on two CPUs of an AMD EPYC the demo kept 0.95 of its
quiet speed and 0.40 of it beside a busy program with 2,000, 0.83 of the quiet speed with 1,000; with the
switch 1.00 and 0.62.

``set_up_threads`` must be called before torch is imported: OpenMP reads the environment once.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
PERIOD = 0.5  # seconds between two looks at what other programs use
BUSY = 0.3  # CPUs that others take from us: threads sleep from here on
QUIET = 0.15  # and spin again below this
SPINS = "300000"  # GNU OpenMP's own default


def set_up_threads() -> None:
    """Set OpenMP's environment, before torch is imported: as many threads as CPUs, and how they wait.

    A CPU quota of a container counts as its number of CPUs. What the user has set stays.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT=SPINS)
    if (quota := cpu_quota()) < len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(quota))))


def cpu_quota() -> float:
    """The CPUs that the control groups of this process grant it; infinity if there is no limit."""

    def quota(group):
        limit, period = map(int, (group / "cpu.max").read_text().split())
        return limit / period

    return least_of_groups(quota)


def least_of_groups(read: Callable[[Path], float]) -> float:
    """The smallest number that ``read`` finds in the folders of the control groups (version 2) that limit
    this process, its own and those above; infinity if none of them has a limit."""
    place = ""
    with suppress(OSError):
        place = OWN.read_text().rpartition("0::/")[2].strip()
    found = [float("inf")]
    folder = CGROUPS / place
    for group in (folder, *folder.parents):
        with suppress(OSError, ValueError, KeyError):  # no limit: no such file, or "max"
            found.append(read(group))
    return min(found)


@contextmanager
def sleep_when_busy(device_type: str) -> Iterator[None]:
    """In this block, threads that wait sleep while other programs use the CPUs that they need, and spin
    otherwise. Nothing happens with a GPU, with one thread, and where ``set_up_threads`` has set nothing."""
    import torch  # not at the top: the environment has to be set before

    threads = torch.get_num_threads()
    if device_type != "cpu" or threads == 1 or os.environ.get("GOMP_SPINCOUNT") != SPINS:
        yield
        return
    end = threading.Event()
    watcher = threading.Thread(target=_watch, args=(threads, end), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        end.set()
        watcher.join()


def _watch(threads, end):
    """Look every ``PERIOD`` seconds until ``end``. Time that a virtual machine wanted and did not get
    ("steal") counts as other programs'."""
    import psutil  # not at the top: --help does not need it

    cpus = os.sched_getaffinity(0)
    process = psutil.Process()
    psutil.cpu_percent(percpu=True)  # a look is at what came since the last one: from here on
    process.cpu_percent()
    spare = None  # while threads sleep: the event that ends the spare teams
    while not end.wait(PERIOD):
        shares = psutil.cpu_percent(percpu=True)  # since the last look, of all programs
        # CPUs that are offline are left out of the list.
        others = sum(share for cpu, share in enumerate(shares) if cpu in cpus) - process.cpu_percent()
        taken = others / 100 - (len(cpus) - threads)  # of the CPUs that our threads need
        if spare is None and taken >= BUSY:
            spare = hold_spare_teams(threads, len(cpus))
        elif spare and taken < QUIET:
            spare.set()
            spare = None
    if spare:
        spare.set()


def hold_spare_teams(threads: int, cpus: int) -> threading.Event:
    """Make OpenMP manage more threads than there are CPUs, by threads that do nothing -> the event that ends
    them. Each new thread of Python brings OpenMP's threads but the first."""
    import torch

    end = threading.Event()

    def hold():
        torch.zeros(1 << 20)  # large enough that torch computes it with several threads
        end.wait()

    for _ in range((cpus - threads) // (threads - 1) + 1):
        threading.Thread(target=hold, daemon=True).start()
    return end
