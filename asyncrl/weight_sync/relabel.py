"""Publishing where generators and learner have the same parameters: a new name for what is there already.

Invariants:
- No byte moves: an update changed the weights in place, while the generators slept.
- A version is live only when every replica has taken its name and woken at it, which they do only where they
  compute what the learner does: see ``turns``.
- The death of a replica is that of its learner rank: nobody is restarted, and nobody catches up.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncrl.errors import WeightSyncError
from asyncrl.generators.pool import GeneratorPool
from asyncrl.learners.base import LearnerInfo
from asyncrl.turns import Turns
from asyncrl.types import Metrics
from asyncrl.weight_sync.base import WeightEcho
from asyncrl.weight_sync.canary import Canary
from asyncrl.weight_sync.publish import PublishReport
from asyncrl.weight_sync.together import together


class RelabelPublisher:
    """The ``Publisher`` of shared parameters. Takes the turn to the generators with each version.

    ``canary``: what the turns check, whose figures are reported here as any publisher's.
    """

    def __init__(
        self,
        pool: GeneratorPool,
        turns: Turns,
        *,
        timeout_s: float,
        canary: Canary | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._turns = turns
        self._timeout_s = timeout_s
        self._canary = canary
        self._clock = clock

    async def open(self, info: LearnerInfo) -> None:
        """Nothing to prepare: nothing is going to travel."""

    async def copied_out(self, version: int) -> None:
        """Nothing is ever copied out."""
        raise WeightSyncError(f"asked to push a copy of version {version}, but the weights are shared")

    async def publish(self, version: int) -> PublishReport:
        """Name the weights ``version`` on all replicas, and wake them. Raises what failed of it at once:
        GeneratorError, CanaryError, PushTimeoutError, NoGeneratorError."""
        start = self._clock()
        await self._pool.until(lambda pool: pool.receivers)
        members = self._pool.receivers
        echoes: list[WeightEcho] = await together(
            self._timeout_s,
            f"naming version {version} on {', '.join(member.name for member in members)}",
            *(m.call(m.replica.swap(version, in_flight=True, kv="recompute")) for m in members),
        )
        await self._turns.to_generators(version)
        self._pool.let_in(members, version)
        return PublishReport(
            version=version,
            checksum=echoes[0].checksum,
            nbytes=0,
            seconds=self._clock() - start,
            pause_s=max(echo.pause_s for echo in echoes),
            attempts=1,
        )

    async def catch_up(self, version: int) -> bool:
        """Nobody is ever left to be let in."""
        return False

    def take_metrics(self) -> Metrics:
        """What the canary found since the last call; nothing without one."""
        return {} if self._canary is None else self._canary.take_metrics()
