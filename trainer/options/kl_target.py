"""The weight of the KL to the reference: constant, or moved so that the KL stays at ``--kl_target``.

    error = clip(KL / target - 1, -0.2, 0.2)        KL: mean of kl/sequence over the batch's responses
    coef  = coef * (1 + error * responses of the batch / --kl_horizon)

The controller of Ziegler et al. 2019 (arXiv:1909.08593, section 2.2). Each old actor counts once, and none
before the actor's first updates: there the KL is 0 whatever the weight. docs/ppo.md, "A target for the KL".
"""

import math
from argparse import Namespace

import torch

from trainer.compute.batching import in_fp64
from trainer.compute.rollout_data import Rollout
from trainer.ppo import Sum
from trainer.runs.base import Kept, Learner

LARGEST_ERROR = 0.2
HORIZON = 4  # batches, where --kl_horizon is not given


class KlTarget(Kept):
    """Keeps ``coef``, the weight of the KL in reward units per nat, the same in all processes.

    learner: the actor's; responses: of a batch of all processes. A horizon shorter than a batch counts as
    one: the weight could become negative.
    """

    kept = ("coef",)

    def __init__(self, args: Namespace, learner: Learner, responses: int):
        self.coef: float = args.kl_coef
        self.target: float = args.kl_target
        self.every: int = args.update_old_actor_freq
        self.learner = learner
        self.horizon: int = max(args.kl_horizon or HORIZON * responses, responses)

    def follow(self, step: int, newest: Rollout, sum_over_processes: Sum) -> None:
        """Take in a new batch with its log-probs under old actor and reference, before it is learned from. A
        KL that is not finite changes nothing."""
        if step <= self.learner.first_batch or step % self.every:
            return
        k1 = in_fp64(torch.where(newest.mask, newest.old_logprobs - newest.ref_logprobs, 0.0)).sum()
        count = newest.mask.any(1).sum().to(k1)  # responses with a score
        total, responses = sum_over_processes(torch.stack([k1, count])).tolist()
        if math.isfinite(total) and responses:
            error = total / responses / self.target - 1
            error = min(max(error, -LARGEST_ERROR), LARGEST_ERROR)
            self.coef *= 1 + error * responses / self.horizon
