"""Memory of the host that tensors have freed: who keeps it, and what gives it back to the system."""

import subprocess
import sys

import pytest
from tiny import ROOT

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
@pytest.mark.parametrize("sharded", [0, 1])
def test_freed_memory_is_kept_for_speed_and_given_back_where_it_is_short(sharded):
    """A sharded run gives it back at once, others when they ask for it."""
    command = [sys.executable, "-c", FREED, str(sharded)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    at_once, asked = (int(size) / 99 / (1 << 21) for size in done.stdout.split())
    assert at_once > 0.9 if sharded else at_once < 0.1
    assert asked > 0.9
