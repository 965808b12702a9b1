"""The learner of a run that only records rollouts: it takes every batch, and the policy stays what it is.

Invariants:
- No update is made, so none is counted: the policy version stays, and with it the lag of every group.
- It holds no weights: there is nothing to push, to check, to export or to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.checkpoint.files import FileEntry
from asyncrl.errors import InvariantError
from asyncrl.learners.base import LearnerInfo, PushReport, StepResult
from asyncrl.types import Batch, Float32Array
from asyncrl.weight_sync.base import Channel, PushGroupSpec


class NoLearner:
    """A ``Learner`` without ranks; see the module."""

    async def start(self) -> LearnerInfo:
        return LearnerInfo(manifest=(), parameters=0)

    async def step(self, batch: Batch) -> StepResult:
        return StepResult(skipped=False, recorded=True, metrics={})

    async def open_push_group(self, spec: PushGroupSpec, channel: Channel = "generators") -> None:
        raise _asked_for("a push group")

    async def copy_out(self, version: int) -> float:
        raise _asked_for("a copy of its weights")

    async def push(self, version: int, channel: Channel = "generators") -> PushReport:
        raise _asked_for("a push")

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        raise _asked_for("log-probs")

    async def offload(self) -> None:
        """It is on no device."""

    async def reload(self) -> None:
        """It is on no device."""

    async def checksum(self) -> str:
        """Empty: there are no parameters."""
        return ""

    async def export(self, folder: Path) -> None:
        raise _asked_for("an export")

    async def copy_state(self, *, weights_only: bool = False) -> None:
        """Nothing to copy."""

    async def write_state(self, folder: Path) -> list[FileEntry]:
        return []

    async def load_state(self, folder: Path) -> None:
        """Nothing to load."""

    async def close(self) -> None: ...


def _asked_for(what: str) -> InvariantError:
    return InvariantError(f"a run that only records rollouts was asked for {what}, but has no learner")
