"""Ray actors that are the ranks of one engine: the same calls in the same order, and one error for a death.

Invariants:
- A rank that fails fails the call; a dead one is a LearnerError that names it.
- Calls go to all ranks with nothing awaited in between, so that no two calls reach two ranks in two orders.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from asyncrl.checkpoint.files import FileEntry
from asyncrl.errors import LearnerError

STATE_LANE = "state"
"""The concurrency group of writing checkpoints, which every actor has beside its default one."""
_CLOSE_S = 10.0


def free_port(host: str) -> int:
    """A port of ``host`` that nothing listens on."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


class RayRanks:
    """``actors`` in the order of their ranks; ``name`` is their section of the config.

    Every actor has ``free_port()``, ``start(port)`` and ``close()``, and the three calls for its state.
    ``handles``: the Ray actors that end with them, where ``actors`` are only what they are called by.
    """

    def __init__(self, name: str, actors: Sequence[Any], handles: Sequence[Any] = ()) -> None:
        self.actors = tuple(actors)
        self._handles = tuple(handles) or self.actors
        self._name = name
        self._started = False

    def __len__(self) -> int:
        return len(self.actors)

    async def start(self, timeout_s: float) -> list[Any]:
        """Have the ranks load and meet; what each ``start`` returned. LearnerError after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                port = await self.call(self.actors[0].free_port.remote(), 0)
                started = await self.all("start", port)
        except TimeoutError:
            raise LearnerError(
                f"{len(self)} {self._name} ranks did not start in {self._name}.start_timeout_s = "
                f"{timeout_s:g} s"
            ) from None
        self._started = True
        return started

    async def all(self, method: str, *args: Any, lane: str | None = None) -> list[Any]:
        """The method on every rank, in the concurrency group ``lane``, the default one if None."""
        options = {} if lane is None else {"concurrency_group": lane}
        refs = [getattr(actor, method).options(**options).remote(*args) for actor in self.actors]
        return await asyncio.gather(*(self.call(ref, rank) for rank, ref in enumerate(refs)))

    async def each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """The method on every rank, with arguments of its own."""
        refs = [
            getattr(actor, method).remote(*args) for actor, args in zip(self.actors, arguments, strict=True)
        ]
        return await asyncio.gather(*(self.call(ref, rank) for rank, ref in enumerate(refs)))

    async def write_state(self, folder: Path) -> list[FileEntry]:
        """Have each rank write what it copied into a folder of this name; paths relative to ``folder``."""
        found = await self.all("write_state", str(folder / self._name), lane=STATE_LANE)
        entries = (entry for of_rank in found for entry in of_rank)
        return [replace(entry, path=f"{self._name}/{entry.path}") for entry in entries]

    async def load_state(self, folder: Path) -> None:
        """Have the ranks go on from what ``write_state`` wrote. Raises CheckpointError."""
        await self.all("load_state", str(folder / self._name))

    async def call(self, ref: Any, rank: int) -> Any:
        """What a call of one rank returned."""
        try:
            return await ref
        except RayActorError as error:
            raise LearnerError(f"{self._name} rank {rank} died: {error}") from error
        except RayTaskError as error:
            raise error.as_instanceof_cause() from None

    async def close(self) -> None:
        """End all ranks: in good order if they can within seconds, by force in any case."""
        try:
            if self._started:  # else they are busy, for as long as a start may take
                async with asyncio.timeout(_CLOSE_S):
                    await self.all("close")
        finally:
            for handle in self._handles:
                ray.kill(handle)
