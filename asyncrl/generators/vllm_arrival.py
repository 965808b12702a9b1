"""How weights arrive in vLLM's workers: by the push group's store, while vLLM samples.

vLLM hands its workers an order only between two steps, which may be long; the store reaches them at once.

Invariants:
- What is staged is of one version, and is taken once.
- A receive that failed leaves nothing that could be taken.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from asyncrl.errors import ChecksumError, WeightSyncError
from asyncrl.weight_sync.base import PushGroupSpec
from asyncrl.weight_sync.broadcast import connect_store
from asyncrl.weight_sync.staging import Outcome, await_joined, dismiss
from asyncrl.weight_sync.staging import receive as receive_staged

T = TypeVar("T")

_DISMISS_TIMEOUT_S = 1.0


class Guard(Protocol):
    """Awaits what would wait for ever if vLLM died."""

    async def __call__(self, call: Coroutine[Any, Any, T]) -> T: ...


@dataclass(frozen=True, slots=True)
class Arrived:
    """A version that lies staged in all workers."""

    version: int
    outcomes: list[Outcome]
    """A worker each."""

    @property
    def checksum(self) -> str:
        """Of all bytes. Raises ChecksumError where workers hold different ones."""
        checksums = {outcome.checksum for outcome in self.outcomes}
        if len(checksums) > 1:
            held = ", ".join(f"worker {o.rank} {o.checksum}" for o in self.outcomes)
            raise ChecksumError(f"version {self.version}: the workers of one replica differ: {held}")
        return checksums.pop()

    @property
    def receive_s(self) -> float:
        """Seconds of the slowest worker."""
        return max(outcome.receive_s for outcome in self.outcomes)


class Arrival:
    """The controlling side of the receivers in ``workers`` workers."""

    def __init__(self, workers: int, guarded: Guard) -> None:
        self._workers = workers
        self._guarded = guarded
        self._spec: PushGroupSpec | None = None
        self._store: Any = None
        self._ticket = 0
        self._staged: Arrived | None = None

    @property
    def outcomes(self) -> list[Outcome]:
        """What the last ``receive`` came to, a worker each; empty once it was taken."""
        return self._staged.outcomes if self._staged is not None else []

    async def join(self, spec: PushGroupSpec, tell: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """All workers join the group as the ranks from ``spec.rank`` on, once ``tell`` has told them to."""
        self._spec, self._staged = None, None
        self._store = await asyncio.to_thread(connect_store, spec)
        await self._guarded(tell())
        await self._guarded(asyncio.to_thread(await_joined, self._store, spec, self._ranks(spec)))
        self._spec = spec

    async def receive(self, version: int) -> None:
        """All workers fill their staging areas."""
        spec, self._staged = self._spec, None
        if spec is None:
            raise WeightSyncError(f"asked to receive version {version} before joining a push group")
        self._ticket += 1
        ticket = self._ticket
        outcomes = await self._guarded(
            asyncio.to_thread(receive_staged, self._store, spec, version, ticket, self._ranks(spec))
        )
        self._staged = Arrived(version, outcomes)

    def take(self, version: int) -> Arrived:
        """What is staged, which has to be ``version``. WeightSyncError otherwise."""
        staged, self._staged = self._staged, None
        if staged is None or staged.version != version:
            held = "nothing" if staged is None else f"version {staged.version}"
            raise WeightSyncError(f"asked to swap to version {version}, but {held} is staged")
        return staged

    async def dismiss(self) -> None:
        """Have what stands ready in the workers leave; where that takes long, they end with their process."""
        if (spec := self._spec) is None:
            return
        dismissing = asyncio.to_thread(dismiss, self._store, spec, self._ranks(spec))
        with contextlib.suppress(WeightSyncError, TimeoutError):
            async with asyncio.timeout(_DISMISS_TIMEOUT_S):
                await dismissing

    def _ranks(self, spec: PushGroupSpec) -> range:
        return range(spec.rank, spec.rank + self._workers)
