"""The pool of reward workers: scores answers, and outlives whatever users' functions do.

Invariants:
- A call ends in exactly one of a score, a RewardError, or the cancellation of its waiter.
- A worker that hangs or dies is replaced alone; the other workers' calls never notice.
- Only the call at fault fails. Those that waited behind it in the same worker run again elsewhere;
  where several were running and it is not known which one did it, each runs again, alone.
- After ``close`` no process is left.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from asyncrl.errors import (
    ConfigError,
    DeadlineError,
    InvariantError,
    RewardError,
    RewardRaisedError,
    RewardTimeoutError,
    RewardValueError,
    RewardWorkerError,
)
from asyncrl.rewards import worker as wire
from asyncrl.rewards.binder import Sample, Signature
from asyncrl.rewards.process import Call, Replies, WorkerProcess, spawn

if TYPE_CHECKING:
    from asyncrl.config import RewardFunctionSection

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_MOST_FAILED_STARTS = 3


@dataclass(frozen=True, slots=True)
class RewardScore:
    """The weighted sum, and each function's own value by name; one that returned None has none."""

    total: float
    parts: dict[str, float]
    extras: dict[str, float] = field(default_factory=dict)
    """What functions said beside their rewards, as ``<function>/<name>``."""
    worker: int = field(default=0, compare=False)
    """Which worker it came from."""
    begun: float = field(default=0.0, compare=False)
    """When that began with it, by the loop's clock."""
    ended: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class RewardStatistics:
    """A snapshot; counters are since the start of the pool."""

    workers: int
    """Processes that are up."""
    waiting: int
    """Calls that no worker has yet."""
    running: int
    """Calls that a worker has."""
    scored: int
    raised: int
    bad_values: int
    timeouts: int
    crashes: int
    restarts: int


@dataclass(slots=True, eq=False)
class _Slot:
    """A place for one worker process after another."""

    seat: int
    process: WorkerProcess | None = None
    task: asyncio.Task[None] | None = None
    ready: asyncio.Future[tuple[Signature, ...]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class RewardPool:
    """Scores answers in ``workers`` processes. Await ``start``, then ``score``; ``close`` at the end.

    ``timeout_s`` is for the sync functions of one call together, and for each async one. ``folder`` is
    where the functions are looked up (default: the current one). ``cores``: the cores that workers may
    use (default: the caller's own); useful where the caller itself is pinned to one. ``alone``: whether
    nothing else is in the reward, so that at least one function has to give a number.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunctionSection],
        *,
        workers: int,
        timeout_s: float,
        folder: Path | None = None,
        cores: Sequence[int] | None = None,
        alone: bool = True,
        start_timeout_s: float = _START_TIMEOUT_S,
        memory_mb: int | None = None,
    ) -> None:
        self._functions = tuple(functions)
        self._workers = workers
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._alone_in_reward = alone
        self._setup = {
            "functions": [{"path": f.path, "name": f.name, "args": f.args} for f in functions],
            "timeout_s": timeout_s,
            "folder": str((folder or Path.cwd()).resolve()),
            "cores": list(cores or ()),
            "memory_mb": memory_mb,
        }
        self._packer = msgpack.Packer(unicode_errors="surrogatepass")
        self._slots: list[_Slot] = []
        self._signatures: tuple[Signature, ...] = ()
        self._wants_ids = True
        self._waiting: deque[Call] = deque()
        self._alone: deque[Call] = deque()
        self._next_id = 0
        self._dispatch_due = False
        self._counts: Counter[str] = Counter()
        self._closed: RewardError | None = RewardWorkerError("the reward pool has not been started")

    async def start(self) -> tuple[Signature, ...]:
        """Start the workers and load the functions in each; returns what the functions take.

        Raises ConfigError for a function that cannot be loaded, and DeadlineError.
        """
        self._slots = [_Slot(seat) for seat in range(self._workers)]
        for i, slot in enumerate(self._slots):
            slot.task = asyncio.create_task(self._keep_running(slot), name=f"reward worker {i}")
        try:
            self._signatures = (await asyncio.gather(*(slot.ready for slot in self._slots)))[0]
            names = [s.name for s in self._signatures]
            for name in names:
                if names.count(name) > 1:
                    raise ConfigError(
                        f"reward.functions: found {names.count(name)} functions with the name {name!r}; "
                        "expected each name once: set reward.functions.name"
                    )
        except BaseException:
            await self.close()
            raise
        self._wants_ids = any(s.wants_ids for s in self._signatures)
        self._closed = None
        return self._signatures

    @property
    def scores_groups(self) -> bool:
        """Whether a function wants the whole group: then ``score_group`` is to be called too."""
        return any(s.takes_group for s in self._signatures)

    async def score(
        self,
        row: Mapping[str, Any],
        prompt: str,
        completion: str,
        completion_ids: Sequence[int],
        finish_reason: str,
        messages: Sequence[Mapping[str, Any]] = (),
        *,
        uid: str = "a sample",
    ) -> RewardScore:
        """Score one answer by the functions of one sample; ``uid`` names it in messages.

        Raises RewardRaisedError, RewardTimeoutError, RewardValueError or RewardWorkerError.
        """
        sample = Sample(row, prompt, completion, completion_ids, finish_reason, messages)
        if self._signatures and all(s.takes_group for s in self._signatures):
            return RewardScore(0.0, {})
        return (await self._scored(False, [sample], uid))[0]

    async def score_group(
        self, samples: Sequence[Sample], earlier: Sequence[Mapping[str, float]], *, uid: str = "a group"
    ) -> list[RewardScore | RewardValueError]:
        """Score the answers of one group, which is whole, by the functions of groups.

        ``earlier``: by name, what functions of one sample gave each answer. An answer for which none of both
        kinds has a number gets an error of its own; otherwise raises as ``score`` does.
        """
        scores = await self._scored(True, samples, uid)
        names = {s.name for s in self._signatures}
        return [
            score if score.parts or names & set(had) or not self._alone_in_reward else self._no_value(uid)
            for score, had in zip(scores, earlier, strict=True)
        ]

    async def _scored(self, group: bool, samples: Sequence[Sample], uid: str) -> list[RewardScore]:
        if self._closed is not None:
            raise self._closed
        self._next_id += 1
        fields = [self._fields(sample) for sample in samples]
        try:
            packed = self._packer.pack([self._next_id, group, fields])
        except (TypeError, ValueError, OverflowError) as error:
            self._packer.reset()
            raise RewardValueError(f"{uid}: its row cannot be sent to a reward worker: {error}") from error
        call = Call(self._next_id, uid, packed, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._dispatch_soon()
        by_function = await call.future
        pairs = zip(self._functions, self._signatures, strict=True)
        functions = [(f, s) for f, s in pairs if s.takes_group == group]
        return [
            self._combined(
                call, functions, [of_all[i] for of_all in by_function], final=not self.scores_groups
            )
            for i in range(len(samples))
        ]

    def _fields(self, sample: Sample) -> list[Any]:
        ids = [int(i) for i in sample.completion_ids] if self._wants_ids else []
        messages = [dict(message) for message in sample.messages]
        return [dict(sample.row), sample.prompt, sample.completion, ids, sample.finish_reason, messages]

    def statistics(self) -> RewardStatistics:
        """Counters, and what is going on now."""
        processes = [slot.process for slot in self._slots if slot.process is not None]
        counts = self._counts
        return RewardStatistics(
            workers=len(processes),
            waiting=len(self._waiting) + len(self._alone),
            running=sum(p.load for p in processes),
            scored=counts[wire.SCORED],
            raised=counts[wire.RAISED],
            bad_values=counts[wire.BAD_VALUE],
            timeouts=counts[wire.TIMED_OUT],
            crashes=counts["crashed"],
            restarts=counts["restarts"],
        )

    async def close(self) -> None:
        """Kill the workers and fail the calls that are left with RewardWorkerError."""
        self._fail_all(RewardWorkerError("the reward pool was closed"))
        tasks = [slot.task for slot in self._slots if slot.task is not None]
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for slot in self._slots:
            slot.ready.cancel()
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
                raise outcome

    # --- workers ---

    async def _keep_running(self, slot: _Slot) -> None:
        """Start a worker, serve it until it ends, and start the next, until cancelled."""
        failed_starts = 0
        while failed_starts < _MOST_FAILED_STARTS:
            try:
                await self._serve_one(slot)
                failed_starts = 0
            except (ConfigError, DeadlineError, OSError) as error:
                if not slot.ready.done():
                    slot.ready.set_exception(error)
                    return
                failed_starts += 1
                logger.warning("a reward worker did not start again (try %d): %s", failed_starts, error)
            except Exception as error:
                # A bug of ours: nobody who waits for a score may wait for ever because of it.
                self._fail_all(RewardWorkerError(f"the reward pool broke: {type(error).__name__}: {error}"))
                raise
            self._counts["restarts"] += 1
        self._slots.remove(slot)
        if not self._slots:
            self._fail_all(RewardWorkerError("no reward worker starts any more; the log says why"))

    async def _serve_one(self, slot: _Slot) -> None:
        """The life of one process; returns when it has ended and its calls are settled."""
        process = await spawn(self._setup, self._timeout_s)
        replies = Replies(process.incoming)
        try:
            signatures = await self._started(replies)
            process.seat = slot.seat
            slot.process = process
            if not slot.ready.done():
                slot.ready.set_result(signatures)
            self._dispatch_soon()
            while messages := await replies.read():
                for call_id, kind, payload in messages:
                    self._on_reply(process, call_id, kind, payload)
                self._dispatch_soon()
        finally:
            slot.process = None
            await asyncio.shield(process.kill())
        self._on_end(process)

    async def _started(self, replies: Replies) -> tuple[Signature, ...]:
        names = ", ".join(f.path for f in self._functions)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                messages = await replies.read()
        except TimeoutError:
            raise DeadlineError(
                f"a reward worker had not loaded {names} after {self._start_timeout_s:g} s; is an import "
                "of theirs waiting for something?"
            ) from None
        if not messages:
            raise ConfigError(f"the process that loads the reward functions {names} ended while doing so")
        _, kind, payload = messages[0]
        if kind == wire.REFUSED:
            raise ConfigError(f"reward.functions: {payload}")
        return tuple(Signature.from_wire(fields) for fields in payload)

    def _fail_all(self, error: RewardError) -> None:
        self._closed = error
        calls = [*self._alone, *self._waiting]
        for slot in self._slots:
            if slot.process is not None:
                calls += [*slot.process.queued, *slot.process.running_async.values()]
        self._alone.clear()
        self._waiting.clear()
        for call in calls:
            call.fail(error)

    # --- calls ---

    def _dispatch_soon(self) -> None:
        """Dispatch once for everything that this turn of the loop brings."""
        if not self._dispatch_due:
            self._dispatch_due = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatch_due = False
        free = [slot.process for slot in self._slots if slot.process is not None]
        if self._alone and free:
            # Keep one worker from new calls until it is idle.
            reserved = min(free, key=lambda process: process.load)
            free.remove(reserved)
            if reserved.load == 0:
                reserved.put(self._alone.popleft())
                reserved.flush()
        while self._waiting:
            with_room = [process for process in free if process.has_room]
            if not with_room:
                break
            call = self._waiting.popleft()
            if not call.future.done():  # its waiter may have been cancelled
                min(with_room, key=lambda process: process.load).put(call)
        for process in free:
            process.flush()

    def _on_reply(self, process: WorkerProcess, call_id: int, kind: str, payload: Any) -> None:
        begun, ended = process.head_since, asyncio.get_running_loop().time()
        call = process.running_async.pop(call_id, None)
        if call is None:
            call = process.head_done()
            call.begun, ended = begun, process.head_since  # as the next one begins
        if call.id != call_id:
            raise InvariantError(f"found a reply to call {call_id}; expected one to call {call.id}")
        if kind == wire.ADVANCED:
            call.since = process.head_since
            process.running_async[call.id] = call
            return
        call.worker, call.ended = process.seat, ended
        self._counts[kind] += 1
        if kind == wire.SCORED:
            if not call.future.done():
                call.future.set_result(payload)
            return
        name, text = payload
        errors: dict[str, RewardError] = {
            wire.RAISED: RewardRaisedError(f"{call.uid}: reward function {name!r} raised\n{text}"),
            wire.BAD_VALUE: RewardValueError(f"{call.uid}: reward function {name!r}: {text}"),
            wire.TIMED_OUT: RewardTimeoutError(self._late(call, repr(name))),
        }
        call.fail(errors[kind])

    def _on_end(self, process: WorkerProcess) -> None:
        """The process is gone: fail the call at fault, and give the others another worker."""
        suspects = process.suspects()
        others = [c for c in (*process.queued, *process.running_async.values()) if c not in suspects]
        if len(suspects) == 1:
            self._blame(suspects[0], process)
        else:
            for call in suspects:
                call.alone = True
            self._alone.extend(suspects)
        self._alone.extend(c for c in others if c.alone)
        self._waiting.extendleft(reversed([c for c in others if not c.alone]))
        self._dispatch_soon()

    def _blame(self, call: Call, process: WorkerProcess) -> None:
        names = ", ".join(repr(s.name) for s in self._signatures)
        code = process.popen.returncode
        self._counts[wire.TIMED_OUT if process.stuck else "crashed"] += 1
        if process.stuck:
            call.fail(RewardTimeoutError(self._late(call, names)))
        else:
            call.fail(
                RewardWorkerError(
                    f"{call.uid}: the process that ran the reward functions {names} ended with "
                    f"{_exit_text(code)}; another took its place"
                )
            )

    def _late(self, call: Call, names: str) -> str:
        return (
            f"{call.uid}: reward functions {names} had not answered after reward.timeout_s = "
            f"{self._timeout_s:g} s; the call was ended"
        )

    def _combined(
        self,
        call: Call,
        functions: Sequence[tuple[RewardFunctionSection, Signature]],
        values: Sequence[Sequence[Any]],
        *,
        final: bool,
    ) -> RewardScore:
        """The weighted sum of one answer; ``final``: no other function has a say."""
        uid = call.uid
        parts: dict[str, float] = {}
        extras: dict[str, float] = {}
        total = 0.0
        for (section, signature), (value, said) in zip(functions, values, strict=True):
            extras |= {f"{signature.name}/{key}": float(x) for key, x in said.items()}
            if value is not None:
                parts[signature.name] = value
                total += section.weight * value
        if final and not parts and self._alone_in_reward:
            raise self._no_value(uid)
        if not math.isfinite(total):
            raise RewardValueError(f"{uid}: found a weighted sum of {total} from {parts}; expected it finite")
        return RewardScore(total, parts, extras, call.worker, call.begun, call.ended)

    def _no_value(self, uid: str) -> RewardValueError:
        names = ", ".join(repr(s.name) for s in self._signatures)
        return RewardValueError(
            f"{uid}: found None of all reward functions ({names}); expected a number of at least 1"
        )


def _exit_text(code: int | None) -> str:
    if code == wire.OUT_OF_MEMORY:
        return "a MemoryError: it wanted more than reward.memory_mb allows, which may be a leak"
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
