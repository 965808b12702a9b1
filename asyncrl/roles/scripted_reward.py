"""A ``ScoringMember`` that computes nothing and takes as long as it is told.

For tests and simulation of everything around a reward model. What it returns is what a real one would: groups
with scores in their rewards, encoded anew, made by a function of the group.

Invariant: time is the event loop's alone, so that it runs under a virtual clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from asyncrl.errors import RoleError
from asyncrl.roles.base import LandedGroup, Ratings, ScoredGroups
from asyncrl.roles.scoring import scored
from asyncrl.types import Group, Task


def sample_scores(group: Group) -> Sequence[float]:
    """An answer's score is its sample's number."""
    return [float(answer.sample) for answer in group.answers]


class ScriptedScoringMember:
    """One call at a time, ``score_s`` seconds each, and ``start_s`` to start.

    ``scores`` makes one number an answer. ``dies_at`` names calls, counted from 0 in the order in which they
    begin, at whose end it is dead; ``hangs_at`` calls that never end.
    """

    def __init__(
        self,
        name: str = "reward_model 0",
        *,
        score_s: float = 0.0,
        start_s: float = 0.0,
        scores: Callable[[Group], Sequence[float]] = sample_scores,
        dies_at: Collection[int] = (),
        hangs_at: Collection[int] = (),
    ) -> None:
        self.name = name
        self.calls: list[list[str]] = []
        """The uids of each, in the order in which they were begun."""
        self.ended = False
        """Whether it was closed or killed."""
        self._score_s = score_s
        self._start_s = start_s
        self._scores = scores
        self._dies_at = frozenset(dies_at)
        self._hangs_at = frozenset(hangs_at)
        self._turn = asyncio.Lock()
        self._up = False

    async def start(self) -> None:
        await asyncio.sleep(self._start_s)
        self._up = True

    async def score(self, groups: Sequence[LandedGroup], weight: float) -> ScoredGroups:
        async with self._turn:
            self._require_up()
            call = len(self.calls)
            self.calls.append([group.meta.uid for group in groups])
            if call in self._hangs_at:
                await asyncio.get_running_loop().create_future()
            await asyncio.sleep(self._score_s)
            if call in self._dies_at:
                self._up = False
            self._require_up()
        asked = [(group.task, group.meta) for group in groups]
        meta, payloads = scored(_Scripted(self._scores), asked, [g.payload for g in groups], weight)
        return ScoredGroups(replace(meta, seconds=self._score_s), tuple(payloads))

    async def close(self) -> None:
        await self.kill()

    async def kill(self) -> None:
        self._up, self.ended = False, True

    def _require_up(self) -> None:
        if not self._up:
            raise RoleError(f"{self.name} is not up")


class _Scripted:
    """A ``ScoringWorker`` over a function of the group."""

    def __init__(self, scores: Callable[[Group], Sequence[float]]) -> None:
        self._scores = scores

    def start(self) -> None: ...

    def close(self) -> None: ...

    def rate(self, groups: Sequence[tuple[Task, Group]]) -> Ratings:
        return Ratings(tuple(tuple(self._scores(group)) for _, group in groups))
