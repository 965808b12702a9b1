"""The embedded engine: any Hugging Face causal LM, continuously batched in a thread of its own.

Invariants:
- One thread runs the model. Between two tokens, and only there, it takes orders: admissions,
  aborts, pauses, swaps. It waits on a condition and never polls.
- Every request ends once: with its completion, by its caller's cancellation, or with an error. When
  the thread fails, all that wait fail with its traceback.
- ``live_version`` changes only in ``swap_staged``, between two tokens of every sequence at once, or in
  ``relabel``, asleep.
- Asleep it samples nothing and holds no keys and values, but everything else of its sequences: they go on
  from their last token once it wakes, with keys and values computed anew.
- With ``deterministic`` a sequence's bits depend on its request and the weights alone: not on what
  runs beside it, nor on its row. (One machine, dtype and number of threads.)

Weights travel elsewhere: something fills ``stage()`` and then calls ``swap_staged``. Or they do not travel,
because another owner of the same parameters changes them while the engine sleeps, and then ``relabel`` says
which version they are.
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
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from asyncrl.config import Dtype
from asyncrl.errors import ConfigError, DeadlineError, GeneratorError, RolloutError
from asyncrl.generators.base import Asleep, GeneratorStatistics, KVAfterSwap
from asyncrl.generators.continuous_batch import Admission, ContinuousBatch, Ended, fixed_rows
from asyncrl.generators.requests import check_request, check_scored, nothing_sampled, whole_answer
from asyncrl.generators.runner import CausalLM, DeviceName, ModelRunner, load_model, resolve_device
from asyncrl.generators.stopping import StopStrings
from asyncrl.generators.weights import DoubleBufferedWeights
from asyncrl.types import Completion, Float32Array, GenerationRequest

log = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_TIMEOUT_S = 30.0
"""Longest wait for the decode thread to end; a forward pass may be running."""


@dataclass(slots=True, eq=False)
class _Order:
    """Something for the decode thread to do between two tokens."""

    run: Callable[[], object]
    done: asyncio.Future[Any] | None = None
    """Settled afterwards, where somebody waits."""


@dataclass(slots=True, eq=False)
class _Swap:
    version: int
    in_flight: bool
    kv: KVAfterSwap
    done: asyncio.Future[float]


class TorchEngine:
    """Samples continuations from ``model``, a path or hub name or a loaded Hugging Face model.

    ``slots`` sequences run at once, each of at most ``max_sequence`` tokens, prompt included.
    ``dtype`` applies to a path; a loaded model keeps its own, belongs to the engine from then on,
    and needs ``tokenizer`` (or its path) for requests with stop strings. ``threads`` is for the CPU.
    ``asleep``: start so, and take no memory for keys and values before ``wake``.
    """

    def __init__(
        self,
        model: str | Path | CausalLM,
        *,
        slots: int,
        max_sequence: int,
        dtype: Dtype = "float32",
        device: DeviceName | torch.device = "auto",
        deterministic: bool = False,
        threads: int = 1,
        tokenizer: Any = None,
        trust_remote_code: bool = False,
        asleep: bool = False,
    ) -> None:
        for name, value in (("slots", slots), ("max_sequence", max_sequence), ("threads", threads)):
            if value < 1:
                raise ConfigError(f"{name} is {value}, but the torch generator needs at least 1")
        self._model = model
        self._slots = slots
        self._max_sequence = max_sequence
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._device = resolve_device(device)
        self._deterministic = deterministic
        self._threads = threads
        self._tokenizer = tokenizer
        self._trust_remote_code = trust_remote_code

        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._weights: DoubleBufferedWeights | None = None
        self._runner: ModelRunner | None = None
        self._batch: ContinuousBatch | None = None
        self._vocab_size = 0

        # Of the event loop alone.
        self._pending: dict[str, tuple[Admission, asyncio.Future[Completion]]] = {}
        self._submitted_tokens = 0
        # Shared, under the condition.
        self._changed = threading.Condition()
        self._waiting: dict[Admission, None] = {}  # an ordered set
        self._orders: deque[_Order] = deque()
        self._swap: _Swap | None = None
        self._closing = False
        self._fault: str | None = None
        # Written by the decode thread alone.
        self._asleep = asleep
        self._paused_at: float | None = None
        self._busy_s = 0.0
        self._slot_s = 0.0
        self._full_s = 0.0
        self._full_tokens = 0
        self._paused_s = 0.0
        self._swaps = 0

    @property
    def live_version(self) -> int:
        """Version that the next token is sampled with."""
        return self._batch.live_version if self._batch is not None else 0

    @property
    def model(self) -> CausalLM:
        """The loaded model. Its weights are the live ones: only read them, and only while paused."""
        self._require_running()
        return self._model

    async def start(self) -> None:
        """Load the model (version 0), allocate all memory, warm up, and start the decode thread.

        Raises ConfigError for a model that the engine cannot serve.
        """
        if self._thread is not None:
            raise GeneratorError("start() of an engine that was started before")
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._load)
        self._thread = threading.Thread(target=self._run, name="asyncrl-decode", daemon=True)
        self._thread.start()

    def _load(self) -> None:
        if isinstance(self._model, str | Path):
            path = self._model
            self._model = load_model(path, dtype=self._dtype, trust_remote_code=self._trust_remote_code)
            if self._tokenizer is None:
                self._tokenizer = str(path)  # loaded when first needed: its import takes seconds
        rows = fixed_rows(self._slots) if self._deterministic else self._slots
        runner = ModelRunner(self._model, slots=rows, max_sequence=self._max_sequence, device=self._device)
        if self._asleep:
            runner.kv.release()
        self._runner = runner
        self._vocab_size = runner.vocab_size
        self._weights = DoubleBufferedWeights(self._model)
        self._batch = ContinuousBatch(runner, rows=rows, fixed=self._deterministic)
        log.info(
            "torch generator: %s on %s, %d slots of %d tokens, %.1f MB of keys and values",
            type(self._model).__name__,
            self._device,
            self._slots,
            self._max_sequence,
            runner.kv.nbytes / 2**20,
        )

    # The event loop's side.

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one continuation; cancelling the awaiting task ends the sequence.

        Raises RolloutError for a request that can never be served, GeneratorError when the engine
        has failed or was closed.
        """
        loop = self._require_running()
        check_request(
            request,
            limit=self._max_sequence,
            limit_text="a slot holds",
            remedy="the engine's max_sequence",
            vocab_size=self._vocab_size,
        )
        stop = await self._stop_strings(request) if request.sampling.stop else None
        if request.uid in self._pending:
            raise GeneratorError(f"request {request.uid} is already running: uids must be unique")
        admission = Admission(request, stop)
        future: asyncio.Future[Completion] = loop.create_future()
        with self._changed:
            self._refuse_if_ended()
            self._waiting[admission] = None
            self._changed.notify()
        self._pending[request.uid] = (admission, future)
        self._submitted_tokens += request.max_tokens
        try:
            return await future
        except asyncio.CancelledError:
            if not self._withdraw(admission) and self._fault is None and not self._closing:
                self._enqueue(_Order(lambda: self._abort_running(admission)))
            raise
        finally:
            del self._pending[request.uid]

    async def _stop_strings(self, request: GenerationRequest) -> StopStrings:
        if isinstance(self._tokenizer, str):
            from transformers import AutoTokenizer  # slow to import, and few runs have stop strings

            path, options = self._tokenizer, {"trust_remote_code": self._trust_remote_code}
            self._tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, path, **options)
        if self._tokenizer is None:
            raise RolloutError(
                f"request {request.uid} has stop strings, but the engine was given no tokenizer"
            )
        return StopStrings(request.sampling.stop, self._tokenizer)

    def _withdraw(self, admission: Admission) -> bool:
        """Take a request back that still waits for a slot; False where it does not wait any more."""
        with self._changed:
            if admission not in self._waiting:
                return False
            del self._waiting[admission]
        self._submitted_tokens -= admission.request.max_tokens
        return True

    async def partials(self) -> dict[str, Completion]:
        """What running sequences have so far, by uid; nothing with ``deterministic``, see the Protocol."""
        self._require_running()
        batch = self._batch
        assert batch is not None
        return {} if self._deterministic else await self._order(batch.partials)

    async def abort(self, uid: str) -> None:
        """End a request now; its ``generate`` returns what it has. Unknown uids are ignored."""
        self._require_running()
        if uid not in self._pending:
            return
        admission, future = self._pending[uid]
        if self._withdraw(admission):
            _settle(future, whole_answer(admission.request, nothing_sampled()))
        else:
            await self._order(lambda: self._abort_running(admission))

    def _abort_running(self, admission: Admission) -> None:
        assert self._batch is not None
        ended = self._batch.abort(admission)
        if ended is not None:
            self._post(self._deliver, [ended])

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        """Log-probs (T - 1,) of tokens 1, 2, ... of T, each given those before it, at temperature 1.

        One forward pass by the live weights, between two tokens. It uses no slot and leaves every running
        sequence its bits. Raises RolloutError for what does not fit ``max_sequence`` or the vocabulary.
        """
        self._require_running()
        check_scored(token_ids, limit=self._max_sequence, vocab_size=self._vocab_size)
        runner = self._runner
        assert runner is not None
        return cast(Float32Array, await self._order(lambda: runner.score(token_ids).cpu().numpy()))

    async def pause(self) -> None:
        """Stop between two tokens; running sequences keep their state."""
        self._require_running()
        await self._order(self._stand_still)

    async def resume(self) -> None:
        self._require_running()
        await self._order(self._go_on)

    @property
    def kv_bytes(self) -> int:
        """Memory of keys and values that is held now."""
        return self._runner.kv.nbytes if self._runner is not None else 0

    @property
    def staging_bytes(self) -> int:
        """Memory of the tensors that the next version is received into: none before the first push."""
        return self._weights.staging_bytes if self._weights is not None else 0

    async def sleep(self) -> Asleep:
        """Stop between two tokens and free the keys and values; what it holds of its sequences stays.

        Requests are taken, aborted and scored as before, but nothing is sampled before ``wake``.
        """
        self._require_running()
        return await self._order(self._fall_asleep)

    async def wake(self) -> None:
        """Compute the keys and values of all running sequences by the weights of now, and go on.

        No effect on an engine that is awake.
        """
        self._require_running()
        await self._order(self._wake_up)

    async def relabel(self, version: int) -> None:
        """The weights, which another owner has changed in place, are those of ``version``; only asleep.

        Nothing that older weights computed is left: keys and values, shared ones included, are gone.
        """
        self._require_running()
        await self._order(lambda: self._relabel(version))

    def live_weights(self) -> dict[str, torch.Tensor]:
        """The tensors that the model computes with, by Hugging Face parameter name; only to read."""
        self._require_running()
        assert self._weights is not None
        return self._weights.live()

    def stage(self) -> dict[str, torch.Tensor]:
        """The tensors to receive the next version into, by Hugging Face parameter name.

        They may be filled from any thread while generation goes on, until ``swap_staged``; ask
        again for the push after that. Tied parameters appear once. On CUDA, synchronise the stream
        that filled them before the swap.
        """
        self._require_running()
        assert self._weights is not None
        return self._weights.staging()

    async def swap_staged(self, version: int, *, in_flight: bool, kv: KVAfterSwap) -> float:
        """Make the staged weights live, as ``version``; return the seconds that generation stood still.

        ``in_flight`` True: between the next two tokens. False: first finish every running sequence,
        admitting none meanwhile (a paused engine does not get there before ``resume``). With ``kv``
        recompute, running sequences get the keys and values that the new weights give.

        Once called the swap happens, even if the awaiting task is cancelled.
        """
        loop = self._require_running()
        assert self._weights is not None
        self._weights.require_staged()
        if version < self.live_version:
            raise GeneratorError(f"swap to version {version}, but {self.live_version} is live already")
        swap = _Swap(version, in_flight, kv, loop.create_future())
        with self._changed:
            self._refuse_if_ended()
            if self._swap is not None:
                raise GeneratorError(
                    f"swap to version {version} while that to {self._swap.version} is still under way"
                )
            self._swap = swap
            self._changed.notify()
        return await asyncio.shield(swap.done)

    def check_health(self) -> None:
        """Raise GeneratorError unless the decode thread runs.

        Not whether it is between two tokens: a long prefill is no fault.
        """
        self._require_running()
        if self._thread is None or not self._thread.is_alive():
            raise GeneratorError("the decode thread is gone")

    def statistics(self) -> GeneratorStatistics:
        """A snapshot; while a step runs, counters show the state before it."""
        batch = self._batch
        sampled = batch.sampled if batch else 0
        return GeneratorStatistics(
            live_version=self.live_version,
            running=batch.running if batch else 0,
            waiting=len(self._waiting),
            outstanding_tokens=self._submitted_tokens - sampled - (batch.forfeited if batch else 0),
            tokens=sampled,
            prefill_tokens=batch.prefilled if batch else 0,
            busy_s=self._busy_s,
            slot_s=self._slot_s,
            paused_s=self._paused_s,
            swaps=self._swaps,
            full_s=self._full_s,
            full_tokens=self._full_tokens,
        )

    async def close(self) -> None:
        """End the decode thread; requests that still run fail with GeneratorError."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                raise DeadlineError(
                    f"the decode thread did not end within {CLOSE_TIMEOUT_S} s of close(): it hangs"
                )
        self._fail_all("the engine was closed")

    def _require_running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._thread is None:
            raise GeneratorError("the engine was not started: await start() first")
        self._refuse_if_ended()
        return self._loop

    def _refuse_if_ended(self) -> None:
        if self._fault is not None:
            raise GeneratorError(self._fault)
        if self._closing:
            raise GeneratorError("the engine was closed")

    async def _order(self, run: Callable[[], T]) -> T:
        assert self._loop is not None
        done: asyncio.Future[T] = self._loop.create_future()
        self._enqueue(_Order(run, done))
        return await done

    def _enqueue(self, order: _Order) -> None:
        with self._changed:
            self._refuse_if_ended()
            self._orders.append(order)
            self._changed.notify()

    def _deliver(self, ended: list[Ended]) -> None:
        for admission, completion in ended:
            expected, future = self._pending.get(admission.request.uid, (None, None))
            # A cancelled request may still end here, after its uid was taken by another try.
            if expected is admission and future is not None:
                _settle(future, completion)

    def _fail_all(self, message: str) -> None:
        with self._changed:
            futures: list[asyncio.Future[Any]] = [future for _, future in self._pending.values()]
            futures += [order.done for order in self._orders if order.done is not None]
            if self._swap is not None:
                futures.append(self._swap.done)
            self._orders.clear()
            self._waiting.clear()
            self._swap = None
        for future in futures:
            if not future.done():
                future.set_exception(GeneratorError(message))

    # The decode thread's side.

    def _post(self, callback: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None
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
            assert self._loop is not None
            if not self._loop.is_closed():
                self._post(self._fail_all, message)

    def _turn(self) -> bool:
        """Wait until there is something to do, and do it: at most one token. False at the end."""
        batch = self._batch
        assert batch is not None
        with self._changed:
            while not (self._closing or self._orders or self._swap_is_due() or self._can_step()):
                self._changed.wait()
            if self._closing:
                return False
        while self._orders:
            order = self._orders[0]  # stays there while it runs, to be failed if it fails
            outcome = order.run()
            if order.done is not None:
                self._post(_settle, order.done, outcome)
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
        self._busy_s += took
        self._slot_s += took * running
        if running == self._slots:
            self._full_s += took
            self._full_tokens += running
        return True

    def _fall_asleep(self) -> Asleep:
        assert self._runner is not None
        assert self._batch is not None
        self._asleep = True
        return Asleep(sequences=self._batch.running, freed_bytes=self._runner.kv.release())

    def _wake_up(self) -> None:
        assert self._runner is not None
        assert self._batch is not None
        if not self._asleep:
            return
        self._runner.kv.allocate()
        if self._batch.running:
            self._batch.recompute()
        self._asleep = False

    def _relabel(self, version: int) -> None:
        assert self._batch is not None
        if not self._asleep:
            raise GeneratorError(
                f"the weights became version {version} while the engine was awake: expected it asleep"
            )
        if version < self._batch.live_version:
            raise GeneratorError(
                f"relabelled as version {version}, but {self._batch.live_version} is live already"
            )
        self._batch.live_version = version
        self._swaps += 1

    def _stand_still(self) -> None:
        if self._paused_at is None:
            self._paused_at = time.monotonic()

    def _go_on(self) -> None:
        if self._paused_at is not None:
            self._paused_s += time.monotonic() - self._paused_at
            self._paused_at = None

    def _can_step(self) -> bool:
        assert self._batch is not None
        draining = self._swap is not None and not self._swap.in_flight
        still = self._asleep or self._paused_at is not None
        return not still and (self._batch.running > 0 or (bool(self._waiting) and not draining))

    def _swap_is_due(self) -> bool:
        assert self._batch is not None
        due = self._swap is not None and (self._swap.in_flight or self._batch.running == 0)
        return due and not self._asleep  # it may have to compute keys and values

    def _perform(self, swap: _Swap) -> None:
        assert self._batch is not None
        assert self._weights is not None
        began = time.monotonic()
        self._weights.swap()
        self._batch.live_version = swap.version
        if swap.kv == "recompute":
            self._batch.recompute()
        took = time.monotonic() - began
        if self._paused_at is None:  # else counted with the pause
            self._paused_s += took
        self._swaps += 1
        with self._changed:
            self._swap = None
        self._post(_settle, swap.done, took)


def _settle(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)
