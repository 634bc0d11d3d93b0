"""Metrics of a step: means over tokens or sequences, exact over all micro-batches and processes."""

import math
from collections.abc import Iterable, Mapping

import torch

from trainer.compute.batching import send

Number = torch.Tensor | float
SQUARE = "_mean_square"


class Metrics:
    """{name: (sum, count)}. It divides only once, after adding up all micro-batches and processes."""

    def __init__(self):
        self._totals = {}

    def add(self, name: str, total: Number, count: Number) -> None:
        """Add to a metric: ``total``, a sum (tensor or number) over ``count`` tokens or sequences."""
        old_total, old_count = self._totals.get(name, (0.0, 0.0))
        total = total.detach().double() if isinstance(total, torch.Tensor) else total
        self._totals[name] = (old_total + total, old_count + count)

    def add_all(self, totals: Mapping[str, Number], count: Number) -> None:
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
            self.add(kept, *self._totals[name])

    def totals(self, names: Iterable[str], device: torch.device) -> torch.Tensor:
        """The sums of these metrics on this process so far, fp64 [names]. Raises KeyError if nothing was
        added to one of them."""
        return _together([self._totals[name][0] for name in names], device)

    def means(self, world) -> dict[str, float]:
        """{name: mean over all processes}. All processes must call it and have added the same names in the
        same order. A sum of squares, as "<name>_mean_square" after the metric <name>, becomes "<name>_std",
        the population standard deviation."""
        flat = _together([x for pair in self._totals.values() for x in pair], world.device)
        means = {}
        for name, (total, count) in zip(self._totals, world.sum(flat).view(-1, 2).tolist(), strict=True):
            mean = total / max(count, 1.0)
            if name.endswith(SQUARE):
                name = name.removesuffix(SQUARE)
                means[f"{name}_std"] = math.sqrt(max(mean - means[name] ** 2, 0.0))
            else:
                means[name] = mean
        return means


def _together(numbers: list[Number], device: torch.device) -> torch.Tensor:
    """Numbers and tensors of one element -> fp64 [n] on the device. A GPU gets all that the host has in one
    copy, and its own in one piece: the host waits for none of them."""
    there = [i for i, x in enumerate(numbers) if isinstance(x, torch.Tensor) and x.device.type != "cpu"]
    host = [0.0 if i in there else float(x) for i, x in enumerate(numbers)]
    flat = send(torch.tensor(host, dtype=torch.float64), device)
    if there:
        values = torch.stack([numbers[i].double().reshape(()) for i in there])
        flat.index_copy_(0, send(torch.tensor(there), device), values)
    return flat
