"""What the test of a learner that leaves its device runs in the ranks' processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.deepspeed_worker import SCORED, Rank, learner, share_of, state_digest


def train_in_turns(at: Rank, updates: int, offloads: bool, target: Path) -> dict[str, Any]:
    """Updates on the recorded batches, the device left in between; and what was saved after the last.

    The state is copied while it is not on the device, as a checkpoint of the generators' turn is.
    """
    with learner(at) as (rank, _):
        found: dict[str, Any] = {"digests": [], "scores": []}
        for version in range(updates):
            rank.step(share_of(at, version))
            if offloads:
                rank.offload()
                rank.offload()  # has no effect a second time
                found["moved"] = rank._engine._is_offloaded
            rank.copy_state()
            if offloads:
                rank.reload()
                rank.reload()
            found["digests"].append(state_digest(rank))
            found["scores"].append(rank.score(SCORED).tolist())
        found["files"] = rank.write_state(target)
        return found
