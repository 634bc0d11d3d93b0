"""Log-probs of given tokens under a language-model head, and their gradient, without the logits of a batch.

Autograd over log_softmax would keep several [tokens, vocabulary] tensors and pass over them again. Here one
chunk of tokens at a time goes through the head. The backward pass needs only the probabilities p, because d
logprob / d logits = (onehot - p) / temperature, and for ``--entropy_coef`` d entropy / d logits = -p (log p +
entropy) / temperature. At most ``MAX_KEPT`` of them are kept; if there are more, all
are computed again, chunk by chunk.

A GPU's kernels (cuda/tokens.py) never write p. They read the logits once in the forward and once in the
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
NOT_TRAINED = (None,) * 5  # gradients of targets, temperature, dtype, forbid_, learn_entropy


def token_logprobs(head, states, targets, temperature, forbid_=None, learn_entropy=False):
    """Log-prob of each token, and entropy, under softmax(head(states) / temperature), in fp32.

    head: an nn.Linear [V, H]; states [N, H]; targets [N] -> logprobs [N] (differentiable), entropy [N] (has a
    gradient only with ``learn_entropy``). Under autocast the products run in its dtype. forbid_: None, or
    what changes the logits first (``EarlyEnds.of``); a target must not be forbidden.
    """
    dtype, count, more = compute_dtype(head.weight), len(states), rows_to_add(len(states), head.weight)
    if more:
        states, targets = F.pad(states, (0, 0, 0, more)), F.pad(targets, (0, more))
    function = _TokenLogprobs if _gpu_kernels(states.device) is None else _GpuTokenLogprobs
    inputs = states, head.weight, head.bias, targets, temperature, dtype, forbid_, learn_entropy
    logprobs, entropy = function.apply(*inputs)
    return logprobs[:count], entropy[:count]


def _gpu_kernels(device):
    """A GPU's kernels if this is a GPU that has them, else None"""
    return kernels_of("cuda") if device.type == "cuda" else None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, bias, targets, temperature, dtype, forbid_=None, learn_entropy=False):
        ctx.temperature, ctx.dtype, ctx.forbid_ = temperature, dtype, forbid_
        logprobs = torch.empty(len(states), device=states.device)
        entropy = torch.empty_like(logprobs)
        keep = any(ctx.needs_input_grad) and len(states) * len(weight) <= MAX_KEPT
        ctx.kept = torch.empty(len(states), len(weight), device=states.device) if keep else None
        for c, logits in _chunks_of_logits(states, weight, bias, dtype, forbid_):
            p = ctx.kept[c] if keep else None
            logprobs[c], entropy[c] = _logprobs(logits, targets[c], temperature, p)
        _keep(ctx, entropy, learn_entropy, states, weight, bias, targets)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, grad_entropy):
        states, weight, bias, targets, *learned = ctx.saved_tensors
        grad = grad / ctx.temperature
        if learned:
            learned.append(grad_entropy / ctx.temperature)
        gradients = (
            (c, _grad_logits(p, targets[c], grad[c], ctx.dtype, *(x[c] for x in learned)))
            for c, p in _chunks_of_probabilities(ctx, states, weight, bias, targets)
        )
        return *_grads_of_head(ctx, states, weight, bias, gradients), *NOT_TRAINED


class _GpuTokenLogprobs(torch.autograd.Function):
    """The same with a GPU's kernels. kept: the logits, if they are one chunk and have a gradient"""

    @staticmethod
    def forward(ctx, states, weight, bias, targets, temperature, dtype, forbid_=None, learn_entropy=False):
        ctx.temperature, ctx.dtype, ctx.forbid_, ctx.kept = temperature, dtype, forbid_, None
        kernels, targets = _gpu_kernels(states.device), targets.contiguous()
        results = [torch.empty(len(states), device=states.device) for _ in range(3)]
        for c, logits in _chunks_of_logits(states, weight, bias, dtype, forbid_):
            kernels.token_logprobs(logits, targets[c], temperature, *(x[c] for x in results))
            if len(logits) == len(states) and any(ctx.needs_input_grad):
                ctx.kept = logits
        logprobs, entropy, total = results
        _keep(ctx, entropy, learn_entropy, states, weight, bias, targets, total)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, grad_entropy):
        states, weight, bias, targets, total, *learned = ctx.saved_tensors
        kernels, grad = _gpu_kernels(states.device), grad.contiguous()
        if learned:
            learned.append(grad_entropy.contiguous())

        def grad_logits(c, logits):
            rows = (x[c] for x in (targets, total, grad))
            return kernels.token_logprobs_backward(
                logits, *rows, ctx.temperature, ctx.dtype, *(x[c] for x in learned)
            )

        kept = [(slice(len(states)), ctx.kept)]
        chunks = _chunks_of_logits(states, weight, bias, ctx.dtype, ctx.forbid_) if ctx.kept is None else kept
        gradients = ((c, grad_logits(c, x)) for c, x in chunks)
        return *_grads_of_head(ctx, states, weight, bias, gradients), *NOT_TRAINED


def _keep(ctx, entropy, learn_entropy, *tensors):
    """Keep these tensors for the backward pass, and the entropy where it has a gradient"""
    ctx.save_for_backward(*tensors, *([entropy] if learn_entropy else []))
    if not learn_entropy:
        ctx.mark_non_differentiable(entropy)


def _grads_of_head(ctx, states, weight, bias, gradients):
    """gradients: of the logits, by chunks: (slice, [n, V] in ctx.dtype) -> those of states, weight, bias"""
    grad_states, table, grad_weight = torch.empty_like(states), weight.to(ctx.dtype), None
    grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None  # none if frozen
    for c, grad_logits in gradients:
        if grad_bias is not None:
            grad_bias += grad_logits.sum(0)
        grad_states[c] = _product(grad_logits, table)
        if ctx.needs_input_grad[1]:
            grad_weight = _add_product(grad_weight, grad_logits.T, states[c].to(ctx.dtype), weight.dtype)
    ctx.kept = None
    return grad_states, grad_weight, grad_bias


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


def head_logits(states, weight, bias, dtype, memory=None):
    """States [n, H] -> logits [n, V] of a head (weight [V, H]; bias [V] or None), from products in ``dtype``.

    On a GPU the logits are in fp32 in any case. Rounded to bf16, logits between 16 and 32 would have steps of
    0.125, and log-probs errors of about 0.03. On a CPU, which has no such product, they are in ``dtype``.
    memory: fp32 [n or more rows, V] that may be used for the result, or None.
    """
    states, weight = states.to(dtype), weight.to(dtype)
    if not states.is_cuda and (dtype != torch.float32 or bias is not None):
        return F.linear(states, weight, None if bias is None else bias.to(dtype))
    logits = _product(states, weight.T, None if memory is None else memory[: len(states)])
    return logits if bias is None else logits.add_(bias)


def _product(a, b, out=None):
    """-> a @ b: on a GPU in fp32, elsewhere in their dtype. out: memory for it"""
    kind = {"out_dtype": torch.float32} if a.is_cuda and a.dtype != torch.float32 else {}
    return torch.mm(a, b, out=out, **kind)


def _add_product(total, a, b, dtype):
    """-> total + a @ b in ``dtype``; total may be None, which counts as 0"""
    if total is None:
        return _product(a, b).to(dtype)
    if a.dtype == dtype:
        return total.addmm_(a, b)
    if a.is_cuda and dtype == torch.float32:
        return torch.addmm(total, a, b, out_dtype=dtype, out=total)
    return total.add_(a @ b)


def _chunks(states, weight):
    """-> slices over the tokens, of at most CHUNK logits each, or of MIN_CHUNK_TOKENS tokens if that is
    more."""
    size = MIN_CHUNK_TOKENS * max(1, CHUNK[states.device.type] // (MIN_CHUNK_TOKENS * len(weight)))
    return [slice(start, min(start + size, len(states))) for start in range(0, len(states), size)]


def _chunks_of_logits(states, weight, bias, dtype, forbid_=None):
    """Yield (slice, its logits [n, V]). Use them before the next: fp32 logits may all share one memory."""
    chunks, table = _chunks(states, weight), weight.to(dtype)
    shared = states.is_cuda or (dtype == torch.float32 and bias is None)
    memory = torch.empty(chunks[0].stop, len(weight), device=states.device) if shared and chunks else None
    for c in chunks:
        logits = head_logits(states[c], table, bias, dtype, memory)
        if forbid_:
            forbid_(logits, c)
        yield c, logits


def _chunks_of_probabilities(ctx, states, weight, bias, targets):
    """Yield (slice, its probabilities [n, V] in fp32): all at once if kept, else computed again by chunks."""
    if ctx.kept is not None:
        yield slice(len(states)), ctx.kept
        return
    memory = None
    for c, logits in _chunks_of_logits(states, weight, bias, ctx.dtype, ctx.forbid_):
        if memory is None:
            memory = torch.empty(logits.shape, device=logits.device)
        p = memory[: len(logits)]
        _logprobs(logits, targets[c], ctx.temperature, p)
        yield c, p
