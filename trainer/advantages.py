"""Scores -> rewards of tokens -> advantages and returns: GAE, RLOO, GRPO, REINFORCE, and their whitening.

Shapes: B sequences, R response columns. Column t belongs to response token t; ``mask`` [B, R] is the action
mask, True on response tokens. ``estimate`` in train_ppo.py chooses the estimator (--advantage).

Whitening: advantages less their mean (``centred``), divided by ``AdvantageScale``, so that rewards of any
size are learned alike. RLOO's and GRPO's have the mean 0 already, and GRPO's are divided by the standard
deviation of their group. The KL to the reference is in losses.py. The critic's values have a scale too
(``ValueScale``):

    value = critic.scale * head(state)        critic.scale: the standard deviation of the returns

When that scale changes, the head is divided by as much, so no value changes (PopArt: van Hasselt et al. 2016,
arXiv:1602.07714). With the first batch the head's bias is set so that the mean value is the mean return, and
where the values are worse than that mean alone, or nearly constant, they are replaced by their least-squares
fit to the returns.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from model.critic import CriticModel
from trainer.compute.batch import Batch
from trainer.compute.batching import in_fp64, send
from trainer.generation.stops import decode
from trainer.runs.base import SavedAttributes

Sum = Callable[[Tensor], Tensor]  # a tensor -> the sum of every process' tensor

ROUNDING = 1e-6  # differences below this share of the numbers are only rounding
RATE = 0.1  # of the running variance: it follows the last ten batches or so
GROWTH = 4.0  # a batch's variance counts at most so many times the running one, or that of the batch before
LARGEST = torch.finfo(torch.float32).max
# Of the returns' variance:
WORSE_THAN_MEAN = 1.1  # times it: values with a larger error are worse than the mean return alone
NEARLY_CONSTANT = 0.1  # times it: values that vary less say next to nothing
LEAST_SHARE = 0.1  # of the running scale: the least that a batch's advantages are divided by


# --------------------------------------------------------------------- scores -> rewards of tokens -> returns


def token_rewards(
    scores: Tensor,
    response_len: Tensor,
    mask: Tensor,
    kl_penalty: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    """Rewards [B, R] of tokens. Each response's score [B] lands on its last token. If there are ``steps``
    [B, R], rewards at tokens inside the response, they land there, and the last token gets the rest of the
    score. ``kl_penalty`` [B, R] (``--kl_in reward``: kl_coef * k1) is taken off every token."""
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


def step_rewards(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> Tensor | None:
    """-> [B, R] fp32 on the batch's device: the sum of the steps that end with each token, and the rewards
    of turns; None without either. ``RawScores.steps``: [(character offset, score)] of each text, which is
    that of the response or of its last turn."""
    steps = batch.raw.steps
    if not steps:
        return batch.turn_rewards
    rewards = torch.zeros(batch.sampler_logprobs.shape)
    rows = zip(steps, batch.texts, batch.responses(), batch.last_turns(), strict=True)
    for row, (pairs, text, ids, first) in enumerate(rows):
        places = token_places([offset for offset, _ in pairs], text, ids[first:], tokenizer)
        for place, (_, score) in zip(places, pairs, strict=True):
            rewards[row, first + place] += score
    rewards = send(rewards, batch.tokens.device)
    return rewards if batch.turn_rewards is None else rewards + batch.turn_rewards


def token_places(
    offsets: Sequence[int], text: str, ids: list[int], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Character offsets in the text of a response -> the places of their tokens. The token of a character is
    the first after which the decoded text reaches and includes it. A later token may hide it again: with byte
    fallback, the two bytes of "é" and the first of "€" decode to three U+FFFD, those of both to "é€". The end
    of the text, or a character that only the whole decodes to: the last token."""

    @cache
    def decoded(count):
        return decode(tokenizer, ids[:count])

    def place(offset):
        if offset >= len(text):
            return len(ids) - 1
        beginning = text[: offset + 1]
        token = bisect_left(
            range(1, len(ids)), True, key=lambda count: decoded(count)[: offset + 1] == beginning
        )
        # An incomplete character is as long as its bytes, or longer.
        for count in range(token, 0, -1):
            if len(decoded(count)) <= offset:
                break
            if decoded(count)[: offset + 1] == beginning:
                token = count - 1
        return token

    return [place(offset) for offset in offsets]


# In a response of several turns time goes from one sampled token to the next: observations are no steps.
# ``order`` is ``Batch.action_order``, None where every response token was sampled.


def actions_first(x: Tensor, order: Tensor | None) -> Tensor:
    """x [B, R] with the columns of each row in this order: those of its sampled tokens stand together."""
    return x if order is None else x.gather(1, order)


def in_place(x: Tensor, order: Tensor | None) -> Tensor:
    """What ``actions_first`` made, with each column at its own place again."""
    return x if order is None else torch.empty_like(x).scatter_(1, order, x)


def discounted_sums(x: Tensor, decay: float, order: Tensor | None = None) -> Tensor:
    """S_t = x_t + decay S_{t+1} for x [B, R] with 0 on padding and observations; t + 1 is the next sampled
    token. From sums of n columns those of 2n: log2(R) operations instead of R, each of which a GPU would have
    to start."""
    x = actions_first(x, order)
    n = 1
    while n < x.shape[1]:
        x = x + decay**n * F.pad(x[:, n:], (0, n))
        n *= 2
    return in_place(x, order)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, order: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), all [B, R] -> (advantages, returns).

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  t + 1 is the next sampled token,
    and the value after the last one is 0. Returns = A + V. Both are 0 on padding and observations.
    """
    rewards = torch.where(mask, rewards, 0.0)
    values = torch.where(mask, values, 0.0)
    following = in_place(F.pad(actions_first(values, order)[:, 1:], (0, 1)), order)  # V_{t+1}
    deltas = rewards + gamma * following - values  # 0 on padding and observations
    advantages = discounted_sums(deltas, gamma * lam, order)
    return advantages, advantages + values


# --------------------------------------------------------------------------- the answers to a prompt compared


def response_rewards(rewards: Tensor, mask: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """The sum of each response's token rewards [B, R] -> ([B / group_size, group_size], a row for each
    prompt; how many of them are scored, [B / group_size, 1]). A response without a score gets the mean of the
    prompt's others.

    The answers to a prompt are rows that follow one another (``local_positions`` in dataset/lm_dataset.py).
    """
    total = torch.where(mask, rewards, 0.0).sum(1).view(-1, group_size)
    return with_mean(total, mask.any(1).view(-1, group_size))


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


def leave_one_out(rewards: Tensor, mask: Tensor, group_size: int) -> Tensor:
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740): A = R less the mean R of the prompt's other answers, the
    same for all tokens of a response -> [B, R], 0 on padding. R: the sum of a response's token rewards."""
    total, count = response_rewards(rewards, mask, group_size)
    others = (total.sum(1, keepdim=True) - total) / (group_size - 1)
    # 1 where all are scored; else it corrects for unscored answers, which were filled with the mean.
    share = count * (group_size - 1) / ((count - 1).clamp(min=1) * group_size)
    return torch.where(mask, (share * without_rounding(total - others, total)).view(-1, 1), 0.0)


def group_normalized(rewards: Tensor, mask: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1): A = (R - mean) / std over the prompt's answers,
    the same for all tokens of a response -> (A, std), both [B, R]. The std is that of a sample (group_size -
    1).

    Without the division by std (Dr. GRPO, arXiv:2503.20783) it is (group_size - 1) / group_size times
    ``leave_one_out``, so divided by their ``root_mean_square`` the two are equal.
    """
    total, count = response_rewards(rewards, mask, group_size)
    centred = without_rounding(total - total.mean(1, keepdim=True), total)
    share = (group_size - 1) / (count - 1).clamp(min=1)  # 1 where all are scored
    std = centred.std(1, keepdim=True) * share.sqrt()  # 0 where all answers are rewarded alike
    normalized = torch.where(std == 0, 0.0, centred / std)
    return torch.where(mask, normalized.view(-1, 1), 0.0), std.expand_as(total).reshape(-1, 1).expand_as(mask)


def scored_apart(scores: Tensor, group_size: int) -> Tensor:
    """[B], True where the scores [B] of the prompt's answers differ. Where they are equal the advantages say
    nothing; with --kl_in reward they are not 0, because the answers' KL differs. NaN: no score."""
    groups = scores.view(-1, group_size)
    groups, _ = with_mean(groups, ~groups.isnan())
    gaps = without_rounding(groups - groups[:, :1], groups)
    return gaps.any(1).repeat_interleave(group_size)


# --------------------------------------------------------------------------------- moments over all processes


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


def group_spread(sizes: Tensor, batch: Batch, group_size: int, sum_over_processes: Sum) -> float:
    """The size of RLOO's and GRPO's advantages: the root mean square of ``sizes`` [B, R] over the groups
    whose scores differ. sizes: of RLOO the advantages, of GRPO each group's standard deviation. The
    advantages of a group have the mean 0 already."""
    apart = scored_apart(batch.scores, group_size)
    return root_mean_square(sizes, batch.action_mask & apart[:, None], sum_over_processes)


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


def scores_differ(batch: Batch, sum_over_processes: Sum) -> bool:
    """Do the batch's scores differ, or the rewards within its responses? If not, nothing can be learned."""
    parts = [moments(batch.scores, ~batch.scores.isnan())]
    if batch.step_rewards is not None:
        parts.append(moments(batch.step_rewards, batch.action_mask))
    return any(mean_std(total)[1] > 0 for total in sum_over_processes(torch.stack(parts)))


class RunningScale(SavedAttributes):
    """A running standard deviation. It is the same in all processes.

    A batch with an outlier counts little; if the next one is like it, the change is taken over.
    """

    saved = ("batches", "variance", "last")
    batches = 0
    variance = 0.0
    last = 0.0  # the variance of the batch before

    @property
    def std(self) -> float:
        """0 before the first batch."""
        return math.sqrt(self.variance)

    def follow(self, variance: float) -> None:
        """Take in the variance of a batch, above 0."""
        self.batches += 1
        limit = GROWTH * max(self.variance, self.last) if self.variance else math.inf
        self.variance += max(1 / self.batches, RATE) * (min(variance, limit) - self.variance)
        self.last = variance


class AdvantageScale(RunningScale):
    """What a batch's advantages are divided by. KL loss and entropy bonus are divided by it too.

    It is the advantages' own size. Where all scores are equal, or nearly so, the advantages are mostly the
    noise of critic or KL. Divided by their own size, this noise would become as large as a lesson, and so
    would the KL's weight. So with equal scores the divisor is no less than the size that earlier batches had
    (1 before any), and with others no less than a tenth of it.
    """

    def whiten(
        self, batch: Batch, advantages: Tensor, size: float, has_signal: bool, divided: bool = False
    ) -> None:
        """Fill the batch's advantages: ``advantages`` [B, R], less their mean already, divided by the scale,
        0 on padding. size: of ``centred`` their standard deviation, else that of ``group_spread``. divided:
        of GRPO, whose advantages are divided by their group's standard deviation already. Then only KL and
        entropy are divided by the scale."""
        batch.advantage_std = size
        batch.advantage_scale = self.divisor(size, has_signal)
        divisor = 1.0 if divided else batch.advantage_scale
        batch.advantages = torch.where(batch.action_mask, advantages / divisor, 0.0)

    def divisor(self, size: float, has_signal: bool) -> float:
        """-> what they are divided by. size: of the batch's advantages; has_signal: ``scores_differ``."""
        if not (has_signal and 0 < size <= LARGEST):
            return max(size, self.std or 1.0)
        divisor = max(size, LEAST_SHARE * self.std)
        self.follow(size**2)
        return divisor


class ValueScale(RunningScale):
    """Keeps ``critic.scale`` at the running standard deviation of a batch's returns. Batches whose scores are
    all equal do not change it: with --kl_in reward their returns differ by the KL only."""

    def __init__(self, critic: CriticModel):
        self.critic = critic

    def fit(self, batch: Batch, has_signal: bool, sum_over_processes: Sum) -> None:
        """Change the critic by the Monte-Carlo returns of a batch, before the batch is learned from. The
        first batch sets the mean of the critic's values, and their slope where it is far off;
        ``batch.values`` then are the new ones. Later batches change the scale alone, and no value."""
        values = batch.values
        mask = batch.action_mask
        total = sum_over_processes(moments(batch.mc_returns, mask))
        error = sum_over_processes(moments(batch.mc_returns - values, mask))
        # Too large, or NaN: no optimizer step will be made of this batch, and no scale either.
        if not (total[1] <= LARGEST and error[1] <= LARGEST):
            return
        variance = mean_std(total)[1] ** 2
        if not self.batches:
            slope = 1.0
            intercept, error_std = mean_std(error)
            _, spread = mean_std(sum_over_processes(moments(values, mask)))
            misleading = error_std**2 > WORSE_THAN_MEAN * variance
            flat = spread**2 < NEARLY_CONSTANT * variance
            if variance and (misleading or flat):  # equal returns say nothing about a slope
                slope, intercept = regression(values, batch.mc_returns, mask, sum_over_processes)
            self.critic.map_values(slope, intercept)
            batch.values = torch.where(mask, slope * values + intercept, 0.0)
        if variance and has_signal:
            self.follow(variance)
            self.critic.rescale(self.std)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": self.critic.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.critic.scale = state["scale"]
