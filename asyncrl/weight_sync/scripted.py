"""What scripted learners and generators agree on: numbers that stand for a version's weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.types import Float32Array


def scripted_logprobs(version: int, token_ids: Sequence[int]) -> Float32Array:
    """Log-probs (T - 1,) of all tokens but the first: other ones for every version and token."""
    ids = np.asarray(token_ids[1:], dtype=np.float32)
    return (-1.0 - version - ids / 1000).astype(np.float32)
