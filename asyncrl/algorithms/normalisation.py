"""Rewards on one scale: mean 0 and deviation 1, over a step's samples or over all since the start.

Plain Python, because the controller computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, sqrt

EPSILON = 1e-6
"""Added to the deviation that rewards are divided by."""


@dataclass(slots=True)
class Moments:
    """Count, mean and sum of squared deviations of all numbers added so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Moments:
        mean = fsum(values) / max(len(values), 1)
        return cls(len(values), mean, fsum((v - mean) ** 2 for v in values))

    def add(self, values: Sequence[float]) -> None:
        """Merge in further numbers (Chan, Golub and LeVeque, 1979)."""
        new, total = Moments.of(values), self.count + len(values)
        if new.count == 0:
            return
        difference = new.mean - self.mean
        self.squares += new.squares + difference**2 * self.count * new.count / total
        self.mean += difference * new.count / total
        self.count = total

    @property
    def std(self) -> float:
        """Unbiased; 0 of fewer than two numbers."""
        return sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def normalised(self, values: Sequence[float]) -> tuple[float, ...]:
        """(value - mean) / (std + 1e-6)."""
        return tuple((v - self.mean) / (self.std + EPSILON) for v in values)

    def state(self) -> dict[str, float]:
        """What ``restored`` takes; plain numbers, for JSON."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    @classmethod
    def restored(cls, state: Mapping[str, float]) -> Moments:
        return cls(int(state["count"]), state["mean"], state["squares"])
