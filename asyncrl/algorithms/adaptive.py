"""The coefficient that the KL to the reference gets, where it is to steer that KL to a target.

Plain Python, because the controller keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class AdaptiveCoefficient:
    """A coefficient that steers the KL to a target (Ziegler et al., 1909.08593).

    It grows while the KL is above the target and falls while it is below, by at most
    20 % x samples / horizon a step. A fixed coefficient is a plain float.
    """

    value: float
    target: float
    """KL a token that is aimed at; more than 0."""
    horizon: float
    """Samples over which an error of a fifth or more changes the coefficient by about a fifth."""

    def update(self, kl: float, samples: int) -> float:
        """Take in a step's mean KL over ``samples`` answers; returns the next step's coefficient."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * samples / self.horizon
        return self.value
