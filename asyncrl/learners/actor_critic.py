"""A policy and its critic as one ``Learner``: every step updates both, at the same time.

Invariants:
- Both train on the same batch, with the values that its groups were given when they landed.
- In the first ``warmup_steps`` versions the critic alone is trained. The policy keeps its bits, its optimizer
  sees no gradient, and the version moves all the same: budget, pushes and lags are those of any other step,
  and whether a step is one of these depends on its version alone.
- A step counts as skipped where the policy's part of it was (in the warm-up: the critic's). A critic's
  update that is not finite is skipped by itself; more than ``max_bad_steps`` in a row end the run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from asyncrl.checkpoint.files import FileEntry, write_file
from asyncrl.errors import BadStepsError
from asyncrl.learners.base import Learner, LearnerInfo, PushReport, StepResult
from asyncrl.types import Batch, Float32Array
from asyncrl.weight_sync.base import Channel, PushGroupSpec

_COUNTS = "counts.json"
"""Beside the critic's own files: its updates in a row that were not finite."""


class Critic(Protocol):
    """All ranks of a critic together, as updates see them."""

    async def step(self, batch: Batch) -> StepResult:
        """Train on the batch, whose groups carry the critic's values."""
        ...

    async def copy_state(self) -> None: ...

    async def write_state(self, folder: Path) -> list[FileEntry]: ...

    async def load_state(self, folder: Path) -> None: ...


class ActorCritic:
    """``policy`` with a ``critic`` beside it, which is started and closed by whoever made it."""

    def __init__(self, policy: Learner, critic: Critic, *, warmup_steps: int, max_bad_steps: int) -> None:
        self._policy = policy
        self._critic = critic
        self._warmup_steps = warmup_steps
        self._max_bad_steps = max_bad_steps
        self._bad_in_a_row = 0
        self._copied_bad_steps: int | None = None
        """As ``_bad_in_a_row`` was when the state was copied; None where only the policy's weights were."""

    async def step(self, batch: Batch) -> StepResult:
        warmup = batch.version < self._warmup_steps
        async with asyncio.TaskGroup() as group:
            critic_task = group.create_task(self._critic.step(batch), name="update of the critic")
            policy_task = None if warmup else group.create_task(self._policy.step(batch), name="update")
        critic = critic_task.result()
        policy = (
            StepResult(critic.skipped, {"actor/lr": 0.0}) if policy_task is None else policy_task.result()
        )
        self._count(critic)
        metrics = {
            **policy.metrics,
            **critic.metrics,
            "critic/warmup": float(warmup),
            "timing_s/policy_update": policy.train_s,
            "timing_s/critic_update": critic.train_s,
        }
        return StepResult(policy.skipped, metrics, max(policy.train_s, critic.train_s), policy.ranks)

    def _count(self, critic: StepResult) -> None:
        self._bad_in_a_row = self._bad_in_a_row + 1 if critic.skipped else 0
        if self._bad_in_a_row > self._max_bad_steps:
            raise BadStepsError(
                f"{self._bad_in_a_row} updates of the critic in a row had a non-finite loss or gradient "
                f"(learner.max_bad_steps = {self._max_bad_steps}); lower critic.lr or look at the rewards"
            )

    async def start(self) -> LearnerInfo:
        return await self._policy.start()

    async def open_push_group(self, spec: PushGroupSpec, channel: Channel = "generators") -> None:
        await self._policy.open_push_group(spec, channel)

    async def copy_out(self, version: int) -> float:
        return await self._policy.copy_out(version)

    async def push(self, version: int, channel: Channel = "generators") -> PushReport:
        return await self._policy.push(version, channel)

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        return await self._policy.score(token_ids)

    async def offload(self) -> None:
        """The policy alone: the critic has devices of its own."""
        await self._policy.offload()

    async def reload(self) -> None:
        await self._policy.reload()

    async def checksum(self) -> str:
        return await self._policy.checksum()

    async def export(self, folder: Path) -> None:
        await self._policy.export(folder)

    async def copy_state(self, *, weights_only: bool = False) -> None:
        if weights_only:
            self._copied_bad_steps = None
            await self._policy.copy_state(weights_only=True)
            return
        self._copied_bad_steps = self._bad_in_a_row
        await asyncio.gather(self._policy.copy_state(), self._critic.copy_state())

    async def write_state(self, folder: Path) -> list[FileEntry]:
        if self._copied_bad_steps is None:
            return await self._policy.write_state(folder)
        written = await asyncio.gather(self._policy.write_state(folder), self._critic.write_state(folder))
        counts = json.dumps({"bad_in_a_row": self._copied_bad_steps}).encode()
        own = await asyncio.to_thread(write_file, folder / "critic", _COUNTS, counts)
        return [*(entry for entries in written for entry in entries), replace(own, path=f"critic/{_COUNTS}")]

    async def load_state(self, folder: Path) -> None:
        counts = await asyncio.to_thread((folder / "critic" / _COUNTS).read_bytes)
        self._bad_in_a_row = int(json.loads(counts)["bad_in_a_row"])
        await asyncio.gather(self._policy.load_state(folder), self._critic.load_state(folder))

    async def close(self) -> None:
        await self._policy.close()
