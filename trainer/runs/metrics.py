"""Metrics of a step: means over tokens or sequences, exact over all micro-batches and processes."""

import math

import torch

from trainer.compute.batching import send


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

    def keep_first(self, name, kept):
        """Add to the metric ``kept`` what ``name`` has so far, the first time that there is any of it: after
        the first minibatch that has ``name``, the mean of ``kept`` is that minibatch's."""
        if name in self._totals and kept not in self._totals:
            self.add(kept, *self._totals[name])

    def total(self, name):
        """The sum of one metric on this process so far. Raises KeyError if nothing was added to it."""
        return float(self._totals[name][0])

    def totals(self, names, device):
        """The sums of these metrics on this process so far, fp64 [names]; a GPU is not waited for. Raises
        KeyError if nothing was added to one of them."""
        return _stack([self._totals[name][0] for name in names], device)

    def means(self, world):
        """{name: mean over all processes}. All processes must call it and have added the same names in the
        same order."""
        flat = _stack([x for pair in self._totals.values() for x in pair], world.device)
        flat = world.sum(flat).view(-1, 2).tolist()
        return {
            name: total / max(count, 1.0) for name, (total, count) in zip(self._totals, flat, strict=True)
        }


def mean_square_to_std(means, name):
    """Where ``means``, of ``Metrics.means``, has a mean square as "<name>_std" beside the mean ``name``, make
    it the population standard deviation."""
    if f"{name}_std" in means:
        variance = means[f"{name}_std"] - means[name] ** 2
        means[f"{name}_std"] = math.sqrt(variance) if variance > 0 else 0.0


def _stack(numbers, device):
    """Numbers and tensors of one element, on the CPU or the device -> fp64 [n] on the device."""
    kind = torch.device(device).type
    there = [i for i, x in enumerate(numbers) if torch.is_tensor(x) and x.device.type == kind]
    flat = [0.0 if i in there else float(x) for i, x in enumerate(numbers)]
    flat = send(torch.tensor(flat, dtype=torch.float64), device)
    if there:
        values = torch.stack([numbers[i].double().reshape(()) for i in there])
        flat.index_copy_(0, send(torch.tensor(there), device), values)
    return flat
