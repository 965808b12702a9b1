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
from pathlib import Path
from typing import Any, Protocol

from asyncrl.checkpoint.files import FileEntry
from asyncrl.queues.annotations import Arrays
from asyncrl.types import Annotation, Group, GroupMeta
from asyncrl.weight_sync.base import PushGroupSpec


@dataclass(frozen=True, slots=True)
class Findings:
    """What a worker computed about a group."""

    arrays: Arrays
    """For the learner, under names of fields of ``learners.base.TrainSample``; 0 outside the loss mask."""
    scalars: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """For the controller: one number a trajectory."""
    reference_version: int | None = None
    """Of a reference: the policy version that it last took weights of; 0: what it started from."""


@dataclass(frozen=True, slots=True)
class Received:
    """A member's answer to a push, before it computes with what arrived."""

    checksum: str
    """Of the weights that lie ready."""
    held_version: int
    """The version that it still computes with."""


class RoleWorker(Protocol):
    """Computes, in one process. Not thread-safe: its actor makes one call at a time."""

    def start(self) -> None:
        """Load what it computes with."""
        ...

    def annotate(self, group: Group) -> Findings: ...

    def close(self) -> None: ...


class FollowingWorker(RoleWorker, Protocol):
    """A worker whose weights follow the policy's."""

    def join(self, spec: PushGroupSpec) -> None:
        """Join the group that weights arrive on, leaving an earlier one. Raises ConfigError where they
        are not those of such a model as this one, WeightSyncError where nobody meets."""
        ...

    def receive(self, version: int) -> Received:
        """Lay ``version``'s weights ready; what is computed with stays as it is. Raises WeightSyncError."""
        ...

    def take(self, version: int, decay: float) -> None:
        """Own weights <- decay own + (1 - decay) what lies ready, which is ``version``.

        With a decay above 0 a second call for one version changes nothing: it would mix twice.
        """
        ...

    def copy_state(self) -> None:
        """Copy the weights, averages in float32, between two groups."""
        ...

    def write_state(self, folder: Path) -> list[FileEntry]:
        """Write that copy; in any thread. Paths are relative to ``folder``."""
        ...

    def load_state(self, folder: Path, version: int) -> None:
        """Compute with what was written, which is the reference of ``version``. Raises CheckpointError."""
        ...


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


class FollowingMember(RoleMember, Protocol):
    """One whose weights follow the policy's. Its calls are made one after the other."""

    async def ping(self) -> None:
        """Return while its process lives, whatever it does; raise RoleError once it does not."""
        ...

    async def join(self, spec: PushGroupSpec) -> None: ...

    async def receive(self, version: int) -> Received: ...

    async def take(self, version: int, decay: float) -> None: ...

    async def copy_state(self) -> None: ...

    async def write_state(self, folder: Path) -> list[FileEntry]: ...

    async def load_state(self, folder: Path, version: int) -> None: ...


class Role(Protocol):
    """All actors of one role, as the controller sees them."""

    name: str

    async def start(self) -> None: ...

    async def annotate(self, meta: GroupMeta, payload: Any) -> Annotation:
        """About one group that landed. Raises RoleError when it could not be had, which ends the run."""
        ...

    async def close(self) -> None: ...
