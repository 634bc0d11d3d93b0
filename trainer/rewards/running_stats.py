"""Running mean and standard deviation of all raw scores so far, for ``--normalize_reward`` (reward.py)."""

import math
from dataclasses import dataclass

SMALLEST_STD = 1e-6  # the least divisor: if all scores are equal, their std is 0


@dataclass
class RunningStats:
    """Count, mean and sum of squared deviations from the mean of some numbers, in fp64.

    ``a + b`` gives the statistics of the numbers of both (Chan, Golub, LeVeque 1979, eq. 2.1; Welford's
    method is the case of one number at a time). So the result does not depend on batches or processes, up to
    rounding. Raises ValueError for fields that no set of numbers can have.
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
        """The statistics of a tensor's numbers, which must be finite. The tensor may be empty."""
        if not x.numel():
            return cls()
        x = x.double()
        return cls(x.numel(), x.mean().item(), (x - x.mean()).square().sum().item())

    def __add__(self, other):
        count = self.count + other.count
        if not count:
            return RunningStats()
        gap, share = other.mean - self.mean, other.count / count
        squares = self.squares + other.squares + gap * gap * self.count * share
        return RunningStats(count, self.mean + gap * share, squares)

    @property
    def std(self):
        """Population standard deviation; 1 if there are no numbers yet, so that ``scale`` changes nothing."""
        return math.sqrt(self.squares / self.count) if self.count else 1.0

    def scale(self, x):
        """(x - mean) / std for a tensor x -> fp32 of the same shape."""
        return ((x.double() - self.mean) / max(self.std, SMALLEST_STD)).float()
