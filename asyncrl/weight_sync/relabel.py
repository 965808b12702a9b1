"""Publishing where generators and learner have the same parameters: a new name for what is there already.

Invariants:
- No byte moves: an update changed the weights in place, while the generators slept.
- A version is live only when every replica has taken its name, woken at it, and, where there is a canary,
  computes with it what the learner does. The learner's half of the canary is taken in its turn.
- The death of a replica is that of its learner rank: nobody is restarted, and nobody catches up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl.errors import WeightSyncError
from asyncrl.generators.pool import GeneratorPool
from asyncrl.learners.base import Learner, LearnerInfo
from asyncrl.turns import Turns
from asyncrl.types import Metrics
from asyncrl.weight_sync.base import WeightEcho
from asyncrl.weight_sync.canary import Canary
from asyncrl.weight_sync.publish import PublishReport
from asyncrl.weight_sync.together import together


class RelabelPublisher:
    """The ``Publisher`` of shared parameters. Takes the turn to the generators with each version."""

    def __init__(
        self,
        learner: Learner,
        pool: GeneratorPool,
        turns: Turns,
        *,
        timeout_s: float,
        canary: Canary | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._learner = learner
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
        names = ", ".join(member.name for member in members)
        if self._canary is not None:
            begun = self._clock()
            (logprobs,) = await self._together(
                f"scoring the canary of version {version} by the learner",
                self._learner.score(self._canary.token_ids),
            )
            self._canary.expect(version, logprobs, self._clock() - begun)
        echoes: list[WeightEcho] = await self._together(
            f"naming version {version} on {names}",
            *(m.call(m.replica.swap(version, in_flight=True, kv="recompute")) for m in members),
        )
        await self._turns.to_generators()
        if self._canary is not None:
            begun = self._clock()
            found = await self._together(
                f"scoring the canary of version {version} on {names}",
                *(m.call(m.replica.score(self._canary.token_ids)) for m in members),
            )
            by_name = {m.name: logprobs for m, logprobs in zip(members, found, strict=True)}
            self._canary.compare(version, by_name, self._clock() - begun)
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

    async def _together(self, doing: str, *calls: Coroutine[Any, Any, Any]) -> list[Any]:
        return await together(self._timeout_s, doing, *calls)
