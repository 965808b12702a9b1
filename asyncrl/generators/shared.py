"""The embedded torch engine on parameters that a learner in the same process trains: a whole ``Generator``.

Invariants:
- It owns no weights. Nothing is received, staged or copied: a swap says which version the parameters are,
  and the engine is asleep while they change and while it is said.
- What it computes with is what the learner trains, tensor for tensor: checked at each swap.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.errors import InvariantError, WeightSyncError
from asyncrl.generators.base import Asleep, GeneratorStatistics, KVAfterSwap
from asyncrl.generators.torch_engine import TorchEngine
from asyncrl.types import Completion, Float32Array, GenerationRequest
from asyncrl.weight_sync.base import PushGroupSpec, WeightEcho
from asyncrl.weight_sync.sharing import SharedModel


class SharedTorchGenerator:
    """Composes a ``TorchEngine`` and a learner's parameters. Starts asleep."""

    def __init__(self, engine: TorchEngine, shared: SharedModel) -> None:
        self._engine = engine
        self._shared = shared

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

    async def sleep(self) -> Asleep:
        return await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()

    async def join(self, spec: PushGroupSpec) -> None:
        raise WeightSyncError(f"asked to join push group {spec.prefix!r}, but has the learner's own weights")

    async def receive(self, version: int) -> None:
        raise WeightSyncError(f"asked to receive version {version}, but has the learner's own weights")

    async def swap(self, version: int, *, in_flight: bool, kv: KVAfterSwap) -> WeightEcho:
        """Name the parameters ``version``; no byte moves, and no key or value is left to keep.

        The echo's checksum is that of the tensors' addresses. Raises InvariantError where the learner's
        are others.
        """
        here, learner = self._shared.addresses(), self._shared.learner_addresses()
        if here != learner:
            moved = sum(here[name] != learner.get(name) for name in here)
            raise InvariantError(
                f"version {version}: {moved} of {len(here)} tensors of the engine are no longer those that "
                "the learner trains: something replaced a parameter instead of changing it in place"
            )
        await self._engine.relabel(version)
        return WeightEcho(version, self._shared.address_checksum(), pause_s=0.0)

    async def check_health(self) -> None:
        self._engine.check_health()

    def statistics(self) -> GeneratorStatistics:
        return self._engine.statistics()

    async def close(self) -> None:
        await self._engine.close()
