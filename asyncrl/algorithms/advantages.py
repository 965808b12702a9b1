"""Group baselines: the rewards of one group in, one scalar advantage a sample out.

The controller computes these, so this module is plain Python: it imports neither torch nor numpy.
What spans the whole batch (whitening, returns over tokens) belongs to the learner: ``returns``.

Invariants:
- The advantages of a group depend on that group alone.
- A group of one, or of equal rewards, has advantage 0.0 exactly: an unbaselined reward is not a
  group advantage, and rounding must not turn "no signal" into a gradient. Three have another baseline
  than the group: reinforce_plus_plus the batch's mean, gae the critic's values, remax the greedy
  answer's reward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import fsum, isfinite, sqrt

from asyncrl.algorithms.names import NEEDING_GREEDY, is_path
from asyncrl.errors import ConfigError, InvariantError

STD_EPSILON = 1e-6
"""Added to the standard deviation of a group's rewards before dividing by it."""

GroupAdvantage = Callable[[Sequence[float], Sequence[int]], Sequence[float]]
"""(rewards, response lengths in trained tokens), both one a sample -> advantages, one a sample."""


def grpo(rewards: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
    """(r - mean) / (std + 1e-6) with the unbiased standard deviation (DeepSeekMath, 2402.03300)."""
    mean, std = _mean(rewards), _std(rewards)
    return tuple((r - mean) / (std + STD_EPSILON) for r in rewards)


def dr_grpo(rewards: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
    """r - mean: no division that would favour easy and hard prompts (Dr. GRPO, 2503.20783)."""
    mean = _mean(rewards)
    return tuple(r - mean for r in rewards)


def rloo(rewards: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
    """r - mean of the others = (r - mean) n / (n - 1) (RLOO, 2402.14740)."""
    mean, n = _mean(rewards), len(rewards)
    return tuple((r - mean) * n / (n - 1) for r in rewards)


def opo(rewards: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
    """r - mean weighted by length, the baseline of least variance (OPO, 2505.23585)."""
    tokens = sum(lengths)
    baseline = fsum(n * r for n, r in zip(lengths, rewards, strict=True)) / tokens if tokens else 0.0
    return tuple(r - baseline for r in rewards)


def grpo_passk(rewards: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
    """The best sample gets (best - second best) / (std + 1e-6), the others 0 (2503.19595)."""
    second, best = sorted(rewards)[-2:]
    lead = (best - second) / (_std(rewards) + STD_EPSILON)
    winner = rewards.index(best)
    return tuple(lead if i == winner else 0.0 for i in range(len(rewards)))


def reinforce_plus_plus(rewards: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
    """The rewards themselves: ``returns`` discounts and whitens them (REINFORCE++, 2501.03262)."""
    return tuple(rewards)


def gae(rewards: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
    """The rewards themselves: the learner weighs them against a critic's values (1506.02438)."""
    return tuple(rewards)


def remax(rewards: Sequence[float], greedy: float) -> tuple[float, ...]:
    """r - reward of the greedy answer to the same prompt (ReMax, 2310.10505). Takes a group of one."""
    return tuple(r - greedy for r in rewards)


ADVANTAGES: Mapping[str, GroupAdvantage] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "grpo_passk": grpo_passk,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": dr_grpo,  # whitened by the learner
    "gae": gae,
}
UNBASELINED = frozenset({"reinforce_plus_plus", "gae"})
"""Advantages that do not compare the samples of a group, and so take groups of any size."""


def group_advantages(
    name: str, rewards: Sequence[float], lengths: Sequence[int] = (), greedy: float | None = None
) -> tuple[float, ...]:
    """One advantage for each reward of a group, in the same order.

    ``lengths`` are the samples' trained tokens; none given: all the same. ``greedy`` is the reward of the
    greedy answer, for remax alone. Raises ConfigError for an unknown name, and InvariantError for a reward
    that is not finite, or a greedy one that is missing: rewards are checked where they are made, so that
    one gets here means a bug. The rewards themselves for a user's own function, which the learner calls:
    users' code does not run in the controller.
    """
    if not is_path(name) and name not in (*ADVANTAGES, *NEEDING_GREEDY):
        known = ", ".join((*ADVANTAGES, *sorted(NEEDING_GREEDY)))
        raise ConfigError(f"algorithm.advantage is {name!r}, expected one of {known}")
    bad = [r for r in (*rewards, greedy or 0.0) if not isfinite(r)]
    if bad:
        raise InvariantError(f"{len(bad)} of {len(rewards)} rewards of a group are not finite: {bad[0]}")
    if is_path(name):
        return tuple(rewards)
    if name in NEEDING_GREEDY:
        if greedy is None:
            raise InvariantError(f"a group of {len(rewards)} has no greedy answer, which {name} needs")
        return remax(rewards, greedy)
    if name not in UNBASELINED and (len(rewards) < 2 or max(rewards) == min(rewards)):
        return (0.0,) * len(rewards)
    return tuple(ADVANTAGES[name](rewards, lengths or (1,) * len(rewards)))


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    """Unbiased, of at least two values."""
    mean = _mean(values)
    return sqrt(fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
