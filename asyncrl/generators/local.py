"""A replica in the controller's own process: for scripted engines, simulation and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.generators.base import Asleep, GeneratorStatistics, KVAfterSwap
from asyncrl.rollout import GroupRequest, RolloutHost
from asyncrl.snapshot import Snapshot
from asyncrl.types import Float32Array, GroupMeta
from asyncrl.weight_sync.base import PushGroupSpec, WeightEcho


class LocalReplica:
    """A ``Replica`` over a ``RolloutHost`` that runs on the same event loop.

    Not for engines that compute: they would stop the loop that decides.
    """

    push_ranks = 1

    def __init__(self, name: str, host: RolloutHost) -> None:
        self.name = name
        self._host = host

    async def start(self) -> None:
        await self._host.engine.start()

    async def run_group(self, request: GroupRequest, salvage: Any = None) -> tuple[GroupMeta, Any]:
        return await self._host.run_group(request, salvage)

    async def snapshot(self) -> Snapshot | None:
        taken = await self._host.snapshot()
        return None if taken is None else Snapshot(*taken)

    async def ping(self) -> None:
        await self._host.engine.check_health()

    async def join(self, spec: PushGroupSpec) -> None:
        await self._host.engine.join(spec)

    async def receive(self, version: int) -> None:
        await self._host.engine.receive(version)

    async def swap(self, version: int, *, in_flight: bool, kv: KVAfterSwap) -> WeightEcho:
        return await self._host.engine.swap(version, in_flight=in_flight, kv=kv)

    async def sleep(self) -> Asleep:
        return await self._host.sleep()

    async def make_room(self) -> None:
        await self._host.make_room()

    async def wake(self) -> None:
        await self._host.wake()

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        return await self._host.engine.score(token_ids)

    async def statistics(self) -> GeneratorStatistics:
        return self._host.engine.statistics()

    async def close(self) -> None:
        await self._host.engine.close()

    async def kill(self) -> None:
        await self._host.engine.close()
