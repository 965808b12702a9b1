"""An asyncio event loop on virtual time: hours of schedule in milliseconds, and hangs become errors.

Invariants:
- ``loop.time()`` starts at 0.0 and is exactly the due time of the latest timer that ran: when nothing is
  ready, it jumps to the next timer. Nothing ever sleeps.
- No real time enters, so equal inputs see equal orders of events, as far as asyncio has one itself (a
  ``TaskGroup`` cancels its tasks in the order of a set).
- When nothing is ready, no timer is set and nothing outside can wake the loop, ``DeadlockError`` names
  every pending task, instead of a hang.

What sleeps or waits through the loop (``asyncio.sleep``, ``timeout``, ``wait_for``, ``TaskGroup``, queues,
events) works unchanged. Work in real threads (``asyncio.to_thread``, ``run_in_executor``) works
too: virtual time stands still until it is done. Likewise a socket or pipe that is registered with the
loop is waited for in real time when no timer is set; with timers set, time jumps past it. Not seen
is a foreign thread that will call ``call_soon_threadsafe`` later: a loop with nothing else to do reports
a deadlock. A timeout over the whole program is a timer too, and hides a deadlock until it fires.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack

from asyncrl.errors import DeadlockError

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_POLL_EVERY = 64
"""Busy iterations between two looks at the real file descriptors, which cost a system call each."""


class _JumpingSelector(selectors.BaseSelector):
    """Passes everything on to a real selector, but jumps in time where that would wait."""

    def __init__(self, advance: Callable[[], bool], refuse_deadlock: Callable[[], None]) -> None:
        self._real = selectors.DefaultSelector()
        self._advance = advance
        self._refuse_deadlock = refuse_deadlock
        self._unpolled = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        busy = timeout is not None and timeout <= 0
        self._unpolled += 1
        if self._unpolled < _POLL_EVERY and (busy or self._advance()):
            return []
        self._unpolled = 0
        found = self._real.select(0)
        if found or busy or self._advance():
            return found
        self._refuse_deadlock()
        return self._real.select(None)

    def register(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """The loop itself; ``asyncio.Runner(loop_factory=VirtualClockLoop)`` takes it, or ``run_virtual``."""

    # Kept by asyncio.BaseEventLoop: the heap of timers, and how near a timer counts as due.
    _scheduled: list[asyncio.TimerHandle]
    _clock_resolution: float

    def __init__(self) -> None:
        self._now = 0.0
        self._threads = 0
        selector = _JumpingSelector(self._advance, self._refuse_deadlock)
        super().__init__(selector)
        self._own_files = len(selector.get_map())  # the pipe that the loop wakes itself with
        self._files = selector.get_map()

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """As in asyncio; virtual time stands still until ``func`` returns."""
        future = super().run_in_executor(executor, func, *args)
        self._threads += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, *args: Any, **kwargs: Any) -> None:
        self._threads += 1  # asyncio joins the executor in a thread of its own
        try:
            await super().shutdown_default_executor(*args, **kwargs)
        finally:
            self._threads -= 1

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._threads -= 1

    def _advance(self) -> bool:
        """Jump to the next timer; False where there is none or a thread is at work."""
        if self._threads or not self._scheduled:
            return False
        self._now = max(self._now, self._scheduled[0].when())
        # asyncio runs what is due before now + resolution, which has to be more than now, late in time too.
        self._clock_resolution = max(1e-9, 2 * math.ulp(self._now))
        return True

    def _refuse_deadlock(self) -> None:
        if self._threads or len(self._files) > self._own_files:
            return
        pending = sorted(_describe(task) for task in asyncio.all_tasks(self))
        raise DeadlockError(
            f"at virtual time {self._now:g} s nothing is ready and no timer is set, but"
            f" {len(pending)} tasks are pending, none of which can go on: {'; '.join(pending) or 'none'}"
        )


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` in virtual time: returns what ``main`` returns, as soon as real time allows.

    Raises DeadlockError where a real loop would hang for ever.
    """
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


def _describe(task: asyncio.Task[Any]) -> str:
    """Name, coroutine and the innermost line that the task waits at."""
    coroutine = task.get_coro()
    name = getattr(coroutine, "__qualname__", repr(coroutine))
    stack = task.get_stack(limit=1)
    where = f" at {Path(stack[0].f_code.co_filename).name}:{stack[0].f_lineno}" if stack else ""
    return f"{task.get_name()} ({name}{where})"
