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

from errors import InputError
from trainer import ppo

RATE = 0.1  # of the running variance: it follows the last ten batches or so
GROWTH = 4.0  # times the variance so far, or that of the batch before, is the most that a batch counts with
LARGEST = torch.finfo(torch.float32).max


class ValueScale:
    """Keeps ``critic.scale`` at the running standard deviation of a batch's returns. Checkpoints keep it
    (``state_dict``). It is the same in all processes.

    Batches whose returns are all equal change nothing. A batch with an outlier counts little; if the next
    one is like it, the change is taken over.
    """

    def __init__(self, critic):
        self.critic = critic
        self.batches, self.variance, self.last = 0, 0.0, 0.0  # last: the variance of the batch before

    def update(self, rollout, returns, sum_over_processes):
        """Take in a batch's Monte-Carlo returns [B, R] before the batch is learned from. The first batch also
        shifts the values, those in ``rollout.values`` included."""
        mask = rollout.mask
        total = sum_over_processes(ppo.moments(returns, mask))
        error = sum_over_processes(ppo.moments(returns - rollout.values, mask))
        # Too large, or NaN: no optimizer step will be made of this batch, and no scale either.
        if not (total[1] <= LARGEST and error[1] <= LARGEST):
            return
        if not self.batches:
            shift = ppo.mean_std(error)[0]
            self.critic.shift(shift)
            rollout.values = torch.where(mask, rollout.values + shift, 0.0)
        if variance := ppo.std_or_zero(total) ** 2:
            self.batches += 1
            limit = GROWTH * max(self.variance, self.last) if self.variance else math.inf
            self.variance += max(1 / self.batches, RATE) * (min(variance, limit) - self.variance)
            self.last = variance
            self.critic.rescale(math.sqrt(self.variance))

    def state_dict(self):
        """What a checkpoint keeps."""
        scale = {"scale": self.critic.scale}
        return {"batches": self.batches, "variance": self.variance, "last": self.last, **scale}

    def load_state_dict(self, state):
        """Take over what ``state_dict`` returned, after the critic's weights. InputError if it is empty: then
        an older version wrote the checkpoint, and the critic's weights mean something else."""
        if not state:
            raise InputError(
                "--resume: the checkpoint is of an older version, whose values had no scale; finish the run "
                "with that version, or start another"
            )
        self.batches, self.variance, self.last = (state[name] for name in ("batches", "variance", "last"))
        self.critic.scale = float(state["scale"])
