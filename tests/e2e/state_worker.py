"""What the tests of a learner's state run in the ranks' processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.deepspeed_worker import Rank, learner, share_of, state_digest, to_arrays


def train_and_save(at: Rank, end: int, save_at: int, target: Path) -> dict[str, Any]:
    """Steps 0 to ``end`` on the recorded batches; the state of ``save_at`` is written after the last, and
    the weights alone of ``end`` into a folder ``weights`` beside it, and by DeepSpeed with ZeRO itself into
    ``deepspeed``."""
    with learner(at) as (rank, _):
        norms, digests = [], []
        for version in range(end):
            if version == save_at:
                rank.copy_state()
            norms.append(rank.step(share_of(at, version)).metrics["actor/grad_norm"])
            digests.append(state_digest(rank))
        files = rank.write_state(target)
        rank.copy_state(weights_only=True)
        rank.write_state(target / "weights")
        if at.backend == "deepspeed" and at.stage:
            rank._engine._engine.save_checkpoint(str(target / "deepspeed"))
        return {
            "norms": norms,
            "digests": digests,
            "files": files,
            "parameters": to_arrays(dict(rank.named_parameters())),
        }


def resume(at: Rank, start: int, end: int, source: Path) -> dict[str, Any]:
    """Steps ``start`` to ``end`` from the state in ``source``."""
    with learner(at) as (rank, _):
        rank.load_state(source)
        norms, digests = [], []
        for version in range(start, end):
            norms.append(rank.step(share_of(at, version)).metrics["actor/grad_norm"])
            digests.append(state_digest(rank))
        return {"norms": norms, "digests": digests, "parameters": to_arrays(dict(rank.named_parameters()))}
