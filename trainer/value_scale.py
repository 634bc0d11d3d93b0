"""Running scales, so that rewards of any size are learned alike: of the critic's values and of advantages.

    value = critic.scale * head(state)        critic.scale: the standard deviation of the returns

When the scale changes, the head is divided by as much, so no value changes (PopArt: van Hasselt et al. 2016,
arXiv:1602.07714). With the first batch the head's bias is set so that the mean value is the mean return, and
where the values are worse than that mean alone, they become the closest line through them.
"""

import math
from typing import Any

import torch
from torch import Tensor

from model.critic import CriticModel
from trainer import ppo
from trainer.compute.rollout_data import Rollout
from trainer.runs.base import Kept

RATE = 0.1  # of the running variance: it follows the last ten batches or so
GROWTH = 4.0  # times the variance so far, or that of the batch before, is the most that a batch counts with
LARGEST = torch.finfo(torch.float32).max
MISLED = 1.1  # times the returns' variance: values with a larger error are worse than the mean return alone
SMALL = 0.1  # times it: values that vary less say next to nothing
LEAST_SHARE = 0.1  # of the running scale: the least that a batch's advantages are divided by


class RunningScale(Kept):
    """A running standard deviation. It is the same in all processes.

    A batch with an outlier counts little; if the next one is like it, the change is taken over.
    """

    kept = ("batches", "variance", "last")
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


def is_informative(rollout: Rollout, sum_over_processes: ppo.Sum) -> bool:
    """Do the batch's scores differ, or the rewards within its responses? If not, nothing can be learned."""
    found = [ppo.moments(rollout.scores, ~rollout.scores.isnan())]
    if rollout.step_rewards is not None:
        found.append(ppo.moments(rollout.step_rewards, rollout.mask))
    return any(ppo.mean_std(total)[1] > 0 for total in sum_over_processes(torch.stack(found)))


class AdvantageScale(RunningScale):
    """What advantages, and with them KL loss and entropy bonus, are divided by: a batch's own size.

    Where all its scores are equal, or nearly so, its advantages are the noise of critic or KL, which would
    become as large as a lesson, and the KL's weight with it: there it is the size that batches had before.
    """

    def whiten(
        self,
        advantages: Tensor,
        rollout: Rollout,
        informative: bool,
        sum_over_processes: ppo.Sum,
        answers: int,
        group_std: Tensor | None = None,
    ) -> tuple[Tensor, float, float]:
        """Advantages [B, R] -> (the same less their mean, divided by the batch's unit, 0 on padding; their
        standard deviation; the unit). informative: see ``is_informative``.

        answers: of "rloo" and "group" those of a prompt, whose mean is their zero already; only prompts whose
        scores differ count; else 0. ``group_std`` [B, R]: what those of "group" are divided by already.
        """
        mask = rollout.mask
        if answers:
            differ = ppo.scored_apart(rollout.scores, answers)
            sizes = advantages if group_std is None else group_std
            std = ppo.root_mean_square(sizes, mask & differ[:, None], sum_over_processes)
        else:
            advantages, std = ppo.centred(advantages, mask, sum_over_processes)
        unit = self.unit(std, informative)
        divisor = unit if group_std is None else 1.0
        return torch.where(mask, advantages / divisor, 0.0), std, unit

    def unit(self, size: float, informative: bool) -> float:
        """size: of the batch's advantages, before they are divided; informative: not all scores are equal."""
        if not (informative and 0 < size <= LARGEST):
            return max(size, self.std or 1.0)
        unit = max(size, LEAST_SHARE * self.std)
        self.follow(size**2)
        return unit


class ValueScale(RunningScale):
    """Keeps ``critic.scale`` at the running standard deviation of a batch's returns. Batches whose scores are
    all equal do not change it: with --kl_in reward their returns differ by the KL only."""

    def __init__(self, critic: CriticModel):
        self.critic = critic

    def rescale_critic(
        self,
        values: Tensor,
        outcomes: Tensor,
        mask: Tensor,
        informative: bool,
        sum_over_processes: ppo.Sum,
    ) -> Tensor:
        """Take in the outcomes [B, R] of a batch before it is learned from -> the critic's values [B, R] from
        now on. The first batch sets their mean, and their slope where it is far off; later they stay."""
        total = sum_over_processes(ppo.moments(outcomes, mask))
        error = sum_over_processes(ppo.moments(outcomes - values, mask))
        # Too large, or NaN: no optimizer step will be made of this batch, and no scale either.
        if not (total[1] <= LARGEST and error[1] <= LARGEST):
            return values
        variance = ppo.mean_std(total)[1] ** 2
        if not self.batches:
            slope = 1.0
            intercept, error_std = ppo.mean_std(error)
            _, spread = ppo.mean_std(sum_over_processes(ppo.moments(values, mask)))
            far_off = error_std**2 > MISLED * variance or spread**2 < SMALL * variance
            if variance and far_off:  # equal returns say nothing about a slope
                slope, intercept = ppo.regression(values, outcomes, mask, sum_over_processes)
            self.critic.map_values(slope, intercept)
            values = torch.where(mask, slope * values + intercept, 0.0)
        if variance and informative:
            self.follow(variance)
            self.critic.rescale(self.std)
        return values

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": self.critic.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.critic.scale = state["scale"]
