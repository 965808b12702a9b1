"""A reference that follows the policy: every so many versions it takes its weights, or their average.

Invariants:
- No group is annotated while weights are taken, and none by two references: one call to one member does it,
  and the member stamps it with the version that it held. What bears another version than the role is at, as
  that of a member that was replaced, is thrown away and computed again.
- All members hold the same weights whenever a group is annotated.
- A member that was replaced holds what the role started from. Before the first refresh that is the reference.
  After it, nobody can give it the reference of a past version: all members take the weights of the policy's
  present version, out of turn and not averaged, and ``reference/version`` says so. A run that promises bits
  (``deterministic``) ends instead, unless those weights are the same.
- A refresh that fails is tried once more, without the members that died of it; a second failure ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from asyncrl.checkpoint.files import FileEntry
from asyncrl.errors import ChecksumError, ReferenceLostError, RoleError, WeightSyncError
from asyncrl.learners.base import LearnerInfo
from asyncrl.roles.base import FollowingMember, Received
from asyncrl.roles.group import RoleGroup
from asyncrl.types import Annotation, GroupMeta, Metrics
from asyncrl.waiting import Signal, now
from asyncrl.weight_sync.refresh import ReferencePush

log = logging.getLogger(__name__)

_PING_S = 10.0
"""What a member gets to answer a ping after a refresh that failed."""


class MovingReference:
    """A ``Role`` over ``group``, whose members are ``FollowingMember``.

    ``every``: versions between two refreshes. ``ema``: the share of the old reference that stays at each,
    None for none. Whoever calls ``refresh`` or ``restore`` holds the learner's weights still meanwhile.
    """

    def __init__(
        self,
        group: RoleGroup,
        push: ReferencePush,
        *,
        every: int,
        ema: float | None = None,
        deterministic: bool = False,
    ) -> None:
        self.name = group.name
        self.version = 0
        """The policy version whose weights the reference took last; 0: it is what it started from."""
        self.restored = 0
        """Times that it took the policy's weights out of turn, or without its average."""
        self._group = group
        self._push = push
        self._every = every
        self._decay = 0.0 if ema is None else ema
        self._deterministic = deterministic
        self._changed = Signal()
        self._annotating = 0
        self._refreshing = False
        self._lost = False
        self._seconds = 0.0
        self._holder: FollowingMember | None = None

    async def start(self) -> None:
        await self._group.start()

    async def open(self, info: LearnerInfo) -> None:
        """Meet the learner. Raises ConfigError where the reference cannot take the policy's weights."""
        await self._push.open(info, await self._members())

    async def annotate(self, meta: GroupMeta, payload: Any) -> Annotation:
        while True:
            await self._changed.until(lambda: not (self._refreshing or self._lost))
            self._annotating += 1
            try:
                annotation = await self._group.annotate(meta, payload)
            finally:
                self._annotating -= 1
                self._changed.notify()
            found = annotation.meta.reference_version
            if found == self.version:
                return annotation
            log.warning(
                "%s was annotated by a reference of version %s, expected %d: once more, after a refresh",
                meta.uid,
                found,
                self.version,
            )
            self._lost = True
            self._changed.notify()

    def is_due(self, version: int) -> bool:
        """Whether the reference follows to ``version``."""
        return version > 0 and version % self._every == 0

    async def refresh(self, version: int) -> None:
        """Follow to ``version``, which the learner holds. Raises what a second failure was."""
        if version == self.version and not self._lost:
            return  # restored to it already
        async with self._alone():
            await self._deliver(version, self._decay)

    async def until_lost(self) -> None:
        """Return once a member does not hold the reference: ``restore`` has to come before any annotation."""
        await self._changed.until(lambda: self._lost)

    async def restore(self, version: int) -> None:
        """Have all members hold ``version``, which the learner holds, where one lost the reference."""
        if not self._lost:
            return  # a refresh came before
        async with self._alone():
            if self._decay > 0 or version != self.version:
                self._start_over(version)
            await self._deliver(version, 0.0)

    async def copy_state(self) -> None:
        """Have a member that holds the reference copy it, while nobody makes it follow."""
        self._holder = (await self._members())[0]
        await self._holder.copy_state()

    async def write_state(self, folder: Path) -> list[FileEntry]:
        """Have that member write its copy into a checkpoint's folder; it may annotate meanwhile."""
        assert self._holder is not None, "copy_state() comes first"
        entries = await self._holder.write_state(folder / self.name)
        return [replace(entry, path=f"{self.name}/{entry.path}") for entry in entries]

    async def load_state(self, folder: Path, version: int) -> None:
        """Have all members be a checkpoint's reference, of ``version``. Raises CheckpointError."""
        members = await self._members()
        await asyncio.gather(*(member.load_state(folder / self.name, version) for member in members))
        self.version = version

    def take_metrics(self) -> Metrics:
        """Seconds of refreshes since the last call, the wait for groups that were annotated included."""
        seconds, self._seconds = self._seconds, 0.0
        return {"timing_s/reference_refresh": seconds, "reference/restored": float(self.restored)}

    async def close(self) -> None:
        await self._group.close()

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """No group is annotated inside; those that were begun end first, each within its own deadline."""
        start = now()
        self._refreshing = True
        try:
            await self._changed.until(lambda: self._annotating == 0)
            yield
        finally:
            self._refreshing = False
            self._seconds += now() - start
            self._changed.notify()

    async def _deliver(self, version: int, decay: float) -> None:
        failed = False
        while True:
            members = await self._members()
            try:
                received = await self._push.stage(version, members)
                if decay > 0 and self._is_fresh(received, version):
                    decay = self._start_over(version)
                await self._push.take(version, decay, members)
                break
            except ChecksumError:
                raise  # what sending again would not mend
            except (WeightSyncError, RoleError) as error:
                if failed:
                    raise
                failed = True
                log.warning("the reference could not follow to version %d, once more: %s", version, error)
                await self._replace_dead(members)
        self.version, self._lost = version, False

    def _is_fresh(self, received: Sequence[Received], version: int) -> bool:
        """Whether a member lost the average; one that has ``version`` took it in the try before."""
        return any(of_member.held_version not in (self.version, version) for of_member in received)

    def _start_over(self, version: int) -> float:
        """The decay with which a reference that was lost is replaced by the policy's ``version``: 0."""
        lost = f"the reference of version {self.version}" + (", an average," if self._decay > 0 else "")
        if self._deterministic:
            raise ReferenceLostError(
                f"{lost} was lost with an actor of the reference that died; expected it to the bit with "
                f"run.deterministic, found the policy at version {version}: start again, or set "
                "run.deterministic to false"
            )
        log.warning("%s was lost with an actor that died: it goes on as the policy's %d", lost, version)
        self.restored += 1
        return 0.0

    async def _replace_dead(self, members: Sequence[FollowingMember]) -> None:
        for member, error in zip(members, await asyncio.gather(*map(_death, members)), strict=True):
            if error is not None:
                await self._group.replace(member, error)

    async def _members(self) -> list[FollowingMember]:
        return cast(list[FollowingMember], await self._group.whole())


async def _death(member: FollowingMember) -> RoleError | None:
    """Why ``member`` counts as dead; None for one that answers."""
    try:
        async with asyncio.timeout(_PING_S):
            await member.ping()
    except TimeoutError:
        return RoleError(f"{member.name} did not answer a ping in {_PING_S:g} s")
    except RoleError as error:
        return error
    return None
