"""The mean and the spread of all numbers seen so far, without keeping them."""

import math
from dataclasses import dataclass

SMALLEST_STD = 1e-6  # scores that are all alike are nothing to divide by


@dataclass
class Running:
    """Count, mean and sum of squared deviations from the mean, in fp64.

    Two add up to that of both halves (Chan, Golub, LeVeque 1979, eq. 2.1; for one number at a time it is
    Welford's): the same whatever the batches and processes, up to rounding. Raises ValueError for fields that
    cannot be those of any numbers.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def __post_init__(self):
        numbers = type(self.count) is int and all(isinstance(x, float) for x in (self.mean, self.squares))
        if not numbers or not math.isfinite(self.mean + self.squares) or min(self.count, self.squares) < 0:
            raise ValueError(
                f"not a count, a mean and squares: {self.count!r}, {self.mean!r}, {self.squares!r}"
            )

    @classmethod
    def of(cls, x):
        """Of a tensor's numbers, which must be finite; of none if it is empty."""
        if not x.numel():
            return cls()
        x = x.double()
        return cls(x.numel(), x.mean().item(), (x - x.mean()).square().sum().item())

    def __add__(self, other):
        count = self.count + other.count
        if not count:
            return Running()
        gap, share = other.mean - self.mean, other.count / count
        squares = self.squares + other.squares + gap * gap * self.count * share
        return Running(count, self.mean + gap * share, squares)

    @property
    def std(self):
        """Population standard deviation; 1 before the first number, so that ``scale`` changes nothing."""
        return math.sqrt(self.squares / self.count) if self.count else 1.0

    def scale(self, x):
        """Shift and scale a tensor as if its numbers came from what was seen: fp32 of the same shape."""
        return ((x.double() - self.mean) / max(self.std, SMALLEST_STD)).float()
