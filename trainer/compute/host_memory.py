"""Frozen models that wait in the host's memory while the GPU does not need them (``--offload_frozen 1``).

Reference, reward models and, if it is not the actor, the old actor are needed for one phase of a step each.
In between their weights lie in pinned host memory, which a GPU reads at the full speed of its bus. They do
not change on the GPU, so nothing is copied back. Weights that a trained model shares (``--lora_r``) stay.
"""

from contextlib import contextmanager


class HostMemory:
    """The models that ``take`` was given, and their way to ``device`` and back."""

    def __init__(self, device):
        self.device, self.waiting = device, {}  # {id of a model: [(parameter, its numbers on the host)]}

    def take(self, models, trained):
        """Move the models' weights to the host, but those that a model in ``trained`` has as well."""
        stay = {id(p) for model in trained for p in model.parameters()}
        for model in models:
            pairs = self.waiting[id(model)] = []
            for p in model.parameters():
                if id(p) not in stay:
                    numbers = p.data.cpu()
                    p.data = numbers = numbers.pin_memory() if self.device.type == "cuda" else numbers
                    pairs.append((p, numbers))

    @contextmanager
    def on_device(self, *models):
        """In this block the models are on the device. Those that were not taken are there all the time."""
        pairs = [pair for model in models for pair in self.waiting.get(id(model), [])]
        try:
            for p, numbers in pairs:
                p.data = numbers.to(self.device, copy=True, non_blocking=True)
            yield
        finally:
            for p, numbers in pairs:
                p.data = numbers
