"""Critic warm-up: the first batches, in which only the critic trains (``--critic_warmup_steps``).

A number: so many batches. "auto": as long as the critic's error on a new batch, before it learns from it,
falls by a tenth or more; at most a quarter of the run. The error is measured in units of the variance of that
batch's returns. It is a rough measure: from 128 responses it is known to a tenth or so. The policy does not
change meanwhile, so the critic is fitted to one fixed policy (VAPO, arXiv:2504.05118, section 4.1).
"""

import math

from trainer import ppo
from trainer.runs.base import Kept

AUTO = "auto"  # of --critic_warmup_steps
FALLING = 0.9  # times the error of the batch before: an error above that has stopped falling


class CriticWarmup(Kept):
    """Decides with which batch the actor begins to train, and tells its ``Learner``.

    steps: the flag's value; most: batches after which "auto" ends. ``error``: of the batch before.
    """

    kept = ("begins", "error")

    def __init__(self, learner, steps, most):
        self.learner = learner
        self.most = most
        self.error = None
        self.begins = None if steps == AUTO else steps

    @property
    def begins(self) -> int | None:
        """The actor's first batch, None while that is open."""
        return None if self.learner.first_batch == math.inf else self.learner.first_batch

    @begins.setter
    def begins(self, batch):
        self.learner.first_batch = math.inf if batch is None else batch

    def note(self, batch, rollout, returns, sum_over_processes):
        """Before batch number ``batch`` is learned from; returns [B, R]: of Monte Carlo."""
        if self.begins is not None:
            return
        squares, count = sum_over_processes(ppo.moments(rollout.values - returns, rollout.mask))[1:].tolist()
        std = ppo.std_or_zero(sum_over_processes(ppo.moments(returns, rollout.mask)))
        error = squares / count / (std**2 or 1.0)
        falls = self.error is None or error < FALLING * self.error
        if batch >= self.most or not falls:
            self.begins = batch
        self.error = error
