"""A ``RoleMember`` that computes nothing and takes as long as it is told.

For tests and simulation of everything around a role. What it returns is what a real one would: encoded
arrays of the right shape, made by a function of the group.

Invariant: time is the event loop's alone, so that it runs under a virtual clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from asyncrl.checkpoint.files import FileEntry, write_file
from asyncrl.errors import RoleError, WeightSyncError
from asyncrl.learners.scripted import scripted_checksum
from asyncrl.queues.annotations import encode_annotation
from asyncrl.queues.codec import checksum, decode_group
from asyncrl.roles.base import Findings, Received
from asyncrl.types import Annotation, AnnotationMeta, Group, GroupMeta
from asyncrl.weight_sync.base import PushGroupSpec


def no_findings(group: Group) -> Findings:
    """Zeros under the name of the reference's log-probs."""
    return Findings({"reference": [np.zeros(len(t.token_ids), np.float32) for t in group.trajectories]})


class ScriptedRoleMember:
    """One call at a time, ``annotate_s`` seconds each, and ``start_s`` to start.

    ``findings`` makes what it answers. ``dies_at`` names calls, counted from 0 in the order in which they
    begin, at whose end it is dead; ``hangs_at`` calls that never end. It follows a ``ScriptedLearner``:
    ``receive_s`` seconds a version, ``dies_receiving`` and ``dies_taking`` name versions that it dies of.
    """

    def __init__(
        self,
        name: str = "scripted 0",
        *,
        role: str = "scripted",
        annotate_s: float = 0.0,
        start_s: float = 0.0,
        findings: Callable[[Group], Findings] = no_findings,
        dies_at: Collection[int] = (),
        hangs_at: Collection[int] = (),
        receive_s: float = 0.0,
        dies_receiving: Collection[int] = (),
        dies_taking: Collection[int] = (),
    ) -> None:
        self.name = name
        self.annotated: list[int] = []
        """Ordinals, in the order in which they were begun."""
        self.ended = False
        """Whether it was closed or killed."""
        self.version = 0
        """The policy version that it took last, which its answers bear."""
        self.taken: list[tuple[int, float]] = []
        """Versions that it took, each with its decay."""
        self._receive_s = receive_s
        self._dies_receiving = frozenset(dies_receiving)
        self._dies_taking = frozenset(dies_taking)
        self._ready: int | None = None
        self._copied = 0
        self._role = role
        self._annotate_s = annotate_s
        self._start_s = start_s
        self._findings = findings
        self._dies_at = frozenset(dies_at)
        self._hangs_at = frozenset(hangs_at)
        self._turn = asyncio.Lock()
        self._up = False

    async def start(self) -> None:
        await asyncio.sleep(self._start_s)
        self._up = True

    async def annotate(self, meta: GroupMeta, payload: bytes) -> Annotation:
        async with self._turn:
            self._require_up()
            call, version = len(self.annotated), self.version
            self.annotated.append(meta.ordinal)
            if call in self._hangs_at:
                await asyncio.get_running_loop().create_future()
            await asyncio.sleep(self._annotate_s)
            if call in self._dies_at:
                self._up = False
            self._require_up()
        group = decode_group(payload)
        findings = self._findings(group)
        record = encode_annotation(group.ordinal, group.response_lengths, findings.arrays)
        found = AnnotationMeta(
            self._role, checksum(record), len(record), self._annotate_s, findings.scalars, version
        )
        return Annotation(found, record)

    async def ping(self) -> None:
        self._require_up()

    async def join(self, spec: PushGroupSpec) -> None:
        self._require_up()

    async def receive(self, version: int) -> Received:
        async with self._turn:
            self._require_up()
            await asyncio.sleep(self._receive_s)
            self._die_of(version, self._dies_receiving)
            self._ready = version
            return Received(scripted_checksum(version), self.version)

    async def take(self, version: int, decay: float) -> None:
        async with self._turn:
            self._require_up()
            self._die_of(version, self._dies_taking)
            if self._ready != version:
                raise WeightSyncError(f"asked to take version {version}, but {self._ready} lies ready")
            if decay == 0 or version != self.version:
                self.taken.append((version, decay))
            self.version = version

    async def copy_state(self) -> None:
        async with self._turn:
            self._require_up()
            self._copied = self.version

    async def write_state(self, folder: Path) -> list[FileEntry]:
        self._require_up()
        await asyncio.to_thread(folder.mkdir)
        return [write_file(folder, "version", str(self._copied).encode())]

    async def load_state(self, folder: Path, version: int) -> None:
        self._require_up()
        self.version = int((folder / "version").read_text())

    async def close(self) -> None:
        await self.kill()

    async def kill(self) -> None:
        self._up, self.ended = False, True

    def _die_of(self, version: int, fatal: Collection[int]) -> None:
        if version in fatal:
            self._up = False
            self._require_up()

    def _require_up(self) -> None:
        if not self._up:
            raise RoleError(f"{self.name} is not up")
