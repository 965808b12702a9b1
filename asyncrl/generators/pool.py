"""The replicas as the controller sees them: routing, health, restarts, and who takes new work.

Invariants:
- Work goes to the live replica with the fewest outstanding tokens (ties: the first). A group, with all
  turns of all its samples, stays on the replica that it was given to.
- A replica that failed, hangs or was given up takes no new work, and its requests fail at once with
  LostGroupError, for the caller to issue again, with what there was of them by the replica's last
  snapshot.
- A restarted replica takes work only once the publisher has let it in at a version.
- ``live_version`` is the oldest version among the replicas that take new work.
- Work that is to run alone waits for a replica to empty itself, and keeps others off it meanwhile.
- While the replicas sleep no time passes for the groups that they have.
- One that joins serves once it is let in, like a restarted one.
- Work that finds no live replica waits as long as one is being restarted or may join; with none left it
  raises NoGeneratorError.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from asyncrl.errors import GeneratorError, LostGroupError, NoGeneratorError, VersionGoneError
from asyncrl.generators.base import Asleep, GeneratorStatistics
from asyncrl.generators.member import Member, Replica
from asyncrl.generators.places import Places
from asyncrl.generators.roster import Roster
from asyncrl.generators.supervision import Supervision
from asyncrl.rollout import GroupRequest
from asyncrl.snapshot import Salvage, key_of
from asyncrl.timeline import NoTimeline, Timeline
from asyncrl.types import GroupMeta, Metrics
from asyncrl.waiting import Deadlines

__all__ = ["GeneratorPool", "Member", "Replica"]

log = logging.getLogger(__name__)

_OUTSTANDING_TOKENS = attrgetter("outstanding_tokens")


class GeneratorPool:
    """Routes groups to replicas, and keeps the replicas running.

    ``restart`` makes a new replica of a name; without it the dead stay dead. A replica is pinged each
    ``health_every_s`` seconds and has ``health_timeout_s`` to answer: one that hangs is noticed within
    their sum, one that dies at once. After ``max_restarts`` restarts in a row in which it completed no
    group, a replica is left dead.

    ``places``: where replicas can be, in a cluster; without it all have their place for ever, and none joins.
    With it there may be fewer than ``min_replicas`` for ``below_min_s`` seconds before ``shortage`` says so.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        restart: Callable[[str], Replica] | None = None,
        max_restarts: int = 3,
        health_every_s: float = 1.0,
        health_timeout_s: float = 3.5,
        places: Places | None = None,
        min_replicas: int = 1,
        max_replicas: int | None = None,
        below_min_s: float = 0.0,
        timeline: Timeline | None = None,
    ) -> None:
        self._timeline = timeline or NoTimeline()
        self._roster = Roster(replicas)
        self._changed = self._roster.changed
        self._supervision = Supervision(
            self._roster,
            restart=restart,
            max_restarts=max_restarts,
            health_every_s=health_every_s,
            health_timeout_s=health_timeout_s,
            places=places,
            min_replicas=min_replicas,
            max_replicas=max_replicas,
            below_min_s=below_min_s,
        )
        self.continued_samples = 0
        """Answers that another replica had finished or begun when it died, and that were not begun again."""
        self.continued_tokens = 0
        """Tokens of these: what was not sampled a second time."""
        self._newest = 0
        self._limits = Deadlines()

    # Who is there.

    @property
    def members(self) -> list[Member]:
        """All that are there, the dead included; a restarted replica stands in its predecessor's place."""
        return self._roster.members

    @property
    def live(self) -> list[Member]:
        """Members that take new work."""
        return self._roster.live

    @property
    def joining(self) -> list[Member]:
        """Members that run and wait for weights."""
        return self._roster.joining

    @property
    def receivers(self) -> list[Member]:
        """Members that the next version is for: the live and the joining ones."""
        return self._roster.receivers

    @property
    def restarts(self) -> int:
        """Replicas started anew so far, over all."""
        return self._supervision.restarts

    @property
    def joined(self) -> int:
        """Replicas that came while the run went on, and served."""
        return self._supervision.joined

    @property
    def left(self) -> list[str]:
        """What became of those that left, a line each."""
        return self._supervision.left

    @property
    def live_version(self) -> int:
        """g: the oldest version among the replicas that take new work; at least one has to be live."""
        return min(member.version for member in self.live)

    @property
    def newest_version(self) -> int:
        """The newest version that any replica was let in with."""
        return self._newest

    async def until(self, condition: Callable[[GeneratorPool], object]) -> None:
        """Wait until ``condition`` holds. Raises NoGeneratorError when no replica is left to change it."""

        met = False

        def met_or_hopeless() -> bool:
            nonlocal met
            met = bool(condition(self))
            return met or self._supervision.is_hopeless()

        await self._changed.until(met_or_hopeless)
        if not met:
            raise self._supervision.too_few()

    # Work.

    async def run_group(
        self,
        request: GroupRequest,
        *,
        limit_s: float | None = None,
        version: int | None = None,
        alone: bool = False,
        salvage: Salvage | None = None,
    ) -> tuple[GroupMeta, Any]:
        """Run a group on the least loaded live replica, waiting for one where all are being restarted.

        ``limit_s``: a replica that has not answered after so many seconds is taken for hung. ``version``:
        only on a replica that is live at that very version. ``alone``: with no other group beside it, so
        that it is known what the replica died of. ``salvage``: what an earlier replica had of this very
        request, to go on from.

        Raises LostGroupError, with what can be salvaged now, when the replica dies or is given up;
        NoGeneratorError when none is left; VersionGoneError when the last replica at ``version`` died and
        the policy has moved on.
        """
        member = await (self._reserve(version) if alone else self._choose(version))
        key, tokens, payload = key_of(request.task), request.max_tokens, None
        if salvage is not None:
            payload = salvage.payload
            tokens -= salvage.progress.tokens
            self._count_continued(salvage, request, member)
        member.outstanding_tokens += tokens
        member.groups.add(key)
        try:
            async with self._limits.timeout(limit_s):
                outcome = await member.call(member.replica.run_group(request, payload))
        except TimeoutError:
            why = f"{member.name} did not answer for {request.task.uid} in {limit_s:g} s"
            member.give_up(why)
            raise LostGroupError(why, member.snapshot.salvage(key) or salvage) from None
        except GeneratorError as error:
            raise LostGroupError(str(error), member.snapshot.salvage(key) or salvage) from error
        finally:
            member.outstanding_tokens -= tokens
            member.groups.discard(key)
            member.reserved &= not alone
            self._changed.notify()
        if member.alive:  # what was decided at its death stands
            member.completed += 1
        self._timeline.group(member.name, outcome[0])
        return outcome

    def _count_continued(self, salvage: Salvage, request: GroupRequest, member: Member) -> None:
        progress = salvage.progress
        self.continued_samples += progress.samples
        self.continued_tokens += progress.tokens
        log.info(
            "%s goes on from %d tokens of %d samples on %s",
            request.task.uid,
            progress.tokens,
            progress.samples,
            member.name,
        )

    async def _choose(self, version: int | None) -> Member:
        members: list[Member] = []

        def able(pool: GeneratorPool) -> list[Member]:
            nonlocal members
            members = [m for m in pool.live if not m.reserved and (version is None or m.version == version)]
            return members

        def gone(pool: GeneratorPool) -> bool:
            return (
                version is not None
                and pool.newest_version > version
                and all(member.version != version for member in pool.live)
            )

        await self.until(lambda pool: able(pool) or gone(pool))
        if not members:
            raise VersionGoneError(
                f"no replica holds version {version} any more, and the newest is {self._newest}: "
                "the last that held it died, and the learner has moved on"
            )
        return min(members, key=_OUTSTANDING_TOKENS)

    async def _reserve(self, version: int | None) -> Member:
        """A live replica with no group, which gets none until ``reserved`` is taken back."""
        while True:
            member = await self._choose(version)
            member.reserved = True
            try:
                await self._emptied(member)
            except BaseException:
                member.reserved = False
                self._changed.notify()
                raise
            if member.alive:
                return member

    async def _emptied(self, member: Member) -> None:
        await self.until(lambda pool: not (member.alive and member.groups))

    def let_in(self, members: Sequence[Member], version: int) -> None:
        """The members hold ``version``, checked: they may work with it."""
        self._newest = max(self._newest, version)
        for member in members:
            if member.state == "joining" and member.life:
                log.warning("%s is back, at version %d", member.name, version)
            elif member.state == "joining" and self._supervision.has_joined(member):
                log.info("%s has joined, at version %d", member.name, version)
            member.let_in(version)

    async def sleep(self) -> list[Asleep]:
        """Have all replicas sleep, with the groups that they have. GeneratorError when one dies of it."""
        members = self.receivers
        self._limits.pause()
        return await asyncio.gather(*(m.call(m.replica.sleep()) for m in members))

    async def make_room(self) -> None:
        """Have all replicas, asleep, take memory for weights. GeneratorError when one dies of it."""
        members = self.receivers
        await asyncio.gather(*(m.call(m.replica.make_room()) for m in members))

    async def wake(self) -> None:
        """Have all replicas go on. GeneratorError when one dies of it."""
        members = self.receivers
        await asyncio.gather(*(m.call(m.replica.wake()) for m in members))
        self._limits.resume()

    # Life and death.

    async def start(self) -> None:
        """Start all replicas; the first that cannot start ends it."""
        await self._supervision.start()

    async def supervise(self) -> None:
        """Watch the replicas, restart those that die, and take in others where there is room.

        Runs until it is cancelled, or until all are dead and none may be restarted or join.
        """
        await self._supervision.supervise()

    async def shortage(self) -> NoGeneratorError:
        """Wait until too few replicas are left, and for too long; the error that says so.

        From then on nobody is waited for: what finds no replica raises NoGeneratorError.
        """
        return await self._supervision.shortage()

    async def probe(self, members: Sequence[Member]) -> None:
        """Ping the members now, and give up those that do not answer in time."""
        await self._supervision.probe(members)

    async def close(self) -> None:
        """End all replicas: those that live in good order, the others by force."""
        await self._supervision.close()

    # What users see.

    async def statistics(self) -> dict[str, GeneratorStatistics]:
        """One snapshot of each live replica that answers, by its name and number of restarts."""

        async def one(member: Member) -> tuple[str, GeneratorStatistics] | None:
            try:
                return f"{member.name}/{member.life}", await member.call(member.replica.statistics())
            except GeneratorError:
                return None  # it was given up by this; whoever works with it hears of it there

        answers = await asyncio.gather(*(one(member) for member in self.live))
        return dict(answer for answer in answers if answer is not None)

    def metrics(self) -> Metrics:
        """How many replicas are at work, and what became of those that are not."""
        return {
            "generator/replicas_live": float(len(self.live)),
            "generator/restarts": float(self.restarts),
            "generator/joined": float(self.joined),
            "generator/left": float(len(self.left)),
            "generator/continued_samples": float(self.continued_samples),
            "generator/continued_tokens": float(self.continued_tokens),
        }

    def describe(self) -> list[str]:
        """Who holds what, for a stall report."""
        return [member.describe() for member in self.members]

    def holder(self, uid: str, ordinal: int) -> str:
        """Name of the replica that works on this group."""
        return next((m.name for m in self.members if (uid, ordinal) in m.groups), "no replica")
