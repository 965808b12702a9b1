"""Several equal actors as one ``Role``: who takes which group, and what happens when one dies.

Invariants:
- Members have at most ``_CALLS_A_MEMBER`` groups each, so that a group is given out late, to whoever is
  free; the others wait here, in the order in which they landed.
- A member that died, broke or did not answer in ``timeout_s`` is killed and replaced, once, by the first
  of its callers to hear of it; the group is tried once more. A second failure ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import RoleError
from asyncrl.roles.base import RoleMember
from asyncrl.types import Annotation, GroupMeta

log = logging.getLogger(__name__)

_CALLS_A_MEMBER = 2
"""One that is computed, and one whose payload is fetched meanwhile."""


@dataclass(eq=False, slots=True)
class _Seat:
    """A member's place, which another takes after its death."""

    member: RoleMember
    calls: int = 0
    repair: asyncio.Task[None] | None = None
    """Puts another member into the seat; there from a death on until that has started."""


class RoleGroup:
    """``members`` under one name. ``restart`` makes another member of a name; without it death is final.

    ``timeout_s`` bounds one call, ``setting`` names the config key that it comes from.
    """

    def __init__(
        self,
        name: str,
        members: Sequence[RoleMember],
        *,
        restart: Callable[[str], RoleMember] | None,
        timeout_s: float,
        setting: str,
    ) -> None:
        self.name = name
        self.restarts = 0
        self._seats = [_Seat(member) for member in members]
        self._restart = restart
        self._timeout_s = timeout_s
        self._setting = setting
        self._free = asyncio.Semaphore(_CALLS_A_MEMBER * len(self._seats))

    @property
    def members(self) -> list[RoleMember]:
        return [seat.member for seat in self._seats]

    async def start(self) -> None:
        async with asyncio.TaskGroup() as group:
            for member in self.members:
                group.create_task(member.start(), name=f"start {member.name}")

    async def whole(self) -> list[RoleMember]:
        """All members, once those that are being replaced have started. Raises what keeps one from that."""
        for seat in self._seats:
            if seat.repair is not None:
                await asyncio.shield(seat.repair)
        return self.members

    async def replace(self, member: RoleMember, error: RoleError) -> None:
        """Put another member into the seat of this one, because of ``error``; returns once it has started."""
        seat = next((seat for seat in self._seats if seat.member is member), None)
        if seat is not None:  # else others have seen to it
            await self._give_up(seat, member, error)

    async def annotate(self, meta: GroupMeta, payload: Any) -> Annotation:
        async with self._free:
            seat = await self._choose()
            member = seat.member
            try:
                return await self._ask(seat, meta, payload)
            except RoleError as error:
                log.warning("%s has to be annotated once more: %s", meta.uid, error)
                await self._give_up(seat, member, error)
            return await self._ask(await self._choose(), meta, payload)

    async def _choose(self) -> _Seat:
        """The seat with the fewest calls, of those whose member is there if any is."""
        for seat in self._seats:
            if seat.repair is not None and seat.repair.done():
                seat.repair.result()  # it failed, and whoever waited for it was cancelled
        seat = min(self._seats, key=lambda s: (s.repair is not None, s.calls))
        if seat.repair is not None:
            await asyncio.shield(seat.repair)
        return seat

    async def _ask(self, seat: _Seat, meta: GroupMeta, payload: Any) -> Annotation:
        seat.calls += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return await seat.member.annotate(meta, payload)
        except TimeoutError:
            raise RoleError(
                f"{seat.member.name} did not annotate {meta.uid} in {self._setting} = {self._timeout_s:g} s"
            ) from None
        finally:
            seat.calls -= 1

    async def _give_up(self, seat: _Seat, member: RoleMember, error: RoleError) -> None:
        """See to it that another member takes the seat, once for all of its callers, and wait for that."""
        if seat.member is member and seat.repair is None:
            if self._restart is None:
                raise RoleError(f"what {member.name} held is lost with it, and the run with that: {error}")
            # A task of its own: a caller whose group is dropped must not leave the seat empty.
            seat.repair = asyncio.create_task(self._replace(seat), name=f"restart {member.name}")
        if seat.repair is not None:
            await asyncio.shield(seat.repair)

    async def _replace(self, seat: _Seat) -> None:
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
