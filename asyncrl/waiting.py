"""Waiting without polling, and never without a name and a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
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


class Deadlines:
    """Timeouts of work that can be made to stand still, and then does not use its time up.

    Between ``pause`` and ``resume`` none of them passes; afterwards each has what it had left.
    """

    def __init__(self) -> None:
        self._running: dict[asyncio.Timeout, float | None] = {}
        """By timeout: the seconds that it had left when all were paused."""
        self._paused = False

    @asynccontextmanager
    async def timeout(self, seconds: float | None) -> AsyncIterator[None]:
        """As ``asyncio.timeout``: TimeoutError after ``seconds`` that were not paused; None for never."""
        async with asyncio.timeout(None if self._paused else seconds) as timeout:
            self._running[timeout] = seconds
            try:
                yield
            finally:
                del self._running[timeout]

    def pause(self) -> None:
        """Let no time pass for any of them, those that begin meanwhile included."""
        if self._paused:
            return
        self._paused = True
        for timeout in self._running:
            due = timeout.when()
            self._running[timeout] = None if due is None else max(0.0, due - now())
            if not timeout.expired():
                timeout.reschedule(None)

    def resume(self) -> None:
        """Go on with what each had left."""
        if not self._paused:
            return
        self._paused = False
        for timeout, left in self._running.items():
            if left is not None and not timeout.expired():
                timeout.reschedule(now() + left)
