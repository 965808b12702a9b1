"""One worker process as the pool sees it: its socket, what it was sent, and how long that takes.

Invariants:
- ``queued[0]`` is the call whose sync functions run now; the others behind it have not begun.
- Whenever a call is in flight, one timer is armed for the earliest moment at which one is overdue.
- A process is killed for a call only if that is overdue on two looks, with a turn of the loop between
  them: a reply that a busy loop has not read yet is no fault of the call.
- What a worker sent before it ended is read, whatever becomes of the writes to it: a transport would drop
  it once a write fails, or at a reset.
- ``kill`` ends the process and everything in its process group, and has reaped it when it returns.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

import asyncrl
from asyncrl.errors import DeadlineError, RewardError
from asyncrl.rewards.worker import MAX_MESSAGE_BYTES

# A worker is given calls ahead for this long, so that short ones do not wait for the pipe.
_AHEAD_S = 0.01
_MOST_AHEAD = 64
_MOST_ASYNC = 64
_REAP_TIMEOUT_S = 10.0
# The worker ends late async calls by itself, one by one; this long after that it must be stuck.
_ASYNC_GRACE_S = 1.0
_SECOND_LOOK_S = 0.02


@dataclass(slots=True, eq=False)
class Call:
    """One answer to score, or a group of them."""

    id: int
    uid: str
    packed: bytes
    future: asyncio.Future[list[list[Any]]]
    """By function, in their order: [value or None, extras] of each sample."""
    alone: bool = False
    """It was in flight beside others when a worker got stuck, and any of them may be at fault."""
    since: float = 0.0
    """When its async functions began, on the loop's clock."""
    begun: float = 0.0
    """When its worker began with it."""
    ended: float = 0.0
    worker: int = 0
    """Seat of the worker that scored it."""

    def fail(self, error: RewardError) -> None:
        """End it with ``error``, unless its waiter was cancelled."""
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A spawned worker. All times are on the loop's clock, in seconds."""

    popen: subprocess.Popen[bytes]
    incoming: socket.socket
    """For ``Replies``; non-blocking."""
    outgoing: asyncio.WriteTransport
    timeout_s: float
    queued: deque[Call] = field(default_factory=deque)
    running_async: dict[int, Call] = field(default_factory=dict)
    outbox: list[bytes] = field(default_factory=list)
    head_since: float = 0.0
    mean_call_s: float = _AHEAD_S
    """Moving average of the time that the sync functions of a call take."""
    seat: int = 0
    """Its number among the workers of the pool; the next one in its place has it too."""
    stuck: bool = False
    """A call was overdue, and the process was killed for it."""
    _exclusive: bool = False
    _overdue: bool = False
    _timer: asyncio.TimerHandle | None = None

    @property
    def load(self) -> int:
        """Calls in flight."""
        return len(self.queued) + len(self.running_async)

    @property
    def has_room(self) -> bool:
        """Whether one more call would begin soon; one that must run alone keeps others out."""
        if self._exclusive and self.load:
            return False
        ahead = max(1, min(_MOST_AHEAD, int(_AHEAD_S / self.mean_call_s)))
        return len(self.queued) < ahead and len(self.running_async) < _MOST_ASYNC

    def put(self, call: Call) -> None:
        """Add a call to the next message; ``flush`` sends it."""
        if not self.queued:
            self.head_since = asyncio.get_running_loop().time()
        self._exclusive = call.alone
        self.queued.append(call)
        self.outbox.append(call.packed)

    def flush(self) -> None:
        """Send what was put since the last flush, as one message."""
        if not self.outbox:
            return
        self.outgoing.write(msgpack.Packer().pack_array_header(len(self.outbox)) + b"".join(self.outbox))
        self.outbox.clear()
        if self._timer is None:
            self._check()

    def head_done(self) -> Call:
        """The running call's sync functions are done: the next one's begin now."""
        now = asyncio.get_running_loop().time()
        self.mean_call_s += 0.1 * (max(now - self.head_since, 1e-6) - self.mean_call_s)
        self.head_since = now
        return self.queued.popleft()

    def suspects(self) -> list[Call]:
        """Calls that may be at fault for what happens to the process now: all that have begun."""
        return [*([self.queued[0]] if self.queued else []), *self.running_async.values()]

    def _check(self) -> None:
        """Kill the process if a call is overdue, otherwise look again when one could be."""
        self._timer = None
        due = [call.since + self.timeout_s + _ASYNC_GRACE_S for call in self.running_async.values()]
        if self.queued:
            due.append(self.head_since + self.timeout_s)
        if not due:
            return
        loop = asyncio.get_running_loop()
        first, was_overdue = min(due), self._overdue
        self._overdue = first <= loop.time()
        if self._overdue and was_overdue:
            self.stuck = True
            self.signal()
        else:
            self._timer = loop.call_at(loop.time() + _SECOND_LOOK_S if self._overdue else first, self._check)

    def signal(self) -> None:
        """SIGKILL to the process and all that it started; its socket then ends."""
        if self.popen.returncode is None:  # not reaped: the number is still its own
            with suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)

    async def kill(self) -> None:
        """End the process and reap it. Raises DeadlineError if the kernel does not let it go."""
        if self._timer is not None:
            self._timer.cancel()
        self.signal()
        self.outgoing.abort()
        self.incoming.close()
        try:
            await asyncio.get_running_loop().run_in_executor(None, self.popen.wait, _REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise DeadlineError(
                f"reward worker {self.popen.pid} was still there {_REAP_TIMEOUT_S:g} s after SIGKILL"
            ) from None


async def spawn(
    setup: Mapping[str, Any], timeout_s: float, module: str = "asyncrl.rewards.worker"
) -> WorkerProcess:
    """Start a worker in a session of its own, with one socket and the standard streams, and set it up.

    ``module`` is what it runs.

    It sees no GPU: what it computes must not take memory from the engines. Where the functions are
    looked up from, ``setup["folder"]``, is its working directory.
    """
    ours, theirs = socket.socketpair()
    package_parent = str(Path(asyncrl.__file__).parent.parent)
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), package_parent]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    with theirs:
        # On the loop's own thread: on Linux the worker dies with the *thread* that started it.
        popen = subprocess.Popen(  # noqa: ASYNC220 a few milliseconds; all further I/O is by the loop
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
            cwd=setup["folder"],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    incoming = ours.dup()
    incoming.setblocking(False)
    try:
        outgoing, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, ours)
    except BaseException:
        ours.close()
        incoming.close()
        popen.kill()
        popen.wait()
        raise
    outgoing.pause_reading()  # before the worker has anything to say: that is for ``Replies``
    outgoing.write(msgpack.packb(setup))
    return WorkerProcess(popen, incoming, outgoing, timeout_s)


class Replies:
    """The messages of one worker, as they arrive."""

    def __init__(self, incoming: socket.socket) -> None:
        self._incoming = incoming
        self._unpacker = msgpack.Unpacker(
            strict_map_key=False, max_buffer_size=MAX_MESSAGE_BYTES, unicode_errors="surrogatepass"
        )

    async def read(self) -> Sequence[list[Any]]:
        """All messages of one read; empty when the worker has closed its end."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                data = await loop.sock_recv(self._incoming, 1 << 18)
            except ConnectionError:
                return ()
            if not data:
                return ()
            self._unpacker.feed(data)
            messages = list(self._unpacker)
            if messages:
                return messages
