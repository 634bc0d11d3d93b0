"""PPO as pure tensor functions: scores -> rewards of tokens -> advantages, whitened -> losses. No I/O, no
modules, no state.

Shapes: B sequences, R response columns. Column t belongs to response token t; its state (what the policy and
the critic had seen) is sequence position prompt_len + t - 1. ``mask`` [B, R] is True on response tokens.

The KL to the reference is added in one of two places: in ``policy_objective`` as k2 (``--kl_in loss``, the
default), or in ``token_rewards`` as k1 taken off the rewards (``--kl_in reward``).

A new estimator of advantages is one function here, called in the place of ``gae`` by ``estimate_advantages``
of train_ppo.py.

Losses are *sums* over response tokens. The caller divides by the token count of the whole minibatch, over
all micro-batches and processes: only then does an update not depend on how the minibatch was cut.

Sources: PPO, Schulman et al. 2017 (arXiv:1707.06347); GAE, Schulman et al. 2016 (arXiv:1506.02438);
k1/k2/k3, Schulman 2020 (joschu.net/blog/kl-approx.html).
"""

import torch

from trainer.compute.batching import send

LEAST_STD = 1e-4  # advantages that are all equal: nothing to learn from, and nothing to divide by


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
    """Rewards [B, R]: the sequence's score [B] lands on its last response token; ``kl_penalty`` [B, R], if
    any (``--kl_in reward``: kl_coef * k1), is taken off every response token."""
    rewards = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    rewards.scatter_(1, response_len[:, None] - 1, scores.float()[:, None])
    if kl_penalty is not None:
        rewards -= torch.where(mask, kl_penalty, 0.0)
    return rewards


def gae(rewards, values, mask, gamma, lam):
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), all [B, R] -> (advantages, returns).

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  the value after the last token
    is 0. Returns = A + V, what the critic is fitted to. Both are 0 on padding. Computed on the CPU: the loop
    has seven small operations a column, and a GPU takes longer to start one than a CPU to do it.
    """
    device, values = values.device, torch.where(mask, values, 0.0)
    rewards, values, mask = torch.stack([rewards, values, mask.to(values.dtype)]).cpu()  # one copy
    mask = mask > 0
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + gamma * lam * next_advantage, 0.0)
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return send(torch.stack([advantages, advantages + values]), device).unbind()


def moments(x, mask):
    """[sum, sum of squares, count] of x under mask, fp64 [3]: add these over processes, then ``mean_std``."""
    x = torch.where(mask, x, 0.0).double()
    return torch.stack([x.sum(), x.square().sum(), mask.sum().double()])


def mean_std(total):
    """``moments`` summed over all processes -> (mean, population standard deviation) as floats."""
    mean = total[0] / total[2]
    variance = (total[1] / total[2] - mean.square()).clamp(min=0)
    mean, std = torch.stack([mean, variance.sqrt()]).tolist()
    return mean, std


def whiten(x, mask, sum_over_processes):
    """x [B, R] less its mean, divided by its standard deviation, both over the response tokens of the whole
    batch on all processes -> (whitened [B, R], 0 on padding; the standard deviation as a float).

    ``estimate_advantages`` of train_ppo.py applies it to every batch's advantages, after ``gae``. Returns are
    not whitened.

    sum_over_processes: tensor -> the sum of every process' tensor.
    """
    mean, std = mean_std(sum_over_processes(moments(x, mask)))
    std = max(std, LEAST_STD)
    return torch.where(mask, (x - mean) / std, 0.0), std


def explained_variance(returns, values, mask, sum_over_processes):
    """1 - Var(returns - values) / Var(returns) over the response tokens of the whole batch: 1 for a critic
    that foresees every return, 0 for one that says the same everywhere. Returns of lambda < 1 contain the
    values themselves: then a useless critic can look good."""
    _, error_std = mean_std(sum_over_processes(moments(returns - values, mask)))
    _, return_std = mean_std(sum_over_processes(moments(returns, mask)))
    return 1 - (error_std / max(return_std, 1e-8)) ** 2


def rollout_metrics(rollout):
    """{name: (sum, count)}: KL to the reference, and how far the sampler's log-probs are from the
    scorer's."""
    mask, tokens = rollout.mask, rollout.response_len.sum()
    k1, k2, k3 = kl_estimators(rollout.old_logprobs, rollout.ref_logprobs)
    gap = (rollout.sampler_logprobs - rollout.old_logprobs).abs()
    per_token = {"kl/k1": k1, "kl/k2": k2, "kl/k3": k3, "rollout/sampler_gap": gap}
    sums = {name: (masked_sum(x, mask), tokens) for name, x in per_token.items()}
    return sums | {"kl/sequence": (masked_sum(k1, mask), len(rollout.tokens))}


def policy_objective(logprobs, mb, clip_epsilon, kl_weight):
    """What the actor minimises: clipped policy loss + kl_weight * k2 to the reference, summed over tokens.

    logprobs [B, R] of the actor; mb: the micro-batch, rows of a ``Rollout``; kl_weight: in units of the loss
    a nat, 0 leaves the KL out. -> (sum, metrics as sums over tokens).
    """
    loss, metrics = policy_loss(logprobs, mb.old_logprobs, mb.advantages, mb.mask, clip_epsilon)
    total = loss
    if kl_weight:
        k2 = kl_estimators(logprobs, mb.ref_logprobs)[1]
        total = total + kl_weight * masked_sum(k2, mb.mask)
    return total, metrics | {"policy/loss": loss}


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
