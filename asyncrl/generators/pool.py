"""The replicas as the controller sees them: routing, health, restarts, and who takes new work.

Invariants:
- Work goes to the live replica with the fewest outstanding tokens (ties: the first). A group, with all
  turns of all its samples, stays on the replica that it was given to.
- A replica that failed, hangs or was given up takes no new work, and its requests fail at once with
  LostGroupError, for the caller to issue again, with what there was of them by the replica's last
  snapshot. It is killed before another of its name starts.
- A restarted replica takes work only once the publisher has let it in at a version.
- ``live_version`` is the oldest version among the replicas that take new work.
- Work that is to run alone waits for a replica to empty itself, and keeps others off it meanwhile.
- While the replicas sleep no time passes for the groups that they have.
- A replica whose place is gone leaves, which is no fault; others join where there is room, up to
  ``max_replicas``, and serve once they are let in like a restarted one.
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
from asyncrl.generators.member import Member, Replica, State
from asyncrl.generators.places import Places
from asyncrl.rollout import GroupRequest
from asyncrl.snapshot import Salvage, key_of
from asyncrl.timeline import NoTimeline, Timeline
from asyncrl.types import GroupMeta, Metrics
from asyncrl.waiting import Deadlines, Signal

__all__ = ["GeneratorPool", "Member", "Replica"]

log = logging.getLogger(__name__)

_BACKOFF_S = 1.0
"""Wait before the first restart; doubled for each in a row that completed no group."""
_BACKOFF_MAX_S = 60.0
_PLACE_CHECK_S = 5.0
"""How often a place is looked after while a replica starts there: nothing else would tell that it is gone."""
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
        self._changed = Signal()
        self._by_state: dict[tuple[State, ...], list[Member]] = {}
        self.members = [Member(replica, self._member_changed) for replica in replicas]
        self.restarts = 0
        """Replicas started anew so far, over all."""
        self.continued_samples = 0
        """Answers that another replica had finished or begun when it died, and that were not begun again."""
        self.continued_tokens = 0
        """Tokens of these: what was not sampled a second time."""
        self.joined = 0
        """Replicas that came while the run went on, and served."""
        self.left: list[str] = []
        """What became of those that left, a line each."""
        self._restart = restart
        self._max_restarts = max_restarts
        self._health_every_s = health_every_s
        self._health_timeout_s = health_timeout_s
        self._places = places
        self._min = min_replicas
        self._max = len(replicas) if max_replicas is None else max_replicas
        self._below_min_s = below_min_s
        self._newcomers: set[Member] = set()
        self._over = False
        """Nobody is waited for any more."""
        self._newest = 0
        self._limits = Deadlines()

    # Who is there.

    @property
    def live(self) -> list[Member]:
        """Members that take new work."""
        return self._in_state("live")

    @property
    def joining(self) -> list[Member]:
        """Members that run and wait for weights."""
        return self._in_state("joining")

    @property
    def receivers(self) -> list[Member]:
        """Members that the next version is for: the live and the joining ones."""
        return self._in_state("live", "joining")

    def _in_state(self, *states: State) -> list[Member]:
        """Kept until a member changes: it is asked for with every group, of up to thousands of members."""
        found = self._by_state.get(states)
        if found is None:
            found = self._by_state[states] = [member for member in self.members if member.state in states]
        return found

    def _member_changed(self) -> None:
        self._by_state.clear()
        self._changed.notify()

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
            return met or self._is_hopeless()

        await self._changed.until(met_or_hopeless)
        if not met:
            raise self._too_few()

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
            elif member in self._newcomers and member.state == "joining":
                self._newcomers.discard(member)
                self.joined += 1
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
        async with asyncio.TaskGroup() as group:
            for member in self.members:
                group.create_task(self._start(member), name=f"start {member.name}")

    async def _start(self, member: Member) -> None:
        await member.call(member.replica.start())
        member.started()

    async def supervise(self) -> None:
        """Watch the replicas, restart those that die, and take in others where there is room.

        Runs until it is cancelled, or until all are dead and none may be restarted or join.
        """
        async with asyncio.TaskGroup() as group:
            for member in self.members:
                group.create_task(self._keep(member), name=f"keep {member.name}")
            if self._places is not None:
                group.create_task(self._take_in(group, self._places), name="take in generators")

    async def shortage(self) -> NoGeneratorError:
        """Wait until too few replicas are left, and for too long; the error that says so.

        From then on nobody is waited for: what finds no replica raises NoGeneratorError.
        """
        while True:
            await self._changed.until(lambda: self._left() < self._min)
            if self._places is not None:
                log.warning(
                    "%d generators are left, generators.min = %d: waiting %g s for others to join",
                    self._left(),
                    self._min,
                    self._below_min_s,
                )
                try:
                    async with asyncio.timeout(self._below_min_s):
                        await self._changed.until(lambda: self._left() >= self._min)
                    continue
                except TimeoutError:
                    pass
            error = self._too_few()
            self._over = True
            self._changed.notify()
            return error

    async def _keep(self, member: Member) -> None:
        """Watch a replica; after each death another takes its place, as long as there is one and it may."""
        if member in self._newcomers:
            await self._bring_up(member)
        while True:
            await member.watch(self._health_every_s, self._health_timeout_s)
            # Before anything else: a hung receiver holds up a push for as long as its sockets are open.
            await self._kill(member)
            if await self._has_lost_its_place(member):
                self._leave(member)
                return
            if self._is_lost(member):
                return
            again = 0 if member.completed else member.fruitless
            delay_s = min(_BACKOFF_MAX_S, _BACKOFF_S * 2**again)
            log.warning("%s is restarted in %g s", member.name, delay_s)
            await asyncio.sleep(delay_s)
            assert self._restart is not None
            fresh = Member(self._restart(member.name), self._member_changed, member.life + 1, again + 1)
            self.members[self.members.index(member)] = fresh
            self._newcomers.discard(member)
            self.restarts += 1
            self._member_changed()
            await self._bring_up(fresh)
            member = fresh

    async def _bring_up(self, member: Member) -> None:
        """Start a replica; what keeps it from starting is its death."""
        guard = asyncio.create_task(self._guard(member), name=f"place of {member.name}")
        try:
            await self._start(member)
        except Exception as error:  # noqa: BLE001  whatever kept it from starting, it counts as a death
            member.give_up(f"it could not be started: {type(error).__name__}: {error}")
        finally:
            guard.cancel()
            await asyncio.gather(guard, return_exceptions=True)

    async def _guard(self, member: Member) -> None:
        """Give up a replica that starts on a node that is gone, which would start for ever."""
        while self._places is not None and member.state == "starting":
            await asyncio.sleep(_PLACE_CHECK_S)
            if await self._has_lost_its_place(member):
                member.give_up("its node went away while it started")

    async def _has_lost_its_place(self, member: Member) -> bool:
        return self._places is not None and not await self._places.is_there(member.name)

    async def _take_in(self, keepers: asyncio.TaskGroup, places: Places) -> None:
        """Have others join wherever there is room, as long as there are fewer than there may be."""
        while True:
            await self._changed.until(lambda: self._left() < self._max)
            member = Member(await places.another(), self._member_changed)
            log.info("%s is started", member.name)
            self._newcomers.add(member)
            self.members.append(member)
            self._member_changed()
            keepers.create_task(self._keep(member), name=f"keep {member.name}")

    def _leave(self, member: Member) -> None:
        """Its node went away, and it with that."""
        self.members.remove(member)
        self._newcomers.discard(member)
        self.left.append(f"{member.name} left with its node: {member.why}")
        log.warning(
            "%s left with its node; %d generators are left (generators.min = %d)",
            member.name,
            self._left(),
            self._min,
        )
        self._member_changed()

    async def _kill(self, member: Member) -> None:
        try:
            async with asyncio.timeout(self._health_timeout_s):
                await member.replica.kill()
        except (TimeoutError, GeneratorError) as error:
            log.warning("%s could not be killed: %s", member.name, error or "no answer in time")

    def _is_lost(self, member: Member) -> bool:
        """Dead, and not to be restarted."""
        if member.alive:
            return False
        return self._restart is None or (0 if member.completed else member.fruitless) >= self._max_restarts

    def _left(self) -> int:
        """Replicas that are there, those included that start or are to be restarted."""
        return sum(not self._is_lost(member) for member in self.members)

    def _is_hopeless(self) -> bool:
        """No replica is left, and none comes."""
        return self._over or (self._places is None and self._left() == 0)

    def _too_few(self) -> NoGeneratorError:
        lost = [f"{m.name} after {m.life} restarts: {m.why}" for m in self.members if self._is_lost(m)]
        left = self._left()
        what = f"{left} generator{'s are' if left > 1 else ' is'}" if left else "no generator is"
        return NoGeneratorError(
            f"{what} left, generators.min = {self._min} (generators.max_restarts = {self._max_restarts} in a "
            f"row without a completed group): {'; '.join([*lost, *self.left])}"
        )

    async def probe(self, members: Sequence[Member]) -> None:
        """Ping the members now, and give up those that do not answer in time."""
        await asyncio.gather(*(m.check(self._health_timeout_s) for m in members if m.alive))

    async def close(self) -> None:
        """End all replicas: those that live in good order, the others by force."""
        ends = (m.replica.close() if m.alive else m.replica.kill() for m in self.members)
        await asyncio.gather(*ends, return_exceptions=True)

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
