"""Metrics of a step: seconds; means over tokens or sequences, exact over micro-batches and processes."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer.compute.batching import fp64_device, in_fp64, send
from trainer.runs.distributed import World

Number = Tensor | float
SQUARE = "_mean_square"


class Metrics:
    """{name: (sum, count)}. It divides only once, after adding up all micro-batches and processes."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[Number, Number]] = {}

    def add(self, name: str, total: Number, count: Number = 1) -> None:
        """Add to a metric: ``total``, a sum (tensor or number) over ``count`` tokens or sequences."""
        old_total, old_count = self._totals.get(name, (0.0, 0.0))
        total = in_fp64(total.detach()) if isinstance(total, Tensor) else total
        self._totals[name] = (old_total + total, old_count + count)

    def add_all(self, totals: Mapping[str, Number], count: Number = 1) -> None:
        """Add to several metrics, over the same ``count``."""
        for name, total in totals.items():
            self.add(name, total, count)

    def merge(self, other: "Metrics") -> None:
        """Add all that another one has."""
        for name, (total, count) in other._totals.items():
            self.add(name, total, count)

    def keep_first(self, name: str, kept: str) -> None:
        """Add to the metric ``kept`` what ``name`` has so far, the first time that there is any of it: after
        the first minibatch that has ``name``, the mean of ``kept`` is that minibatch's."""
        if name in self._totals and kept not in self._totals:
            self._totals[kept] = self._totals[name]

    def sums(self, names: Sequence[str], world: World) -> list[float]:
        """The sums of these metrics over all processes so far. Raises KeyError if nothing was added to one of
        them."""
        return world.sum(stacked_fp64([self._totals[name][0] for name in names], world.device)).tolist()

    def means(self, world: World) -> dict[str, float]:
        """{name: mean over all processes}. All processes must call it and have added the same names in the
        same order. A sum of squares, as "<name>_mean_square" after the metric <name>, becomes "<name>_std",
        the population standard deviation."""
        flat = stacked_fp64([x for pair in self._totals.values() for x in pair], world.device)
        means: dict[str, float] = {}
        for name, (total, count) in zip(self._totals, world.sum(flat).view(-1, 2).tolist(), strict=True):
            mean = total / count if count else math.nan  # such as of no response with a score
            if name.endswith(SQUARE):
                name = name.removesuffix(SQUARE)
                means[f"{name}_std"] = math.sqrt(max(mean - means[name] ** 2, 0.0))
            else:
                means[name] = mean
        return means


class Seconds(dict[str, float]):
    """{phase of a step: how long it took, without the phases inside it}"""

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """In this block the time counts as this phase's."""
        start = time.perf_counter()
        before = sum(self.values())
        yield
        inside = sum(self.values()) - before
        self[phase] = self.get(phase, 0.0) + time.perf_counter() - start - inside


Loss = tuple[Tensor, Metrics]  # a micro-batch's share of a minibatch's loss, and what was measured with it


def stacked_fp64(numbers: list[Number], device: torch.device) -> Tensor:
    """Numbers and tensors of one element -> fp64 [n] on its ``fp64_device``. The host waits for no GPU."""
    plain = torch.tensor([x for x in numbers if not isinstance(x, Tensor)], dtype=torch.float64)
    place = fp64_device(device)
    sent = iter(send(plain, place))  # in one copy
    tensors = [x if isinstance(x, Tensor) else next(sent) for x in numbers]
    return torch.stack([in_fp64(x).to(place, non_blocking=True) for x in tensors])
