"""The process that runs users' environments: ``python -m asyncrl.environments.worker FD PARENT``.

It speaks msgpack over one socket. In: first the setup as a map, then lists of calls, each ``[id, session,
verb, argument]`` with the verb ``reset`` (a row and its prompt's messages), ``step`` (a message), ``finish``
(why it ended) or ``close``. Out: ``[id, kind, payload]``.

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
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

from asyncrl.environments.adapters import __path__ as _adapters
from asyncrl.environments.adapters.base import Adapter
from asyncrl.environments.agents import __file__ as _agents
from asyncrl.environments.forms import Make, load
from asyncrl.environments.protocol import BadAnswerError, Step
from asyncrl.environments.tools import __file__ as _tools
from asyncrl.errors import ConfigError
from asyncrl.rewards.worker import BAD_VALUE, RAISED, READY, REFUSED, SETUP_ID, connected, traceback_text

DONE = "done"  # payload: the fields of a Step

_OURS = (__file__, _agents, _tools, *map(str, Path(_adapters[0]).glob("*.py")))

Call = tuple[int, str, Any]


class Session:
    """One environment on a thread of its own; ``calls`` is what it is asked, in order.

    Where it can be interrupted, it is as soon as it is to be closed, whatever it does.
    """

    def __init__(self, make: Make, most_characters: int, send: Callable[[list[Any]], None]) -> None:
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
        environment: Adapter | None = None
        with asyncio.Runner() as runner:

            def settle(value: Any) -> Any:
                return runner.run(_awaited(value)) if inspect.isawaitable(value) else value

            while True:
                call_id, verb, argument = self.calls.get()
                try:
                    if environment is None and verb != "close":
                        environment = self._make(settle)
                        self._interrupt = getattr(environment, "interrupt", None)
                    step = self._run(environment, verb, argument)
                except _Refused as error:
                    reply = [call_id, BAD_VALUE, str(error)]
                except BaseException as error:  # noqa: BLE001 users' code may raise anything, SystemExit included
                    reply = [call_id, RAISED, traceback_text(error, _OURS)]
                else:
                    reply = [call_id, DONE, list(astuple(step))]
                self._send(reply)
                if verb == "close":
                    return

    def _run(self, environment: Adapter | None, verb: str, argument: Any) -> Step:
        if environment is None:
            return Step(done=True)
        try:
            step = _asked(environment, verb, argument)
        except BadAnswerError as error:
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


def _asked(environment: Adapter, verb: str, argument: Any) -> Step:
    match verb:
        case "reset":
            return environment.reset(*argument)
        case "step":
            return environment.step(argument)
        case "finish":
            return environment.finish(argument)
    environment.close()
    return Step(done=True)


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
