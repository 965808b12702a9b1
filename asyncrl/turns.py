"""Whose turn it is, where generators and learner share their devices.

A turn of the generators ends when a batch is ready: they fall asleep, with their keys and values freed and
their unfinished answers kept. The learner's turn is one update, and ends with the version that it made: the
generators wake at it, and the unfinished answers go on under the new weights.

Invariants:
- Never both: no update runs unless all generators sleep, and they sample nothing while one runs.
- No turn is taken from a running evaluation: it is of one version, and an update would change that.
- Where there is a canary, no turn of the generators goes on unless they compute what the learner does, also
  after an update that changed nothing. The learner's half of it is taken in its own turn.
- Every change of turn has a deadline, ``weight_sync.timeout_s``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

from asyncrl.generators.base import Asleep
from asyncrl.generators.pool import GeneratorPool
from asyncrl.learners.base import Learner
from asyncrl.types import Metrics
from asyncrl.waiting import now
from asyncrl.weight_sync.canary import Canary
from asyncrl.weight_sync.canary_scores import compare_generators, score_learner
from asyncrl.weight_sync.together import together


class Turns(Protocol):
    """What the controller asks before and after each update."""

    async def to_learner(self, evaluated: Callable[[], Awaitable[None]]) -> None:
        """Return once the learner may work: ``evaluated`` has returned, and the generators sleep.

        Raises what ``evaluated`` raises, GeneratorError, or PushTimeoutError.
        """
        ...

    async def to_generators(self, version: int) -> None:
        """Return once the generators may sample with ``version``, which they have.

        Raises GeneratorError, PushTimeoutError, or CanaryError.
        """
        ...

    def take_metrics(self) -> Metrics:
        """Figures since the last call."""
        ...


class NoTurns:
    """For sides on devices of their own: each may always work."""

    async def to_learner(self, evaluated: Callable[[], Awaitable[None]]) -> None:
        """At once."""

    async def to_generators(self, version: int) -> None:
        """At once."""

    def take_metrics(self) -> Metrics:
        return {}


class ColocatedTurns:
    """Puts all replicas of ``pool`` to sleep and wakes them, within ``timeout_s`` each time.

    The first turn is the learner's: replicas start asleep.
    """

    def __init__(
        self,
        pool: GeneratorPool,
        learner: Learner,
        *,
        timeout_s: float,
        canary: Canary | None = None,
    ) -> None:
        self._pool = pool
        self._learner = learner
        self._timeout_s = timeout_s
        self._canary = canary
        self.whose: Literal["learner", "generators"] = "learner"
        self._seconds = 0.0
        self._carried_groups = 0
        self._carried_samples = 0
        self._freed_bytes = 0

    async def to_learner(self, evaluated: Callable[[], Awaitable[None]]) -> None:
        if self.whose == "learner":
            return
        await evaluated()
        start = now()
        groups = sum(len(member.groups) for member in self._pool.members)
        asleep: list[Asleep]
        (asleep,) = await together(self._timeout_s, "putting the generators to sleep", self._pool.sleep())
        self.whose = "learner"
        self._carried_groups += groups
        self._carried_samples += sum(one.sequences for one in asleep)
        self._freed_bytes = sum(one.freed_bytes for one in asleep)
        self._seconds += now() - start

    async def to_generators(self, version: int, leave: Callable[[], Awaitable[None]] | None = None) -> None:
        """``leave``: what the learner does before the generators wake."""
        if self.whose == "generators":
            return
        if self._canary is not None:
            await score_learner(self._canary, version, self._learner, timeout_s=self._timeout_s, clock=now)
        if leave is not None:
            await leave()
        start = now()
        await together(self._timeout_s, "waking the generators", self._pool.wake())
        self.whose = "generators"
        self._seconds += now() - start
        if self._canary is not None:
            members = self._pool.receivers
            await compare_generators(self._canary, version, members, timeout_s=self._timeout_s, clock=now)

    def take_metrics(self) -> Metrics:
        """Seconds in which the turn changed hands, of which those of waking are part of the push's, and those
        of the canary are not counted; groups that were carried over an update, and answers of these that had
        begun; megabytes (2**20 bytes) that the generators' sleep made free for the last update."""
        metrics = {
            "timing_s/turns": self._seconds,
            "turns/carried_groups": float(self._carried_groups),
            "turns/carried_samples": float(self._carried_samples),
            "turns/kv_freed_mb": self._freed_bytes / 2**20,
        }
        self._seconds, self._carried_groups, self._carried_samples = 0.0, 0, 0
        return metrics
