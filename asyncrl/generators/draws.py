"""Counter-based random draws: the only source of randomness in generation.

Invariant: draw t of a trajectory is a pure function of its ``DrawKey`` and t.
"""

from __future__ import annotations

import numpy as np

from asyncrl.types import DrawKey, Float32Array

_WORD = (1 << 64) - 1


def draw_stream(key: DrawKey) -> np.random.Generator:
    """The draws of one trajectory, from the first.

    Philox4x64 (Salmon et al., 2011) is keyed by (seed, ordinal); sample and attempt are words of
    its counter, whose lowest word counts the draws, so that no two trajectories share a draw.
    """
    philox = np.random.Philox(
        key=[key.seed & _WORD, key.ordinal & _WORD],
        counter=[0, key.sample & _WORD, key.attempt & _WORD, 0],
    )
    return np.random.Generator(philox)


def uniform_draws(key: DrawKey, count: int) -> Float32Array:
    """The draws 0 to ``count - 1`` of a trajectory: float32 in [0, 1], shape (count,)."""
    return draw_stream(key).random(count).astype(np.float32)
