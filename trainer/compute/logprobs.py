"""Log-probs of given tokens under a language-model head, and their gradient, without the logits of a batch.

Autograd over log_softmax would keep several [tokens, vocabulary] tensors and pass over them again. Here one
chunk of tokens at a time goes through the head. The backward pass needs only the probabilities p, because d
logprob / d logits = (onehot - p) / temperature, and for ``--entropy_coef`` d entropy / d logits = -p (log p +
entropy) / temperature. If there are more than ``MAX_KEPT`` of them, all are computed again, chunk by chunk.

A GPU's kernels (compute/cuda) never write p. They read the logits once in the forward and once in the
backward pass, where p follows from the logits and their log sum e^logits. Logits of a single chunk are kept.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.compute.kernels import differentiable, kernels_for, kernels_of
from trainer.compute.precision import compute_dtype, rows_to_add

# Logits in one chunk [tokens, vocabulary]: 8 MiB in fp32 fit a CPU's cache. 512 MiB on a GPU are 832 tokens
# where the vocabulary is 152,000: so many that the products take far longer than reading and writing the
# weight's gradient, which is done once a chunk
LOGITS_PER_CHUNK = {"cpu": 1 << 21, "cuda": 1 << 27, "mps": 1 << 24}
GPU = "cuda"  # the kind of device whose kernels read logits twice
MIN_CHUNK_TOKENS = 64  # the fewest tokens in a chunk, because each chunk reads all weights of the head
# At most so many numbers are kept from forward to backward: probabilities, or a GPU's logits of one chunk
MAX_KEPT = {"cpu": 1 << 24, "cuda": 1 << 27, "mps": 1 << 24}


def token_logprobs(
    head: nn.Linear,
    states: Tensor,
    targets: Tensor,
    temperature: float,
    forbid: Callable[[Tensor, slice], None] | None = None,
    learn_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each token, and entropy, under softmax(head(states) / temperature), in fp32.

    head: [V, H]; states [N, H]; targets [N] -> logprobs [N] (differentiable), entropy [N] (has a gradient
    only with ``learn_entropy``). Under autocast the products run in its dtype. forbid: None, or what changes
    the logits first (``Forbidden.of``); a target must not be forbidden."""
    count = len(states)
    more = rows_to_add(count, head.weight)
    if more:
        states = F.pad(states, (0, 0, 0, more))
        targets = F.pad(targets, (0, more))
    targets = targets.contiguous()
    dtype = compute_dtype(head.weight)
    kind = states.device.type
    gpu = kernels_of(kind) if kind == GPU else None
    size = MIN_CHUNK_TOKENS * max(1, LOGITS_PER_CHUNK[kind] // (MIN_CHUNK_TOKENS * len(head.weight)))
    chunks = [slice(start, start + size) for start in range(0, count + more, size)]
    keeps = torch.is_grad_enabled() and (count + more) * len(head.weight) <= MAX_KEPT[kind]
    kept = []  # of each chunk the logits (a GPU's kernels), or the probabilities

    def logits_of(c, states, weight, bias):
        logits = head_logits(states[c], weight, bias, dtype)
        if forbid:
            forbid(logits, c)
        return logits

    def forward(states, weight, bias):
        logprobs, entropy, log_sum = (torch.empty(len(states), device=states.device) for _ in range(3))
        table = weight.to(dtype)
        for c in chunks:
            x = logits_of(c, states, table, bias)
            if gpu:
                gpu.token_logprobs(x, targets[c], temperature, logprobs[c], entropy[c], log_sum[c])
            else:
                logprobs[c], entropy[c], x = _logprobs(x, targets[c], temperature, keeps)
            if keeps:
                kept.append(x)
            del x  # the next chunk's logits take its memory
        return (logprobs, entropy), (states, weight, bias, log_sum, entropy)

    def gradient(states, weight, bias, log_sum, entropy, grad, grad_entropy):
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        grad_bias = torch.zeros_like(bias) if bias is not None and bias.requires_grad else None
        table = weight.to(dtype)
        grad = grad / temperature  # d logits are divided by it
        grad_entropy = grad_entropy / temperature
        for c in chunks:
            x = kept.pop(0) if keeps else logits_of(c, states, table, bias)
            if not keeps and not gpu:
                x = _logprobs(x, targets[c], temperature, True)[2]
            learned = (entropy[c], grad_entropy[c]) if learn_entropy else (None, None)
            if gpu:
                d = x if dtype == x.dtype else torch.empty_like(x, dtype=dtype)
                gpu.over_rows(
                    "token_logprobs_backward",
                    x,
                    targets[c],
                    log_sum[c],
                    grad[c],
                    *learned,
                    d,
                    1 / temperature,
                )
            else:
                d = _grad_logits(x, targets[c], grad[c], dtype, *learned)
            grad_states[c] = _product(d, table)
            if grad_bias is not None:
                grad_bias += d.sum(0)
            if grad_weight is not None:
                _add_product(grad_weight, d.T, states[c].to(dtype))
            del x, d  # before the next chunk
        return grad_states, grad_weight, grad_bias

    logprobs, entropy = differentiable(forward, gradient, states, head.weight, head.bias)
    return logprobs[:count], (entropy if learn_entropy else entropy.detach())[:count]


def _logprobs(logits, targets, temperature, keeps):
    """logits [n, V], overwritten -> log-probs of targets [n], entropy [n], probabilities [n, V], which may be
    None unless ``keeps``"""
    p = torch.empty_like(logits, dtype=torch.float32) if keeps else None
    kernels = kernels_for(logits)
    if kernels is not None:
        logprobs, entropy = torch.empty(2, len(logits))
        kernels.over_rows("token_logprobs", logits, targets, logprobs, entropy, p, float(temperature))
        return logprobs, entropy, p
    z = logits.float()
    if temperature != 1:
        z /= temperature
    z.clamp_(min=torch.finfo(z.dtype).min)  # -inf times a probability of 0 would be NaN
    p = torch.softmax(z, -1, out=p)
    # log sum e^z, from the largest logit and its probability: two cheap passes instead of an expensive one
    total = z.amax(-1) - p.amax(-1).log()
    return z.gather(1, targets[:, None]).squeeze(1) - total, total - z.mul_(p).sum(-1), p


def _grad_logits(p, targets, grad, dtype, entropy, grad_entropy):
    """-> grad (onehot - p) [n, V] in ``dtype``; p may be overwritten. entropy H [n] and its gradient h [n]
    add - h p (log p + H); None add nothing."""
    kernels = kernels_for(p, grad, entropy, grad_entropy, result=dtype)
    if kernels is not None:
        result = torch.empty_like(p, dtype=dtype)
        kernels.over_rows("token_logprobs_backward", p, targets, grad, entropy, grad_entropy, result)
        return result
    learned = None
    if entropy is not None:
        learned = torch.special.entr(p).sub_(p * entropy[:, None]).mul_(grad_entropy[:, None])
    result = p.mul_(-grad[:, None]).scatter_add_(1, targets[:, None], grad[:, None])
    return (result if learned is None else result.add_(learned)).to(dtype)


def head_logits(states: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
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
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b)


def _add_product(total, a, b):
    """Add a @ b to ``total``."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)
