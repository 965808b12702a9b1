"""A ``RoleMember`` that computes nothing and takes as long as it is told.

For tests and simulation of everything around a role. What it returns is what a real one would: encoded
arrays of the right shape, made by a function of the group.

Invariant: time is the event loop's alone, so that it runs under a virtual clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import numpy as np

from asyncrl.errors import RoleError
from asyncrl.queues.annotations import encode_annotation
from asyncrl.queues.codec import checksum, decode_group
from asyncrl.roles.base import Findings
from asyncrl.types import Annotation, AnnotationMeta, Group, GroupMeta


def no_findings(group: Group) -> Findings:
    """Zeros under the name of the reference's log-probs."""
    return Findings({"reference": [np.zeros(len(t.token_ids), np.float32) for t in group.trajectories]})


class ScriptedRoleMember:
    """One call at a time, ``annotate_s`` seconds each, and ``start_s`` to start.

    ``findings`` makes what it answers. ``dies_at`` names calls, counted from 0 in the order in which they
    begin, at whose end it is dead; ``hangs_at`` calls that never end.
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
    ) -> None:
        self.name = name
        self.annotated: list[int] = []
        """Ordinals, in the order in which they were begun."""
        self.ended = False
        """Whether it was closed or killed."""
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
            call = len(self.annotated)
            self.annotated.append(meta.ordinal)
            if call in self._hangs_at:
                await asyncio.get_running_loop().create_future()
            await asyncio.sleep(self._annotate_s)
            if call in self._dies_at:
                self._up = False
            self._require_up()
        findings = self._findings(decode_group(payload))
        record = encode_annotation(
            meta.ordinal, [t.response_tokens for t in meta.trajectories], findings.arrays
        )
        found = AnnotationMeta(self._role, checksum(record), len(record), self._annotate_s, findings.scalars)
        return Annotation(found, record)

    async def close(self) -> None:
        await self.kill()

    async def kill(self) -> None:
        self._up, self.ended = False, True

    def _require_up(self) -> None:
        if not self._up:
            raise RoleError(f"{self.name} is not up")
