"""Replay: the last ``--replay_batches`` batches are learned from again, beside the new one.

A step takes as many optimizer steps as without (``minibatch_order`` in train_ppo.py). Older
responses are scored again with today's models; the importance weight min(pi_now / pi_then, --importance_cap)
of each token says that an earlier policy drew them (the decoupled objective of Hilton et al. 2022,
arXiv:2110.00641). Every process keeps the same global batches, so a run can be resumed with another number of
processes.
"""

from dataclasses import dataclass
from typing import Any

import torch

from trainer.compute.batch import Batch, join_batches
from trainer.options.option import Option
from trainer.runs.distributed import World

# What is kept of a batch. Other tensors are computed anew in each step; prompts, texts and parts are lost.
FIELDS = (
    "tokens",
    "prompt_len",
    "response_len",
    "finished",
    "sampler_logprobs",
    "ref_logprobs",
    "scores",
    "step_rewards",  # where there is a reward function or a text game
    "is_action",  # of several turns
)


@dataclass
class Replay(Option):
    """The last ``size`` global batches, on the CPU."""

    size: int
    positions: list[int]  # the rows of a global batch that belong to this process (dataset/lm_dataset.py)
    world: World
    kept: Batch | None = None  # their rows, one batch below the other

    def add_replayed(self, batch: Batch) -> Batch:
        """This process' rows of the kept batches, and below them those of the new ``batch`` [B]."""
        if not self.kept:
            return batch
        starts = range(0, len(self.kept.tokens), len(self.positions) * self.world.size)
        older_rows = self.kept.rows([start + place for start in starts for place in self.positions])
        there = Batch(**{name: x.to(batch.tokens.device) for name, x in older_rows.tensors().items()})
        return join_batches([there, batch])

    def after_step(self, step: int, batch: Batch) -> None:
        """Keep a new batch, of which each process gives its rows; forget the oldest beyond ``size``."""
        own: dict[str, Any] = {name: x.cpu() for name, x in batch.tensors().items() if name in FIELDS}
        parts = self.world.gather((self.positions, own))
        new = join_batches([Batch(**fields) for _, fields in parts])
        order = torch.tensor([place for positions, _ in parts for place in positions]).argsort().tolist()
        batches = [new.rows(order)]
        if self.kept:
            batches.insert(0, self.kept)
        self.kept = join_batches(batches).newest(self.size * len(order))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps."""
        return self.kept.tensors() if self.kept else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self.kept = Batch(**state) if state else None
