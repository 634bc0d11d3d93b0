"""The first minute and a half on a GPU: does each part work there at all, and how fast is it, roughly?

    python benchmarks smoke

Each check stands alone: one that fails says why, and the next one is done. Nothing is needed but torch and
transformers. The large checks have the shape of Qwen 2.5 0.5B.
"""

import shutil
import time
from contextlib import nullcontext
from functools import partial

import torch
from common import EOS, copy_rate, matrix_rate, policy, vocabulary_of
from generation import make_prompts, make_sampler, without
from update import make_rollout, needed_operations, ours

from trainer.compute import kernels
from trainer.compute.precision import fast_dtype, set_precision
from trainer.compute.scoring import PolicyScorer, pack_sequences, score_all
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys

# What waits for the GPU, as torch's profiler calls it
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = (
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cudaGraphLaunch",
    "cuLaunchKernelEx",
    "cudaLaunchKernelExC",
)
SMALL = "128x4"
LARGE = {"size": "0.5B", "rows": 64, "new_tokens": 128, "response": 239}


def the_gpu(device):
    """Which one it is, and what Triton needs to compile."""
    found = {"compiler": shutil.which("cc") or shutil.which("gcc") or "none"}
    if device != "cpu":
        properties = torch.cuda.get_device_properties(0)
        found |= {"name": properties.name, "sm": f"{properties.major}{properties.minor}"}
        found["GB"] = round(properties.total_memory / 1e9, 1)
    return found | {"dtype": str(fast_dtype("auto", torch.device(device)))[6:]}


def rates(device):
    """What the machine can do: large matrix products and copies."""
    dtype = fast_dtype("auto", torch.device(device))
    products = round(matrix_rate(dtype, device=device) / 1e12, 2)
    return {f"{str(dtype)[6:]} TFLOP/s": products, "copy GB/s": round(copy_rate(device) / 1e9)}


def compiled_kernels(device):
    """Whether Triton (on a CPU, C) compiles them and they compute rightly. Without them all is slower."""
    found = kernels.kernels_of(device)
    if found is None:
        raise RuntimeError("no kernels; the log has the warning that says why")
    return {"kernels": found.__name__}


def captured_graphs(device):
    """Whether decoding steps are captured and replayed as CUDA graphs."""
    sampler = Sampler(policy(SMALL, device=device), fast_dtype("auto", torch.device(device)), 16)
    sampler.sample(make_prompts(16, 8, 8), noise_keys(0, 0, range(16)), [EOS], 24, 1.0)
    found = {"graphs": len(sampler.graphs.captured)}
    if device != "cpu" and not found["graphs"]:
        raise RuntimeError("nothing was captured; the log has the warning that says why")
    return found


def kernels_change_nothing(device):
    """Log-probs and gradients in fp32 with kernels and without: the largest differences, relative to the
    largest number."""
    rollout = make_rollout(8, device=device)
    found = []
    for parts in ([], ["kernels"]):
        with without(*parts) if parts else nullcontext():
            model = policy(SMALL, device=device)
            pack_sequences(model.base_model)
            logprobs, _, _ = PolicyScorer(model, torch.float32)(rollout.tokens, rollout.layout, 1.0)
            logprobs.sum().backward()
            grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            found.append((logprobs.detach(), grads))
    names = ("log-probs", "gradients")
    shares = {
        name: ((a - b).abs().max() / a.abs().max()).item() for name, a, b in zip(names, *found, strict=True)
    }
    if not max(shares.values()) < 1e-3:
        raise RuntimeError(f"kernels compute something else: {shares}")
    return {name: f"{share:.1e}" for name, share in shares.items()}


def rollout_of_a_large_model(device):
    """Tokens per second of sampling, and how far the sampler's log-probs are from those of training."""
    size, rows, new_tokens, _ = LARGE.values()
    vocabulary = vocabulary_of(size)
    dtype = fast_dtype("auto", torch.device(device))
    model = policy(size, vocabulary=vocabulary, device=device)
    prompts = make_prompts(rows, 32, 32, vocabulary=vocabulary)
    sampler = make_sampler(model, dtype, rows, prompts, new_tokens)
    keys = noise_keys(0, 0, range(rows))
    sampler.sample(prompts, keys, [EOS], 8, 1.0)
    start = time.perf_counter()
    rollout = sampler.sample(prompts, keys, [EOS], new_tokens, 1.0)
    tokens = int(rollout.response_len.sum())
    seconds = time.perf_counter() - start
    pack_sequences(model.base_model)
    scorer = PolicyScorer(model, dtype)
    scored, _ = score_all(rollout, scorer)
    gap = ((scored - rollout.sampler_logprobs).abs() * rollout.action_mask).sum() / tokens
    return {"tokens/s": round(tokens / seconds), "sampler gap": f"{gap.item():.1e}"}


def update_of_a_large_model(device):
    """Seconds of one optimizer step, its share of the matrix rate, and what it starts and waits for."""
    size, rows, _, response = LARGE.values()
    dtype = fast_dtype("auto", torch.device(device))
    vocabulary = vocabulary_of(size)
    rollout = make_rollout(rows, device=device, response=response, vocabulary=vocabulary)
    model = policy(size, vocabulary=vocabulary, device=device)
    pack_sequences(model.base_model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, weight_decay=0.0, fused=True)
    step = partial(ours, PolicyScorer(model, dtype), optimizer, rollout)
    step()
    wait(device)
    start = time.perf_counter()
    step()
    wait(device)
    seconds = time.perf_counter() - start
    operations = needed_operations(model, rollout.layout.lengths, int(rollout.response_len.sum()))
    share = operations / seconds / matrix_rate(dtype, device=device)
    return {"seconds a step": round(seconds, 3), "of matrix rate": round(share, 2), **counts(step)}


def wait(device):
    if device != "cpu":
        torch.cuda.synchronize()


def counts(work):
    """How many kernels and graphs the host starts, and how often it waits for the GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        work()
    calls = {event.key: event.count for event in profile.key_averages()}
    return {
        "launches": sum(calls.get(name, 0) for name in LAUNCHES),
        "waits": sum(calls.get(name, 0) for name in WAITS),
    }


CHECKS = [
    the_gpu,
    rates,
    compiled_kernels,
    captured_graphs,
    kernels_change_nothing,
    rollout_of_a_large_model,
    update_of_a_large_model,
]


def checked(check, device):
    """A line of the results: what a check found, or the error that it ended with."""
    set_precision("auto", torch.device(device))
    start = time.perf_counter()
    try:
        found = check(device)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    line = {
        "check": check.__name__.replace("_", " "),
        "seconds": round(time.perf_counter() - start, 1),
        **found,
    }
    print(line, flush=True)
    return line


def cases(device):
    return [partial(checked, check, device) for check in CHECKS]


def rows(results):
    for r in results:
        found = ", ".join(f"{name} {value}" for name, value in r.items() if name not in ("check", "seconds"))
        yield {"check": r["check"], "seconds": r["seconds"], "found": found}
