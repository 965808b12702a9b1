"""Publishing where no weights travel: generators that stay at the start model, or none at all."""

from __future__ import annotations

from asyncrl.errors import WeightSyncError
from asyncrl.generators.pool import GeneratorPool
from asyncrl.learners.base import LearnerInfo
from asyncrl.types import Metrics
from asyncrl.weight_sync.publish import PublishReport


class UnsentPublisher:
    """The ``Publisher`` of half a run: a version is live because nobody has to be sent it."""

    def __init__(self, pool: GeneratorPool) -> None:
        self._pool = pool

    async def open(self, info: LearnerInfo) -> None:
        """Nothing to prepare: nothing is going to travel."""

    async def copied_out(self, version: int) -> None:
        """Nothing is ever copied out."""
        raise WeightSyncError(f"asked to push a copy of version {version}, but nobody is sent weights")

    async def publish(self, version: int) -> PublishReport:
        """Let all in that started. Raises NoGeneratorError where there were some and none is left."""
        if self._pool.members:
            await self._pool.until(lambda pool: pool.receivers)
        self._pool.let_in(self._pool.receivers, version)
        return PublishReport(version, checksum="", nbytes=0, seconds=0.0, pause_s=0.0, attempts=1)

    async def catch_up(self, version: int) -> bool:
        """Let those in that were restarted: they loaded what the others have."""
        joining = self._pool.joining
        self._pool.let_in(joining, version)
        return bool(joining)

    def take_metrics(self) -> Metrics:
        return {}
