"""What a role is, to the controller and to the process that computes.

A role (the reference policy, a critic, a reward model) is a group of actors that computes something about
every group of trajectories as it lands, before it goes into the queue. Each rollout awaits what its own group
gets, so that a role works while the generators sample and the learner updates. A reward model comes first:
its scores decide whether a group is worth the others' time.

Three seats, each a Protocol:

- ``Role``: what the controller awaits; ``roles/group.py`` is one over several members.
- ``RoleMember``: one actor as its role sees it; ``roles/actor.py`` makes one of a Ray actor.
- ``RoleWorker``: what computes, a plain object in the actor's process, which tests build without Ray.

Invariants:
- Scores become part of the group, as its other rewards are: it comes back in a payload of its own.
- An annotation is about one group and in the order of its trajectories: arrays (T,), scalars by trajectory.
- Arrays go from the role's process to the learner's as a msgpack payload (``queues/annotations.py``);
  only scalars pass through the controller's loop.
- Payloads are returned from actor calls: the controller's process owns them, and they outlive the actor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl.checkpoint.files import FileEntry
from asyncrl.queues.annotations import Arrays
from asyncrl.types import Annotation, Group, GroupMeta, Task
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


@dataclass(frozen=True, slots=True)
class LandedGroup:
    """A group that came back from its generator, and the task that it answers."""

    task: Task
    meta: GroupMeta
    payload: Any
    """A Ray object reference, or bytes in tests."""


@dataclass(frozen=True, slots=True)
class Ratings:
    """What a reward model thinks of the answers of some groups."""

    scores: tuple[tuple[float, ...], ...]
    """By group, one an answer, the baseline's last; not finite where the model could give none."""
    cut: int = 0
    """Answers that were too long for the model, and lost their beginning."""


@dataclass(frozen=True, slots=True)
class ScoredMeta:
    """What one call to a reward model came to."""

    metas: tuple[GroupMeta, ...]
    """Of the scored groups, in the order in which they were given."""
    seconds: float
    """What the model's process worked on them."""
    cut: int = 0
    """Answers that were too long for the model, and lost their beginning."""


@dataclass(frozen=True, slots=True)
class ScoredGroups:
    """Groups with their scores; ``payloads`` are Ray object references, or bytes in tests."""

    meta: ScoredMeta
    payloads: tuple[Any, ...]


class Worker(Protocol):
    """What every role has in its process. Not thread-safe: its actor makes one call at a time."""

    def start(self) -> None:
        """Load what it computes with."""
        ...

    def close(self) -> None: ...


class ScoringWorker(Worker, Protocol):
    """Scores answers."""

    def rate(self, groups: Sequence[tuple[Task, Group]]) -> Ratings: ...


class RoleWorker(Worker, Protocol):
    """Annotates groups."""

    def annotate(self, group: Group) -> Findings: ...


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


class Member(Protocol):
    """One actor of a role, wherever it runs. Raises RoleError when it died.

    Cancelling the task that awaits a call gives the call up.
    """

    name: str

    async def start(self) -> None: ...

    async def close(self) -> None:
        """End in good order, within seconds."""
        ...

    async def kill(self) -> None:
        """End now, whatever state it is in."""
        ...


class ScoringMember(Member, Protocol):
    """One of a reward model."""

    async def score(self, groups: Sequence[LandedGroup], weight: float) -> ScoredGroups:
        """The groups, with ``weight`` times its scores in their rewards; see ``roles/scoring.py``."""
        ...


class RoleMember(Member, Protocol):
    """One that annotates groups."""

    async def annotate(self, meta: GroupMeta, payload: Any) -> Annotation:
        """About the group behind ``payload``."""
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
