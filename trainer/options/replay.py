"""Replay: the last ``--replay_batches`` batches are learned from again, beside the new one.

A step takes as many optimizer steps as without (``minibatch_order`` in dataset/data_order.py). Older
responses are scored again with today's models; the importance weight min(pi_now / pi_then, --importance_cap)
of each token says that an earlier policy drew them (the decoupled objective of Hilton et al. 2022,
arXiv:2110.00641). Every process keeps the same global batches, so a run can be resumed with another number of
processes.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.compute.rollout_data import Rollout, join_rollouts
from trainer.runs.distributed import World

# What is kept of a rollout. All other fields are computed anew in each step.
FIELDS = (
    *("tokens", "prompt_len", "response_len", "finished", "sampler_logprobs", "ref_logprobs", "scores"),
    "step_rewards",  # where there is a reward function
)


def newest_rows(rollout: Rollout, count: int) -> Rollout:
    """The last ``count`` rows of a joined rollout: those of the new batch, which has not been learned
    from."""
    first = len(rollout.tokens) - count
    return rollout.rows(range(first, len(rollout.tokens))) if first else rollout


@dataclass
class Replay:
    """The last ``size`` global batches, on the CPU."""

    size: int
    positions: list[int]  # the rows of a global batch that belong to this process (dataset/data_order.py)
    world: World
    batches: list[dict[str, Any]] = field(default_factory=list)

    def join(self, rollout: Rollout) -> Rollout:
        """This process' rows of the kept batches, and below them those of the new ``rollout`` [B]."""
        device = rollout.tokens.device
        parts = [
            Rollout(**{name: x[self.positions].to(device) for name, x in batch.items()})
            for batch in self.batches
        ]
        return join_rollouts([*parts, rollout]) if parts else rollout

    def keep(self, rollout: Rollout) -> None:
        """Keep a new batch, of which each process gives its rows; forget the oldest beyond ``size``."""
        if not self.size:
            return
        filled = {name: getattr(rollout, name) for name in FIELDS}
        mine = {name: x.cpu() for name, x in filled.items() if x is not None}
        parts = self.world.gather((self.positions, mine))
        joined = join_rollouts([Rollout(**fields) for _, fields in parts])
        order = torch.tensor([place for positions, _ in parts for place in positions]).argsort()
        self.batches.append({name: getattr(joined, name)[order] for name in mine})
        self.batches = self.batches[-self.size :]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps."""
        return {
            f"{number}.{name}": x.contiguous()
            for number, batch in enumerate(self.batches)
            for name, x in batch.items()
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what ``state_dict`` returned."""
        batches: dict[int, dict[str, torch.Tensor]] = {}
        for key, x in state.items():
            number, _, name = key.partition(".")
            batches.setdefault(int(number), {})[name] = x
        self.batches = [batches[number] for number in sorted(batches)]
