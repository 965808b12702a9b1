"""Publishing: the control plane of a weight push, from the learner to every replica.

Invariants:
- A version is live only when every replica that takes work has swapped to it and echoed the
  sender's checksum.
- Where a canary is due, a version is live only when every receiver computes with it what the learner does.
- What is pushed is what the learner holds: the caller sees to it that no update runs meanwhile.
- A push is bounded by ``weight_sync.timeout_s``, and fails at once when a receiver is given up. Then the
  group is rebuilt with the survivors under a new prefix, and the push is sent again: as often as
  receivers died of it, and once where none did.
- A restarted replica takes work only after a push that it took part in: the next version's, or one
  of its own between two updates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from asyncrl.errors import CanaryError, ChecksumError, GeneratorError, WeightSyncError
from asyncrl.generators.base import KVAfterSwap
from asyncrl.generators.pool import GeneratorPool, Member
from asyncrl.learners.base import Learner, LearnerInfo, PushReport
from asyncrl.types import Metrics
from asyncrl.weight_sync.base import BESIDE, Backend, PushGroupSpec, WeightEcho, mismatches
from asyncrl.weight_sync.canary import Canary
from asyncrl.weight_sync.canary_scores import compare_generators, score_learner
from asyncrl.weight_sync.together import together

log = logging.getLogger(__name__)

_TRANSIENT_FAILURES = 1
"""Failures of one push that are forgiven though nobody died."""
_FINAL = (ChecksumError, CanaryError)
"""What sending again would not mend."""


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
        backend: Backend,
        bucket_bytes: int,
        timeout_s: float,
        in_flight: bool,
        kv: KVAfterSwap,
        canary: Canary | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._learner = learner
        self._pool = pool
        self._bucket_bytes = bucket_bytes
        self._backend = backend
        self._hands_over = backend in BESIDE
        self._timeout_s = timeout_s
        self._in_flight = in_flight
        self._kv = kv
        self._canary = canary
        self._clock = clock
        self._generation = 0
        self._info: LearnerInfo | None = None
        self._receivers: list[Member] = []

    async def open(self, info: LearnerInfo) -> None:
        """Take the facts of a learner that stands; the first push builds the group."""
        self._info = info

    async def copied_out(self, version: int) -> None:
        """With ``weight_sync.overlap``, while the learner still holds what it copied out: score it, if due.

        Raises WeightSyncError when the learner takes too long.
        """
        canary = self._due_canary(version, self._pool.receivers)
        if canary is not None:
            await self._score_learner(canary, version)

    async def publish(self, version: int) -> PublishReport:
        """Make ``version``, which the learner holds, live on all replicas, the restarted ones included.

        Waits for a replica where all are being restarted. Raises WeightSyncError when it failed twice
        without a death, ChecksumError or CanaryError at once, NoGeneratorError when no replica is left.
        """
        while True:
            await self._pool.until(lambda pool: pool.receivers)
            report = await self._deliver(version, lambda: self._pool.receivers)
            if report is not None:
                return report

    async def catch_up(self, version: int) -> bool:
        """Let the replicas that wait for weights in at ``version``, which the learner holds.

        The live ones are left alone. False when none could be let in. With ``weight_sync.overlap`` the
        learner may be past ``version``: without log-probs of it, the canary waits for the next push.
        """
        try:
            return await self._deliver(version, lambda: self._pool.joining) is not None
        except _FINAL:
            raise
        except WeightSyncError as error:
            # It failed at its first task: another life is worth more than the run's end.
            for member in self._pool.joining:
                member.give_up(f"it could not be brought to version {version}: {error}")
            return False

    async def _deliver(self, version: int, choose: Callable[[], list[Member]]) -> PublishReport | None:
        """Push to the chosen and let them in; None when nobody is left to choose."""
        start = self._clock()
        attempts = transient = 0
        while receivers := choose():
            attempts += 1
            try:
                sent, echoes = await self._push(version, receivers)
            except _FINAL:
                raise
            except (WeightSyncError, GeneratorError) as error:
                await self._pool.probe(receivers)
                transient += all(member.alive for member in receivers)
                if transient > _TRANSIENT_FAILURES:
                    raise
                log.warning("push of version %d failed, sending it again: %s", version, error)
                continue
            self._pool.let_in(receivers, version)
            return PublishReport(
                version=version,
                checksum=sent.checksum,
                nbytes=sent.nbytes,
                seconds=self._clock() - start,
                pause_s=max(echo.pause_s for echo in echoes),
                attempts=attempts,
            )
        return None

    async def _push(self, version: int, receivers: list[Member]) -> tuple[PushReport, list[WeightEcho]]:
        if self._receivers != receivers:
            await self._rebuild(receivers)
        names = [member.name for member in receivers]
        try:
            sent, *_ = await self._together(
                f"sending version {version} to {', '.join(names)}",
                self._learner.push(version),
                *(m.call(m.replica.receive(version)) for m in receivers),
            )
        except BaseException:
            self._receivers = []  # the group may be broken, or out of step
            raise
        swaps = (m.replica.swap(version, in_flight=self._in_flight, kv=self._kv) for m in receivers)
        echoes: list[WeightEcho] = await self._together(
            f"swapping to version {version} on {', '.join(names)}",
            *(m.call(swap) for m, swap in zip(receivers, swaps, strict=True)),
        )
        wrong = [names[i] for i in mismatches(sent.checksum, echoes)]
        if wrong or any(echo.version != version for echo in echoes):
            raise ChecksumError(
                f"version {version}: the learner sent {sent.checksum}, but "
                + ", ".join(f"{n} holds {e.version}:{e.checksum}" for n, e in zip(names, echoes, strict=True))
            )
        canary = self._due_canary(version, receivers)
        if canary is not None:
            await self._check(canary, version, receivers)
        return sent, echoes

    def _due_canary(self, version: int, receivers: list[Member]) -> Canary | None:
        newcomers = any(member.state == "joining" for member in receivers)
        due = self._canary is not None and self._canary.due(version, newcomers=newcomers)
        return self._canary if due else None

    async def _score_learner(self, canary: Canary, version: int) -> None:
        await score_learner(canary, version, self._learner, timeout_s=self._timeout_s, clock=self._clock)

    async def _check(self, canary: Canary, version: int, receivers: list[Member]) -> None:
        """Compare what the receivers compute with ``version``, which is live on them."""
        if not canary.knows(version):
            if canary.overlap:
                canary.owe(version)
                return
            await self._score_learner(canary, version)
        await compare_generators(canary, version, receivers, timeout_s=self._timeout_s, clock=self._clock)

    def take_metrics(self) -> Metrics:
        """What the canary found since the last call; nothing without one."""
        return {} if self._canary is None else self._canary.take_metrics()

    async def _rebuild(self, receivers: list[Member]) -> None:
        assert self._info is not None, "open() comes first"
        self._receivers = []
        self._generation += 1
        host, port = self._info.store or ("127.0.0.1", 0)
        # Where weights are handed over, a learner rank and the replica of its number make a slot.
        slots = [self._pool.members.index(member) for member in receivers] if self._hands_over else []
        spec = PushGroupSpec(
            host=host,
            port=port,
            prefix=f"push{self._generation}",
            rank=0,
            world_size=1 + sum(member.replica.push_ranks for member in receivers),
            backend=self._backend,
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
            manifest=self._info.manifest,
            adapters=self._info.adapters,
            slots=tuple(slots),
        )
        # Each replica has as many ranks in a row as it has workers; it is told its first.
        ranks = accumulate((m.replica.push_ranks for m in receivers[:-1]), initial=1)
        specs = [spec.of_slot(slot, 1) for slot in slots] or [replace(spec, rank=rank) for rank in ranks]
        await self._together(
            f"building push group {spec.prefix}",
            self._learner.open_push_group(spec),
            *(m.call(m.replica.join(own)) for m, own in zip(receivers, specs, strict=True)),
        )
        self._receivers = receivers

    async def _together(self, doing: str, *calls: Coroutine[Any, Any, Any]) -> list[Any]:
        return await together(self._timeout_s, doing, *calls)
