"""Tokens per second of generation: this program's engine compared with transformers' ``generate``.

Both have the same model, prompts and lengths, and sample from the whole softmax. Fixed lengths: 64 prompts of
32 tokens, 128 new tokens each. Varying lengths: 256 prompts of 16 to 48 tokens; each new token is an EOS
with probability 1/32, so responses have 32 tokens on average, and 128 at most. ``generate`` gets the batch
size at which it is fastest. It runs in fp32 or bf16, whichever is faster at fixed lengths; the engine runs in
the type that ``--dtype auto`` chooses.
"""

import random
import time

import torch
from common import EOS, PAD, VOCABULARY, in_turns, policy, show, spread

from trainer.compute.packing import pack_sequences
from trainer.compute.precision import fast_dtype
from trainer.generation.engine import Sampler
from trainer.generation.sampling_noise import noise_keys

REPETITIONS = 3
DTYPES = ("float32", "bfloat16")  # generate is tried with each


def make_prompts(count, shortest, longest, seed=0):
    rng = random.Random(seed)
    return [
        [rng.randrange(2, VOCABULARY) for _ in range(rng.randint(shortest, longest))] for _ in range(count)
    ]


def generate(model, prompts, batch_size, max_new_tokens):
    """Run transformers' generate on all prompts, left-padded -> the number of tokens sampled."""
    total = 0
    for start in range(0, len(prompts), batch_size):
        part = prompts[start : start + batch_size]
        width = max(map(len, part))
        ids = torch.tensor([[PAD] * (width - len(p)) + p for p in part], device=model.device)
        real = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part], device=model.device)
        options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": max_new_tokens}
        with torch.no_grad():
            out = model.generate(ids, attention_mask=real, pad_token_id=PAD, eos_token_id=EOS, **options)
        responses = out[:, width:]
        ended = (responses == EOS).int()
        lengths = torch.where(ended.any(1), ended.argmax(1) + 1, responses.shape[1])
        total += int(lengths.sum())
    return total


def engine(sampler, prompts, max_new_tokens):
    keys = noise_keys(0, 0, range(len(prompts)))
    return int(sampler.sample(prompts, keys, [EOS], max_new_tokens, 1.0).response_len.sum())


def best_generate(models, prompts, new_tokens, batch_sizes):
    """The (dtype, batch size) with which generate samples most tokens per second. First all dtypes are tried
    with the last batch size, then the other sizes with the best dtype."""
    rates = {}

    def rate(dtype, size):
        start = time.perf_counter()
        tokens = generate(models[dtype], prompts, size, new_tokens)
        rates[dtype, size] = tokens / (time.perf_counter() - start)
        print(f"  generate, {dtype}, batch size {size}: {rates[dtype, size]:.0f} tokens/s")

    for dtype in models:
        rate(dtype, batch_sizes[-1])
    best, _ = max(rates, key=rates.get)
    for size in batch_sizes[:-1]:
        rate(best, size)
    return max(rates, key=rates.get)


def measure(name, size, prompts, new_tokens, mean_length, batch_sizes, slots, device, dtypes=DTYPES):
    print(f"{name}, {size}")
    base = policy(size, mean_length).to(device)
    models = {d: policy(size, mean_length).to(device, getattr(torch, d)) for d in dtypes}
    dtype, batch_size = best_generate(models, prompts, new_tokens, batch_sizes)
    pack_sequences(base.base_model)
    ours = fast_dtype("auto", base.device)
    sampler, tokens = Sampler(base, ours, slots), {"engine": [], "generate": []}
    engine(sampler, prompts, new_tokens)
    seconds = in_turns(
        {
            "engine": lambda: tokens["engine"].append(engine(sampler, prompts, new_tokens)),
            "generate": lambda: tokens["generate"].append(
                generate(models[dtype], prompts, batch_size, new_tokens)
            ),
        },
        REPETITIONS,
        warm_up=0,  # both have just run
    )
    rates = {k: [n / s for n, s in zip(tokens[k], seconds[k], strict=True)] for k in seconds}
    ratios = [a / b for a, b in zip(rates["engine"], rates["generate"], strict=True)]
    return {
        "case": name,
        "model": size,
        "engine": f"{str(ours)[6:]}, {slots} slots",
        "generate": f"{dtype}, batches of {batch_size}",
        "engine tokens/s": spread(rates["engine"], 0),
        "generate tokens/s": spread(rates["generate"], 0),
        "ratio": spread(ratios, 2),
    }


def run(device):
    fixed = measure("fixed", "512x8", make_prompts(64, 32, 32), 128, None, [64], 64, device)
    faster = [fixed["generate"].split(",")[0]]  # the faster type; trying both again takes half a minute
    varied = make_prompts(256, 16, 48)
    results = [fixed, measure("varying", "512x8", varied, 128, 32, [64, 256], 256, device, faster)]
    if device != "cpu":  # a case large enough for a GPU
        prompts = make_prompts(128, 32, 32)
        results.append(measure("fixed, 512 new tokens", "512x8", prompts, 512, None, [128], 128, device))
    return results


def rows(results):
    for r in results:
        cells = {k: f"{r[k]['median']:.0f}" for k in ("engine tokens/s", "generate tokens/s")}
        yield {k: r[k] for k in ("case", "model", "engine", "generate")} | cells | {"ratio": show(r["ratio"])}
