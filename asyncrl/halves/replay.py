"""Where the groups come from of a run that trains on recorded rollouts.

Invariants:
- Groups come as they were recorded: tokens, log-probs, versions and rewards; their ordinals are this run's.
- None comes before its youngest token's version is there: else the run has come out of step, and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.errors import ReplayError
from asyncrl.halves.recording import Recording
from asyncrl.rollout import GroupRequest
from asyncrl.snapshot import Salvage
from asyncrl.types import GroupMeta


class RecordedGroups:
    """A ``GroupSource``: what it is asked for is in ``recording``, whoever else would have made it.

    ``newest_version``: of the policy. ``store`` makes of payloads what the learner is handed; called in a
    thread.
    """

    def __init__(
        self,
        recording: Recording,
        newest_version: Callable[[], int],
        store: Callable[[Sequence[bytes]], Sequence[Any]],
    ) -> None:
        self._recording = recording
        self._newest_version = newest_version
        self._store = store

    async def run_group(
        self,
        request: GroupRequest,
        *,
        limit_s: float | None = None,
        alone: bool = False,
        salvage: Salvage | None = None,
    ) -> tuple[GroupMeta, Any]:
        """The recorded group of this ordinal. Raises ReplayError where the policy is not that far yet."""
        ordinal, newest = request.task.ordinal, self._recording.newest_version(request.task.ordinal)
        if newest > (reached := self._newest_version()):
            raise ReplayError(
                f"recorded group {ordinal} ({request.task.uid}) holds tokens of version {newest}, but the "
                f"policy is at {reached}: updates of this run were skipped that the recorded run "
                "made; look at why they were not finite"
            )
        return await asyncio.to_thread(self._fetch, ordinal)

    def _fetch(self, ordinal: int) -> tuple[GroupMeta, Any]:
        meta, payload = self._recording.group(ordinal)
        (stored,) = self._store([payload])
        return meta, stored
