"""The weight of the KL to the reference: constant, or moved so that the KL stays at ``--kl_target``.

    error = clip(KL / target - 1, -0.2, 0.2)        KL: mean of kl/sequence over the batch's responses
    coef  = coef * (1 + error * responses of the batch / --kl_horizon)

The controller of Ziegler et al. 2019 (arXiv:1909.08593, section 2.2). Each old actor counts once, and none
before the actor's first updates: there the KL is 0 whatever the weight. docs/ppo.md, "A target for the KL".
"""

import math
from argparse import Namespace

import torch

from trainer.advantages import Sum
from trainer.compute.batch import Batch
from trainer.compute.batching import in_fp64
from trainer.options.option import Option
from trainer.runs.base import SavedAttributes
from trainer.runs.optimizer_step import TrainState

LARGEST_ERROR = 0.2
HORIZON = 4  # batches, where --kl_horizon is not given


class KlTarget(SavedAttributes, Option):
    """Keeps ``coef``, the weight of the KL in reward units per nat, the same in all processes.

    train_state: the actor's; world_size: of processes. A horizon shorter than a batch counts as one: the
    weight could become negative.
    """

    saved = ("coef",)

    def __init__(
        self, args: Namespace, train_state: TrainState, world_size: int, sum_over_processes: Sum
    ) -> None:
        self.coef: float = args.kl_coef
        self.target: float = args.kl_target
        self.every: int = args.update_old_actor_freq
        self.train_state = train_state
        self.batch_size: int = args.batch_size
        self.sum_over_processes = sum_over_processes
        responses = args.batch_size * world_size
        self.horizon: int = max(args.kl_horizon or HORIZON * responses, responses)

    def before_estimate(self, step: int, batch: Batch) -> None:
        """Move the weight by the KL of the new batch, whose log-probs are under old actor and reference. A KL
        that is not finite changes nothing."""
        if step <= self.train_state.first_batch or step % self.every:
            return
        newest = batch.newest(self.batch_size)
        mask = newest.action_mask
        k1 = in_fp64(torch.where(mask, newest.old_logprobs - newest.ref_logprobs, 0.0)).sum()
        count = mask.any(1).sum().to(k1)  # responses with a score
        total, responses = self.sum_over_processes(torch.stack([k1, count])).tolist()
        if math.isfinite(total) and responses:
            error = total / responses / self.target - 1
            error = min(max(error, -LARGEST_ERROR), LARGEST_ERROR)
            self.coef *= 1 + error * responses / self.horizon
