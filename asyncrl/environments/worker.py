"""The process that runs users' environments: ``python -m asyncrl.environments.worker FD PARENT``.

It speaks msgpack over one socket. In: first the setup as a map, then lists of calls, each ``[id, session,
verb, argument]`` with the verb ``reset`` (a row), ``step`` (a message) or ``close``. Out: ``[id, kind,
payload]``.

Invariants:
- A session has one environment and one thread, on which all its calls run, in their order. Sessions do not
  wait for each other.
- An answer that is too long is not sent: it is a failure of its session, and says how long it was.
- It ends with its parent, as a reward worker does.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from asyncrl.environments.protocol import Step, as_messages, as_step
from asyncrl.errors import ConfigError
from asyncrl.functions import load_function
from asyncrl.rewards.worker import BAD_VALUE, RAISED, READY, REFUSED, SETUP_ID, connected, traceback_text

DONE = "done"  # payload: messages, done, reward

Call = tuple[int, str, Any]


class Session:
    """One environment on a thread of its own; ``calls`` is what it is asked, in order.

    Where it can be interrupted, it is as soon as it is to be closed, whatever it does.
    """

    def __init__(
        self, make: Callable[[], Any], most_characters: int, send: Callable[[list[Any]], None]
    ) -> None:
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._make = make
        self._most_characters = most_characters
        self._send = send
        self._interrupt: Callable[[], None] | None = None
        threading.Thread(target=self._serve, name="environment", daemon=True).start()

    def close(self, call_id: int) -> None:
        """Have it closed once it is done with what it was asked before."""
        if self._interrupt is not None:
            self._interrupt()
        self.calls.put((call_id, "close", None))

    def _serve(self) -> None:
        environment: Any = None
        with asyncio.Runner() as runner:
            while True:
                call_id, verb, argument = self.calls.get()
                try:
                    if environment is None and verb != "close":
                        environment = self._make()
                        self._interrupt = getattr(environment, "interrupt", None)
                    step = self._run(runner, environment, verb, argument)
                except _Refused as error:
                    reply = [call_id, BAD_VALUE, str(error)]
                except BaseException as error:  # noqa: BLE001 users' code may raise anything, SystemExit included
                    reply = [call_id, RAISED, traceback_text(error, (__file__,))]
                else:
                    reply = [call_id, DONE, list(astuple(step))]
                self._send(reply)
                if verb == "close":
                    return

    def _run(self, runner: asyncio.Runner, environment: Any, verb: str, argument: Any) -> Step:
        function: Any = getattr(environment, verb, None)
        if function is None and verb == "close":
            return Step(done=True)
        result = function() if verb == "close" else function(argument)
        if inspect.isawaitable(result):
            result = runner.run(_awaited(result))
        if verb == "close":
            return Step(done=True)
        try:
            step = as_step(result) if verb == "step" else Step(as_messages(result))
        except ValueError as error:
            raise _Refused(f"{verb}: {error}") from None
        length = sum(len(message["content"]) for message in step.messages)
        if length > self._most_characters:
            raise _Refused(
                f"{verb}: found an observation of {length} characters; expected at most "
                f"environment.max_observation_chars = {self._most_characters}"
            )
        return step


class _Refused(Exception):
    """What an environment returned cannot be taken."""


async def _awaited(result: Any) -> Any:
    return await result


def load(setup: Mapping[str, Any]) -> Callable[[], Any]:
    """What makes one environment. Raises ConfigError where there is no such class, or it lacks a method.

    A class may have a ``check`` of its arguments, which raises ConfigError too.
    """
    found = load_function(setup["path"], Path(setup["folder"]))
    if inspect.isclass(found):
        missing = [name for name in ("reset", "step") if not callable(getattr(found, name, None))]
        if missing:
            raise ConfigError(
                f"{setup['path']}: found no method {' and no '.join(missing)}; expected reset and step"
            )
    try:
        inspect.signature(found).bind(**setup["args"])
    except TypeError as error:
        raise ConfigError(f"{setup['path']}: args {setup['args']}: {error}") from error
    check = getattr(found, "check", None)
    if inspect.isclass(found) and found.__module__.startswith("asyncrl.") and check is not None:
        check(**setup["args"])
    return lambda: found(**setup["args"])


def main() -> None:
    setup, calls, send = connected()
    try:
        make = load(setup)
    except ConfigError as error:
        send([SETUP_ID, REFUSED, str(error)])
        return
    send([SETUP_ID, READY, None])
    sessions: dict[int, Session] = {}
    while True:
        for call_id, number, verb, argument in calls.get():
            if number not in sessions:
                sessions[number] = Session(make, setup["max_observation_chars"], send)
            if verb == "close":
                sessions.pop(number).close(call_id)
            else:
                sessions[number].calls.put((call_id, verb, argument))


if __name__ == "__main__":
    main()
