"""PPO as pure tensor functions: scores -> rewards of tokens -> advantages, whitened -> losses.

Shapes: B sequences, R response columns. Column t belongs to response token t; ``mask`` [B, R] is True on
response tokens. Losses are *sums* over response tokens, which the caller divides by the token count of the
whole minibatch. Sources: PPO, Schulman et al. 2017 (arXiv:1707.06347); GAE, Schulman et al. 2016
(arXiv:1506.02438); k1/k2/k3, Schulman 2020 (joschu.net/blog/kl-approx.html); a higher upper clip, Yu et al.
2025 (arXiv:2503.14476); dual clip, Ye et al. 2020 (arXiv:1912.09729).
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.compute.batching import in_fp64
from trainer.compute.rollout_data import Rollout

Sum = Callable[[Tensor], Tensor]  # a tensor -> the sum of every process' tensor

ROUNDING = 1e-6  # differences below this share of the numbers are only rounding


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


def token_rewards(
    scores: Tensor,
    response_len: Tensor,
    mask: Tensor,
    kl_penalty: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    """Rewards [B, R]: the sequence's score [B] lands on its last response token, less the part of it that
    ``steps`` [B, R], if any, have on tokens of their own; ``kl_penalty`` [B, R], if any (``--kl_in reward``:
    kl_coef * k1), is taken off every response token."""
    rewards = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    last = response_len[:, None] - 1
    rest = torch.where(scores.isnan(), 0.0, scores).float()[:, None]
    if steps is not None:
        rewards += steps
        rest = rewards.gather(1, last) + rest - steps.sum(1, keepdim=True)
    rewards.scatter_(1, last, rest)
    if kl_penalty is not None:
        rewards -= torch.where(mask, kl_penalty, 0.0)
    return rewards


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), all [B, R] -> (advantages, returns).

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  the value after the last token
    is 0. Returns = A + V. Both are 0 on padding.
    """
    rewards = torch.where(mask, rewards, 0.0)
    values = torch.where(mask, values, 0.0)
    deltas = rewards + gamma * F.pad(values[:, 1:], (0, 1)) - values  # 0 on padding
    advantages = discounted_sums(deltas, gamma * lam)
    return advantages, advantages + values


def discounted_sums(x: Tensor, decay: float) -> Tensor:
    """S_t = x_t + decay S_{t+1} for x [B, R] with 0 on padding. From sums of n columns those of 2n: log2(R)
    operations instead of R, each of which a GPU would have to start."""
    n = 1
    while n < x.shape[1]:
        x = x + decay**n * F.pad(x[:, n:], (0, n))
        n *= 2
    return x


def response_rewards(rewards: Tensor, mask: Tensor, answers: int) -> tuple[Tensor, Tensor]:
    """The sum of each response's token rewards [B, R] -> ([B / answers, answers], a row for each prompt; how
    many of them are scored, [B / answers, 1]). In the place of one without a score stands the others' mean.

    The answers to a prompt are rows that follow one another (``local_positions`` in dataset/data_order.py).
    """
    total = torch.where(mask, rewards, 0.0).sum(1).view(-1, answers)
    return with_mean(total, mask.any(1).view(-1, answers))


def with_mean(total: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [P, n] -> (the same, the row's mean of those that are scored where one is not; their count
    [P, 1])."""
    count = scored.sum(1, keepdim=True)
    mean = torch.where(scored, total, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    return torch.where(scored, total, mean), count


def without_rounding(differences: Tensor, total: Tensor) -> Tensor:
    """``differences`` [P, n] of the numbers ``total`` [P, n], 0 where they are only rounding: below a
    millionth of the row's largest number. So answers that are rewarded alike have no advantage."""
    size = total.abs().amax(1, keepdim=True)
    return torch.where(differences.abs() < ROUNDING * size, 0.0, differences)


def leave_one_out(rewards: Tensor, mask: Tensor, answers: int) -> Tensor:
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740): A = R less the mean R of the prompt's other answers, the
    same for all tokens of a response -> [B, R], 0 on padding. R: the sum of a response's token rewards."""
    total, count = response_rewards(rewards, mask, answers)
    others = (total.sum(1, keepdim=True) - total) / (answers - 1)
    # 1 where all are scored. Else the mean stands for some, and this makes ``others`` of those that are.
    share = count * (answers - 1) / ((count - 1).clamp(min=1) * answers)
    return torch.where(mask, (share * without_rounding(total - others, total)).view(-1, 1), 0.0)


def group_normalized(rewards: Tensor, mask: Tensor, answers: int) -> tuple[Tensor, Tensor]:
    """GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1): A = (R - mean) / std over the prompt's answers,
    the same for all tokens of a response -> (A, std), both [B, R]. The std is that of a sample (answers - 1).

    Without the division by std (Dr. GRPO, arXiv:2503.20783) it is (answers - 1) / answers times
    ``leave_one_out``, so divided by their ``root_mean_square`` the two are equal.
    """
    total, count = response_rewards(rewards, mask, answers)
    centred = without_rounding(total - total.mean(1, keepdim=True), total)
    share = (answers - 1) / (count - 1).clamp(min=1)  # 1 where all are scored
    std = centred.std(1, keepdim=True) * share.sqrt()  # 0 where all answers are rewarded alike
    normalized = torch.where(std == 0, 0.0, centred / std)
    return torch.where(mask, normalized.view(-1, 1), 0.0), std.expand_as(total).reshape(-1, 1).expand_as(mask)


def scored_apart(scores: Tensor, answers: int) -> Tensor:
    """[B], True where the scores [B] of the prompt's answers differ. Where they are equal the advantages say
    nothing; with --kl_in reward they are not 0, because the answers' KL differs. NaN: no score."""
    groups = scores.view(-1, answers)
    groups, _ = with_mean(groups, ~groups.isnan())
    gaps = without_rounding(groups - groups[:, :1], groups)
    return gaps.any(1).repeat_interleave(answers)


def importance_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, cap: float) -> Tensor:
    """min(pi_old / pi_sampler, cap) of each sampled token [B, R], 1 on padding; all 1 where ``cap`` is 0.

    The tokens were drawn by the sampler, in its number type; the ratio's denominator is the training forward.
    Where the two disagree, each token's loss is weighted by this: truncated importance sampling (Ionides
    2008, doi.org/10.1198/106186008X320456).
    """
    if not cap:
        return torch.ones_like(old_logprobs)
    return torch.where(mask, old_logprobs - sampler_logprobs, 0.0).exp().clamp(max=cap)


def effective_sample_size(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, sum_over_processes: Sum
) -> float:
    """(sum w)^2 / (n sum w^2) of w = pi_old / pi_sampler, without a cap, over the n response tokens of the
    whole batch: 1 where sampler and scorer agree, 1/n where a single token has nearly all the weight. NaN
    where a w is too large for fp64."""
    total = sum_over_processes(moments(in_fp64(old_logprobs - sampler_logprobs).exp(), mask))
    return (total[0].square() / (total[1] * total[2])).item()


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """[sum, sum of squares, count] of x under mask, fp64 [3]: add these over processes, then ``mean_std``."""
    x = in_fp64(x)
    mask = mask.to(x.device)
    x = torch.where(mask, x, 0.0)
    return torch.stack([x.sum(), x.square().sum(), mask.sum().double()])


def mean_std(total: Tensor) -> tuple[float, float]:
    """``moments`` summed over all processes -> (mean, population standard deviation) as floats. The deviation
    is 0 where it is only rounding: below a millionth of the mean."""
    sum_, squares, count = total.tolist()
    count = count or 1.0  # no response has a score
    mean = sum_ / count
    std = math.sqrt(max(squares / count - mean * mean, 0.0))
    return mean, 0.0 if std <= ROUNDING * abs(mean) else std


def centred(x: Tensor, mask: Tensor, sum_over_processes: Sum) -> tuple[Tensor, float]:
    """x [B, R] less its mean over the response tokens of the whole batch on all processes -> (the
    differences, their standard deviation). Zeros where that is only rounding.

    sum_over_processes: tensor -> the sum of every process' tensor.
    """
    mean, std = mean_std(sum_over_processes(moments(x, mask)))
    return (x - mean if std else torch.zeros_like(x)), std


def root_mean_square(x: Tensor, mask: Tensor, sum_over_processes: Sum) -> float:
    """sqrt of the mean of x², a float, over the tokens of ``mask`` on all processes; 0 without any."""
    total = sum_over_processes(moments(x, mask))
    return (total[1] / total[2].clamp(min=1)).sqrt().item()


def regression(x: Tensor, y: Tensor, mask: Tensor, sum_over_processes: Sum) -> tuple[float, float]:
    """The line slope * x + intercept that is closest to y (least squares) over the response tokens of the
    whole batch -> (slope, intercept). The slope is at least 0, and 0 where all x or all y are equal."""
    x_total = sum_over_processes(moments(x, mask))
    x_mean, x_std = mean_std(x_total)
    y_mean, y_std = mean_std(sum_over_processes(moments(y, mask)))
    slope = 0.0
    if x_std and y_std:
        products = (in_fp64(x) - x_mean) * (in_fp64(y) - y_mean)
        total = torch.where(mask.to(products.device), products, 0.0).sum()
        covariance = (sum_over_processes(total) / x_total[2]).item()
        slope = max(covariance / x_std**2, 0.0)
    return slope, y_mean - slope * x_mean


def explained_variance(returns: Tensor, values: Tensor, mask: Tensor, sum_over_processes: Sum) -> float:
    """1 - Var(returns - values) / Var(returns) over the response tokens of the whole batch; NaN where all
    returns are equal. returns: discounted sums of rewards; GAE's with lambda below 1 contain the values
    themselves: with them even noise would seem to explain something."""
    _, error_std = mean_std(sum_over_processes(moments(returns - values, mask)))
    _, return_std = mean_std(sum_over_processes(moments(returns, mask)))
    return 1 - (error_std / return_std) ** 2 if return_std else math.nan


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
    mb: Rollout,
    low: float,
    high: float,
    dual: float = 0.0,
    kind: str = "clip",
    kl_in_reward: float = 0.0,
    decay: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token (kind: "clip", "cispo" or "gspo") times its importance weight -> (sum over
    tokens, metrics as sums). logprobs [B, R] of the actor. kl_in_reward: the KL's weight with --kl_in reward,
    in units of the loss; decay: gamma * lambda, what a later token's reward counts in an advantage."""
    log_ratio = torch.where(mb.mask, logprobs - mb.old_logprobs, 0.0)
    ratio = log_ratio.exp()
    advantages = mb.advantages
    if kl_in_reward:  # the advantages have the KL of before the updates; here what was moved since
        advantages = advantages - kl_in_reward * discounted_sums(log_ratio.detach(), decay)
    limited = sequence_ratio(log_ratio, mb.mask) if kind == "gspo" else ratio  # what the clip is of
    if kind == "cispo":
        per_token = cispo_loss(logprobs, limited, advantages, low, high)
    else:
        per_token = clipped_loss(limited, advantages, low, high, dual)
    loss = masked_sum(mb.importance_weights * mb.counted * per_token, mb.mask)
    with torch.no_grad():
        outside = (limited < 1 - low) | (limited > 1 + high)
        metrics = {
            "policy/loss": loss,
            # k3 of the old policy against the new one: what --target_kl stops on
            "policy/approx_kl": masked_sum(ratio - 1 - log_ratio, mb.mask),
            "policy/clip_fraction": masked_sum(outside.float(), mb.mask),
            "policy/ratio": masked_sum(ratio, mb.mask),
        }
    return loss, metrics


def kl_loss(logprobs: Tensor, mb: Rollout) -> Tensor:
    """k2 to the reference times the ratio, which has no gradient, and the importance weight -> the sum over
    tokens. Its gradient is that of today's KL(actor || reference) (arXiv:2510.01555). logprobs [B, R]."""
    ratio = torch.where(mb.mask, logprobs.detach() - mb.old_logprobs, 0.0).exp()
    _, k2, _ = kl_estimators(logprobs, mb.ref_logprobs)
    return masked_sum(mb.importance_weights * ratio * k2, mb.mask)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange: float, scale: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """0.5 max((V - G)^2, (clip(V, V_old ± cliprange) - G)^2), summed -> (sum, metrics as sums).

    All of it in units of ``scale``, the standard deviation of the returns (value_scale.py). cliprange 0: no
    clip, 0.5 (V - G)^2.
    """
    error = ((values - returns) / scale).square()
    change = (values - old_values) / scale
    limit = cliprange or torch.inf
    clipped_error = ((old_values - returns) / scale + change.clamp(-limit, limit)).square()
    loss = 0.5 * masked_sum(torch.max(error, clipped_error), mask)
    clipped = (change.abs() > limit).float() * (clipped_error > error)
    return loss, {"value/loss": loss, "value/clip_fraction": masked_sum(clipped, mask)}
