"""Where replicas can be, while nodes come and go: what an elastic pool asks, and the answer of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from asyncrl.generators.member import Replica


class Places(Protocol):
    """Where the replicas of a pool are, and where more could be."""

    async def is_there(self, name: str) -> bool:
        """Whether a replica of this name, which has died, can be started again where it was."""
        ...

    async def another(self) -> Replica:
        """Wait until there is room for one more, however long that takes, and make it; it is not started."""
        ...


class Seats(Protocol):
    """Rooms in a cluster, by the replica's name; see ``asyncrl/seats.py``."""

    async def is_there(self, name: str) -> bool: ...

    async def find(self, name: str) -> object: ...


class ClusterPlaces:
    """Seats in a cluster, taken by what ``make`` makes of a name; the first ``taken`` names are taken."""

    def __init__(self, seats: Seats, make: Callable[[str], Replica], taken: int) -> None:
        self._seats = seats
        self._make = make
        self._taken = taken

    async def is_there(self, name: str) -> bool:
        return await self._seats.is_there(name)

    async def another(self) -> Replica:
        # Never a name again whose replica left: its lines in a log and a timeline are its own.
        name = _name(self._taken)
        await self._seats.find(name)
        self._taken += 1
        return self._make(name)


def generator_names(count: int) -> list[str]:
    """Names of the first ``count`` generators."""
    return [_name(number) for number in range(count)]


def generator_number(name: str) -> int:
    return int(name.rpartition(" ")[2])


def _name(number: int) -> str:
    return f"generator {number}"
