"""CPU threads: how many there are, and how they wait for each other on a machine that others use too.

The threads of a CPU operation wait for the slowest of them, thousands of times a second. A thread that spins
while it waits goes on at once; one that sleeps has to be woken, which costs a small model a quarter of its
speed. But where another program has taken a CPU, a spinning thread takes the CPU from the very thread that it
waits for: the demo then runs at a fifteenth of its speed, and with sleeping threads at two thirds.

So threads spin, and sleep as soon as others use the CPUs: ``sleep_when_busy`` watches this and switches. The
numbers that are computed do not depend on it, because the number of threads stays the same. The switch is a
rule of GNU OpenMP, which torch uses on Linux: while it manages more threads than there are CPUs, threads wait
as OMP_WAIT_POLICY says, and otherwise they spin GOMP_SPINCOUNT times first (its manual, "GOMP_SPINCOUNT").

``set_up_threads`` must be called before torch is imported: OpenMP reads the environment once.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

CGROUPS, OWN = Path("/sys/fs/cgroup"), "/proc/self/cgroup"
PERIOD = 0.5  # seconds between two looks at what other programs use
BUSY, QUIET = 0.3, 0.15  # CPUs that others take from us: threads sleep from BUSY on, and spin below QUIET
SPINS = "300000"  # GNU OpenMP's own default


def set_up_threads():
    """Set OpenMP's environment, before torch is imported: as many threads as CPUs, and how they wait.

    A CPU quota of a container counts as its number of CPUs. What the user has set stays.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT=SPINS)
    if (quota := cpu_quota()) < len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(quota))))


def cpu_quota(groups=CGROUPS, own=OWN):
    """The CPUs that the control groups of this process grant it, a float; infinity if there is no limit."""
    return min(map(_quota_of, own_groups("cpu", groups, own)), default=float("inf"))


def own_groups(controller, groups=CGROUPS, own=OWN):
    """The folders of the control groups that limit this process, its own and those above it -> a list.

    controller: "cpu" or "memory"; groups: where the groups lie; own: the file that says which are its own.
    """
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path(own).read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            root = groups / controller if controller in controllers.split(",") else groups  # version 1, 2
            folder = root / place.strip("/")
            found += [group for group in (folder, *folder.parents) if group.is_relative_to(groups)]
    return found


def _quota_of(group):
    with contextlib.suppress(OSError, ValueError):
        limit, period = (group / "cpu.max").read_text().split()  # version 2
        return float("inf") if limit == "max" else int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError):
        limit, period = (int((group / f"cpu.cfs_{x}_us").read_text()) for x in ("quota", "period"))
        return limit / period if limit > 0 else float("inf")
    return float("inf")


@contextlib.contextmanager
def sleep_when_busy(device):
    """In this block, threads that wait sleep while other programs use the CPUs that they need, and spin
    otherwise. Nothing happens with a GPU, with one thread, where ``set_up_threads`` has set nothing, and on
    systems other than Linux."""
    import torch  # not at the top: the environment has to be set before

    threads, ours = torch.get_num_threads(), os.environ.get("GOMP_SPINCOUNT") == SPINS
    if device.type != "cpu" or threads == 1 or not ours or not Path("/proc/stat").exists():
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
    cpus = os.sched_getaffinity(0)
    spare, before = SpareTeams(threads, len(cpus)), cpu_seconds(cpus)
    while not end.wait(PERIOD):
        now = cpu_seconds(cpus)
        if should_sleep(bool(spare.holders), cpus_taken(before, now, len(cpus), threads)):
            spare.start()
        else:
            spare.end()
        before = now
    spare.end()


def should_sleep(sleeping, taken):
    """Whether threads should sleep while they wait, from whether they do now and from ``cpus_taken``."""
    return taken >= (QUIET if sleeping else BUSY)


def cpu_seconds(cpus):
    """-> (the clock, CPU seconds of this process, CPU seconds of all programs on these CPUs), all in seconds.

    Time that a virtual machine wanted and did not get ("steal") counts as other programs'.
    """
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cpus:
            user, nice, system, _idle, _waiting, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return time.monotonic(), time.process_time(), ticks / os.sysconf("SC_CLK_TCK")


def cpus_taken(before, now, cpus, threads):
    """How many of the CPUs that ``threads`` threads need were used by other programs between two looks."""
    seconds, own, total = (b - a for a, b in zip(before, now, strict=True))
    return (total - own) / seconds - (cpus - threads)


class SpareTeams:
    """OpenMP threads that do nothing. While they exist, OpenMP manages more threads than there are CPUs."""

    def __init__(self, threads, cpus):
        self.count = (cpus - threads) // (threads - 1) + 1  # each adds its threads but the first
        self.holders, self._end = [], None

    def start(self):
        """Begin to hold them."""
        if self.holders:
            return
        self._end = threading.Event()
        self.holders = [
            threading.Thread(target=self._hold, args=(self._end,), daemon=True) for _ in range(self.count)
        ]
        for holder in self.holders:
            holder.start()

    def end(self):
        """Let them go."""
        if self.holders:
            self._end.set()
        for holder in self.holders:
            holder.join()
        self.holders = []

    @staticmethod
    def _hold(end):
        import torch

        torch.zeros(1 << 20)  # large enough that torch computes it with several threads
        end.wait()
