"""Several equal actors as one: who takes which call, and what happens when one dies.

Invariants:
- Members have at most ``_CALLS_A_MEMBER`` calls each, so that a group is given out late, to whoever is
  free; the others wait here, in the order in which they landed.
- A member that died, broke or did not answer in ``timeout_s`` is killed and replaced, once, by the first
  of its callers to hear of it; the call is made once more. A second failure ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from asyncrl.errors import RoleError
from asyncrl.roles.base import Member, RoleMember
from asyncrl.types import Annotation, GroupMeta

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Member)
T = TypeVar("T")

_CALLS_A_MEMBER = 2
"""One that is computed, and one whose payload is fetched meanwhile."""


@dataclass(eq=False, slots=True)
class _Seat(Generic[M]):
    """A member's place, which another takes after its death."""

    member: M
    calls: int = 0
    repair: asyncio.Task[None] | None = None
    """Puts another member into the seat; there from a death on until that has started."""


class MemberGroup(Generic[M]):
    """``members`` under one name. ``restart`` makes another member of a name; without it death is final.

    ``timeout_s`` bounds one call, ``setting`` names the config key that it comes from.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[M],
        *,
        restart: Callable[[str], M] | None,
        timeout_s: float,
        setting: str,
    ) -> None:
        self.name = name
        self.restarts = 0
        self._seats = [_Seat(member) for member in members]
        self._restart = restart
        self._timeout_s = timeout_s
        self._setting = setting
        self.calls = _CALLS_A_MEMBER * len(self._seats)
        """How many are made at the same time."""
        self._free = asyncio.Semaphore(self.calls)

    @property
    def members(self) -> list[M]:
        return [seat.member for seat in self._seats]

    async def start(self) -> None:
        async with asyncio.TaskGroup() as group:
            for member in self.members:
                group.create_task(member.start(), name=f"start {member.name}")

    async def whole(self) -> list[M]:
        """All members, once those that are being replaced have started. Raises what keeps one from that."""
        for seat in self._seats:
            if seat.repair is not None:
                await asyncio.shield(seat.repair)
        return self.members

    async def replace(self, member: M, error: RoleError) -> None:
        """Put another member into the seat of this one, because of ``error``; returns once it has started."""
        seat = next((seat for seat in self._seats if seat.member is member), None)
        if seat is not None:  # else others have seen to it
            await self._give_up(seat, member, error)

    async def ask(self, doing: str, call: Callable[[M], Awaitable[T]]) -> T:
        """What a member answers to ``call``, which is made twice at most. Raises what the second raised.

        ``doing``: what is asked of it, for messages, e.g. "annotate train-7".
        """
        async with self._free:
            seat = await self._choose()
            member = seat.member
            try:
                return await self._ask(seat, doing, call)
            except RoleError as error:
                log.warning("another has to %s: %s", doing, error)
                await self._give_up(seat, member, error)
            return await self._ask(await self._choose(), doing, call)

    async def _choose(self) -> _Seat[M]:
        """The seat with the fewest calls, of those whose member is there if any is."""
        for seat in self._seats:
            if seat.repair is not None and seat.repair.done():
                seat.repair.result()  # it failed, and whoever waited for it was cancelled
        seat = min(self._seats, key=lambda s: (s.repair is not None, s.calls))
        if seat.repair is not None:
            await asyncio.shield(seat.repair)
        return seat

    async def _ask(self, seat: _Seat[M], doing: str, call: Callable[[M], Awaitable[T]]) -> T:
        seat.calls += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call(seat.member)
        except TimeoutError:
            raise RoleError(
                f"{seat.member.name} did not {doing} in {self._setting} = {self._timeout_s:g} s"
            ) from None
        finally:
            seat.calls -= 1

    async def _give_up(self, seat: _Seat[M], member: M, error: RoleError) -> None:
        """See to it that another member takes the seat, once for all of its callers, and wait for that."""
        if seat.member is member and seat.repair is None:
            if self._restart is None:
                raise RoleError(f"what {member.name} held is lost with it, and the run with that: {error}")
            # A task of its own: a caller whose group is dropped must not leave the seat empty.
            seat.repair = asyncio.create_task(self._replace(seat), name=f"restart {member.name}")
        if seat.repair is not None:
            await asyncio.shield(seat.repair)

    async def _replace(self, seat: _Seat[M]) -> None:
        assert self._restart is not None
        await seat.member.kill()
        seat.member = self._restart(seat.member.name)
        await seat.member.start()
        self.restarts += 1
        log.warning("%s was restarted", seat.member.name)
        seat.repair = None

    async def close(self) -> None:
        """End all members: those that live in good order, the others by force."""
        repairs = [seat.repair for seat in self._seats if seat.repair is not None]
        for repair in repairs:
            repair.cancel()
        await asyncio.gather(*repairs, return_exceptions=True)
        ends = (s.member.close() if s.repair is None else s.member.kill() for s in self._seats)
        await asyncio.gather(*ends, return_exceptions=True)


class RoleGroup(MemberGroup[RoleMember]):
    """A ``Role`` of equal members."""

    async def annotate(self, meta: GroupMeta, payload: Any) -> Annotation:
        return await self.ask(f"annotate {meta.uid}", lambda member: member.annotate(meta, payload))
