"""The Ray shell of a role: a process that holds one ``RoleWorker``.

Invariants:
- The annotated payload is a return value: the controller's process owns it, and it outlives the actor.
- One call at a time: Ray keeps the others waiting, in their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError

from asyncrl.errors import RoleError
from asyncrl.placement import actor_options, pin_process
from asyncrl.roles.base import RoleWorker
from asyncrl.roles.worker import annotated
from asyncrl.types import Annotation, AnnotationMeta, GroupMeta

BuildWorker = Callable[[], RoleWorker]
"""Called in the actor's process; travels there by pickle, so a ``functools.partial`` of a plain function."""


class RoleActor:
    """A thin shell around one ``RoleWorker``."""

    def __init__(self, role: str, build: BuildWorker, cores: tuple[int, ...] | None) -> None:
        pin_process(cores)
        self._role = role
        self._worker = build()

    def start(self) -> None:
        self._worker.start()

    def annotate(self, payload: bytes, expected: int) -> tuple[AnnotationMeta, bytes]:
        return annotated(self._role, self._worker, payload, expected)

    def close(self) -> None:
        self._worker.close()


_RemoteRole: Any = ray.remote(RoleActor)


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
        self._actor = _RemoteRole.options(**actor_options(gpus)).remote(role, build, cores)

    async def start(self) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._call(self._actor.start.remote())
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

    async def close(self) -> None:
        try:
            async with asyncio.timeout(10):
                await self._call(self._actor.close.remote())
        finally:
            ray.kill(self._actor)

    async def kill(self) -> None:
        ray.kill(self._actor)

    async def _call(self, ref: Any) -> Any:
        try:
            return await ref
        except RayActorError as error:
            raise RoleError(f"{self.name} died: {error}") from error
        except TaskCancelledError as error:
            raise RoleError(f"{self.name} cancelled a call that nobody gave up") from error
        except RayTaskError as error:
            raise error.as_instanceof_cause() from None
