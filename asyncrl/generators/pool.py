"""The replicas as the controller sees them: routing, liveness, and who takes new work.

Invariants:
- Work goes to the live replica with the fewest outstanding tokens (ties: the first).
- A replica that failed takes no new work; its requests fail with GeneratorError, for the caller to
  issue again.
- ``live_version`` is the oldest version among the replicas that take new work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.errors import GeneratorError, InfrastructureError, NoGeneratorError
from asyncrl.generators.base import GeneratorStatistics, KVAfterSwap
from asyncrl.rollout import GroupRequest
from asyncrl.types import GroupMeta
from asyncrl.weight_sync.base import PushGroupSpec, WeightEcho

log = logging.getLogger(__name__)


class Replica(Protocol):
    """One generator with its rollout host, wherever it runs. Raises GeneratorError when it died."""

    name: str
    push_ranks: int
    """Ranks that it takes in the push group: one for each process that holds weights."""

    async def start(self) -> None: ...

    async def run_group(self, request: GroupRequest) -> tuple[GroupMeta, Any]:
        """The group's meta, and a reference to (or the bytes of) its payload.

        Cancelling the awaiting task cancels the rollout and frees its slots.
        """
        ...

    async def ping(self) -> None: ...

    async def join(self, spec: PushGroupSpec) -> None: ...

    async def receive(self, version: int) -> None: ...

    async def swap(self, version: int, *, in_flight: bool, kv: KVAfterSwap) -> WeightEcho: ...

    async def statistics(self) -> GeneratorStatistics: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class Member:
    """A replica and what the pool knows of it."""

    replica: Replica
    version: int = 0
    alive: bool = True
    outstanding_tokens: int = 0
    groups: set[tuple[str, int]] = field(default_factory=set)
    """Uid and ordinal of each group that it works on, evaluation included."""


class GeneratorPool:
    """Routes groups to replicas."""

    def __init__(self, replicas: Sequence[Replica], *, ping_timeout_s: float = 5.0) -> None:
        self.members = [Member(replica) for replica in replicas]
        self._ping_timeout_s = ping_timeout_s

    @property
    def live(self) -> list[Member]:
        """Members that take new work."""
        return [member for member in self.members if member.alive]

    @property
    def live_version(self) -> int:
        """g: the oldest version among the replicas that take new work."""
        return min(member.version for member in self._living())

    async def start(self) -> None:
        async with asyncio.TaskGroup() as group:
            for member in self.members:
                group.create_task(member.replica.start(), name=f"start {member.replica.name}")

    async def run_group(self, request: GroupRequest) -> tuple[GroupMeta, Any]:
        """Run a group on the least loaded replica; raises GeneratorError when that one dies."""
        member = min(self._living(), key=lambda m: m.outstanding_tokens)
        member.outstanding_tokens += request.max_tokens
        key = (request.task.uid, request.task.ordinal)
        member.groups.add(key)
        try:
            return await member.replica.run_group(request)
        except GeneratorError as error:
            self.mark_dead(member, str(error))
            raise
        finally:
            member.outstanding_tokens -= request.max_tokens
            member.groups.discard(key)

    def mark_dead(self, member: Member, why: str) -> None:
        """Give the member no more work."""
        if member.alive:
            member.alive = False
            log.error("%s is out: %s", member.replica.name, why)

    async def probe(self, members: Sequence[Member]) -> None:
        """Ping the members, and mark those dead that do not answer in time."""

        async def one(member: Member) -> None:
            try:
                async with asyncio.timeout(self._ping_timeout_s):
                    await member.replica.ping()
            except (InfrastructureError, TimeoutError) as error:
                why = str(error) or f"no answer to a ping in {self._ping_timeout_s:g} s"
                self.mark_dead(member, why)

        await asyncio.gather(*(one(member) for member in members if member.alive))

    async def statistics(self) -> list[GeneratorStatistics]:
        """One snapshot a live replica."""
        return await asyncio.gather(*(member.replica.statistics() for member in self.live))

    async def close(self) -> None:
        await asyncio.gather(
            *(member.replica.close() for member in self.members if member.alive), return_exceptions=True
        )

    def describe(self) -> list[str]:
        """Who holds what, for a stall report."""
        return [
            f"{m.replica.name}: {'live at version ' + str(m.version) if m.alive else 'dead'}, "
            f"{len(m.groups)} groups, at most {m.outstanding_tokens} tokens outstanding"
            for m in self.members
        ]

    def holder(self, uid: str, ordinal: int) -> str:
        """Name of the replica that works on this group."""
        return next((m.replica.name for m in self.members if (uid, ordinal) in m.groups), "no replica")

    def _living(self) -> list[Member]:
        living = self.live
        if not living:
            names = ", ".join(member.replica.name for member in self.members)
            raise NoGeneratorError(f"no generator is left: {names} all died; the log says why of each")
        return living
