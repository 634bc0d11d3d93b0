"""The scale of the critic's values: they are learned in units of the returns' standard deviation.

AdamW moves every weight by about the learning rate, however large the error. So a critic that has to say 100
would need a hundred times the steps of one that has to say 1. Therefore

    value = critic.scale * head(state)        critic.scale: the standard deviation of the returns

and the value loss and its clip are in units of that scale too (``value_loss`` in ppo.py). A run whose rewards
(and ``--kl_coef``) are 100 times as large then learns the same. When the scale changes, the head is divided
by as much, so no value changes (PopArt: van Hasselt et al. 2016, arXiv:1602.07714).

With the first batch the head's bias is set so that the mean value is the mean return: a reward that is
always about 50 need not be learned step by step either.
"""

import math

import torch

from trainer import ppo

RATE = 0.1  # of the running variance: it follows the last ten batches or so
GROWTH = 4.0  # times the variance so far is the most that a batch counts with: for outliers


class ValueScale:
    """Keeps ``critic.scale`` at the running standard deviation of a batch's returns. Checkpoints keep it
    (``state_dict``). It is the same in all processes."""

    def __init__(self, critic):
        self.critic, self.batches, self.variance = critic, 0, 0.0

    def update(self, rollout, returns, sum_over_processes):
        """Take in a batch's Monte-Carlo returns [B, R] before the batch is learned from. The first batch also
        shifts the values, those in ``rollout.values`` included."""
        mask = rollout.mask
        total = sum_over_processes(ppo.moments(returns, mask))
        if total[1] > torch.finfo(torch.float32).max:  # no step will be made of it: the loss is not finite
            return
        if not self.batches:
            shift = ppo.mean_std(sum_over_processes(ppo.moments(returns - rollout.values, mask)))[0]
            self.critic.shift(shift)
            rollout.values = torch.where(mask, rollout.values + shift, 0.0)
        self.batches += 1
        variance = min(ppo.mean_std(total)[1] ** 2, GROWTH * self.variance or math.inf)
        self.variance += max(1 / self.batches, RATE) * (variance - self.variance)
        self.critic.rescale(math.sqrt(self.variance) or 1.0)

    def state_dict(self):
        """What a checkpoint keeps."""
        return {"batches": self.batches, "variance": self.variance, "scale": self.critic.scale}

    def load_state_dict(self, state):
        """Take over what ``state_dict`` returned, after the critic's weights. ValueError if it is empty: then
        an older version wrote the checkpoint, and the critic's weights mean something else."""
        if not state:
            raise ValueError("an older version wrote it, whose values had no scale; finish it with that one")
        self.batches, self.variance = state["batches"], state["variance"]
        self.critic.scale = float(state["scale"])
