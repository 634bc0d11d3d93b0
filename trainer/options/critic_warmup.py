"""Critic warm-up: the first batches, in which only the critic trains (``--critic_warmup_steps``).

A number: so many batches. "auto": as long as the critic's error on a new batch, before it learns from it,
falls by a tenth or more; at most a quarter of the run. The error is measured in units of the variance of that
batch's returns. It is a rough measure: from 128 responses it is known to a tenth or so. The policy does not
change meanwhile, so the critic is fitted to one fixed policy (VAPO, arXiv:2504.05118, section 4.1).
"""

import math
from collections.abc import Callable

from torch import Tensor

from trainer import ppo
from trainer.compute.rollout_data import Rollout
from trainer.runs.base import Kept, Learner

AUTO = "auto"  # of --critic_warmup_steps
FALLING = 0.9  # times the error of the batch before: an error above that has stopped falling


class CriticWarmup(Kept):
    """Decides with which batch the actor begins to train, and tells its ``Learner``.

    steps: the flag's value; most: batches after which "auto" ends. ``error``: of the batch before.
    """

    kept = ("begins", "error")

    def __init__(self, learner: Learner, steps: int | str, most: int):
        self.learner = learner
        self.most = most
        self.error: float | None = None
        self.begins = None if steps == AUTO else int(steps)

    @property
    def begins(self) -> int | None:
        """The actor's first batch, None while that is open."""
        first = self.learner.first_batch
        return None if math.isinf(first) else int(first)

    @begins.setter
    def begins(self, batch: int | None) -> None:
        self.learner.first_batch = math.inf if batch is None else batch

    def follow(self, step: int, newest: Rollout, sum_over_processes: Callable[[Tensor], Tensor]) -> None:
        """Take in a new batch with its values and outcomes, before it is learned from."""
        if self.begins is not None:
            return
        moments = sum_over_processes(ppo.moments(newest.values - newest.outcomes, newest.mask))
        squares, count = moments[1:].tolist()
        std = ppo.std_or_zero(sum_over_processes(ppo.moments(newest.outcomes, newest.mask)))
        error = squares / count / (std**2 or 1.0)
        falls = self.error is None or error < FALLING * self.error
        if step >= self.most or not falls:
            self.begins = step
        self.error = error
