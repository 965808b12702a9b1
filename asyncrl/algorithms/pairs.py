"""Which answers of a group make a pair to learn a preference from.

Plain Python, because the controller chooses them.

Invariant: a pair's answers have different rewards: ties make no pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


def pairs_in_group(
    rewards: Sequence[float], which: Literal["extremes", "all"] = "extremes"
) -> list[tuple[int, int]]:
    """(better, worse) by index. ``extremes``: the best against the worst; ``all``: every two that differ.

    Of equal rewards the first counts. A group of one, or of equal rewards, makes no pair.
    """
    indices = range(len(rewards))
    if which == "all":
        return [(i, j) for i in indices for j in indices if rewards[i] > rewards[j]]
    if not rewards or max(rewards) == min(rewards):
        return []
    return [(rewards.index(max(rewards)), rewards.index(min(rewards)))]


def pair_signs(rewards: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
    """1.0 for the best answer of a group, -1.0 for the worst, 0.0 for all others.

    ``lengths`` in trained tokens: an answer without any can be in no pair. All 0.0 where there is none.
    """
    trained = [i for i, length in enumerate(lengths) if length > 0]
    signs = [0.0] * len(rewards)
    for better, worse in pairs_in_group([rewards[i] for i in trained]):
        signs[trained[better]], signs[trained[worse]] = 1.0, -1.0
    return tuple(signs)
