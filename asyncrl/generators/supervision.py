"""The life and death of a pool's replicas: they are watched, restarted, taken in, and leave.

Invariants:
- A replica is killed before another of its name starts.
- A replica whose place is gone leaves, which is no fault; others join where there is room, up to
  ``max_replicas``.
- What keeps a replica from starting is its death.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from asyncrl.errors import GeneratorError, NoGeneratorError
from asyncrl.generators.member import Member, Replica
from asyncrl.generators.places import Places
from asyncrl.generators.roster import Roster

log = logging.getLogger(__name__)

_BACKOFF_S = 1.0
"""Wait before the first restart; doubled for each in a row that completed no group."""
_BACKOFF_MAX_S = 60.0
_PLACE_CHECK_S = 5.0
"""How often a place is looked after while a replica starts there: nothing else would tell that it is gone."""


class Supervision:
    """Keeps the replicas of ``roster`` running; its settings are those of ``GeneratorPool``."""

    def __init__(
        self,
        roster: Roster,
        *,
        restart: Callable[[str], Replica] | None,
        max_restarts: int,
        health_every_s: float,
        health_timeout_s: float,
        places: Places | None,
        min_replicas: int,
        max_replicas: int | None,
        below_min_s: float,
    ) -> None:
        self.restarts = 0
        """Replicas started anew so far, over all."""
        self.joined = 0
        """Replicas that came while the run went on, and served."""
        self.left: list[str] = []
        """What became of those that left, a line each."""
        self._roster = roster
        self._restart = restart
        self._max_restarts = max_restarts
        self._health_every_s = health_every_s
        self._health_timeout_s = health_timeout_s
        self._places = places
        self._min = min_replicas
        self._max = len(roster.members) if max_replicas is None else max_replicas
        self._below_min_s = below_min_s
        self._newcomers: set[Member] = set()
        self._over = False
        """Nobody is waited for any more."""

    async def start(self) -> None:
        """Start all replicas; the first that cannot start ends it."""
        async with asyncio.TaskGroup() as group:
            for member in self._roster.members:
                group.create_task(self._start(member), name=f"start {member.name}")

    async def _start(self, member: Member) -> None:
        await member.call(member.replica.start())
        member.started()

    async def supervise(self) -> None:
        """Watch the replicas, restart those that die, and take in others where there is room.

        Runs until it is cancelled, or until all are dead and none may be restarted or join.
        """
        async with asyncio.TaskGroup() as group:
            for member in self._roster.members:
                group.create_task(self._keep(member), name=f"keep {member.name}")
            if self._places is not None:
                group.create_task(self._take_in(group, self._places), name="take in generators")

    async def shortage(self) -> NoGeneratorError:
        """Wait until too few replicas are left, and for too long; the error that says so.

        From then on nobody is waited for: what finds no replica raises NoGeneratorError.
        """
        while True:
            await self._roster.changed.until(lambda: self._left() < self._min)
            if self._places is not None:
                log.warning(
                    "%d generators are left, generators.min = %d: waiting %g s for others to join",
                    self._left(),
                    self._min,
                    self._below_min_s,
                )
                try:
                    async with asyncio.timeout(self._below_min_s):
                        await self._roster.changed.until(lambda: self._left() >= self._min)
                    continue
                except TimeoutError:
                    pass
            error = self.too_few()
            self._over = True
            self._roster.changed.notify()
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
            fresh = self._roster.succeed(member, self._restart(member.name), fruitless=again + 1)
            self._newcomers.discard(member)
            self.restarts += 1
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
            await self._roster.changed.until(lambda: self._left() < self._max)
            member = self._roster.add(await places.another())
            log.info("%s is started", member.name)
            self._newcomers.add(member)
            keepers.create_task(self._keep(member), name=f"keep {member.name}")

    def _leave(self, member: Member) -> None:
        """Its node went away, and it with that."""
        self._roster.remove(member)
        self._newcomers.discard(member)
        self.left.append(f"{member.name} left with its node: {member.why}")
        log.warning(
            "%s left with its node; %d generators are left (generators.min = %d)",
            member.name,
            self._left(),
            self._min,
        )

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
        dead = self._roster.in_state("dead")  # looked up, not counted: it is asked at every change
        return len(self._roster.members) - sum(map(self._is_lost, dead))

    def is_hopeless(self) -> bool:
        """No replica is left, and none comes."""
        return self._over or (self._places is None and self._left() == 0)

    def too_few(self) -> NoGeneratorError:
        """What became of them, as an error."""
        lost = [
            f"{m.name} after {m.life} restarts: {m.why}" for m in self._roster.members if self._is_lost(m)
        ]
        left = self._left()
        what = f"{left} generator{'s are' if left > 1 else ' is'}" if left else "no generator is"
        return NoGeneratorError(
            f"{what} left, generators.min = {self._min} (generators.max_restarts = {self._max_restarts} in a "
            f"row without a completed group): {'; '.join([*lost, *self.left])}"
        )

    def has_joined(self, member: Member) -> bool:
        """Count a newcomer that serves now; False for one that was there before."""
        if member not in self._newcomers:
            return False
        self._newcomers.discard(member)
        self.joined += 1
        return True

    async def probe(self, members: Sequence[Member]) -> None:
        """Ping the members now, and give up those that do not answer in time."""
        await asyncio.gather(*(m.check(self._health_timeout_s) for m in members if m.alive))

    async def close(self) -> None:
        """End all replicas: those that live in good order, the others by force."""
        ends = (m.replica.close() if m.alive else m.replica.kill() for m in self._roster.members)
        await asyncio.gather(*ends, return_exceptions=True)
