"""What the tests of a learner's state run in the ranks' processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.deepspeed_worker import Rank, learner, share_of, state_digest, to_arrays


def train_on(
    at: Rank, versions: range, resume: Path | None = None, save: Path | None = None
) -> dict[str, Any]:
    """Steps ``versions`` on the recorded batches, from what is in ``resume`` on; then ``save``."""
    with learner(at) as (rank, _):
        if resume is not None:
            rank.load_state(resume)
        digest = state_digest(rank)
        norms = []
        for version in versions:
            result = rank.step(share_of(at, version))
            assert not result.skipped
            norms.append(result.metrics["actor/grad_norm"])
        files = []
        if save is not None:
            rank.copy_state()
            # What is written is the copy, and not what became of its source since.
            rank.step(share_of(at, versions.stop))
            files = rank.write_state(save)
        return {
            "digest": digest,
            "norms": norms,
            "last": state_digest(rank),
            "files": files,
            "parameters": to_arrays(dict(rank.named_parameters())),
        }
