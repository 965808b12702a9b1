"""Group baselines: the rewards of one group in, one scalar advantage a sample out.

The controller computes these, so this module is plain Python: it imports neither torch nor numpy.
What spans the whole batch (whitening, returns over tokens) belongs to the learner instead.

Invariants:
- The advantages of a group depend on that group alone.
- A group of one, or of equal rewards, has advantage 0.0 exactly: an unbaselined reward is not a
  group advantage, and rounding must not turn "no signal" into a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import fsum, isfinite, sqrt

from asyncrl.errors import ConfigError, InvariantError

STD_EPSILON = 1e-6
"""Added to the standard deviation of a group's rewards before dividing by it."""

GroupAdvantage = Callable[[Sequence[float], Sequence[int]], tuple[float, ...]]
"""(rewards, response lengths in trained tokens), both one a sample -> advantages, one a sample."""


def grpo(rewards: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
    """(r - mean) / (std + 1e-6) with the unbiased standard deviation (DeepSeekMath, 2402.03300)."""
    mean = fsum(rewards) / len(rewards)
    std = sqrt(fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return tuple((r - mean) / (std + STD_EPSILON) for r in rewards)


ADVANTAGES: Mapping[str, GroupAdvantage] = {"grpo": grpo}


def group_advantages(name: str, rewards: Sequence[float], lengths: Sequence[int] = ()) -> tuple[float, ...]:
    """One advantage for each reward of a group, in the same order.

    Raises ConfigError for an unknown name and InvariantError for a reward that is not finite:
    rewards are checked where they are made, so that one gets here means a bug.
    """
    if name not in ADVANTAGES:
        raise ConfigError(f"algorithm.advantage is {name!r}, expected one of {', '.join(ADVANTAGES)}")
    bad = [r for r in rewards if not isfinite(r)]
    if bad:
        raise InvariantError(f"{len(bad)} of {len(rewards)} rewards of a group are not finite: {bad[0]}")
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return (0.0,) * len(rewards)
    return ADVANTAGES[name](rewards, lengths)
