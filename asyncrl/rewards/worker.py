"""The process that runs users' reward functions: ``python -m asyncrl.rewards.worker FD PARENT``.

It speaks msgpack over one socket. In: first a ``Setup`` as a map, then lists of calls, each
``[id, row, prompt, completion, completion_ids, finish_reason]``. Out: ``[id, kind, payload]``.

Invariants:
- Sync functions of a call run on the main thread, one call after the other in the order received, so
  that the pool always knows which call is running. Async ones run together on a loop of their own.
- A reply goes out as soon as a call is done, never batched: the pool times calls by it.
- It ends with its parent: by signal (Linux), and by the end of the socket everywhere.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import math
import numbers
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgpack

from asyncrl.errors import ConfigError
from asyncrl.functions import load_function
from asyncrl.rewards.binder import Sample, Signature, named_values, signature_of
from asyncrl.rewards.builtin import BUILTIN

# Kinds of reply. The payload of the failures is [function name, text].
READY = "ready"  # payload: signatures, as maps
REFUSED = "refused"  # payload: text
ADVANCED = "advanced"  # the sync functions of a call are done, its async ones run
SCORED = "scored"  # payload: one value a function, None where not applicable
RAISED = "raised"
BAD_VALUE = "bad_value"
TIMED_OUT = "timed_out"

SETUP_ID = -1
MAX_MESSAGE_BYTES = 1 << 30
_TRACEBACK_CHARACTERS = 4000
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Function:
    """A loaded reward function."""

    call: Callable[..., Any]
    args: Mapping[str, Any]
    signature: Signature

    def start(self, values: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
        """Call it; of an async function, the coroutine."""
        missing = [name for name in self.signature.required if name not in values]
        if missing:
            raise KeyError(f"this row has no column for the parameter {missing[0]!r}")
        return self.call(**{**self.signature.arguments(values, row), **self.args})


class _Failure(Exception):
    """A reward that could not be had, ready to be sent."""

    def __init__(self, kind: str, name: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.payload = [name, text]


def load(path: str, name: str | None, args: Mapping[str, Any], folder: Path) -> Function:
    """Find and inspect one function. Raises ConfigError."""
    if path in BUILTIN:
        call: Callable[..., Any] = BUILTIN[path]
    elif ":" not in path and "." not in path:
        raise ConfigError(
            f"found {path!r}; expected package.module:function, file.py:function, or one of the built-in "
            f"{', '.join(BUILTIN)}"
        )
    else:
        call = load_function(path, folder)
    try:
        return Function(call, args, signature_of(call, name or path.rpartition(":")[2], args))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def as_value(result: Any) -> float | None:
    """A function's result as one finite number; None stays None. Raises ValueError saying why not."""
    if result is None:
        return None
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(
                f"found a dict with {', '.join(map(str, result)) or 'nothing'}; expected 'score' in it"
            )
        return as_value(result["score"])
    if isinstance(result, (list, tuple)):
        raise ValueError(
            f"found {len(result)} values, {_short(result)}; expected 1 number for the 1 completion"
        )
    if not isinstance(result, numbers.Real) and getattr(result, "ndim", None) == 0:
        result = result.item()  # a scalar of numpy or torch
    if inspect.iscoroutine(result):
        result.close()
        raise ValueError("found a coroutine; expected a number: write the function as async def")
    if not isinstance(result, numbers.Real):
        raise ValueError(f"found {_short(result)} ({type(result).__name__}); expected a finite number")
    try:
        value = float(result)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"found {value}; expected a finite number")
    return value


class Worker:
    """Runs calls; ``send`` is given each reply and may be used from two threads."""

    def __init__(
        self, functions: list[Function], timeout_s: float, send: Callable[[list[Any]], None]
    ) -> None:
        self._functions = functions
        self._timeout_s = timeout_s
        self._send = send
        self._has_async = any(f.signature.is_async for f in functions)
        self._loop = asyncio.new_event_loop() if self._has_async else None
        self._tasks: set[asyncio.Task[None]] = set()
        if self._loop is not None:
            threading.Thread(target=self._loop.run_forever, name="async rewards", daemon=True).start()

    def run(self, call: list[Any]) -> None:
        """Run the sync functions of one call, and reply or hand it on to the async ones."""
        call_id, *fields = call
        sample = Sample(*fields)
        values = named_values(sample)
        results: list[float | None] = [None] * len(self._functions)
        try:
            for i, function in enumerate(self._functions):
                if not function.signature.is_async:
                    results[i] = _checked(function, partial(function.start, values, sample.row))
        except _Failure as failure:
            self._send([call_id, failure.kind, failure.payload])
            return
        if self._loop is None:
            self._send([call_id, SCORED, results])
            return
        self._send([call_id, ADVANCED, None])
        self._loop.call_soon_threadsafe(self._spawn, call_id, values, sample.row, results)

    def _spawn(self, *call: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._finish(*call))
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    async def _finish(
        self, call_id: int, values: Mapping[str, Any], row: Mapping[str, Any], results: list[float | None]
    ) -> None:
        async def one(i: int, function: Function) -> None:
            results[i] = await self._awaited(function, values, row)

        asynchronous = [(i, f) for i, f in enumerate(self._functions) if f.signature.is_async]
        try:
            await asyncio.gather(*(one(i, f) for i, f in asynchronous))
        except _Failure as failure:
            self._send([call_id, failure.kind, failure.payload])
        else:
            self._send([call_id, SCORED, results])

    async def _awaited(
        self, function: Function, values: Mapping[str, Any], row: Mapping[str, Any]
    ) -> float | None:
        name = function.signature.name
        clock = asyncio.timeout(self._timeout_s)
        try:
            async with clock:
                result = await function.start(values, row)
        except BaseException as error:  # users' code may raise anything, SystemExit included
            if clock.expired():
                raise _Failure(TIMED_OUT, name, "") from None
            if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            raise _Failure(RAISED, name, _traceback(error)) from None
        return _checked(function, lambda: result)


def _checked(function: Function, start: Callable[[], Any]) -> float | None:
    name = function.signature.name
    try:
        result = start()
    except BaseException as error:  # noqa: BLE001 users' code may raise anything, SystemExit included
        raise _Failure(RAISED, name, _traceback(error)) from None
    try:
        return as_value(result)
    except ValueError as error:
        raise _Failure(BAD_VALUE, name, str(error)) from None


def _traceback(error: BaseException) -> str:
    """The user's part of the traceback; its end, if it is long."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace)).strip()
    return text if len(text) <= _TRACEBACK_CHARACTERS else "..." + text[-_TRACEBACK_CHARACTERS:]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _receive(connection: socket.socket, calls: queue.SimpleQueue[Any]) -> None:
    """Read messages until the parent closes the socket, then end this process and its children."""
    unpacker = msgpack.Unpacker(
        strict_map_key=False, max_buffer_size=MAX_MESSAGE_BYTES, unicode_errors="surrogatepass"
    )
    try:
        while data := connection.recv(1 << 18):
            unpacker.feed(data)
            for message in unpacker:
                calls.put(message)
    finally:
        # Not an exit: user code may hold the main thread, and may have started processes.
        os.killpg(os.getpid(), signal.SIGKILL)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    _die_with(int(sys.argv[2]))
    os.dup2(2, 1)  # what users' functions print goes to stderr
    lock = threading.Lock()
    packer = msgpack.Packer(unicode_errors="surrogatepass")

    def send(reply: list[Any]) -> None:
        with lock:
            connection.sendall(packer.pack(reply))

    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, calls), name="receive", daemon=True).start()
    setup = calls.get()
    if setup["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup["cores"])
    try:
        folder = Path(setup["folder"])
        functions = [load(f["path"], f["name"], f["args"], folder) for f in setup["functions"]]
    except ConfigError as error:
        send([SETUP_ID, REFUSED, str(error)])
        return
    worker = Worker(functions, setup["timeout_s"], send)
    send([SETUP_ID, READY, [asdict(f.signature) for f in functions]])
    while True:
        for call in calls.get():
            worker.run(call)


if __name__ == "__main__":
    main()
