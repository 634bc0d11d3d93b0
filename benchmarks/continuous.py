"""Tokens per second of generation: this program's engine compared with transformers' continuous batching.

Both have the same model, prompts, lengths and number type, a slot for every sequence, and sample from the
whole softmax. The cases are those of generation.py, at two sizes. They are measured alternately.
"""

import copy
import time
from functools import partial

import torch
from common import policy, show, spread, vocabulary_of
from generation import REPETITIONS, continuous_rate, engine, make_prompts

from trainer.compute.precision import fast_dtype, set_precision
from trainer.compute.scoring import pack_sequences
from trainer.generation.engine import Sampler


def engine_rate(sampler, prompts, new_tokens):
    start = time.perf_counter()
    tokens = engine(sampler, prompts, new_tokens)
    return tokens / (time.perf_counter() - start)


def measure(name, size, prompts, new_tokens, mean_length, device):
    print(f"{name}, {size}")
    set_precision("auto", torch.device(device))
    base = policy(size, mean_length, vocabulary_of(size), device=device)
    dtype = fast_dtype("auto", base.device)
    theirs = copy.deepcopy(base).to(dtype)
    pack_sequences(base.base_model)
    sampler = Sampler(base, dtype, len(prompts))
    engine(sampler, prompts, new_tokens)  # warm-up; ``continuous_rate`` has one of its own
    ours_rates, their_rates = [], []
    for _ in range(REPETITIONS):
        ours_rates.append(engine_rate(sampler, prompts, new_tokens))
        their_rates.append(continuous_rate(theirs, prompts, new_tokens))
    return {
        "case": name,
        "model": size,
        "dtype": str(dtype)[6:],
        "engine tokens/s": spread(ours_rates, 0),
        "continuous batching tokens/s": spread(their_rates, 0),
        "ratio": spread([a / b for a, b in zip(ours_rates, their_rates, strict=True)], 2),
    }


def cases(device):
    fixed = make_prompts(64, 32, 32), 128, None
    varying = make_prompts(256, 16, 48), 128, 32
    return [
        partial(measure, name, size, *case, device)
        for size in ("512x8", "128x4")
        for name, case in {"fixed": fixed, "varying": varying}.items()
    ]


def rows(results):
    for result in results:
        rates = {name: f"{x['median']:.0f}" for name, x in result.items() if name.endswith("tokens/s")}
        yield result | rates | {"ratio": show(result["ratio"])}
