"""PPO as pure tensor functions: scores -> advantages -> losses. No I/O, no modules, no state.

Shapes: B sequences, R response columns. Column t belongs to response token t; its state (what the policy and
the critic had seen) is sequence position prompt_len + t - 1. ``mask`` [B, R] is True on response tokens.

Losses are *sums* over response tokens. The caller divides by the token count of the whole minibatch, over
all micro-batches and processes: only then does an update not depend on how the minibatch was cut.

Sources: PPO, Schulman et al. 2017 (arXiv:1707.06347); GAE, Schulman et al. 2016 (arXiv:1506.02438);
k1/k2/k3, Schulman 2020 (joschu.net/blog/kl-approx.html); expert balance, Fedus et al. 2021
(arXiv:2101.03961).
"""

import math

import torch
import torch.nn.functional as F


def length_mask(lengths, width):
    """lengths [B] -> bool [B, width], True where column < length."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def masked_sum(x, mask):
    """Sum of x where mask is True. ``where``, not ``*``: padding may hold anything, even NaN."""
    return torch.where(mask, x, 0.0).sum()


def kl_estimators(logprobs, ref_logprobs):
    """Per-token estimates of KL(policy || reference) from samples of the policy: (k1, k2, k3), each [B, R].

    k1 = log(p/q) is unbiased and may be negative; k2 = k1^2 / 2 is biased, but its on-policy *gradient* is
    that of the KL; k3 = q/p - 1 + k1 is unbiased and never negative, but its gradient is that of KL(q || p).
    """
    k1 = logprobs - ref_logprobs
    return k1, 0.5 * k1.square(), torch.exp(-k1) - 1 + k1


def token_rewards(scores, response_len, mask, kl_penalty=None):
    """The sequence's score [B] lands on its last response token; ``kl_penalty`` [B, R] is taken off each."""
    rewards = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    rewards.scatter_(1, response_len[:, None] - 1, scores.float()[:, None])
    if kl_penalty is not None:
        rewards -= torch.where(mask, kl_penalty, 0.0)
    return rewards


def gae(rewards, values, mask, gamma, lam):
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), all [B, R] -> (advantages, returns).

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  the value after the last token
    is 0. Returns = A + V, what the critic is fitted to. Both are 0 on padding.
    """
    values = torch.where(mask, values, 0.0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + gamma * lam * next_advantage, 0.0)
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def moments(x, mask):
    """[sum, sum of squares, count] of x under mask, fp64 [3]: add these over processes, then ``mean_std``."""
    x = torch.where(mask, x, 0.0).double()
    return torch.stack([x.sum(), x.square().sum(), mask.sum().double()])


def mean_std(total):
    """``moments`` summed over all processes -> (mean, population standard deviation) as floats."""
    mean = total[0] / total[2]
    variance = (total[1] / total[2] - mean.square()).clamp(min=0)
    return mean.item(), variance.sqrt().item()


def policy_loss(logprobs, old_logprobs, advantages, mask, clip_epsilon):
    """Clipped surrogate (arXiv:1707.06347, eq. 7), token level -> (sum, metrics as sums over tokens).

    approx_kl is k3 of the old policy against the new one: it is what ``--target_kl`` stops on.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_epsilon, 1 + clip_epsilon)
    loss = masked_sum(-torch.min(ratio * advantages, clipped * advantages), mask)
    with torch.no_grad():
        metrics = {
            "policy/approx_kl": masked_sum(ratio - 1 - log_ratio, mask),
            "policy/clip_fraction": masked_sum(((ratio - 1).abs() > clip_epsilon).float(), mask),
            "policy/ratio": masked_sum(ratio, mask),
        }
    return loss, metrics


def value_loss(values, old_values, returns, mask, cliprange):
    """0.5 max((V - G)^2, (clip(V, V_old ± cliprange) - G)^2), summed -> (sum, metrics as sums)."""
    clipped = old_values + (values - old_values).clamp(-cliprange, cliprange)
    error, clipped_error = (values - returns).square(), (clipped - returns).square()
    loss = 0.5 * masked_sum(torch.max(error, clipped_error), mask)
    with torch.no_grad():
        metrics = {
            "value/error": masked_sum(error, mask),
            "value/clip_fraction": masked_sum((clipped_error > error).float(), mask),
        }
    return loss, metrics


def load_balance_loss(router_logits, lengths, top_k):
    """Mixture-of-experts load balancing, per sequence (arXiv:2101.03961, eq. 4), summed over B and layers.

    router_logits: one [N, E] a layer, of the tokens of B sequences row by row; lengths [B] sum to N. Per
    sequence, so that the cut into micro-batches does not change it. E * sum_e f_e P_e, f_e the share of a
    sequence's choices that went to expert e, P_e its mean gate probability: 1 a layer when balanced.
    """
    total = torch.zeros((), device=lengths.device)
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    for logits in router_logits:
        experts = logits.shape[-1]
        gate = logits.float().softmax(-1)
        chosen = F.one_hot(gate.topk(top_k, dim=-1).indices, experts).sum(-2).float()
        per_sequence = torch.zeros(len(lengths), experts, device=lengths.device)
        share = per_sequence.index_add(0, row, chosen) / (lengths[:, None] * top_k)
        mean_gate = per_sequence.index_add(0, row, gate) / lengths[:, None]
        total = total + experts * (share * mean_gate).sum()
    return total


def cosine_lr(peak, step, total, warmup=0):
    """``warmup`` steps that rise in equal parts to ``peak``, then a cosine from ``peak`` down to peak / 10 at
    the last of ``total`` optimizer steps (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5)."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = min((step - warmup) / max(total - warmup - 1, 1), 1.0)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
