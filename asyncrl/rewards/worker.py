"""The process that runs users' reward functions: ``python -m asyncrl.rewards.worker FD PARENT``.

It speaks msgpack over one socket. In: first a ``Setup`` as a map, then lists of calls, each ``[id, group,
samples]``: the functions of one sample are run, or those of a group, on ``samples``, each a list of
``Sample``'s fields. Out: ``[id, kind, payload]``.

Invariants:
- Sync functions of a call run on the main thread, one call after the other in the order received, so
  that the pool always knows which call is running. Async ones run together on a loop of their own.
- A reply goes out as soon as a call is done, never batched: the pool times calls by it.
- It ends with its parent: by signal (Linux), and by the end of the socket everywhere.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack

from asyncrl.errors import ConfigError
from asyncrl.rewards.binder import Sample
from asyncrl.rewards.functions import Function, Reader, load
from asyncrl.rewards.results import Value

# Kinds of reply. The payload of the failures is [function name, text].
READY = "ready"  # payload: signatures, as maps
REFUSED = "refused"  # payload: text
ADVANCED = "advanced"  # the sync functions of a call are done, its async ones run
SCORED = "scored"  # payload: a list a function, of [value or None, extras] a sample
RAISED = "raised"
BAD_VALUE = "bad_value"
TIMED_OUT = "timed_out"

SETUP_ID = -1
OUT_OF_MEMORY = 77
"""Exit code of a worker whose function wanted more memory than it may have: what it holds goes with it."""
MAX_MESSAGE_BYTES = 1 << 30
_TRACEBACK_CHARACTERS = 4000
_PR_SET_PDEATHSIG = 1
_OURS = tuple(str(Path(__file__).with_name(name)) for name in ("worker.py", "functions.py", "rubrics.py"))


class _Failure(Exception):
    """A reward that could not be had, ready to be sent."""

    def __init__(self, kind: str, name: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.payload = [name, text]


class Worker:
    """Runs calls; ``send`` is given each reply and may be used from two threads."""

    def __init__(
        self, functions: list[Function], timeout_s: float, send: Callable[[list[Any]], None]
    ) -> None:
        self._functions = {
            group: [f for f in functions if f.signature.takes_group == group] for group in (False, True)
        }
        self._timeout_s = timeout_s
        self._send = send
        self._has_async = any(f.signature.is_async for f in functions)
        self._loop = asyncio.new_event_loop() if self._has_async else None
        self._tasks: set[asyncio.Task[None]] = set()
        if self._loop is not None:
            threading.Thread(target=self._loop.run_forever, name="async rewards", daemon=True).start()

    def run(self, call: list[Any]) -> None:
        """Run the sync functions of one call, and reply or hand it on to the async ones."""
        call_id, group, fields = call
        samples = [Sample(*of_one) for of_one in fields]
        functions = self._functions[group]
        results: list[list[Value]] = [[] for _ in functions]
        try:
            for i, function in enumerate(functions):
                if not function.signature.is_async:
                    results[i] = _called(function, samples)
        except _Failure as failure:
            self._send([call_id, failure.kind, failure.payload])
            return
        if self._loop is None:
            self._send([call_id, SCORED, results])
            return
        self._send([call_id, ADVANCED, None])
        self._loop.call_soon_threadsafe(self._spawn, call_id, functions, samples, results)

    def _spawn(self, *call: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._finish(*call))
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    async def _finish(
        self, call_id: int, functions: list[Function], samples: list[Sample], results: list[list[Value]]
    ) -> None:
        async def one(i: int, function: Function) -> None:
            results[i] = await self._awaited(function, samples)

        asynchronous = [(i, f) for i, f in enumerate(functions) if f.signature.is_async]
        try:
            await asyncio.gather(*(one(i, f) for i, f in asynchronous))
        except _Failure as failure:
            self._send([call_id, failure.kind, failure.payload])
        else:
            self._send([call_id, SCORED, results])

    async def _awaited(self, function: Function, samples: list[Sample]) -> list[Value]:
        name = function.signature.name
        clock = asyncio.timeout(self._timeout_s)
        try:
            async with clock:
                started, reader = function.start(samples)
                result = await started
        except BaseException as error:  # users' code may raise anything, SystemExit included
            if clock.expired():
                raise _Failure(TIMED_OUT, name, "") from None
            if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            _end_if_out_of_memory(error)
            raise _Failure(RAISED, name, traceback_text(error, _OURS)) from None
        return _read(name, reader, result)


def _called(function: Function, samples: list[Sample]) -> list[Value]:
    name = function.signature.name
    try:
        result, reader = function.start(samples)
    except BaseException as error:  # noqa: BLE001 users' code may raise anything, SystemExit included
        _end_if_out_of_memory(error)
        raise _Failure(RAISED, name, traceback_text(error, _OURS)) from None
    return _read(name, reader, result)


def _read(name: str, reader: Reader, result: Any) -> list[Value]:
    try:
        return reader(result)
    except ValueError as error:
        raise _Failure(BAD_VALUE, name, str(error)) from None


def _end_if_out_of_memory(error: BaseException) -> None:
    """A function that leaks would fail every call from here on, so another process takes this one's place."""
    if (
        isinstance(error, MemoryError)
        and resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    ):
        sys.stderr.write(traceback_text(error, _OURS) + "\n")
        sys.stderr.flush()
        os._exit(OUT_OF_MEMORY)


def limit_memory(megabytes: int | None) -> None:
    """Allocations beyond it fail in this process, and in each that it starts. Linux alone enforces it."""
    if megabytes is not None:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = megabytes << 20
        if most == resource.RLIM_INFINITY or wanted < most:
            resource.setrlimit(resource.RLIMIT_DATA, (wanted, most))


def traceback_text(error: BaseException, ours: Sequence[str]) -> str:
    """The user's part of the traceback, without frames of the files ``ours``; its end, if it is long."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace)).strip()
    return text if len(text) <= _TRACEBACK_CHARACTERS else "..." + text[-_TRACEBACK_CHARACTERS:]


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


def connected() -> tuple[dict[str, Any], queue.SimpleQueue[Any], Callable[[list[Any]], None]]:
    """What a worker process begins with: its setup, the calls that follow, and how replies are sent.

    ``send`` may be used from any thread. The process ends with its parent from here on.
    """
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
    setup: dict[str, Any] = calls.get()
    limit_memory(setup["memory_mb"])
    if setup["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup["cores"])
    return setup, calls, send


def main() -> None:
    setup, calls, send = connected()
    try:
        folder = Path(setup["folder"])
        functions = [
            load(f["path"], f["name"], f["args"], folder, setup["timeout_s"]) for f in setup["functions"]
        ]
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
