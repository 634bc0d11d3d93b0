"""Tokens per second of generation: this program's engine compared with transformers' continuous batching.

Both have the same model, prompts, lengths and number type, a slot for every sequence, and sample from the
whole softmax. The cases are those of generation.py, at two sizes. The two run alternately, each time in a
process of its own: what one leaves behind, threads above all, would slow the other down.
"""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from common import policy, show, spread, vocabulary_of
from generation import REPETITIONS, continuous_rate, engine, make_prompts

from trainer.compute.precision import fast_dtype, set_precision
from trainer.compute.scoring import pack_sequences
from trainer.generation.engine import Sampler


def in_a_process(work, *given):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def model_of(size, mean_length, device):
    set_precision("auto", torch.device(device))
    return policy(size, mean_length, vocabulary_of(size), device=device)


def ours(size, prompts, new_tokens, mean_length, device):
    """Tokens per second of the engine: one run after a warm-up."""
    base = model_of(size, mean_length, device)
    pack_sequences(base.base_model)
    sampler = Sampler(base, fast_dtype("auto", base.device), len(prompts))
    engine(sampler, prompts, min(8, new_tokens))
    start = time.perf_counter()
    tokens = engine(sampler, prompts, new_tokens)
    return tokens / (time.perf_counter() - start)


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
    fixed = make_prompts(64, 32, 32), 128, None
    varying = make_prompts(256, 16, 48), 128, 32
    return [
        partial(measure, name, size, *case, device)
        for name, case in {"fixed": fixed, "varying": varying}.items()
        for size in ("512x8", "128x4")
    ]


def rows(results):
    for result in results:
        rates = {name: f"{x['median']:.0f}" for name, x in result.items() if name.endswith("tokens/s")}
        yield result | rates | {"ratio": show(result["ratio"])}
