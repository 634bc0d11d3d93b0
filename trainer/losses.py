"""PPO's losses as functions of tensors: policy (clipped, CISPO, GSPO), value, KL to the reference.

Shapes: B sequences, R response columns. Column t belongs to response token t. Losses are *sums* over response
tokens, which the caller divides by the token count of the whole minibatch. Padding is in no loss
(``action_mask``). ``evaluate_tokens`` in train_ppo.py chooses the response tokens of the policy loss
(``loss_mask``).

Sources: PPO, Schulman et al. 2017 (arXiv:1707.06347); k1/k2/k3, Schulman 2020
(joschu.net/blog/kl-approx.html); a higher upper clip, Yu et al. 2025 (arXiv:2503.14476); dual clip, Ye et al.
2020 (arXiv:1912.09729).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.advantages import discounted_sums
from trainer.compute.batch import Batch


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x where mask is True. ``where``, not ``*``: padding may hold anything, even NaN."""
    return torch.where(mask, x, 0.0).sum()


def kl_estimators(logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per-token estimates of KL(policy || reference) from samples of the policy: (k1, k2, k3), each [B, R].

    k1 = log(p/q) is unbiased and may be negative; k2 = k1^2 / 2 is biased, but its on-policy *gradient* is
    that of the KL; k3 = q/p - 1 + k1 is unbiased and never negative, but its gradient is that of KL(q || p).
    """
    k1 = logprobs - ref_logprobs
    return k1, 0.5 * k1.square(), torch.exp(-k1) - 1 + k1


def importance_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, cap: float) -> Tensor:
    """min(pi_old / pi_sampler, cap) of each sampled token [B, R], 1 on padding; all 1 where ``cap`` is 0.

    PPO's ratio divides by pi_old of the training forward, which may differ from pi_sampler: the sampler draws
    the tokens in its own number type. Where the two disagree, each token's loss is weighted by this:
    truncated importance sampling (Ionides 2008, doi.org/10.1198/106186008X320456).
    """
    if not cap:
        return torch.ones_like(old_logprobs)
    return torch.where(mask, old_logprobs - sampler_logprobs, 0.0).exp().clamp(max=cap)


def choose_tokens(share: float, entropy: Tensor, mask: Tensor, gather: Callable) -> Tensor:
    """``--entropy_top``: the share of response tokens at which the old actor's entropy [B, R] is highest,
    over the whole batch and all processes; the policy loss is of these only (Wang et al. 2025,
    arXiv:2506.01939).

    -> bool [B, R]. gather: x -> the x of every process.
    """
    everyone = torch.cat(gather(entropy[mask].cpu()))
    if not len(everyone):  # no response has a score
        return mask
    count = max(1, round(share * len(everyone)))
    least = everyone.kthvalue(len(everyone) - count + 1).values.item()
    return (entropy >= least) & mask


def clipped_loss(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv:1707.06347, eq. 7) of each token, at most
    dual * |A| where A is negative (0: no limit). All [B, R]."""
    per_token = -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual:
        per_token = torch.where(advantages < 0, torch.min(per_token, -dual * advantages), per_token)
    return per_token


def cispo_loss(logprobs: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-clip(r, 1 - low, 1 + high) A log pi of each token, the clipped ratio without a gradient (CISPO,
    MiniMax 2025, arXiv:2506.13585, eqs. 4 and 5): the clip takes no token's gradient away. All [B, R]."""
    return -ratio.clamp(1 - low, 1 + high).detach() * advantages * logprobs


def sequence_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """exp(mean of a response's log ratios) for each of its tokens, [B, R] (GSPO, Zheng et al. 2025,
    arXiv:2507.18071). The gradient of each is that of its own token's log-prob (their section 4.3), so tokens
    may differ in their advantages. log_ratio is 0 on padding."""
    mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return (mean.detach() + (log_ratio - log_ratio.detach())).exp()


def policy_loss(
    logprobs: Tensor,
    mb: Batch,
    low: float,
    high: float,
    dual: float = 0.0,
    kind: str = "clip",
    kl_in_reward: float = 0.0,
    decay: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token (kind: "clip", "cispo" or "gspo") times its importance weight -> (sum over
    tokens, metrics as sums). logprobs [B, R] of the actor. kl_in_reward: the KL's weight with --kl_in reward,
    in units of the loss; decay: gamma * lambda, by which each later token's reward counts less."""
    log_ratio = torch.where(mb.action_mask, logprobs - mb.old_logprobs, 0.0)
    ratio = log_ratio.exp()
    advantages = mb.advantages
    # --kl_in reward: also take off what the updates added to the KL.
    if kl_in_reward:
        added = discounted_sums(log_ratio.detach(), decay, mb.action_order)
        advantages = advantages - kl_in_reward * added
    limited = sequence_ratio(log_ratio, mb.action_mask) if kind == "gspo" else ratio  # which the clip limits
    if kind == "cispo":
        per_token = cispo_loss(logprobs, limited, advantages, low, high)
    else:
        per_token = clipped_loss(limited, advantages, low, high, dual)
    loss = masked_sum(mb.importance_weights * mb.loss_mask * per_token, mb.action_mask)
    with torch.no_grad():
        outside = (limited < 1 - low) | (limited > 1 + high)
        metrics = {
            "policy/loss": loss,
            # k3 of the old policy against the new one: what --target_kl stops on
            "policy/approx_kl": masked_sum(ratio - 1 - log_ratio, mb.action_mask),
            "policy/clip_fraction": masked_sum(outside.float(), mb.action_mask),
            "policy/ratio": masked_sum(ratio, mb.action_mask),
        }
    return loss, metrics


def kl_loss(logprobs: Tensor, mb: Batch) -> Tensor:
    """k2 to the reference times the ratio, which has no gradient, and the importance weight -> the sum over
    tokens. Its gradient is that of today's KL(actor || reference) (arXiv:2510.01555). logprobs [B, R]."""
    ratio = torch.where(mb.action_mask, logprobs.detach() - mb.old_logprobs, 0.0).exp()
    _, k2, _ = kl_estimators(logprobs, mb.ref_logprobs)
    return masked_sum(mb.importance_weights * ratio * k2, mb.action_mask)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange: float, scale: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """0.5 max((V - G)^2, (clip(V, V_old ± cliprange) - G)^2), summed -> (sum, metrics as sums).

    All of it in units of ``scale``, the standard deviation of the returns (``ValueScale``). cliprange 0: no
    clip, 0.5 (V - G)^2.
    """
    error = ((values - returns) / scale).square()
    change = (values - old_values) / scale
    limit = cliprange or torch.inf
    clipped_error = ((old_values - returns) / scale + change.clamp(-limit, limit)).square()
    loss = 0.5 * masked_sum(torch.max(error, clipped_error), mask)
    clipped = (change.abs() > limit).float() * (clipped_error > error)
    return loss, {"value/loss": loss, "value/clip_fraction": masked_sum(clipped, mask)}
