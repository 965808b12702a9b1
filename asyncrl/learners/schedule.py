"""The learning rate of an update, from the number of updates before it and nothing else.

Invariant: a pure function of (updates completed, settings), so that a resumed run needs no
scheduler state, and an update that was skipped does not move it.
"""

from __future__ import annotations

from math import cos, pi
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    completed: int, *, peak: float, schedule: Schedule, warmup_steps: int, total_steps: int
) -> float:
    """Rises linearly from peak / warmup_steps to peak, then is constant or falls towards 0.

    ``completed`` is the number of updates behind the policy. The falling schedules reach 0 one
    update after the last, so that no update of the run has learning rate 0.
    """
    if completed < warmup_steps:
        return peak * (completed + 1) / warmup_steps
    progress = min((completed - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    if schedule == "linear":
        return peak * (1.0 - progress)
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + cos(pi * progress))
    return peak
