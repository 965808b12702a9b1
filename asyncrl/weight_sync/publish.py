"""Publishing: the control plane of a weight push, from the learner to every replica.

Invariants:
- A version is live only when every replica that takes work has swapped to it and echoed the
  sender's checksum.
- A push is bounded by ``weight_sync.timeout_s``. When it fails, the replicas that do not answer are
  given up, the group is rebuilt with the survivors under a new prefix, and the push is sent again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from asyncrl.errors import ChecksumError, InfrastructureError, PushTimeoutError, WeightSyncError
from asyncrl.generators.base import KVAfterSwap
from asyncrl.generators.pool import GeneratorPool, Member
from asyncrl.learners.base import Learner, LearnerInfo, PushReport
from asyncrl.weight_sync.base import PushGroupSpec, WeightEcho, mismatches

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PublishReport:
    """One version made live."""

    version: int
    checksum: str
    nbytes: int
    seconds: float
    pause_s: float
    """Longest standstill of a replica."""
    attempts: int


class WeightPublisher:
    """Pushes versions and makes them live, one at a time."""

    def __init__(
        self,
        learner: Learner,
        pool: GeneratorPool,
        *,
        backend: str,
        bucket_bytes: int,
        timeout_s: float,
        in_flight: bool,
        kv: KVAfterSwap,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._learner = learner
        self._pool = pool
        self._bucket_bytes = bucket_bytes
        self._backend = backend
        self._timeout_s = timeout_s
        self._in_flight = in_flight
        self._kv = kv
        self._clock = clock
        self._generation = 0
        self._info: LearnerInfo | None = None
        self._receivers: list[Member] = []

    async def open(self, info: LearnerInfo) -> None:
        """Build the push group of the learner and all live replicas."""
        self._info = info
        await self._rebuild()

    async def publish(self, version: int) -> PublishReport:
        """Make ``version`` live everywhere. Raises WeightSyncError when no replica could take it."""
        start = self._clock()
        attempts = 0
        while True:
            attempts += 1
            try:
                if attempts > 1 or self._receivers != self._pool.live:
                    await self._rebuild()
                report, echoes = await self._push(version)
                break
            except InfrastructureError as error:
                if isinstance(error, ChecksumError) or not await self._give_up_the_silent():
                    raise
                log.warning("push of version %d failed, sending it again: %s", version, error)
        for member in self._receivers:
            member.version = version
        return PublishReport(
            version=version,
            checksum=report.checksum,
            nbytes=report.nbytes,
            seconds=self._clock() - start,
            pause_s=max(echo.pause_s for echo in echoes),
            attempts=attempts,
        )

    async def _push(self, version: int) -> tuple[PushReport, list[WeightEcho]]:
        receivers = self._receivers
        names = [member.replica.name for member in receivers]
        sent, *_ = await self._together(
            f"sending version {version} to {', '.join(names)}",
            self._learner.push(version),
            *(member.replica.receive(version) for member in receivers),
        )
        echoes: list[WeightEcho] = await self._together(
            f"swapping to version {version} on {', '.join(names)}",
            *(m.replica.swap(version, in_flight=self._in_flight, kv=self._kv) for m in receivers),
        )
        wrong = [names[i] for i in mismatches(sent.checksum, echoes)]
        if wrong or any(echo.version != version for echo in echoes):
            raise ChecksumError(
                f"version {version}: the learner sent {sent.checksum}, but "
                + ", ".join(f"{n} holds {e.version}:{e.checksum}" for n, e in zip(names, echoes, strict=True))
            )
        return sent, echoes

    async def _rebuild(self) -> None:
        assert self._info is not None, "open() comes first"
        self._receivers = self._pool.live
        if not self._receivers:
            raise WeightSyncError("no replica is left to push weights to")
        self._generation += 1
        host, port = self._info.store or ("127.0.0.1", 0)
        spec = PushGroupSpec(
            host=host,
            port=port,
            prefix=f"push{self._generation}",
            rank=0,
            world_size=1 + sum(m.replica.push_ranks for m in self._receivers),
            backend="nccl" if self._backend == "nccl" else "gloo",
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
            manifest=self._info.manifest,
        )
        # Each replica has as many ranks in a row as it has workers; it is told its first.
        ranks = accumulate((m.replica.push_ranks for m in self._receivers[:-1]), initial=1)
        await self._together(
            f"building push group {spec.prefix}",
            self._learner.open_push_group(spec),
            *(m.replica.join(replace(spec, rank=r)) for m, r in zip(self._receivers, ranks, strict=True)),
        )

    async def _give_up_the_silent(self) -> bool:
        """Ping all receivers; True if some survive, so that another try makes sense."""
        before = len(self._pool.live)
        await self._pool.probe(self._receivers)
        return 0 < len(self._pool.live) < before

    async def _together(self, doing: str, *calls: Coroutine[Any, Any, Any]) -> list[Any]:
        """All calls at once, within the timeout; the first failure cancels the rest."""
        tasks = [asyncio.create_task(call) for call in calls]
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.gather(*tasks)
        except TimeoutError:
            raise PushTimeoutError(
                f"{doing}: not done after weight_sync.timeout_s = {self._timeout_s:g} s"
            ) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
