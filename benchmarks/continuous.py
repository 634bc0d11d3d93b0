"""Tokens per second of generation: this program's engine compared with transformers' continuous batching.

Both have the same model, prompts, lengths and number type, a slot for every sequence, and sample from the
whole softmax. The work is that of generation.py, at two sizes. The two run alternately, each time in a
process of its own: what one leaves behind, threads above all, would slow the other down.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from common import policy, show, spread, vocabulary_of
from generation import REPETITIONS, continuous_rate, rate_without, workloads

from trainer.compute.precision import fast_dtype, set_precision
from trainer.compute.scoring import pack_sequences


def in_a_process(work, *given):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def model_of(size, mean_length, device):
    set_precision("auto", torch.device(device))
    return policy(size, mean_length, vocabulary_of(size), device=device)


def ours(size, prompts, new_tokens, mean_length, device):
    base = model_of(size, mean_length, device)
    pack_sequences(base.base_model)
    return rate_without((), base, fast_dtype("auto", base.device), len(prompts), prompts, new_tokens)


def theirs(size, prompts, new_tokens, mean_length, device):
    base = model_of(size, mean_length, device)
    return continuous_rate(base.to(fast_dtype("auto", base.device)), prompts, new_tokens)


def measure(name, size, prompts, new_tokens, mean_length, device):
    print(f"{name}, {size}", flush=True)
    rates = {ours: [], theirs: []}
    for _ in range(REPETITIONS):
        for side, found in rates.items():
            found.append(in_a_process(side, size, prompts, new_tokens, mean_length, device))
    return {
        "case": name,
        "model": size,
        "dtype": str(fast_dtype("auto", torch.device(device)))[6:],
        "engine tokens/s": spread(rates[ours], 0),
        "continuous batching tokens/s": spread(rates[theirs], 0),
        "ratio": spread([a / b for a, b in zip(*rates.values(), strict=True)], 2),
    }


def cases(device):
    return [
        partial(measure, name, size, *work, device)
        for name, work in workloads().items()
        for size in ("512x8", "128x4")
    ]


def rows(results):
    for result in results:
        rates = {name: f"{x['median']:.0f}" for name, x in result.items() if name.endswith("tokens/s")}
        yield result | rates | {"ratio": show(result["ratio"])}
