"""The Ray shell of a generator: a process that holds an engine, its rollout host and its scorer.

Invariants:
- Control calls have a concurrency group of their own, so that a push or a ping never waits behind
  rollouts.
- A payload is a return value of ``run_group`` or ``snapshot``: the controller's process owns it, and it
  outlives the actor.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, TaskCancelledError

from asyncrl.config import Config
from asyncrl.errors import GeneratorError
from asyncrl.generators.base import Asleep, GeneratorStatistics, KVAfterSwap
from asyncrl.out_of_memory import is_out_of_memory
from asyncrl.placement import pin_process
from asyncrl.processes import Whereabouts, kill_actor, process_at, whereabouts
from asyncrl.rollout import GroupRequest, RolloutHost
from asyncrl.snapshot import GroupKey, Progress, Snapshot
from asyncrl.timeline import shifted, unix_offset
from asyncrl.types import Float32Array, GroupMeta
from asyncrl.weight_sync.base import PushGroupSpec, WeightEcho

if TYPE_CHECKING:
    from asyncrl.weight_sync.sharing import SharedModel

log = logging.getLogger(__name__)
T = TypeVar("T")

_FETCH_S = 60.0
"""Longest that a copy of a payload may take from node to node before the run goes on without it."""
_ROLLOUT_CALLS = 100_000
"""The budget bounds rollouts; Ray must not bound them a second time."""


class GeneratorActor:
    """A thin shell around ``RolloutHost``."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        folder: str,
        cores: tuple[int, ...] | None,
        shared: Future[SharedModel] | None = None,
    ) -> None:
        """``shared``: the parameters of a learner in this process, once it stands."""
        self._shared = shared
        self._all_cores = tuple(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
        pin_process(cores)
        self._cores = cores
        self._config = config
        self._model_path = model_path
        self._folder = Path(folder)
        self._host: RolloutHost | None = None
        self._home: asyncio.AbstractEventLoop | None = None
        self._close: Callable[[], Awaitable[None]] | None = None

    @ray.method(concurrency_group="generate")
    async def start(self) -> Whereabouts:
        """Build and start everything; returns where it runs."""
        from asyncrl.generators.build import build_host

        self._home = asyncio.get_running_loop()
        shared: SharedModel | None = None
        if self._shared is not None:
            shared = await asyncio.wrap_future(self._shared)
        self._host, self._close = await build_host(
            self._config, self._model_path, self._folder, self._all_cores, self._cores, shared
        )
        return whereabouts()

    @ray.method(concurrency_group="generate")
    async def run_group(
        self, request: GroupRequest, salvage: list[ray.ObjectRef[bytes]]
    ) -> tuple[GroupMeta, bytes]:
        """``salvage`` holds one reference or none; in a list, so that its loss does not fail the call."""
        host = self._started()
        meta, payload = await host.run_group(request, await self._fetched(request, salvage))
        return shifted(meta, unix_offset()), payload

    async def _fetched(self, request: GroupRequest, salvage: list[ray.ObjectRef[bytes]]) -> bytes | None:
        if not salvage:
            return None
        try:
            payload: bytes = await salvage[0]
        except ObjectLostError as error:
            log.warning("%s starts from nothing: its snapshot is lost: %s", request.task.uid, error)
            return None
        return payload

    @ray.method(concurrency_group="control")
    async def snapshot(self) -> tuple[dict[GroupKey, Progress] | None, bytes]:
        """None: it is too soon for another one."""
        return await self._at_home(self._started().snapshot()) or (None, b"")

    @ray.method(concurrency_group="control")
    async def ping(self) -> None:
        """By way of the engine's own loop: a loop that is stuck does not answer."""
        await self._at_home(self._started().engine.check_health())

    @ray.method(concurrency_group="control")
    async def join(self, spec: PushGroupSpec) -> None:
        await self._at_home(self._started().engine.join(spec))

    @ray.method(concurrency_group="control")
    async def receive(self, version: int) -> None:
        await self._at_home(self._started().engine.receive(version))

    @ray.method(concurrency_group="control")
    async def swap(self, version: int, in_flight: bool, kv: KVAfterSwap) -> WeightEcho:
        return await self._at_home(self._started().engine.swap(version, in_flight=in_flight, kv=kv))

    @ray.method(concurrency_group="control")
    async def sleep(self) -> Asleep:
        return await self._at_home(self._started().sleep())

    @ray.method(concurrency_group="control")
    async def make_room(self) -> None:
        await self._at_home(self._started().make_room())

    @ray.method(concurrency_group="control")
    async def wake(self) -> None:
        await self._at_home(self._started().wake())

    @ray.method(concurrency_group="control")
    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        return await self._at_home(self._started().engine.score(token_ids))

    @ray.method(concurrency_group="control")
    async def statistics(self) -> GeneratorStatistics:
        return self._started().engine.statistics()

    @ray.method(concurrency_group="generate")
    async def close(self) -> None:
        if self._close is not None:
            await self._close()

    async def _at_home(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a control call on the engine's own loop: each concurrency group has a loop of its own."""
        assert self._home is not None, "the engine has no loop before start()"
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._home))

    def _started(self) -> RolloutHost:
        if self._host is None:
            raise GeneratorError("the generator was called before start()")
        return self._host


LANES = {"generate": _ROLLOUT_CALLS, "control": 8}
"""The concurrency groups of a ``GeneratorActor``, and how many calls each serves at once."""
ROLLOUT_LANE = frozenset({"start", "run_group", "close"})
"""Its methods that are in the group "generate"; all others are in "control"."""
_RemoteGenerator: Any = ray.remote(concurrency_groups=LANES)(GeneratorActor)


def generator_actor(
    config: Config, model_path: str, *, cores: tuple[int, ...] | None, options: Mapping[str, Any]
) -> Any:
    """A Ray actor for one replica, pinned to ``cores``, with the ``options`` that place it."""
    return _RemoteGenerator.options(**options).remote(config, model_path, str(Path.cwd()), cores)


class RayReplica:
    """A ``GeneratorActor`` as the pool sees it: its deaths are GeneratorErrors.

    ``shares``: the Ray actor that ``actor``'s calls go to, where that holds more than the generator: it is
    left running by ``close``, for its other owner to end.
    """

    def __init__(self, name: str, config: Config, actor: Any, *, shares: Any = None) -> None:
        self.name = name
        self.push_ranks = config.generators.workers
        self._start_timeout_s = config.generators.start_timeout_s
        self._actor = actor
        self._shares = shares
        self._started = False
        self._process: psutil.Process | None = None
        """Its process, where that runs on this machine."""
        self._elsewhere = False
        """Whether it runs on another node than the controller."""

    async def start(self) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                place = await self._call(self._actor.start.remote())
        except TimeoutError:
            raise GeneratorError(
                f"{self.name} did not start in generators.start_timeout_s = {self._start_timeout_s:g} s"
            ) from None
        self._started = True
        self._process = process_at(place)
        self._elsewhere = place.node != whereabouts().node

    async def run_group(self, request: GroupRequest, salvage: Any = None) -> tuple[GroupMeta, Any]:
        given = [] if salvage is None else [salvage]
        meta_ref, payload_ref = self._actor.run_group.options(num_returns=2).remote(request, given)
        try:
            meta: GroupMeta = await self._call(meta_ref)
        except asyncio.CancelledError:
            # Cancelling our await does not cancel the call: its slots would stay taken.
            ray.cancel(meta_ref)
            raise
        await self._bring_here(payload_ref)
        return shifted(meta, -unix_offset()), payload_ref

    async def snapshot(self) -> Snapshot | None:
        groups_ref, payload_ref = self._actor.snapshot.options(num_returns=2).remote()
        groups: dict[GroupKey, Progress] | None = await self._call(groups_ref)
        if groups is None:
            return None
        await self._bring_here(payload_ref)
        return Snapshot(groups, payload_ref)

    async def ping(self) -> None:
        await self._call(self._actor.ping.remote())

    async def join(self, spec: PushGroupSpec) -> None:
        await self._call(self._actor.join.remote(spec))

    async def receive(self, version: int) -> None:
        await self._call(self._actor.receive.remote(version))

    async def swap(self, version: int, *, in_flight: bool, kv: KVAfterSwap) -> WeightEcho:
        echo: WeightEcho = await self._call(self._actor.swap.remote(version, in_flight, kv))
        return echo

    async def sleep(self) -> Asleep:
        asleep: Asleep = await self._call(self._actor.sleep.remote())
        return asleep

    async def make_room(self) -> None:
        await self._call(self._actor.make_room.remote())

    async def wake(self) -> None:
        await self._call(self._actor.wake.remote())

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        logprobs: Float32Array = await self._call(self._actor.score.remote(token_ids))
        return logprobs

    async def statistics(self) -> GeneratorStatistics:
        statistics: GeneratorStatistics = await self._call(self._actor.statistics.remote())
        return statistics

    async def close(self) -> None:
        try:
            if self._started:  # else it is busy, for as long as a start may take
                async with asyncio.timeout(10):
                    await self._call(self._actor.close.remote())
        finally:
            if self._shares is None:
                ray.kill(self._actor)

    async def kill(self) -> None:
        kill_actor(self._shares or self._actor, self._process)

    async def _bring_here(self, payload: Any) -> None:
        """Have a copy of a payload on the controller's node, so that it outlives the replica's."""
        if self._elsewhere:
            # Its bytes go from node to node; this process sees none of them.
            await asyncio.to_thread(ray.wait, [payload], timeout=_FETCH_S, fetch_local=True)

    async def _call(self, ref: Any) -> Any:
        try:
            return await ref
        except RayActorError as error:
            # Ray's message is a page; what happened stands near its end, before what it guesses.
            why = " ".join(str(error).split("The actor is dead because ")[-1].split())
            why = why.split(" Some common causes include")[0]
            raise GeneratorError(f"{self.name} died: {why}") from error
        except TaskCancelledError as error:
            raise GeneratorError(f"{self.name} cancelled a call that nobody gave up") from error
        except RayTaskError as error:
            if isinstance(error.cause, BaseException) and is_out_of_memory(error.cause):
                why = f"{type(error.cause).__name__}: {error.cause}"
                raise GeneratorError(f"{self.name} is out of memory: {why}") from error
            raise error.as_instanceof_cause() from None
