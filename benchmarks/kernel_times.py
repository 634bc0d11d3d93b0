"""Which GPU kernels take the time of a PPO step: of collecting (rollout and reward) and of learning.

Two steps are warm-up, the third runs under torch's profiler. For each part: seconds on the clock, seconds in
which kernels ran ("busy" is their share), the number of kernels, and those that took the most time.
"""

import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from common import vocabulary_of
from end_to_end import Ours, write_inputs
from torch.autograd import DeviceType

CASES = [("512x8", 128, 64), ("0.5B", 64, 64)]  # (size, batch, response tokens)
MOST = 25  # kernels that are listed


def profiled(work):
    """Call ``work()`` -> (its result, {"seconds", "busy", "kernels", "longest": [[name, calls, ms], …]})"""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        start = time.perf_counter()
        result = work()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    found = [e for e in profile.key_averages() if e.device_type == DeviceType.CUDA]
    found.sort(key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in found) / 1e6
    longest = [[e.key[:100], e.count, round(e.self_device_time_total / 1e3, 2)] for e in found[:MOST]]
    facts = {"seconds": round(seconds, 3), "busy": round(busy / seconds, 2)}
    return result, facts | {"kernels": sum(e.count for e in found), "longest": longest}


def measure(size, batch, new_tokens, device):
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), size, None, vocabulary_of(size))
        ours = Ours(Path(folder), 1, batch, new_tokens, device)
    for _ in range(2):
        ours.step()
    return {"model": size, "batch": batch, "response": new_tokens, "step": profiled(ours.step)[1]}


def cases(device):
    if device == "cpu":
        raise SystemExit("error: kernel_times: needs a GPU")
    return [partial(measure, *case, device) for case in CASES]


def rows(results):
    for r in results:
        for part in ("collect", "learn"):
            for name, calls, ms in r[part]["longest"][:12]:
                found = {"model": r["model"], "part": part, "busy": r[part]["busy"], "kernel": name}
                yield found | {"calls": calls, "ms": ms}
