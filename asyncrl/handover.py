"""Turns and pushes where generators and learner share devices, but have weights of their own.

The learner's turn ends in an order in which neither side's peak meets the other's: the generators take memory
for weights and nothing else; the weights are pushed; the learner leaves the device; the generators take
memory for keys and values, and go on. Theirs ends with their leaving, before the learner comes.

Invariants:
- Never both: the learner is off the device while a generator samples, and the generators sleep while it is
  on. Only weights are there twice, while they are pushed.
- Whenever generators wake they have been sent weights since they slept, if need be those that they had:
  asleep they keep none.
- A version is live only when every replica has echoed the sender's checksum, has woken with it, and, where
  there is a canary, computes with it what the learner does. The learner's half is taken in its turn.
- Nobody is restarted: starting one would take memory that is the other side's.
- Every step has a deadline, ``weight_sync.timeout_s``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from asyncrl.errors import WeightSyncError
from asyncrl.generators.pool import GeneratorPool
from asyncrl.learners.base import Learner, LearnerInfo
from asyncrl.turns import ColocatedTurns
from asyncrl.types import Metrics
from asyncrl.waiting import now
from asyncrl.weight_sync.canary import Canary
from asyncrl.weight_sync.publish import PublishReport, WeightPublisher
from asyncrl.weight_sync.together import together


class HandoverTurns:
    """The ``Turns`` of a pool whose replicas start asleep and a learner that starts on the device.

    ``publisher`` pushes, without a canary of its own; ``canary`` looks at each push.
    """

    def __init__(
        self,
        learner: Learner,
        pool: GeneratorPool,
        publisher: WeightPublisher,
        *,
        timeout_s: float,
        canary: Canary | None = None,
    ) -> None:
        self._learner = learner
        self._pool = pool
        self._publisher = publisher
        self._turns = ColocatedTurns(pool, learner, timeout_s=timeout_s, canary=canary)
        self._timeout_s = timeout_s
        self._seconds = 0.0

    async def to_learner(self, evaluated: Callable[[], Awaitable[None]]) -> None:
        if self._turns.whose == "learner":
            return
        await self._turns.to_learner(evaluated)
        await self._step("moving the learner's state to the device", self._learner.reload())

    async def to_generators(self, version: int) -> None:
        """Pushes ``version`` again, where ``hand_over`` has not given the turn away with it."""
        if self._turns.whose == "learner":
            await self.hand_over(version)

    async def hand_over(self, version: int) -> PublishReport:
        """Give the generators ``version``, which the learner holds, and the turn.

        Raises what failed of it: WeightSyncError, GeneratorError, CanaryError or NoGeneratorError.
        """
        start = now()
        await self._pool.until(lambda pool: pool.receivers)
        await self._step("making room for weights on the generators", self._pool.make_room())
        report = await self._publisher.publish(version)
        await self._turns.to_generators(version, self._leave)
        return replace(report, seconds=now() - start)

    async def _leave(self) -> None:
        await self._step("moving the learner's state off the device", self._learner.offload())

    async def _step(self, doing: str, call: Coroutine[Any, Any, None]) -> None:
        start = now()
        await together(self._timeout_s, doing, call)
        self._seconds += now() - start

    def take_metrics(self) -> Metrics:
        """Those of ``ColocatedTurns``; the seconds are of both sides."""
        metrics = self._turns.take_metrics()
        metrics["timing_s/turns"] += self._seconds
        self._seconds = 0.0
        return metrics


class HandoverPublisher:
    """The ``Publisher`` whose pushes are part of a change of turn."""

    def __init__(
        self, turns: HandoverTurns, publisher: WeightPublisher, *, canary: Canary | None = None
    ) -> None:
        self._turns = turns
        self._publisher = publisher
        self._canary = canary

    async def open(self, info: LearnerInfo) -> None:
        """Take the facts of a learner that stands."""
        await self._publisher.open(info)

    async def copied_out(self, version: int) -> None:
        """Nothing is ever copied out: no generator works while the learner does."""
        raise WeightSyncError(f"asked to push a copy of version {version}, but the sides take turns")

    async def publish(self, version: int) -> PublishReport:
        """Make ``version``, which the learner holds in its turn, live on all replicas, and wake them.

        Raises as ``HandoverTurns.hand_over``.
        """
        return await self._turns.hand_over(version)

    async def catch_up(self, version: int) -> bool:
        """Nobody is ever left to be let in."""
        return False

    def take_metrics(self) -> Metrics:
        """What the canary found since the last call; nothing without one."""
        return {} if self._canary is None else self._canary.take_metrics()
