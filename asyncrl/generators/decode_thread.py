"""The thread of the embedded engine: it runs the model, and does between two tokens what it is told.

Invariants:
- It takes orders, admissions and swaps between two tokens, and only there. It waits on a condition and
  never polls.
- ``live_version`` changes only in a swap, between two tokens of every sequence at once, or in ``relabel``,
  asleep.
- Whatever breaks it is told once to ``failed``, with its traceback; from then on it takes nothing.
- Asleep it samples nothing and holds no keys and values, but everything else of its sequences: they go on
  from their last token once it wakes, with keys and values computed anew.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch

from asyncrl.errors import DeadlineError, GeneratorError
from asyncrl.generators.base import Asleep, KVAfterSwap
from asyncrl.generators.continuous_batch import Admission, ContinuousBatch, Ended
from asyncrl.generators.runner import ModelRunner
from asyncrl.generators.weights import DoubleBufferedWeights

log = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_TIMEOUT_S = 30.0
"""Longest wait for the thread to end; a forward pass may be running."""


@dataclass(slots=True, eq=False)
class _Order:
    """Something to do between two tokens."""

    run: Callable[[], object]
    done: asyncio.Future[Any] | None = None
    """Settled afterwards, where somebody waits."""


@dataclass(slots=True, eq=False)
class _Swap:
    version: int
    in_flight: bool
    kv: KVAfterSwap
    done: asyncio.Future[float]


class DecodeThread:
    """Runs ``batch`` on ``slots`` slots, for an engine on ``loop``.

    ``deliver`` and ``failed`` are called on ``loop``: with the answers that ended, and with why the thread
    did. ``asleep``: it starts so.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        batch: ContinuousBatch,
        runner: ModelRunner,
        weights: DoubleBufferedWeights,
        *,
        slots: int,
        threads: int,
        asleep: bool,
        deliver: Callable[[Sequence[Ended]], None],
        failed: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._batch = batch
        self._runner = runner
        self._weights = weights
        self._slots = slots
        self._threads = threads
        self._deliver = deliver
        self._failed = failed
        self._thread = threading.Thread(target=self._run, name="asyncrl-decode", daemon=True)
        # Shared, under the condition.
        self._changed = threading.Condition()
        self._waiting: dict[Admission, None] = {}  # an ordered set
        self._orders: deque[_Order] = deque()
        self._swap: _Swap | None = None
        self._closing = False
        self._fault: str | None = None
        # Written by the thread alone.
        self._asleep = asleep
        self._paused_at: float | None = None
        self.busy_s = 0.0
        self.slot_s = 0.0
        self.full_s = 0.0
        self.full_tokens = 0
        self.paused_s = 0.0
        self.swaps = 0

    # For the event loop.

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    def refuse_if_ended(self) -> None:
        """Raises GeneratorError once it failed or was closed."""
        if self._fault is not None:
            raise GeneratorError(self._fault)
        if self._closing:
            raise GeneratorError("the engine was closed")

    def submit(self, admission: Admission) -> None:
        """Have a request sampled once a slot is free."""
        with self._changed:
            self.refuse_if_ended()
            self._waiting[admission] = None
            self._changed.notify()

    def withdraw(self, admission: Admission) -> bool:
        """Take a request back that still waits for a slot; False where it does not wait any more."""
        with self._changed:
            if admission not in self._waiting:
                return False
            del self._waiting[admission]
            return True

    async def do(self, run: Callable[[], T]) -> T:
        """What ``run`` returns, called by the thread between two tokens."""
        done: asyncio.Future[T] = self._loop.create_future()
        self._enqueue(_Order(run, done))
        return await done

    def give_up(self, admission: Admission) -> None:
        """End a running sequence that nobody waits for any more."""
        if self._fault is None and not self._closing:
            self._enqueue(_Order(lambda: self.abort(admission)))

    async def swap(self, version: int, *, in_flight: bool, kv: KVAfterSwap) -> float:
        """See ``TorchEngine.swap_staged``."""
        swap = _Swap(version, in_flight, kv, self._loop.create_future())
        with self._changed:
            self.refuse_if_ended()
            if self._swap is not None:
                raise GeneratorError(
                    f"swap to version {version} while that to {self._swap.version} is still under way"
                )
            self._swap = swap
            self._changed.notify()
        return await asyncio.shield(swap.done)

    def fail_all(self, message: str) -> None:
        """All that wait for the thread get a GeneratorError."""
        with self._changed:
            futures: list[asyncio.Future[Any]] = [o.done for o in self._orders if o.done is not None]
            if self._swap is not None:
                futures.append(self._swap.done)
            self._orders.clear()
            self._waiting.clear()
            self._swap = None
        for future in futures:
            if not future.done():
                future.set_exception(GeneratorError(message))

    async def end(self) -> None:
        """Take nothing from now on, and end after the token of now. Raises DeadlineError where it hangs."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise DeadlineError(
                f"the decode thread did not end within {CLOSE_TIMEOUT_S} s of close(): it hangs"
            )

    def _enqueue(self, order: _Order) -> None:
        with self._changed:
            self.refuse_if_ended()
            self._orders.append(order)
            self._changed.notify()

    # Orders: for the thread, by way of ``do``.

    def abort(self, admission: Admission) -> None:
        """End a running sequence; what it has goes to ``deliver``."""
        ended = self._batch.abort(admission)
        if ended is not None:
            self._post(self._deliver, [ended])

    def fall_asleep(self) -> Asleep:
        self._asleep = True
        return Asleep(sequences=self._batch.running, freed_bytes=self._runner.kv.release())

    def wake_up(self) -> None:
        if not self._asleep:
            return
        self._runner.kv.allocate()
        if self._batch.running:
            self._batch.recompute()
        self._asleep = False

    def relabel(self, version: int) -> None:
        if not self._asleep:
            raise GeneratorError(
                f"the weights became version {version} while the engine was awake: expected it asleep"
            )
        if version < self._batch.live_version:
            raise GeneratorError(
                f"relabelled as version {version}, but {self._batch.live_version} is live already"
            )
        self._batch.live_version = version
        self.swaps += 1

    def stand_still(self) -> None:
        if self._paused_at is None:
            self._paused_at = time.monotonic()

    def go_on(self) -> None:
        if self._paused_at is not None:
            self.paused_s += time.monotonic() - self._paused_at
            self._paused_at = None

    # For the thread itself.

    def _post(self, callback: Callable[..., object], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(callback, *arguments)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except BaseException:  # noqa: BLE001  whatever it was, all that wait must hear of it
            message = f"the decode thread failed\n{traceback.format_exc()}"
            log.error("%s", message)
            with self._changed:
                self._fault = message
            if not self._loop.is_closed():
                self._post(self._failed, message)

    def _turn(self) -> bool:
        """Wait until there is something to do, and do it: at most one token. False at the end."""
        batch = self._batch
        with self._changed:
            while not (self._closing or self._orders or self._swap_is_due() or self._can_step()):
                self._changed.wait()
            if self._closing:
                return False
        while self._orders:
            order = self._orders[0]  # stays there while it runs, to be failed if it fails
            outcome = order.run()
            if order.done is not None:
                self._post(settle, order.done, outcome)
            self._orders.popleft()
        with self._changed:
            swap = self._swap if self._swap_is_due() else None
        if swap is not None:
            self._perform(swap)
        began = time.monotonic()
        with self._changed:
            if not self._can_step():
                return True
            admitted: list[Admission] = []
            if self._waiting and (self._swap is None or self._swap.in_flight):
                admitted = list(islice(self._waiting, self._slots - batch.running))
                for admission in admitted:
                    del self._waiting[admission]
        if admitted:
            batch.admit(admitted)
        running = batch.running
        ended = batch.step()
        if ended:
            self._post(self._deliver, ended)
        took = time.monotonic() - began
        self.busy_s += took
        self.slot_s += took * running
        if running == self._slots:
            self.full_s += took
            self.full_tokens += running
        return True

    def _can_step(self) -> bool:
        draining = self._swap is not None and not self._swap.in_flight
        still = self._asleep or self._paused_at is not None
        return not still and (self._batch.running > 0 or (bool(self._waiting) and not draining))

    def _swap_is_due(self) -> bool:
        due = self._swap is not None and (self._swap.in_flight or self._batch.running == 0)
        return due and not self._asleep  # it may have to compute keys and values

    def _perform(self, swap: _Swap) -> None:
        began = time.monotonic()
        self._weights.swap()
        self._batch.live_version = swap.version
        if swap.kv == "recompute":
            self._batch.recompute()
        took = time.monotonic() - began
        if self._paused_at is None:  # else counted with the pause
            self.paused_s += took
        self.swaps += 1
        with self._changed:
            self._swap = None
        self._post(settle, swap.done, took)


def settle(future: asyncio.Future[Any], value: object) -> None:
    """Set a result, unless its caller was cancelled meanwhile."""
    if not future.done():
        future.set_result(value)
