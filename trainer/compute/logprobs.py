"""Log-probs of given tokens under a language-model head, and their gradient, without the logits of a batch.

Autograd over log_softmax would keep several [tokens, vocabulary] tensors and pass over them again. Here one
chunk of tokens at a time goes through the head. The backward pass needs only the probabilities p, because d
logprob / d logits = (onehot - p) / temperature, and for ``--entropy_coef`` d entropy / d logits = -p (log p +
entropy) / temperature. At most ``MAX_KEPT`` of them are kept; if there are more, all
are computed again, chunk by chunk.

A GPU's kernels (compute/cuda) never write p. They read the logits once in the forward and once in the
backward pass, where p follows from the logits and their log sum e^logits. Logits of a single chunk are kept.
"""

import torch
import torch.nn.functional as F

from trainer.compute.kernels import kernels_for, kernels_of
from trainer.compute.precision import compute_dtype, rows_to_add

# Logits in one chunk [tokens, vocabulary]: 8 MiB in fp32 fit a CPU's cache. 512 MiB on a GPU are 832 tokens
# where the vocabulary is 152,000: so many that the products take far longer than reading and writing the
# weight's gradient, which is done once a chunk
CHUNK = {"cpu": 1 << 21, "cuda": 1 << 27}
MIN_CHUNK_TOKENS = 64  # the fewest tokens in a chunk, because each chunk reads all weights of the head
MAX_KEPT = 1 << 24  # at most this many probabilities (64 MiB) are kept from forward to backward


def token_logprobs(head, states, targets, temperature, forbid_=None, learn_entropy=False):
    """Log-prob of each token, and entropy, under softmax(head(states) / temperature), in fp32.

    head: an nn.Linear [V, H]; states [N, H]; targets [N] -> logprobs [N] (differentiable), entropy [N] (has a
    gradient only with ``learn_entropy``). Under autocast the products run in its dtype. forbid_: None, or
    what changes the logits first (``EarlyEnds.of``); a target must not be forbidden.
    """
    dtype = compute_dtype(head.weight)
    count = len(states)
    if more := rows_to_add(count, head.weight):
        states = F.pad(states, (0, 0, 0, more))
        targets = F.pad(targets, (0, more))
    logprobs, entropy = _TokenLogprobs.apply(
        states, head.weight, head.bias, targets, temperature, dtype, forbid_, learn_entropy
    )
    return logprobs[:count], entropy[:count]


def _gpu_kernels(device):
    """A GPU's kernels if this is a GPU that has them, else None"""
    return kernels_of("cuda") if device.type == "cuda" else None


class _TokenLogprobs(torch.autograd.Function):
    """kept: with a GPU's kernels the logits, if they are one chunk, elsewhere the probabilities, if they are
    few; None if there is no gradient, and if the logits are computed again"""

    @staticmethod
    def forward(ctx, states, weight, bias, targets, temperature, dtype, forbid_, learn_entropy):
        ctx.temperature = temperature
        ctx.dtype = dtype
        ctx.forbid_ = forbid_
        ctx.kept = None
        ctx.gpu = _gpu_kernels(states.device)
        targets = targets.contiguous()
        trained = any(ctx.needs_input_grad)
        logprobs, entropy, log_sum = (torch.empty(len(states), device=states.device) for _ in range(3))
        if trained and not ctx.gpu and len(states) * len(weight) <= MAX_KEPT:
            ctx.kept = torch.empty(len(states), len(weight), device=states.device)
        for c, logits in _chunks_of_logits(states, weight, bias, dtype, forbid_):
            if ctx.gpu:
                ctx.gpu.token_logprobs(logits, targets[c], temperature, logprobs[c], entropy[c], log_sum[c])
                ctx.kept = logits if trained and len(logits) == len(states) else None
            else:
                p = None if ctx.kept is None else ctx.kept[c]
                logprobs[c], entropy[c] = _logprobs(logits, targets[c], temperature, p)
            del logits
        ctx.save_for_backward(states, weight, bias, targets, log_sum, entropy if learn_entropy else None)
        if not learn_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, grad_entropy):
        states, weight, bias, targets, log_sum, entropy = ctx.saved_tensors
        temperature = 1.0 if ctx.gpu else ctx.temperature  # a GPU's kernels divide by it themselves
        grad = grad / temperature
        grad_entropy = grad_entropy / temperature
        grad_states = torch.empty_like(states)
        table = weight.to(ctx.dtype)
        grad_weight = None
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None  # none if frozen
        chunks = [(slice(len(states)), ctx.kept)]
        if ctx.kept is None:
            chunks = _chunks_of_logits(states, weight, bias, ctx.dtype, ctx.forbid_)
        for c, x in chunks:
            learned = () if entropy is None else (entropy[c], grad_entropy[c])
            if ctx.gpu:
                d = ctx.gpu.token_logprobs_backward(
                    x, targets[c], log_sum[c], grad[c], ctx.temperature, ctx.dtype, *learned
                )
            else:
                p = x
                if ctx.kept is None:
                    p = torch.empty_like(x, dtype=torch.float32)
                    _logprobs(x, targets[c], ctx.temperature, p)
                d = _grad_logits(p, targets[c], grad[c], ctx.dtype, *learned)
            if grad_bias is not None:
                grad_bias += d.sum(0)
            grad_states[c] = _product(d, table)
            if ctx.needs_input_grad[1]:
                grad_weight = _add_product(grad_weight, d.T, states[c].to(ctx.dtype), weight.dtype)
            del x, d
        ctx.kept = None
        return grad_states, grad_weight, grad_bias, None, None, None, None, None


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


def _grad_logits(p, targets, grad, dtype, *learned):
    """-> grad (onehot - p) [n, V] in ``dtype``; p may be overwritten. learned: entropy H [n] and its gradient
    h [n], for - h p (log p + H) beside it, or nothing"""
    if (kernels := kernels_for(p, grad, *learned, result=dtype)) is not None:
        return kernels.token_logprobs_backward(p, targets, grad, dtype, *learned)
    more = None
    if learned:
        entropy, grad_entropy = (x[:, None] for x in learned)
        more = torch.special.entr(p).sub_(p * entropy).mul_(grad_entropy)
    result = p.mul_(-grad[:, None]).scatter_add_(1, targets[:, None], grad[:, None])
    return (result if more is None else result.add_(more)).to(dtype)


def head_logits(states, weight, bias, dtype):
    """States [n, H] -> logits [n, V] of a head (weight [V, H]; bias [V] or None), from products in ``dtype``.

    On a GPU the logits are in fp32 in any case. Rounded to bf16, logits between 16 and 32 would have steps of
    0.125, and log-probs errors of about 0.03. On a CPU, which has no such product, they are in ``dtype``.
    """
    states = states.to(dtype)
    weight = weight.to(dtype)
    if not states.is_cuda:
        return F.linear(states, weight, None if bias is None else bias.to(dtype))
    logits = _product(states, weight.T)
    return logits if bias is None else logits.add_(bias)


def _product(a, b):
    """-> a @ b: on a GPU in fp32, elsewhere in their dtype"""
    kind = {"out_dtype": torch.float32} if a.is_cuda and a.dtype != torch.float32 else {}
    return torch.mm(a, b, **kind)


def _add_product(total, a, b, dtype):
    """-> total + a @ b in ``dtype``; total may be None, which counts as 0"""
    if total is None:
        return _product(a, b).to(dtype)
    if a.dtype == dtype:
        return total.addmm_(a, b)
    if a.is_cuda and dtype == torch.float32:
        return torch.addmm(total, a, b, out_dtype=dtype, out=total)
    return total.add_(a @ b)


def _chunks_of_logits(states, weight, bias, dtype, forbid_=None):
    """Yield (slice of the tokens, its logits [n, V]): at most CHUNK of them, or those of MIN_CHUNK_TOKENS
    tokens if that is more. Let go of them before the next: they take its memory."""
    count = len(states)
    table = weight.to(dtype)
    size = MIN_CHUNK_TOKENS * max(1, CHUNK[states.device.type] // (MIN_CHUNK_TOKENS * len(weight)))
    for start in range(0, count, size):
        c = slice(start, min(start + size, count))
        logits = head_logits(states[c], table, bias, dtype)
        if forbid_:
            forbid_(logits, c)
        yield c, logits
        del logits
