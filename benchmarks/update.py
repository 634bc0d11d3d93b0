"""Speed of an update compared with the machine's matrix rate: forward, backward, clip and step of a policy.

64 sequences: prompts of 16 to 48 tokens, responses of 32 tokens on average and 128 at most; on a GPU 256
sequences, with responses of 239 tokens in the case "0.5B". Only operations that the task needs are counted:
two per weight and token in the forward and four in the backward, for real tokens only, the head at response
positions only, attention only over tokens that a token may see.
"plain" is the best case of a transformers model: equal lengths, no padding, logits at every position.
"""

import random
import time
from functools import partial

import torch
from common import VOCABULARY, matrix_rate, policy, show, spread, vocabulary_of

from trainer import losses
from trainer.compute.batch import Batch
from trainer.compute.batching import Layout, micro_batches, tokens_per_forward
from trainer.compute.cpu import kernels
from trainer.compute.memory import keep_freed_memory
from trainer.compute.precision import autocast, fast_dtype, set_precision
from trainer.compute.scoring import PolicyScorer, pack_sequences

REPETITIONS = 3
FLOATS = ("sampler_logprobs", "old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")
CASES = [("512x8", "float32"), ("512x8", "bfloat16"), ("128x4", "float32")]
# On a GPU, in the type that --dtype auto chooses: (size, sequences, response tokens or None for varying ones)
GPU_CASES = [("0.5B", 256, 239), ("512x8", 256, None)]


def make_rollout(rows=64, seed=0, device="cpu", response=None, vocabulary=VOCABULARY):
    """A ``Batch`` filled with random numbers; only its lengths matter here. response: tokens of every
    response, or None for 32 on average."""
    rng = random.Random(seed)
    prompt_len = torch.tensor([rng.randint(16, 48) for _ in range(rows)])
    drawn = [min(128, 1 + int(rng.expovariate(1 / 32))) for _ in range(rows)]
    response_len = torch.tensor([response or n for n in drawn])
    tokens = torch.randint(2, vocabulary, (rows, int((prompt_len + response_len).max())))
    fields = {"tokens": tokens, "prompt_len": prompt_len, "response_len": response_len}
    fields["finished"] = torch.ones(rows, dtype=torch.bool)
    for name in FLOATS:
        fields[name] = 0.1 * torch.randn(rows, int(response_len.max()))
    fields["importance_weights"] = torch.ones_like(fields["rewards"])
    fields["loss_mask"] = torch.ones_like(fields["rewards"], dtype=torch.bool)
    return Batch(**{name: x.to(device) for name, x in fields.items()})


def weights_per_token(model):
    """Number of weights that every token is multiplied with: all matrices but the embedding and the head."""
    outside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    return sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in outside)


def needed_operations(model, lengths, predicted):
    """Operations of forward and backward. lengths: tokens per sequence; predicted: positions with logits."""
    config = model.config
    width = config.hidden_size  # of all heads together, in the models of common.py
    attention = sum(2 * 2 * width * n * (n + 1) / 2 for n in lengths) * config.num_hidden_layers
    head = 2 * config.hidden_size * config.vocab_size * predicted
    return 3 * (2 * weights_per_token(model) * sum(lengths) + attention + head)


def ours(scorer, optimizer, rollout):
    """One update as the trainer does it: micro-batches, PPO loss, gradient clip, optimizer step."""
    tokens = rollout.response_len.sum().item()
    budget = tokens_per_forward(rollout.tokens.device)
    for index in micro_batches(rollout.layout.lengths, budget):
        mb = rollout.rows(index)
        logprobs, _, _ = scorer(mb.tokens, mb.layout, 1.0)
        loss, _ = losses.policy_loss(logprobs, mb, 0.2, 0.2)
        loss = loss + 0.02 * losses.kl_loss(logprobs, mb)
        (loss / tokens).backward()
    torch.nn.utils.clip_grad_norm_(scorer.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def plain(model, tokens, dtype):
    with autocast(tokens.device, dtype):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    model.zero_grad()


def timed(function, device):
    start = time.perf_counter()
    function()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def padding_waste(rollout):
    """The share of computed tokens that are padding: (outside attention, inside attention). Compiled
    attention, on a CPU, has no padding."""
    lengths, outside, inside = rollout.layout.lengths, 0, 0
    compiled = rollout.tokens.is_cpu and kernels.library() is not None
    for index in micro_batches(lengths, tokens_per_forward(rollout.tokens.device)):
        packing = Layout([lengths[i] for i in index])
        outside += sum(lengths[i] for i in index)
        padded = len(index) * packing.longest
        inside += sum(packing.lengths) if compiled else padded
    return tuple(round(1 - sum(lengths) / computed, 3) for computed in (outside, inside))


def measure(size, dtype_name, device, sequences=64, response=None):
    keep_freed_memory()  # as the trainer does; the peer profits as well
    set_precision(dtype_name, torch.device(device))
    dtype, vocabulary = getattr(torch, dtype_name), vocabulary_of(size)
    rollout = make_rollout(sequences, device=device, response=response, vocabulary=vocabulary)
    model, peer = (policy(size, 32, vocabulary, device=device) for _ in range(2))
    pack_sequences(model.base_model)
    scorer = PolicyScorer(model, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, weight_decay=0.0, fused=True)
    lengths, equal = rollout.layout.lengths, torch.randint(2, vocabulary, (16, 128), device=device)
    needs = {
        "ours": needed_operations(model, lengths, rollout.response_len.sum().item()),
        "plain": needed_operations(model, [128] * 16, 16 * 128),
    }
    steps = {"ours": lambda: ours(scorer, optimizer, rollout), "plain": lambda: plain(peer, equal, dtype)}
    shares, rates = {"ours": [], "plain": []}, []
    for repetition in range(-1, REPETITIONS):
        for name, step in steps.items():
            before = matrix_rate(dtype, device=device)
            seconds = timed(step, device)
            rate = (before + matrix_rate(dtype, device=device)) / 2  # the machine's speed is not constant
            if repetition >= 0:
                shares[name].append(needs[name] / seconds / rate)
                rates.append(rate / 1e9)
    found = {
        "model": size,
        "dtype": dtype_name,
        "matrix GFLOP/s": spread(rates, 0),
        "ours": spread(shares["ours"]),
        "plain transformers": spread(shares["plain"]),
    }
    names = ("padding", "padding in attention") if device == "cpu" else ()
    return found | dict(zip(names, padding_waste(rollout) if names else (), strict=True))


def cases(device):
    if device == "cpu":
        return [partial(measure, size, dtype, device) for size, dtype in CASES]
    dtype = str(fast_dtype("auto", torch.device(device)))[6:]
    return [partial(measure, size, dtype, device, *lengths) for size, *lengths in GPU_CASES]


def rows(results):
    for r in results:
        yield {k: show(v) if isinstance(v, dict) else v for k, v in r.items()}
