"""What a role is, to the controller and to the process that computes.

A role (the reference policy, a critic) is a group of actors that computes something about every group of
trajectories as it lands, before it goes into the queue. Each rollout awaits the annotation of its own
group, so that a role works while the generators sample and the learner updates.

Three seats, each a Protocol:

- ``Role``: what the controller awaits; ``roles/group.py`` is one over several members.
- ``RoleMember``: one actor as its role sees it; ``roles/actor.py`` makes one of a Ray actor.
- ``RoleWorker``: what computes, a plain object in the actor's process, which tests build without Ray.

Invariants:
- An annotation is about one group and in the order of its trajectories: arrays (T,), scalars by trajectory.
- Arrays go from the role's process to the learner's as a msgpack payload (``queues/annotations.py``);
  only scalars pass through the controller's loop.
- Payloads are returned from actor calls: the controller's process owns them, and they outlive the actor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.queues.annotations import Arrays
from asyncrl.types import Annotation, Group, GroupMeta


@dataclass(frozen=True, slots=True)
class Findings:
    """What a worker computed about a group."""

    arrays: Arrays
    """For the learner, under names of fields of ``learners.base.TrainSample``; 0 outside the loss mask."""
    scalars: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """For the controller: one number a trajectory."""


class RoleWorker(Protocol):
    """Computes, in one process. Not thread-safe: its actor makes one call at a time."""

    def start(self) -> None:
        """Load what it computes with."""
        ...

    def annotate(self, group: Group) -> Findings: ...

    def close(self) -> None: ...


class RoleMember(Protocol):
    """One actor of a role, wherever it runs. Raises RoleError when it died."""

    name: str

    async def start(self) -> None: ...

    async def annotate(self, meta: GroupMeta, payload: Any) -> Annotation:
        """About the group behind ``payload``. Cancelling the awaiting task gives the call up."""
        ...

    async def close(self) -> None:
        """End in good order, within seconds."""
        ...

    async def kill(self) -> None:
        """End now, whatever state it is in."""
        ...


class Role(Protocol):
    """All actors of one role, as the controller sees them."""

    name: str

    async def start(self) -> None: ...

    async def annotate(self, meta: GroupMeta, payload: Any) -> Annotation:
        """About one group that landed. Raises RoleError when it could not be had, which ends the run."""
        ...

    async def close(self) -> None: ...
