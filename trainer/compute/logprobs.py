"""Log-probs of given tokens under a language-model head, and their gradient, without the logits of a batch.

Autograd over log_softmax would keep several [tokens, vocabulary] tensors and pass over them again. Here one
chunk of tokens at a time goes through the head. The backward pass needs only the probabilities p, because d
logprob / d logits = (onehot - p) / temperature. At most ``MAX_KEPT`` of them are kept; if there are more, all
are computed again, chunk by chunk.
"""

import torch
import torch.nn.functional as F

from trainer.compute.kernels import kernels_for
from trainer.compute.precision import compute_dtype, rows_to_add

# Logits in one chunk [tokens, vocabulary]: 8 MiB in fp32 fit a CPU's cache, 256 MiB keep a GPU busy
CHUNK = {"cpu": 1 << 21, "cuda": 1 << 26}
MIN_CHUNK_TOKENS = 64  # the fewest tokens in a chunk, because each chunk reads all weights of the head
MAX_KEPT = 1 << 24  # at most this many probabilities (64 MiB) are kept from forward to backward


def token_logprobs(head, states, targets, temperature):
    """Log-prob of each token, and entropy, under softmax(head(states) / temperature), in fp32.

    head: an nn.Linear [V, H]; states [N, H]; targets [N] -> logprobs [N] (differentiable), entropy [N] (for
    logging, no gradient). Under autocast the products run in its dtype.
    """
    dtype, count, more = compute_dtype(head.weight), len(states), rows_to_add(len(states), head.weight)
    if more:
        states, targets = F.pad(states, (0, 0, 0, more)), F.pad(targets, (0, more))
    logprobs, entropy = _TokenLogprobs.apply(states, head.weight, head.bias, targets, temperature, dtype)
    return logprobs[:count], entropy[:count]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, bias, targets, temperature, dtype):
        ctx.save_for_backward(states, weight, bias, targets)
        ctx.temperature, ctx.dtype = temperature, dtype
        logprobs = torch.empty(len(states), device=states.device)
        entropy = torch.empty_like(logprobs)
        keep = any(ctx.needs_input_grad) and len(states) * len(weight) <= MAX_KEPT
        ctx.kept = torch.empty(len(states), len(weight), device=states.device) if keep else None
        for c, logits in _chunks_of_logits(states, weight, bias, dtype):
            p = ctx.kept[c] if keep else None
            logprobs[c], entropy[c] = _logprobs(logits, targets[c], temperature, p)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        states, weight, bias, targets = ctx.saved_tensors
        grad = grad / ctx.temperature
        grad_states, table = torch.empty_like(states), weight.to(ctx.dtype)
        grad_weight = None
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None  # none if frozen
        for c, p in _chunks_of_probabilities(ctx, states, weight, bias, targets):
            grad_logits = _grad_logits(p, targets[c], grad[c], ctx.dtype)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_states[c] = grad_logits @ table
            if ctx.needs_input_grad[1]:
                grad_weight = _add_product(grad_weight, grad_logits.T, states[c].to(ctx.dtype), weight.dtype)
        ctx.kept = None
        return grad_states, grad_weight, grad_bias, None, None, None


def _logprobs(logits, targets, temperature, p=None):
    """logits [n, V], overwritten -> log-probs of targets [n], entropy [n]. Probabilities go into p [n, V]."""
    if (kernels := kernels_for(logits)) is not None:
        return kernels.token_logprobs(logits, targets, temperature, p)
    z = logits.float()
    if temperature != 1:
        z /= temperature
    z.clamp_(min=torch.finfo(z.dtype).min)  # -inf times a probability of 0 would be NaN
    p = torch.softmax(z, -1, out=p)
    # log sum e^z, from the largest logit and its probability: two cheap passes instead of an expensive one
    total = z.amax(-1) - p.amax(-1).log()
    return z.gather(1, targets[:, None]).squeeze(1) - total, total - z.mul_(p).sum(-1)


def _grad_logits(p, targets, grad, dtype):
    """-> grad (onehot - p) [n, V] in ``dtype``; p may be overwritten"""
    if (kernels := kernels_for(p, grad, result=dtype)) is not None:
        return kernels.token_logprobs_backward(p, targets, grad, dtype)
    return p.mul_(-grad[:, None]).scatter_add_(1, targets[:, None], grad[:, None]).to(dtype)


def _add_product(total, a, b, dtype):
    """-> total + a @ b in ``dtype``; total may be None, which counts as 0"""
    if total is None:
        return (a @ b).to(dtype)
    return total.addmm_(a, b) if a.dtype == dtype else total.add_(a @ b)


def _chunks(states, weight):
    """-> slices over the tokens, of at most CHUNK logits each, or of MIN_CHUNK_TOKENS tokens if that is
    more."""
    size = MIN_CHUNK_TOKENS * max(1, CHUNK[states.device.type] // (MIN_CHUNK_TOKENS * len(weight)))
    return [slice(start, min(start + size, len(states))) for start in range(0, len(states), size)]


def _chunks_of_logits(states, weight, bias, dtype):
    """Yield (slice, its logits [n, V]). Use them before the next: fp32 logits all share one memory."""
    chunks, table = _chunks(states, weight), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    plain = dtype == torch.float32 and bias is None
    memory = torch.empty(chunks[0].stop, len(weight), device=states.device) if plain and chunks else None
    for c in chunks:
        inputs = states[c].to(dtype)
        if plain:
            yield c, torch.mm(inputs, table.T, out=memory[: len(inputs)])
        else:
            yield c, F.linear(inputs, table, bias)


def _chunks_of_probabilities(ctx, states, weight, bias, targets):
    """Yield (slice, its probabilities [n, V] in fp32): all at once if kept, else computed again by chunks."""
    if ctx.kept is not None:
        yield slice(len(states)), ctx.kept
        return
    memory = None
    for c, logits in _chunks_of_logits(states, weight, bias, ctx.dtype):
        if memory is None:
            memory = torch.empty(logits.shape, device=logits.device)
        p = memory[: len(logits)]
        _logprobs(logits, targets[c], ctx.temperature, p)
        yield c, p
