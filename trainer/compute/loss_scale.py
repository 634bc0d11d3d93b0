"""The loss scale of fp16 training: a power of two by which the loss is multiplied before the backward pass.

fp16 has no number between 0 and 6e-8, and none above 65504. The gradients of many activations are smaller
than that and would become 0. So the loss, and with it every gradient, is multiplied by the scale, and the
gradients of the weights, which are fp32, are divided by it again before they are clipped. Both are exact. If
the scale is too large, a gradient becomes infinite: that optimizer step is left out and the scale is halved.
After ``INTERVAL`` good steps in a row it is doubled (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2;
the numbers are those of torch's GradScaler). A run has one scale, for actor and critic alike.
"""

import torch

from model.weights import sharded_and_whole

FIRST = 2.0**16
LEAST = 1.0
MOST = 2.0**24
INTERVAL = 2000  # good optimizer steps in a row after which the scale is doubled


class LossScale:
    """The loss scale of a run in ``dtype``. Only fp16 has one: in other types nothing is multiplied."""

    def __init__(self, dtype, interval=INTERVAL):
        self.active = dtype == torch.float16
        self.interval = interval
        self.value = FIRST if self.active else 1.0
        self.good_steps = 0

    def scaled(self, loss):
        """-> the loss to call ``backward`` on."""
        return loss * self.value if self.active else loss

    def unscale(self, model):
        """Divide a model's gradients by the scale, in place."""
        if self.active:
            for part in sharded_and_whole(p.grad for p in model.parameters() if p.grad is not None):
                if part:
                    torch._foreach_mul_(part, 1 / self.value)

    def adapt(self, finite):
        """Halve or double the scale after a minibatch's optimizer steps -> whether it was halved.

        finite: whether all gradients of these steps were. A scale of ``LEAST`` is not halved any more.
        """
        if not self.active:
            return False
        before = self.value
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, LEAST)
        elif self.good_steps == self.interval:
            self.value = min(self.value * 2, MOST)
            self.good_steps = 0
        return self.value < before

    def state_dict(self):
        """What a checkpoint keeps of it; {} unless the run is in fp16."""
        return {"value": self.value, "good_steps": self.good_steps} if self.active else {}

    def load_state_dict(self, state):
        """The reverse. {}, of a run in another type, changes nothing."""
        if self.active and state:
            self.value = state["value"]
            self.good_steps = state["good_steps"]
