"""Which replicas there are, and in which state.

Invariants:
- ``changed`` is notified after every change of who is there or of a member's state.
- The lists by state are never older than the last change.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.generators.member import Member, Replica, State
from asyncrl.waiting import Signal


class Roster:
    """The members of a pool, in the order in which they came."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.changed = Signal()
        self._by_state: dict[tuple[State, ...], list[Member]] = {}
        self.members = [Member(replica, self._member_changed) for replica in replicas]

    def add(self, replica: Replica) -> Member:
        """A member for a replica that was not there."""
        member = Member(replica, self._member_changed)
        self.members.append(member)
        self._member_changed()
        return member

    def succeed(self, dead: Member, replica: Replica, *, fruitless: int) -> Member:
        """A member in the place of one that died, after ``fruitless`` restarts in a row."""
        fresh = Member(replica, self._member_changed, dead.life + 1, fruitless)
        self.members[self.members.index(dead)] = fresh
        self._member_changed()
        return fresh

    def remove(self, member: Member) -> None:
        self.members.remove(member)
        self._member_changed()

    @property
    def live(self) -> list[Member]:
        """Members that take new work."""
        return self.in_state("live")

    @property
    def joining(self) -> list[Member]:
        """Members that run and wait for weights."""
        return self.in_state("joining")

    @property
    def receivers(self) -> list[Member]:
        """Members that the next version is for: the live and the joining ones."""
        return self.in_state("live", "joining")

    def in_state(self, *states: State) -> list[Member]:
        """Kept until a member changes: it is asked for with every group, of up to thousands of members."""
        found = self._by_state.get(states)
        if found is None:
            found = self._by_state[states] = [member for member in self.members if member.state in states]
        return found

    def _member_changed(self) -> None:
        self._by_state.clear()
        self.changed.notify()
