"""Waiting without polling, and never without a name and a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from asyncrl.errors import DeadlineError

T = TypeVar("T")


def now() -> float:
    """Seconds by the clock of the running loop, which is a virtual one in simulations."""
    return asyncio.get_running_loop().time()


class Signal:
    """Wakes every waiter whenever something changed; they look for themselves at what."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as ``condition`` holds; it is looked at once a notification."""
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)


async def within(seconds: float, doing: str, setting: str, work: Awaitable[T]) -> T:
    """Await ``work``; raises DeadlineError that names it and the setting when it takes longer."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise DeadlineError(f"{doing}: not done after {setting} = {seconds:g} s") from None
