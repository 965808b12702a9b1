"""The embedded engine: any Hugging Face causal LM, continuously batched in a thread of its own.

Invariants:
- ``DecodeThread`` runs the model; what is here is the event loop's side.
- Every request ends once: with its completion, by its caller's cancellation, or with an error. When
  the thread fails, all that wait fail with its traceback.
- With ``deterministic`` a sequence's bits depend on its request and the weights alone: not on what
  runs beside it, nor on its row. (One machine, dtype and number of threads.)

Weights travel elsewhere: something fills ``stage()`` and then calls ``swap_staged``. Or they do not travel,
because another owner of the same parameters changes them while the engine sleeps, and then ``relabel`` says
which version they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from asyncrl.config import Dtype
from asyncrl.errors import ConfigError, GeneratorError, RolloutError
from asyncrl.generators.base import Asleep, GeneratorStatistics, KVAfterSwap
from asyncrl.generators.continuous_batch import Admission, ContinuousBatch, Ended, fixed_rows
from asyncrl.generators.decode_thread import DecodeThread, settle
from asyncrl.generators.requests import check_request, check_scored, nothing_sampled, whole_answer
from asyncrl.generators.runner import CausalLM, DeviceName, ModelRunner, load_model, resolve_device
from asyncrl.generators.stopping import StopStrings
from asyncrl.generators.weights import DoubleBufferedWeights
from asyncrl.types import Completion, Float32Array, GenerationRequest

log = logging.getLogger(__name__)


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

        self._asleep = asleep

        self._weights: DoubleBufferedWeights | None = None
        self._runner: ModelRunner | None = None
        self._batch: ContinuousBatch | None = None
        self._thread: DecodeThread | None = None
        self._vocab_size = 0
        self._closed = False
        self._pending: dict[str, tuple[Admission, asyncio.Future[Completion]]] = {}
        self._submitted_tokens = 0

    @property
    def live_version(self) -> int:
        """Version that the next token is sampled with."""
        return self._batch.live_version if self._batch is not None else 0

    @property
    def model(self) -> CausalLM:
        """The loaded model. Its weights are the live ones: only read them, and only while paused."""
        self._running()
        return self._model

    async def start(self) -> None:
        """Load the model (version 0), allocate all memory, warm up, and start the decode thread.

        Raises ConfigError for a model that the engine cannot serve.
        """
        if self._thread is not None:
            raise GeneratorError("start() of an engine that was started before")
        batch, runner, weights = await asyncio.to_thread(self._load)
        self._refuse_if_closed()
        self._batch, self._runner, self._weights = batch, runner, weights
        self._thread = DecodeThread(
            asyncio.get_running_loop(),
            batch,
            runner,
            weights,
            slots=self._slots,
            threads=self._threads,
            asleep=self._asleep,
            deliver=self._deliver,
            failed=self._fail_all,
        )
        self._thread.start()

    def _load(self) -> tuple[ContinuousBatch, ModelRunner, DoubleBufferedWeights]:
        if isinstance(self._model, str | Path):
            path = self._model
            self._model = load_model(path, dtype=self._dtype, trust_remote_code=self._trust_remote_code)
            if self._tokenizer is None:
                self._tokenizer = str(path)  # loaded when first needed: its import takes seconds
        rows = fixed_rows(self._slots) if self._deterministic else self._slots
        runner = ModelRunner(self._model, slots=rows, max_sequence=self._max_sequence, device=self._device)
        if self._asleep:
            runner.kv.release()
        self._vocab_size = runner.vocab_size
        weights = DoubleBufferedWeights(self._model)
        batch = ContinuousBatch(runner, rows=rows, fixed=self._deterministic)
        log.info(
            "torch generator: %s on %s, %d slots of %d tokens, %.1f MB of keys and values",
            type(self._model).__name__,
            self._device,
            self._slots,
            self._max_sequence,
            runner.kv.nbytes / 2**20,
        )
        return batch, runner, weights

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one continuation; cancelling the awaiting task ends the sequence.

        Raises RolloutError for a request that can never be served, GeneratorError when the engine
        has failed or was closed.
        """
        thread = self._running()
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
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        thread.submit(admission)
        self._pending[request.uid] = (admission, future)
        self._submitted_tokens += request.max_tokens
        try:
            return await future
        except asyncio.CancelledError:
            if not self._withdraw(admission):
                thread.give_up(admission)
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
        assert self._thread is not None
        if not self._thread.withdraw(admission):
            return False
        self._submitted_tokens -= admission.request.max_tokens
        return True

    async def partials(self) -> dict[str, Completion]:
        """What running sequences have so far, by uid; nothing with ``deterministic``, see the Protocol."""
        thread, batch = self._running(), self._batch
        assert batch is not None
        return {} if self._deterministic else await thread.do(batch.partials)

    async def abort(self, uid: str) -> None:
        """End a request now; its ``generate`` returns what it has. Unknown uids are ignored."""
        thread = self._running()
        if uid not in self._pending:
            return
        admission, future = self._pending[uid]
        if self._withdraw(admission):
            settle(future, whole_answer(admission.request, nothing_sampled()))
        else:
            await thread.do(lambda: thread.abort(admission))

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        """Log-probs (T - 1,) of tokens 1, 2, ... of T, each given those before it, at temperature 1.

        One forward pass by the live weights, between two tokens. It uses no slot and leaves every running
        sequence its bits. Raises RolloutError for what does not fit ``max_sequence`` or the vocabulary.
        """
        thread = self._running()
        check_scored(token_ids, limit=self._max_sequence, vocab_size=self._vocab_size)
        runner = self._runner
        assert runner is not None
        return cast(Float32Array, await thread.do(lambda: runner.score(token_ids).cpu().numpy()))

    async def pause(self) -> None:
        """Stop between two tokens; running sequences keep their state."""
        thread = self._running()
        await thread.do(thread.stand_still)

    async def resume(self) -> None:
        thread = self._running()
        await thread.do(thread.go_on)

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
        thread = self._running()
        return await thread.do(thread.fall_asleep)

    async def wake(self) -> None:
        """Compute the keys and values of all running sequences by the weights of now, and go on.

        No effect on an engine that is awake.
        """
        thread = self._running()
        await thread.do(thread.wake_up)

    async def relabel(self, version: int) -> None:
        """The weights, which another owner has changed in place, are those of ``version``; only asleep.

        Nothing that older weights computed is left: keys and values, shared ones included, are gone.
        """
        thread = self._running()
        await thread.do(lambda: thread.relabel(version))

    def live_weights(self) -> dict[str, torch.Tensor]:
        """The tensors that the model computes with, by Hugging Face parameter name; only to read."""
        self._running()
        assert self._weights is not None
        return self._weights.live()

    def stage(self) -> dict[str, torch.Tensor]:
        """The tensors to receive the next version into, by Hugging Face parameter name.

        They may be filled from any thread while generation goes on, until ``swap_staged``; ask
        again for the push after that. Tied parameters appear once. On CUDA, synchronise the stream
        that filled them before the swap.
        """
        self._running()
        assert self._weights is not None
        return self._weights.staging()

    async def swap_staged(self, version: int, *, in_flight: bool, kv: KVAfterSwap) -> float:
        """Make the staged weights live, as ``version``; return the seconds that generation stood still.

        ``in_flight`` True: between the next two tokens. False: first finish every running sequence,
        admitting none meanwhile (a paused engine does not get there before ``resume``). With ``kv``
        recompute, running sequences get the keys and values that the new weights give.

        Once called the swap happens, even if the awaiting task is cancelled.
        """
        thread = self._running()
        assert self._weights is not None
        self._weights.require_staged()
        if version < self.live_version:
            raise GeneratorError(f"swap to version {version}, but {self.live_version} is live already")
        return await thread.swap(version, in_flight=in_flight, kv=kv)

    def check_health(self) -> None:
        """Raise GeneratorError unless the decode thread runs.

        Not whether it is between two tokens: a long prefill is no fault.
        """
        if not self._running().is_alive:
            raise GeneratorError("the decode thread is gone")

    def statistics(self) -> GeneratorStatistics:
        """A snapshot; while a step runs, counters show the state before it."""
        batch, thread = self._batch, self._thread
        if batch is None or thread is None:
            return GeneratorStatistics(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0)
        return GeneratorStatistics(
            live_version=self.live_version,
            running=batch.running,
            waiting=thread.waiting,
            outstanding_tokens=self._submitted_tokens - batch.sampled - batch.forfeited,
            tokens=batch.sampled,
            prefill_tokens=batch.prefilled,
            busy_s=thread.busy_s,
            slot_s=thread.slot_s,
            paused_s=thread.paused_s,
            swaps=thread.swaps,
            full_s=thread.full_s,
            full_tokens=thread.full_tokens,
        )

    async def close(self) -> None:
        """End the decode thread; requests that still run fail with GeneratorError."""
        self._closed = True
        if self._thread is not None:
            await self._thread.end()
        self._fail_all("the engine was closed")

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise GeneratorError("the engine was closed")

    def _running(self) -> DecodeThread:
        """The thread. Raises GeneratorError where there is none yet, or none any more."""
        self._refuse_if_closed()
        if self._thread is None:
            raise GeneratorError("the engine was not started: await start() first")
        self._thread.refuse_if_ended()
        return self._thread

    def _deliver(self, ended: Sequence[Ended]) -> None:
        for admission, completion in ended:
            expected, future = self._pending.get(admission.request.uid, (None, None))
            # A cancelled request may still end here, after its uid was taken by another try.
            if expected is admission and future is not None:
                settle(future, completion)

    def _fail_all(self, message: str) -> None:
        if self._thread is not None:
            self._thread.fail_all(message)
        for _, future in self._pending.values():
            if not future.done():
                future.set_exception(GeneratorError(message))
