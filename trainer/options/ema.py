"""A moving average of the actor's weights (``--ema_beta``), evaluated and saved beside the actor.

    v = b_n v + (1 - b_n) w,   b_n = beta (1 - beta^(n-1)) / (1 - beta^n) after the actor's n-th batch

The weights before training never count (the bias correction of Adam, arXiv:1412.6980, section 3). The average
is in fp32, of what trains only, and always in the main memory. docs/ppo.md, "An average of the actor".
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer.compute.batch import Batch
from trainer.options.option import Option
from trainer.runs.optimizer_step import TrainState


class Ema(Option):
    """The average of what a ``TrainState`` trains. beta: 0 for none.

    ``batches``: how many count so far; ``weights``: {name: their average, fp32 on the CPU}.
    """

    def __init__(self, train_state: TrainState, beta: float):
        self.train_state = train_state
        self.beta = beta
        self.batches = 0
        found = train_state.model.named_parameters() if beta else ()
        self.trained = {name: p for name, p in found if p.requires_grad}
        self.weights = {name: _on_host(p).clone() for name, p in self.trained.items()}

    def after_step(self, step: int, batch: Batch) -> None:
        """Take in the weights after a step, if the actor trained in it."""
        if step < self.train_state.first_batch:
            return
        self.batches += 1
        share = (1 - self.beta) / (1 - self.beta**self.batches)
        for name, p in self.trained.items():
            self.weights[name].lerp_(_on_host(p), share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """In this block the model has the averaged weights, and this object holds the training weights
        meanwhile."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the two, one parameter at a time: there is never a third copy of all."""
        for name, p in self.trained.items():
            mine = self.weights[name].clone()
            self.weights[name].copy_(p)
            p.copy_(mine)

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"batches": torch.tensor(self.batches), **self.weights}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what ``state_dict`` returned. Raises KeyError or RuntimeError for another model's."""
        self.batches = int(state["batches"])
        for name, x in self.weights.items():
            x.copy_(state[name])


def _on_host(p: Tensor) -> Tensor:
    return p.detach().to("cpu", torch.float32)
