"""The pool of environment workers: gives each trajectory a session, and outlives what users' code does.

Invariants:
- A call of a session ends in exactly one of a Step, an EnvironmentFaultError, or its waiter's cancellation.
- A session stays in the process that it began in. One that hangs fails alone, also where nobody waits for it
  any more: its process takes no new sessions, another takes its place at once, and it is killed when its
  other sessions are over.
- When a process dies, the sessions in it fail, and another takes its place.
- After ``close`` no process is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from asyncrl.environments.protocol import Message, Step
from asyncrl.environments.worker import DONE
from asyncrl.errors import (
    ConfigError,
    DeadlineError,
    EnvironmentFaultError,
    EnvironmentRaisedError,
    EnvironmentTimeoutError,
    EnvironmentValueError,
    EnvironmentWorkerError,
)
from asyncrl.rewards.process import Replies, WorkerProcess, spawn
from asyncrl.rewards.worker import BAD_VALUE, REFUSED

if TYPE_CHECKING:
    from asyncrl.config import EnvironmentSection

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_MOST_FAILED_STARTS = 3
_MODULE = "asyncrl.environments.worker"


@dataclass(slots=True, eq=False)
class _Call:
    """Something that an environment was asked, and has not answered."""

    what: str
    answer: asyncio.Future[list[Any]]
    timer: asyncio.TimerHandle | None

    def untimed(self) -> None:
        """It is late no more."""
        if self.timer is not None:
            self.timer.cancel()

    def fail(self, error: EnvironmentFaultError) -> None:
        """End it with ``error``, unless its waiter was cancelled."""
        self.untimed()
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(slots=True, eq=False)
class _Home:
    """One worker process with its sessions."""

    process: WorkerProcess
    sessions: set[int] = field(default_factory=set)
    pending: dict[int, _Call] = field(default_factory=dict)
    """By number; those whose waiter was cancelled stay until they are answered or late."""
    hung: bool = False
    """A call of it never came back: it takes no more sessions, and goes with its last one."""

    def send(self, call: list[Any]) -> None:
        self.process.outgoing.write(msgpack.packb([call], unicode_errors="surrogatepass"))


class EnvironmentPool:
    """Environments of one kind in ``section.workers`` processes. Await ``start``; ``close`` at the end.

    ``folder``: where the environment is looked up (default: the current one).
    """

    def __init__(
        self, section: EnvironmentSection, *, folder: Path | None = None, cores: tuple[int, ...] = ()
    ) -> None:
        self._section = section
        self._setup = {
            "kind": section.kind,
            "path": section.path,
            "command": list(section.command),
            "form": section.form,
            "args": section.args,
            "tools": list(section.tools),
            "parse": section.parse,
            "max_turns": section.max_turns,
            "max_observation_chars": section.max_observation_chars,
            "folder": str((folder or Path.cwd()).resolve()),
            "cores": list(cores),
            "memory_mb": section.memory_mb,
        }
        self._homes: list[_Home] = []
        self._seats: list[asyncio.Task[None]] = []
        self._leavers: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._broken: EnvironmentFaultError | None = None
        self._next_id = 0

    async def start(self) -> None:
        """Start the workers, the environment loaded in each. Raises ConfigError and DeadlineError."""
        first = [asyncio.get_running_loop().create_future() for _ in range(self._section.workers)]
        self._seats = [
            asyncio.create_task(self._keep_running(ready), name=f"environment worker {i}")
            for i, ready in enumerate(first)
        ]
        try:
            await asyncio.gather(*first)
        except BaseException:
            for ready in first:
                ready.cancel()
            await self.close()
            raise

    @asynccontextmanager
    async def session(self, uid: str) -> AsyncIterator[Session]:
        """One environment, made at its ``reset`` and gone at the end; ``uid`` names it in messages."""
        home = await self._choose(uid)
        self._next_id += 1
        session = Session(self, home, self._next_id, uid)
        home.sessions.add(session.number)
        try:
            yield session
        finally:
            home.sessions.discard(session.number)
            if session.begun and home in self._homes:
                # Nobody waits for it: what its close does is of no concern to the trajectory any more.
                home.send([0, session.number, "close", None])
            self._end_if_left(home)

    async def call(self, session: Session, verb: str, argument: Any, *, awaited: bool = False) -> Step:
        """Have the session's environment do something, within ``environment.timeout_s``.

        ``awaited``: it may take as long as somebody waits for it, and then so long to end.
        """
        home, what = session.home, f"{session.uid}: {verb} of {self._section.what}"
        if home not in self._homes:
            raise EnvironmentWorkerError(f"{what}: its process has ended")
        self._next_id += 1
        call_id = self._next_id
        loop = asyncio.get_running_loop()
        timeout_s = self._section.timeout_s
        timer = None if awaited else loop.call_later(timeout_s, self._late, home, call_id)
        call = home.pending[call_id] = _Call(what, loop.create_future(), timer)
        home.send([call_id, session.number, verb, argument])
        try:
            kind, payload = await call.answer
        except asyncio.CancelledError:
            if call_id in home.pending and call.timer is None:
                call.timer = loop.call_later(timeout_s, self._late, home, call_id)
            raise
        if kind == DONE:
            messages, *others = payload
            return Step(tuple(messages), *others)
        if kind == BAD_VALUE:
            raise EnvironmentValueError(f"{what}: {payload}")
        raise EnvironmentRaisedError(f"{what} raised\n{payload}")

    async def close(self) -> None:
        """Kill the workers; sessions that are left fail."""
        self._broken = EnvironmentWorkerError("the environment pool was closed")
        tasks = [*self._seats, *self._leavers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- workers ---

    async def _choose(self, uid: str) -> _Home:
        """The process with the fewest sessions, once there is one that takes new ones."""

        def free() -> list[_Home]:
            return [home for home in self._homes if not home.hung]

        async with self._changed:
            await self._changed.wait_for(lambda: self._broken is not None or free())
        if self._broken is not None:
            raise EnvironmentWorkerError(f"{uid}: {self._broken}")
        return min(free(), key=lambda home: len(home.sessions))

    async def _keep_running(self, ready: asyncio.Future[None]) -> None:
        """Start a worker, serve it while it takes sessions, and start the next, until cancelled."""
        failed_starts = 0
        while failed_starts < _MOST_FAILED_STARTS:
            try:
                home, replies = await self._started()
            except (ConfigError, DeadlineError, OSError) as error:
                if not ready.done():
                    ready.set_exception(error)
                    return
                failed_starts += 1
                logger.warning("an environment worker did not start again (try %d): %s", failed_starts, error)
                continue
            failed_starts = 0
            serving = asyncio.create_task(self._serve(home, replies), name="serving an environment worker")
            self._leavers.add(serving)
            serving.add_done_callback(self._leavers.discard)
            self._homes.append(home)
            if not ready.done():
                ready.set_result(None)
            async with self._changed:
                self._changed.notify_all()
                await self._changed.wait_for(lambda: home.hung or home not in self._homes)  # noqa: B023
        self._broken = EnvironmentWorkerError("no environment worker starts any more; the log says why")
        async with self._changed:
            self._changed.notify_all()

    async def _started(self) -> tuple[_Home, Replies]:
        path = self._section.name
        process = await spawn(self._setup, self._section.timeout_s, module=_MODULE)
        replies = Replies(process.incoming)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                messages = await replies.read()
            if not messages:
                raise ConfigError(f"the process that loads the environment {path} ended while doing so")
            _, kind, payload = messages[0]
            if kind == REFUSED:
                raise ConfigError(f"environment: {payload}")
        except TimeoutError:
            await process.kill()
            raise DeadlineError(
                f"an environment worker had not loaded {path} after {_START_TIMEOUT_S:g} s"
            ) from None
        except BaseException:
            await process.kill()
            raise
        return _Home(process), replies

    async def _serve(self, home: _Home, replies: Replies) -> None:
        """Hand out a process's answers until it ends."""
        try:
            while messages := await replies.read():
                for call_id, kind, payload in messages:
                    call = home.pending.pop(call_id, None)
                    if call is not None:
                        call.untimed()
                        if not call.answer.done():
                            call.answer.set_result([kind, payload])
        except Exception:
            logger.exception("what an environment worker sent cannot be read; it is given up")
        finally:
            self._homes.remove(home)
            await asyncio.shield(home.process.kill())
            code = home.process.popen.returncode
            for call in home.pending.values():
                text = f"{call.what}: its process ended with code {code}; another took its place"
                call.fail(EnvironmentWorkerError(text))
            home.pending.clear()
            async with self._changed:
                self._changed.notify_all()

    def _late(self, home: _Home, call_id: int) -> None:
        """A call was not answered in time: its process takes no new sessions, and ends after the last one."""
        call = home.pending.pop(call_id)
        limit = f"environment.timeout_s = {self._section.timeout_s:g} s"
        call.fail(EnvironmentTimeoutError(f"{call.what} had not answered after {limit}"))
        if not home.hung:
            home.hung = True
            task = asyncio.create_task(self._tell(), name="an environment worker leaves")
            self._leavers.add(task)
            task.add_done_callback(self._leavers.discard)
        self._end_if_left(home)

    def _end_if_left(self, home: _Home) -> None:
        if home.hung and not home.sessions:
            home.process.signal()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class Session:
    """One environment, for one trajectory."""

    def __init__(self, pool: EnvironmentPool, home: _Home, number: int, uid: str) -> None:
        self.home = home
        self.number = number
        self.uid = uid
        self.begun = False
        self._pool = pool

    async def reset(self, row: Mapping[str, Any], prompt: Sequence[Message] = ()) -> Step:
        """Make it and begin; the messages are added to the row's ``prompt``, or replace it.

        Raises EnvironmentFaultError.
        """
        self.begun = True
        return await self._pool.call(self, "reset", [dict(row), [dict(message) for message in prompt]])

    async def step(self, message: Message) -> Step:
        """Give it the model's message. Raises EnvironmentFaultError."""
        return await self._pool.call(self, "step", dict(message))

    async def finish(self, reason: str) -> Step:
        """Tell it that no step follows, and why: ``stop`` or ``length``. Raises EnvironmentFaultError."""
        return await self._pool.call(self, "finish", reason)

    async def play(self, base_url: str) -> Step:
        """Where it is an agent: have it play, with the policy at ``base_url``, for as long as this is
        awaited.

        Raises EnvironmentFaultError.
        """
        return await self._pool.call(self, "step", {"base_url": base_url}, awaited=True)
