"""All roles of a run, as rollouts see them: what a group waits for between its landing and the queue.

Invariants:
- The reward model, if there is one, comes first; then all other roles work on a group at the same time, and
  it goes on with one annotation of each, in their order.
- ``timing_s/annotate_wait`` is time that a step would not have taken had scores and annotations taken none:
  from the moment at which the last group of its batch was back from its generator until it had the batch,
  as far as the learner was waiting then. 0: all of it was hidden.
- ``reference/version`` is the newest reference that a group of the step's batch was annotated by, and
  ``reference/version_min`` the oldest: the policy version that it had last taken weights of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from asyncrl.roles.base import Role
from asyncrl.roles.reward_group import RewardModelGroup
from asyncrl.types import Annotation, GroupMeta, Metrics, ReadyGroup, Task


class Annotator:
    """Has ``reward_model`` score and ``roles`` annotate what lands.

    Without any, everything here is free and says nothing.
    """

    def __init__(self, roles: Sequence[Role], reward_model: RewardModelGroup | None = None) -> None:
        self._roles = tuple(roles)
        self._reward_model = reward_model
        self._all: list[Role | RewardModelGroup] = [*roles]
        if reward_model is not None:
            self._all.append(reward_model)
        self._seconds = {role.name: 0.0 for role in self._roles}
        self._waited_s = 0.0
        self._references: list[int] = []
        self._working: dict[int, list[str]] = {}
        """By ordinal of a group, the roles that have not annotated it yet."""
        self._scoring: set[int] = set()
        """Ordinals of the groups that the reward model has."""

    async def start(self) -> None:
        """Start all roles at once; the first that cannot start ends it."""
        async with asyncio.TaskGroup() as group:
            for role in self._all:
                group.create_task(role.start(), name=f"start {role.name}")

    async def score(self, task: Task, meta: GroupMeta, payload: Any) -> tuple[GroupMeta, Any]:
        """The group with the reward model's scores; as it is where there is no such model."""
        if self._reward_model is None:
            return meta, payload
        self._scoring.add(meta.ordinal)
        try:
            return await self._reward_model.score(task, meta, payload)
        finally:
            self._scoring.discard(meta.ordinal)

    async def annotate(self, meta: GroupMeta, payload: Any) -> tuple[Annotation, ...]:
        """One annotation of each role. Raises the error of the first role that fails."""
        if not self._roles:
            return ()
        working = self._working[meta.ordinal] = [role.name for role in self._roles]

        async def one(role: Role) -> Annotation:
            annotation = await role.annotate(meta, payload)
            working.remove(role.name)
            return annotation

        tasks = [asyncio.ensure_future(one(role)) for role in self._roles]
        try:
            annotations = tuple(await asyncio.gather(*tasks))
        finally:
            del self._working[meta.ordinal]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for annotation in annotations:
            self._seconds[annotation.meta.role] += annotation.meta.seconds
        return annotations

    def holder(self, ordinal: int) -> str | None:
        """Whom a group waits for here, for reports; None for one that is not here."""
        if ordinal in self._scoring:
            return "the reward model for its scores"
        working = self._working.get(ordinal)
        return f"{' and '.join(working)} for its annotation" if working else None

    def waited(self, groups: Sequence[ReadyGroup], start: float, end: float) -> None:
        """The learner waited from ``start`` to ``end`` for this batch."""
        if self._all and groups:
            self._waited_s += end - max(start, *(group.landed_at for group in groups))
        found = (a.meta.reference_version for group in groups for a in group.annotations)
        self._references += [version for version in found if version is not None]

    def take_metrics(self) -> Metrics:
        """Seconds since the last call: of each role's own work, summed over its actors; of waiting."""
        if not self._all:
            return {}
        metrics = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        if self._reward_model is not None:
            metrics |= self._reward_model.take_metrics()
        metrics["timing_s/annotate_wait"] = self._waited_s
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._waited_s = 0.0
        if self._references:
            metrics["reference/version"] = float(max(self._references))
            metrics["reference/version_min"] = float(min(self._references))
            self._references = []
        return metrics

    async def close(self) -> None:
        await asyncio.gather(*(role.close() for role in self._all), return_exceptions=True)
