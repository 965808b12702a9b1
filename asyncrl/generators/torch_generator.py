"""The embedded torch engine with the receiving half of weight sync: a whole ``Generator``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.generators.base import GeneratorStatistics, KVAfterSwap
from asyncrl.generators.torch_engine import TorchEngine
from asyncrl.types import Completion, Float32Array, GenerationRequest
from asyncrl.weight_sync.adapters import AdapterMerger
from asyncrl.weight_sync.base import PushGroupSpec, WeightEcho
from asyncrl.weight_sync.broadcast import PushGroup


class TorchGenerator:
    """Composes a ``TorchEngine`` and a ``PushGroup``: receive while generating, pause only to swap."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._group: PushGroup | None = None
        self._staged: tuple[int, str, float] | None = None
        """Version, checksum and seconds of what lies in the staging area."""
        self._merger: AdapterMerger | None = None

    @property
    def live_version(self) -> int:
        return self._engine.live_version

    async def start(self) -> None:
        await self._engine.start()

    async def generate(self, request: GenerationRequest) -> Completion:
        return await self._engine.generate(request)

    async def partials(self) -> dict[str, Completion]:
        return await self._engine.partials()

    async def abort(self, uid: str) -> None:
        await self._engine.abort(uid)

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        return await self._engine.score(token_ids)

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def join(self, spec: PushGroupSpec) -> None:
        group, self._group = self._group, None
        if group is not None:
            # In a thread: it may wait for a broadcast that a dead peer holds up.
            await asyncio.to_thread(group.close)
        if spec.adapters and self._merger is None:
            # Before the first push of this life: what it holds is the start model.
            start = self._engine.live_weights()
            self._merger = await asyncio.to_thread(AdapterMerger, start, spec.manifest, spec.adapters)
        self._group = await asyncio.to_thread(PushGroup, spec)

    async def receive(self, version: int) -> None:
        group = self._group
        if group is None:
            raise WeightSyncError(f"asked to receive version {version} before joining a push group")
        self._staged = None
        clock = asyncio.get_running_loop().time
        start = clock()
        checksum = await asyncio.to_thread(self._fill, group, version, self._engine.stage())
        self._staged = (version, checksum, clock() - start)

    async def swap(self, version: int, *, in_flight: bool, kv: KVAfterSwap) -> WeightEcho:
        if self._staged is None or self._staged[0] != version:
            held = "nothing" if self._staged is None else f"version {self._staged[0]}"
            raise WeightSyncError(f"asked to swap to version {version}, but {held} is staged")
        _, checksum, receive_s = self._staged
        self._staged = None
        pause_s = await self._engine.swap_staged(version, in_flight=in_flight, kv=kv)
        return WeightEcho(version, checksum, pause_s, receive_s)

    def _fill(self, group: PushGroup, version: int, staging: Mapping[str, Tensor]) -> str:
        """Receive into ``staging``, in a thread; the checksum of what arrived."""
        if self._merger is None:
            return group.receive(version, staging)
        checksum = group.receive(version, self._merger.room)
        self._merger.merge(staging)
        return checksum

    async def check_health(self) -> None:
        self._engine.check_health()

    def statistics(self) -> GeneratorStatistics:
        return self._engine.statistics()

    async def close(self) -> None:
        if self._group is not None:
            self._group.close()
        await self._engine.close()
