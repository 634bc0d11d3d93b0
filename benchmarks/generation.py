"""Tokens per second of generation: this program's engine compared with transformers' ``generate``.

Both have the same model, prompts and lengths, and sample from the whole softmax. "fixed": no response ends
early. "varying": each new token is an EOS with probability 1/32, so responses have 32 tokens on average, and
128 at most. ``generate`` gets the batch size at which it is fastest. On a CPU it runs in fp32 or bf16,
whichever is faster at fixed lengths; the engine, and on a GPU ``generate`` too, in the type that ``--dtype
auto`` chooses. On a GPU ``generate`` is measured once where it takes longer than ``LONG``. More peers are
measured once there (``peer_cases``): the engine without its parts, transformers' continuous batching (on a
CPU: continuous.py), and at fixed lengths vLLM where it is installed. One that fails is a line in the results,
and the others go on.

A real model, on a CPU, by itself:

    python benchmarks/generation.py --model DIR [--dtypes float32] [--threads 1]

Prompts of 55 tokens, each with four answers of at most 64, as PPO samples them: 8 prompts, and 32. One token
in 48 ends an answer, so lengths vary. "of machine": the operations that the sampled tokens need, each prompt
once, divided by those that a large matrix product of the same dtype reaches in the same seconds, on the same
threads: measured before and after. ``generate`` gets all sequences at once, in the same dtype.

"of copy rate": the bytes that decoding has to read (every weight once a step, and the keys and values of the
tokens before), as a share of what a large copy reads and writes in the same time.
"""

import argparse
import copy
import gc
import itertools
import random
import tempfile
import time
import traceback
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch
from common import (
    EOS,
    PAD,
    VOCABULARY,
    copy_rate,
    in_turns,
    installed,
    matrix_rate,
    policy,
    show,
    spread,
    table,
    vocabulary_of,
    write_results,
)
from transformers import ContinuousBatchingConfig, GenerationConfig
from update import weights_per_token

from errors import first_line
from model.loading import load_policy
from trainer.compute import kernels
from trainer.compute.memory import keep_freed_memory
from trainer.compute.precision import fast_dtype, set_precision
from trainer.compute.scoring import pack_sequences
from trainer.generation.cuda_graphs import CudaGraphs
from trainer.generation.engine import Sampler
from trainer.generation.kv_cache import bytes_per_token
from trainer.generation.sampling import noise_keys

REPETITIONS = 3
LONG = 5  # seconds
PARTS = (["graphs"], ["kernels"], ["kernels", "graphs"])
LONGEST_SILENCE = 100  # seconds in which transformers' continuous batching has to finish some sequence
WHOLE_SOFTMAX = {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": PAD, "eos_token_id": EOS}
DTYPES = ("float32", "bfloat16")  # generate is tried with each, on a CPU


def make_prompts(count, shortest, longest, seed=0, vocabulary=VOCABULARY):
    rng = random.Random(seed)
    return [
        [rng.randrange(2, vocabulary) for _ in range(rng.randint(shortest, longest))] for _ in range(count)
    ]


def workloads():
    """{name: (prompts, new tokens of each at most, their mean length or None)} on a CPU."""
    return {
        "fixed": (make_prompts(64, 32, 32), 128, None),
        "varying": (make_prompts(256, 16, 48), 128, 32),
    }


def generate(model, prompts, batch_size, max_new_tokens):
    """Run transformers' generate on all prompts, left-padded -> the number of tokens sampled."""
    total = 0
    for start in range(0, len(prompts), batch_size):
        part = prompts[start : start + batch_size]
        width = max(map(len, part))
        ids = torch.tensor([[PAD] * (width - len(p)) + p for p in part], device=model.device)
        real = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part], device=model.device)
        with torch.no_grad():
            out = model.generate(ids, attention_mask=real, max_new_tokens=max_new_tokens, **WHOLE_SOFTMAX)
        responses = out[:, width:]
        ended = (responses == EOS).int()
        lengths = torch.where(ended.any(1), ended.argmax(1) + 1, responses.shape[1])
        total += int(lengths.sum())
    return total


def engine(sampler, prompts, max_new_tokens):
    keys = noise_keys(0, 0, range(len(prompts)))
    return int(sampler.sample(prompts, keys, [EOS], max_new_tokens, 1.0).response_len.sum())


@contextmanager
def without(*parts):
    """In this block there are no "kernels", no "graphs" or neither: peers that cost nothing."""
    with ExitStack() as patches:
        if "kernels" in parts:  # those of a GPU, and of a CPU
            patches.enter_context(mock.patch.object(kernels, "_cuda", lambda: None))
            patches.enter_context(mock.patch.object(kernels.cpu, "library", lambda: None))
        if "graphs" in parts:
            uncaptured = mock.patch.object(CudaGraphs, "run", lambda self, key, step, state: step())
            patches.enter_context(uncaptured)
        yield


def make_sampler(base, dtype, slots, prompts, new_tokens):
    """A sampler with room for ``slots`` of these sequences, as a run builds it: a shorter call before the one
    that is measured captures all graphs."""
    width = max(map(len, prompts)) + new_tokens
    cache = slots * width * bytes_per_token(base.config, dtype.itemsize)
    return Sampler(base, dtype, slots, cache, (len(prompts), width, new_tokens))


def rate_without(parts, base, dtype, slots, prompts, new_tokens):
    """Tokens per second of the engine, without these parts if any: one run after a warm-up."""
    with without(*parts):
        sampler = make_sampler(base, dtype, slots, prompts, new_tokens)
        engine(sampler, prompts, 8)
        start = time.perf_counter()
        tokens = engine(sampler, prompts, new_tokens)
        return round(tokens / (time.perf_counter() - start))


def continuous_rate(model, prompts, new_tokens):
    """Tokens per second of transformers' continuous batching with its defaults and room for all sequences:
    one run after a warm-up. It samples from the same distribution as ``generate``."""
    default = ContinuousBatchingConfig
    page = getattr(default, "page_size", default.block_size)  # older versions have the latter
    pages = sum(-(-(len(p) + new_tokens) // page) for p in prompts)
    manager = model.continuous_batching_context_manager(
        generation_config=GenerationConfig(max_new_tokens=new_tokens, **WHOLE_SOFTMAX),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=pages, allow_block_sharing=False),
    )
    with manager as running:
        for longest in (min(8, new_tokens), new_tokens):
            start = time.perf_counter()
            running.add_requests(prompts, max_new_tokens=longest)
            found = []
            for _ in prompts:
                found.append(running.get_result(timeout=LONGEST_SILENCE))
                if found[-1] is None or found[-1].error:
                    raise RuntimeError(found[-1].error if found[-1] else "no answer")
            seconds = time.perf_counter() - start
    return round(sum(len(x.generated_tokens) for x in found) / seconds)


def attempted(name, work):
    """What a peer found, or a line that says why it could not."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        found = f"{type(error).__name__}: {first_line(error)}"[:200]
    finally:
        gc.collect()  # a failure's traceback holds the peer's memory until here
        torch.cuda.empty_cache()
    print(f"  {name}: {found}")
    return found


def best_generate(models, prompts, new_tokens, batch_sizes):
    """The fastest of generate: ((dtype, batch size), (tokens per second, seconds)). First all dtypes are
    tried with the last batch size, then the other sizes with the best dtype."""
    rates = {}

    def rate(dtype, size):
        start = time.perf_counter()
        tokens = generate(models[dtype], prompts, size, new_tokens)
        seconds = time.perf_counter() - start
        rates[dtype, size] = tokens / seconds, seconds
        print(f"  generate, {dtype}, batch size {size}: {tokens / seconds:.0f} tokens/s")

    for dtype in models:
        rate(dtype, batch_sizes[-1])
    best, _ = max(rates, key=rates.get)
    for size in batch_sizes[:-1]:
        rate(best, size)
    return max(rates.items(), key=lambda item: item[1])


def needed_bytes(model, prompts, new_tokens, slots, bytes_each):
    """What decoding ``new_tokens`` for every prompt, ``slots`` at a time, has to read from memory."""
    head = model.get_output_embeddings().weight.numel()
    steps = -(-len(prompts) // slots) * new_tokens
    tokens = sum(new_tokens * len(p) + new_tokens * (new_tokens - 1) / 2 for p in prompts)
    weights = bytes_each * (weights_per_token(model) + head)
    return steps * weights + tokens * bytes_per_token(model.config, bytes_each)


def vllm_rate(model, prompts, new_tokens):
    """Tokens per second of vLLM with its defaults, in bf16, on the same prompts: one run after a warm-up."""
    from vllm import LLM, SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(folder, dtype="bfloat16", skip_tokenizer_init=True, gpu_memory_utilization=0.4)
    for _ in range(2):
        start = time.perf_counter()
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
    return round(sum(len(x.outputs[0].token_ids) for x in found) / seconds)


def measure(name, size, prompts, new_tokens, mean_length, batch_sizes, slots, device, dtypes=DTYPES):
    print(f"{name}, {size}")
    vocabulary = vocabulary_of(size)
    set_precision("auto", torch.device(device))  # without cuDNN's attention, which would slow generate down
    base = policy(size, mean_length, vocabulary, device=device)
    models = {d: policy(size, mean_length, vocabulary, device=device).to(getattr(torch, d)) for d in dtypes}
    best = best_generate(models, prompts, new_tokens, batch_sizes)
    (dtype, batch_size), (their_rate, their_seconds) = best
    pack_sequences(base.base_model)
    ours = fast_dtype("auto", base.device)
    sampler, tokens = make_sampler(base, ours, slots, prompts, new_tokens), {"engine": [], "generate": []}
    engine(sampler, prompts, new_tokens)
    work = {"engine": lambda: tokens["engine"].append(engine(sampler, prompts, new_tokens))}
    once = device != "cpu" and their_seconds > LONG
    if not once:
        work["generate"] = lambda: tokens["generate"].append(
            generate(models[dtype], prompts, batch_size, new_tokens)
        )
    seconds = in_turns(work, REPETITIONS, warm_up=0)  # both have just run
    rates = {k: [n / s for n, s in zip(tokens[k], seconds[k], strict=True)] for k in seconds}
    if once:
        rates["generate"] = [their_rate] * REPETITIONS
    ratios = [a / b for a, b in zip(rates["engine"], rates["generate"], strict=True)]
    result = {
        "case": name,
        "model": size,
        "engine": f"{str(ours)[6:]}, {slots} slots",
        "generate": f"{dtype}, batches of {batch_size}",
        "engine tokens/s": spread(rates["engine"], 0),
        "generate tokens/s": spread(rates["generate"], 0),
        "ratio": spread(ratios, 2),
    }
    if mean_length is None:
        needs = needed_bytes(base, prompts, new_tokens, slots, ours.itemsize)
        result["of copy rate"] = round(needs / min(seconds["engine"]) / copy_rate(device), 3)
    return result


def measure_peers(name, size, prompts, new_tokens, mean_length, device, dtype=None):
    """Tokens per second of the peers beside ``generate``, for the same case as ``measure``."""
    set_precision("auto", torch.device(device))
    base = policy(size, mean_length, vocabulary_of(size), device=device)
    ours = fast_dtype("auto", base.device)
    theirs = copy.deepcopy(base).to(dtype or ours)
    pack_sequences(base.base_model)
    peers = {}
    for without_these in PARTS:
        work = partial(rate_without, without_these, base, ours, len(prompts), prompts, new_tokens)
        peers[f"without {' and '.join(without_these)}"] = work
    peers["continuous batching"] = partial(continuous_rate, theirs, prompts, new_tokens)
    if mean_length is None and device != "cpu" and installed("vllm"):
        peers["vLLM"] = partial(vllm_rate, theirs, prompts, new_tokens)
    found = {f"{peer}, tokens/s": attempted(f"{name}, {size}, {peer}", work) for peer, work in peers.items()}
    return {"case": name, "model": size, **found}


def workloads_of_gpu():
    """By worth, as arguments of ``measure``: one length at both sizes; short responses of varying length; a
    step's batch of 256; nano-vllm's workload, 256 prompts of 100 to 1,024 tokens and responses of 562 in the
    mean (of at most 1,024: without that limit 760)."""
    for name, size, count, shortest, longest, new_tokens, mean in (
        ("fixed", "0.5B", 128, 32, 32, 512, None),
        ("fixed", "512x8", 128, 32, 32, 512, None),
        ("varying", "512x8", 256, 16, 48, 128, 32),
        ("fixed, a batch", "0.5B", 256, 32, 32, 239, None),
        ("nano-vllm", "0.5B", 256, 100, 1024, 1024, 760),
    ):
        prompts = make_prompts(count, shortest, longest, vocabulary=vocabulary_of(size))
        yield name, size, prompts, new_tokens, mean


def peer_cases(device):
    return [partial(measure_peers, *case, device) for case in workloads_of_gpu()]


def cases(device):
    if device != "cpu":
        dtype = str(fast_dtype("auto", torch.device(device)))[6:]
        return [
            partial(measure, *case, [len(case[2])], len(case[2]), device, [dtype])
            for case in workloads_of_gpu()
        ]
    fixed, varying = (("512x8", *work) for work in workloads().values())
    return [
        partial(measure, "fixed", *fixed, [64], 64, device),
        partial(measure, "varying", *varying, [64, 256], 256, device),
    ]


# ------------------------------------------------------------------------------------------- a real model

ANSWERS = 4  # to each prompt
ENDS = 48  # one token in so many is an EOS


def needed_operations(model, prompts, response_lens):
    """Of a forward over each prompt once and over every token of its answers but the last. prompts: one a
    response, the same ones next to each other."""
    config = model.config
    once = [len(prompt) for prompt, _ in itertools.groupby(prompts)]
    tokens = sum(once) + sum(response_lens) - len(prompts)
    head = model.get_output_embeddings().weight.numel() * sum(response_lens)
    pairs = sum(n * (n + 1) / 2 for n in once)
    for prompt, length in zip(prompts, response_lens, strict=True):
        whole = len(prompt) + length - 1
        pairs += (whole * (whole + 1) - len(prompt) * (len(prompt) + 1)) / 2
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return 2 * (weights_per_token(model) * tokens + head) + 4 * config.num_hidden_layers * width * pairs


def measure_model(path, groups, dtype, repetitions=REPETITIONS - 1):
    """``groups`` prompts with ``ANSWERS`` answers each, beside ``generate``."""
    keep_freed_memory()
    base = load_policy(path)
    theirs = copy.deepcopy(base).to(getattr(torch, dtype))
    pack_sequences(base.base_model)
    vocabulary = base.config.vocab_size
    prompts = [p for p in make_prompts(groups, 55, 55, vocabulary=vocabulary) for _ in range(ANSWERS)]
    ends = list(range(0, vocabulary, ENDS))
    sampler = Sampler(base, getattr(torch, dtype))
    keys = noise_keys(0, 0, range(len(prompts)))
    ids = torch.tensor(prompts)
    rates = defaultdict(list)

    def ours(new_tokens=64):
        return sampler.sample(prompts, keys, ends, new_tokens, 1.0).response_len.tolist()

    def generated(new_tokens=64):
        sampling = WHOLE_SOFTMAX | {"eos_token_id": ends}
        with torch.no_grad():
            out = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **sampling
            )
        ended = torch.isin(out[:, ids.shape[1] :], torch.tensor(ends)).int()
        return torch.where(ended.any(1), ended.argmax(1) + 1, ended.shape[1]).tolist()

    for work in (ours, generated):
        work(2)
    for _ in range(repetitions):
        for name, work in (("engine", ours), ("generate", generated)):
            before = matrix_rate(getattr(torch, dtype))
            start = time.perf_counter()
            lengths = work()
            seconds = time.perf_counter() - start
            possible = seconds * (before + matrix_rate(getattr(torch, dtype))) / 2
            rates[f"{name} tokens/s"].append(sum(lengths) / seconds)
            rates[f"{name}, of machine"].append(needed_operations(base, prompts, lengths) / possible)
    start = time.perf_counter()
    sampler.load(base)
    loading = time.perf_counter() - start
    pairs = zip(rates["engine tokens/s"], rates["generate tokens/s"], strict=True)
    return {
        "answers": f"{groups} x {ANSWERS}",
        "dtype": dtype,
        **{name: spread(found, 0 if name.endswith("s/s") else 2) for name, found in rates.items()},
        "ratio": spread([a / b for a, b in pairs], 2),
        "load, seconds": round(loading, 2),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a directory of transformers")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for dtype in args.dtypes:
        for groups in (8, 32):
            results.append(measure_model(args.model, groups, dtype))
            write_results("generation_model", {"results": results})
    shown = [{k: show(v) if isinstance(v, dict) else v for k, v in result.items()} for result in results]
    print(table(shown))


def rows(results):
    for r in results:
        rates = {k: f"{v['median']:.0f}" for k, v in r.items() if isinstance(v, dict)}
        yield r | rates | ({"ratio": show(r["ratio"])} if rates else {})


if __name__ == "__main__":
    main()
