"""The Ray shell of a role: a process that holds one ``Worker``.

Invariants:
- Which calls are made is up to the role: a worker gets those of the seat in ``base.py`` that it fills.
- Payloads are return values: the controller's process owns them, and they outlive the actor.
- One call at a time: Ray keeps the others waiting, in their order. Pings and the writing of checkpoints
  have threads of their own: a ping is answered whatever the others wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import psutil
import ray
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError

from asyncrl.checkpoint.files import FileEntry
from asyncrl.errors import RoleError
from asyncrl.placement import actor_options, pin_process
from asyncrl.processes import Whereabouts, kill_actor, process_at, whereabouts
from asyncrl.roles.base import (
    FollowingWorker,
    LandedGroup,
    Received,
    RoleWorker,
    ScoredGroups,
    ScoredMeta,
    ScoringWorker,
    Worker,
)
from asyncrl.roles.scoring import scored
from asyncrl.roles.worker import annotated
from asyncrl.types import Annotation, AnnotationMeta, GroupMeta, Task
from asyncrl.weight_sync.base import PushGroupSpec

BuildWorker = Callable[[], Worker]
"""Called in the actor's process; travels there by pickle, so a ``functools.partial`` of a plain function."""


_CONTROL = "control"
"""The concurrency group of pings."""
_STATE = "state"
"""That of writing checkpoints."""


class RoleActor:
    """A thin shell around one ``Worker``."""

    def __init__(self, role: str, build: BuildWorker, cores: tuple[int, ...] | None) -> None:
        pin_process(cores)
        self._role = role
        self._worker = build()

    def start(self) -> Whereabouts:
        self._worker.start()
        return whereabouts()

    def annotate(self, payload: bytes, expected: int) -> tuple[AnnotationMeta, bytes]:
        return annotated(self._role, cast(RoleWorker, self._worker), payload, expected)

    def score(
        self, asked: Sequence[tuple[Task, GroupMeta]], weight: float, *payloads: bytes
    ) -> tuple[ScoredMeta | bytes, ...]:
        """What was asked of each payload; as arguments of their own, so that Ray fetches them beforehand."""
        meta, records = scored(cast(ScoringWorker, self._worker), asked, payloads, weight)
        return (meta, *records)

    def ping(self) -> None:
        """It lives."""

    def join(self, spec: PushGroupSpec) -> None:
        self._following.join(spec)

    def receive(self, version: int) -> Received:
        return self._following.receive(version)

    def take(self, version: int, decay: float) -> None:
        self._following.take(version, decay)

    def copy_state(self) -> None:
        self._following.copy_state()

    def write_state(self, folder: str) -> list[FileEntry]:
        return self._following.write_state(Path(folder))

    def load_state(self, folder: str, version: int) -> None:
        self._following.load_state(Path(folder), version)

    def close(self) -> None:
        self._worker.close()

    @property
    def _following(self) -> FollowingWorker:
        return cast(FollowingWorker, self._worker)


_RemoteRole: Any = ray.remote(concurrency_groups={_CONTROL: 1, _STATE: 1})(RoleActor)


class RayRoleMember:
    """A ``RoleActor`` as its role sees it: its deaths are RoleErrors."""

    def __init__(
        self,
        name: str,
        role: str,
        build: BuildWorker,
        *,
        cores: tuple[int, ...] | None,
        gpus: int,
        start_timeout_s: float,
    ) -> None:
        self.name = name
        self._role = role
        self._start_timeout_s = start_timeout_s
        self._started = False
        self._process: psutil.Process | None = None
        """Its process, where that runs on this machine."""
        self._actor = _RemoteRole.options(**actor_options(gpus)).remote(role, build, cores)

    async def start(self) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self._process = process_at(await self._call(self._actor.start.remote()))
                self._started = True
        except TimeoutError:
            raise RoleError(
                f"{self.name} did not start in {self._role}.start_timeout_s = {self._start_timeout_s:g} s"
            ) from None

    async def annotate(self, meta: GroupMeta, payload: Any) -> Annotation:
        meta_ref, record_ref = self._actor.annotate.options(num_returns=2).remote(payload, meta.checksum)
        try:
            found: AnnotationMeta = await self._call(meta_ref)
        except asyncio.CancelledError:
            ray.cancel(meta_ref)  # one that runs goes on to its end, one that waits does not begin
            raise
        return Annotation(found, record_ref)

    async def score(self, groups: Sequence[LandedGroup], weight: float) -> ScoredGroups:
        asked = [(group.task, group.meta) for group in groups]
        payloads = [group.payload for group in groups]
        call = self._actor.score.options(num_returns=1 + len(groups))
        meta_ref, *records = call.remote(asked, weight, *payloads)
        try:
            found: ScoredMeta = await self._call(meta_ref)
        except asyncio.CancelledError:
            ray.cancel(meta_ref)  # as above
            raise
        return ScoredGroups(found, tuple(records))

    async def ping(self) -> None:
        await self._call(self._actor.ping.options(concurrency_group=_CONTROL).remote())

    async def join(self, spec: PushGroupSpec) -> None:
        await self._call(self._actor.join.remote(spec))

    async def receive(self, version: int) -> Received:
        received: Received = await self._call(self._actor.receive.remote(version))
        return received

    async def take(self, version: int, decay: float) -> None:
        await self._call(self._actor.take.remote(version, decay))

    async def copy_state(self) -> None:
        await self._call(self._actor.copy_state.remote())

    async def write_state(self, folder: Path) -> list[FileEntry]:
        lane = self._actor.write_state.options(concurrency_group=_STATE)
        entries: list[FileEntry] = await self._call(lane.remote(str(folder)))
        return entries

    async def load_state(self, folder: Path, version: int) -> None:
        await self._call(self._actor.load_state.remote(str(folder), version))

    async def close(self) -> None:
        try:
            if self._started:  # else it is busy, for as long as a start may take
                async with asyncio.timeout(10):
                    await self._call(self._actor.close.remote())
        finally:
            ray.kill(self._actor)

    async def kill(self) -> None:
        kill_actor(self._actor, self._process)

    async def _call(self, ref: Any) -> Any:
        try:
            return await ref
        except RayActorError as error:
            raise RoleError(f"{self.name} died: {error}") from error
        except TaskCancelledError as error:
            raise RoleError(f"{self.name} cancelled a call that nobody gave up") from error
        except RayTaskError as error:
            raise error.as_instanceof_cause() from None
