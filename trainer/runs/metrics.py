"""Metrics of a step: means over tokens or sequences, exact over all micro-batches and processes."""

import torch


class Metrics:
    """{name: (sum, count)}. It divides only once, after adding up all micro-batches and processes."""

    def __init__(self):
        self._totals = {}

    def add(self, name, total, count):
        """Add to a metric: ``total``, a sum (tensor or number) over ``count`` tokens or sequences."""
        old_total, old_count = self._totals.get(name, (0.0, 0.0))
        total = total.detach().double() if isinstance(total, torch.Tensor) else total
        self._totals[name] = (old_total + total, old_count + count)

    def add_all(self, totals, count):
        for name, total in totals.items():
            self.add(name, total, count)

    def merge(self, other):
        for name, (total, count) in other._totals.items():
            self.add(name, total, count)

    def total(self, name):
        """The sum of one metric on this process so far. Raises KeyError if nothing was added to it."""
        return float(self._totals[name][0])

    def means(self, world):
        """{name: mean over all processes}. All processes must call it and have added the same names in the
        same order."""
        flat = [float(x) for pair in self._totals.values() for x in pair]
        flat = world.sum(torch.tensor(flat, dtype=torch.float64, device=world.device)).view(-1, 2).tolist()
        return {
            name: total / max(count, 1.0) for name, (total, count) in zip(self._totals, flat, strict=True)
        }
