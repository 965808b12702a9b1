"""A vLLM engine as a ``Generator``: it samples while the next weights arrive, and stops only to swap.

``AsyncLLM`` runs the model in processes of its own. Requests and answers are token ids; weights come
through vLLM's weight transfer interface, by the backend in ``generators/vllm_weights.py``.

Invariants:
- ``live_version`` changes only while the engine stands still, so each token has one version. vLLM
  labels what each step sampled; at each swap the tokens so far are counted here too, and a completion
  whose labels disagree with the counts is an error.
- The prefix cache never serves a block of older weights: blocks are salted with the version at which
  their request was handed over, and a request that had no token yet at a swap is handed over again.
- When a swap fails half-way, nothing is sampled any more: the weights would be of two versions.
- One that shares its device sleeps and wakes by ``generators/vllm_sleep.py``, and starts asleep. Its requests
  are kept over the sleep, and go on from their tokens.
- Every request ends once: with its completion, by its caller's cancellation, or with an error.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from asyncrl.errors import GeneratorError, RolloutError
from asyncrl.generators.base import Asleep, GeneratorStatistics, KVAfterSwap
from asyncrl.generators.requests import check_request, check_scored, nothing_sampled, whole_answer
from asyncrl.generators.stopping import StopStrings
from asyncrl.generators.vllm_answers import completion_of, cut_across, partial_of, scores_of
from asyncrl.generators.vllm_arrival import Arrival
from asyncrl.generators.vllm_meter import Meter
from asyncrl.generators.vllm_parameters import prompt_of, sampling_parameters, scoring_parameters
from asyncrl.generators.vllm_settings import VLLMSettings, has_tokenizer
from asyncrl.generators.vllm_sleep import VLLMSleep
from asyncrl.generators.vllm_start import start_vllm, warm_up_requests
from asyncrl.types import Completion, Float32Array, GenerationRequest
from asyncrl.weight_sync.base import PushGroupSpec, WeightEcho

log = logging.getLogger(__name__)
T = TypeVar("T")

_CLOSE_TIMEOUT_S = 20.0
_FIRST = -1
"""A priority before that of all other requests, 0."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request on its way, and what was counted of it at each swap."""

    request: GenerationRequest
    handed_over: bool = False
    again: bool = False
    """Aborted by a swap before its first token: to be handed over again, under the new version."""
    aborted: bool = False
    starts: list[tuple[int, int]] = field(default_factory=list)
    """Version and index of its first token, for each version that was made live meanwhile."""


class VLLMEngine:
    """The ``Generator`` over vLLM. Belongs to the event loop that ``start`` ran on."""

    def __init__(self, settings: VLLMSettings) -> None:
        self._settings = settings
        self._engine: Any = None
        self._eos: tuple[int, ...] = ()
        self._vocab_size = 0
        self._sequences: dict[str, _Sequence] = {}
        self._scored = 0
        self._live_version = 0
        self._meter = Meter(settings.slots)
        self._paused_s = 0.0
        self._swaps = 0
        self._fault: str | None = None
        self._ended: asyncio.Future[None] | None = None
        """Done once the engine died or was closed; everything that waits for vLLM waits for this too."""
        self._open = asyncio.Event()
        """Requests are handed over while this is set."""
        self._control = asyncio.Lock()
        """One pause, resume, swap, or step between sleep and waking at a time."""
        self._sleep = VLLMSleep()
        self.arrival = Arrival(settings.workers, self._with_engine)
        self.commit_times: list[float] = []
        """Seconds of the last swap in which each worker exchanged its weights."""
        self.held_s = 0.0
        """Seconds of the last swap after vLLM's own pause call had returned, until generation went on."""

    @property
    def live_version(self) -> int:
        return self._live_version

    # Starting and ending.

    async def start(self) -> None:
        """Load the model and run it once. Raises ConfigError for what vLLM refuses in its arguments."""
        self._ended = asyncio.get_running_loop().create_future()
        started = await asyncio.to_thread(start_vllm, self._settings, self._meter)
        self._engine, self._vocab_size, self._eos = started.llm, started.vocab_size, started.eos
        await self._engine.update_weight_version(str(self._live_version))
        await self._warm_up()
        # It ends only when the engine dies, or is shut down by close().
        self._engine.output_handler.add_done_callback(lambda _: self._end("vLLM's engine died"))
        self._open.set()
        if self._settings.shares_device:
            await self.sleep()
        log.info(
            "vLLM: %s, %s, %d workers, %d sequences of %d tokens at a time",
            self._settings.model,
            self._settings.dtype,
            self._settings.workers,
            self._settings.slots,
            self._settings.max_model_len,
        )

    async def _warm_up(self) -> None:
        self._open.set()
        for requests in warm_up_requests(self._settings, self._vocab_size):
            await asyncio.gather(*map(self.generate, requests))
        await self._engine.reset_prefix_cache()
        self._meter.reset()

    async def close(self) -> None:
        """End all of vLLM's processes; requests that still run fail with GeneratorError."""
        self._end("the engine was closed")
        engine, self._engine = self._engine, None
        await self.arrival.dismiss()
        if engine is not None:
            await asyncio.to_thread(engine.shutdown, _CLOSE_TIMEOUT_S)
            del engine
            gc.collect()  # it is part of cycles, and its end fails in an interpreter that ends

    def _end(self, why: str) -> None:
        """Everything that waits, and all that comes, fails from now on."""
        if self._fault is None:
            self._fault = why
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
        self._open.set()

    # Sampling.

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one continuation; cancelling the awaiting task ends the sequence.

        Raises RolloutError for a request that can never be served, GeneratorError when the engine
        died or was closed.
        """
        self._require_running()
        check_request(
            request,
            limit=self._settings.max_model_len,
            limit_text="max_model_len is",
            remedy="generators.vllm.max_model_len",
            vocab_size=self._vocab_size,
        )
        if request.sampling.stop and not has_tokenizer(self._settings.model):
            raise RolloutError(
                f"request {request.uid} has stop strings, but {self._settings.model} has no tokenizer"
            )
        if request.uid in self._sequences:
            raise GeneratorError(f"request {request.uid} is already running: uids must be unique")
        sequence = self._sequences[request.uid] = _Sequence(request)
        try:
            while True:
                if not self._open.is_set():
                    await self._open.wait()
                self._require_running()
                if sequence.aborted:
                    return whole_answer(request, nothing_sampled())
                sequence.again = False
                output = await self._with_engine(self._sample(sequence))
                if not sequence.again:
                    answer = completion_of(request.uid, output, sequence.starts)
                    whole = whole_answer(request, answer)
                    if request.given and request.sampling.stop:
                        stop = StopStrings(request.sampling.stop, self._engine.get_tokenizer())
                        return cut_across(whole, request.given, stop)
                    return whole
        finally:
            del self._sequences[request.uid]

    async def _sample(self, sequence: _Sequence) -> Any:
        """vLLM's final output. Everything up to its first await registers the request."""
        request = sequence.request
        salt = str(self._live_version) if self._settings.prefix_caching else None
        prompt = prompt_of(request.context_ids, salt)
        sequence.handed_over = True
        sequence.starts = [(self._live_version, 0)]
        self._meter.begin()
        return await self._answer(request.uid, prompt, sampling_parameters(request, self._eos))

    async def _answer(self, uid: str, prompt: Any, parameters: Any, priority: int = 0) -> Any:
        """vLLM's final output; of the requests that wait, it takes those of the lowest priority first."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        final: Any = None
        try:
            async for output in self._engine.generate(prompt, parameters, uid, priority=priority):
                final = output
        except EngineDeadError as error:
            self._end(f"vLLM's engine died: {error}")
            raise GeneratorError(f"request {uid}: {self._fault}") from error
        except (EngineGenerateError, ValueError) as error:
            cause = error.__cause__ or error
            raise GeneratorError(f"request {uid}: vLLM failed: {cause!r}") from error
        return final

    async def partials(self) -> dict[str, Completion]:
        """What running requests have so far, by uid; those without a new token left out."""
        self._require_running()
        found = {}
        for uid, state in self._states():
            sequence = self._sequences[uid]
            sampled = partial_of(uid, state, sequence.starts)
            if len(sampled.token_ids):
                found[uid] = whole_answer(sequence.request, sampled)
        return found

    def _states(self) -> list[tuple[str, Any]]:
        """uid and vLLM's own state of each request that it has not ended."""
        processor = self._engine.output_processor
        return [
            (uid, processor.request_states[internal])
            for uid in self._sequences
            for internal in processor.external_req_ids.get(uid, ())
        ]

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        """Log-probs (T - 1,) of tokens 1, 2, ... of T, each given those before it, at temperature 1.

        A request beside the others: the next that takes a slot, whatever waits. It takes nothing from the
        prefix cache, leaves nothing there that another finds, and is left out of the statistics. Raises
        RolloutError for what is outside the vocabulary, or does not fit ``max_model_len`` together with
        the one token that vLLM has to sample.
        """
        self._require_running()
        check_scored(token_ids, limit=self._settings.max_model_len - 1, vocab_size=self._vocab_size)
        self._scored += 1
        uid = f"score-{self._scored}"
        prompt = prompt_of(token_ids, uid if self._settings.prefix_caching else None)
        if not self._open.is_set():
            await self._open.wait()
            self._require_running()
        self._meter.begin()
        output = await self._with_engine(self._answer(uid, prompt, scoring_parameters(), _FIRST))
        self._meter.leave_out(tokens=1, prefill_tokens=len(token_ids))
        return scores_of(uid, token_ids, output)

    async def abort(self, uid: str) -> None:
        """End a request now; its ``generate`` returns what it has. Unknown uids are ignored."""
        self._require_running()
        sequence = self._sequences.get(uid)
        if sequence is None:
            return
        sequence.aborted = True
        if sequence.handed_over:
            await self._with_engine(self._engine.abort(uid))

    # Standing still.

    async def pause(self) -> None:
        """Stop between two tokens; running sequences keep their state."""
        self._require_running()
        async with self._control:
            self._open.clear()
            await self._with_engine(self._engine.pause_generation(mode="keep", clear_cache=False))
            self._meter.stand_still()

    async def resume(self) -> None:
        self._require_running()
        async with self._control:
            if self._sleep.asleep:
                raise GeneratorError("asked to resume while asleep: wake() ends that")
            self._meter.go_on()
            await self._with_engine(self._engine.resume_generation())
            self._open.set()

    async def sleep(self) -> Asleep:
        """Stop between two tokens, and give up keys, values and weights; requests stay for later.

        vLLM puts running requests back in its queue: awake, it computes their keys and values from their
        tokens, by the weights of then. On a CPU it gives up no memory.
        """
        self._require_running()
        async with self._control:
            self._open.clear()
            freed = await self._with_engine(self._sleep.fall_asleep(self._engine))
            self._meter.stand_still()
            counts = await self._count_tokens()
        return Asleep(sum(count > 0 for count in counts.values()), freed)

    async def make_room(self) -> None:
        """Take memory for weights, and for nothing else."""
        self._require_running()
        async with self._control:
            await self._with_engine(self._sleep.make_room(self._engine))

    async def wake(self) -> None:
        """Go on. Raises GeneratorError where no weights came since it fell asleep."""
        self._require_running()
        async with self._control:
            if not self._sleep.asleep:
                return
            self._meter.go_on()
            await self._with_engine(self._sleep.wake(self._engine))
            self._open.set()

    # Weights.

    async def join(self, spec: PushGroupSpec) -> None:
        """All workers join the group, as the ranks from ``spec.rank`` on; generation goes on."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        from asyncrl.generators.vllm_weights import spec_to_plain

        self._require_running()
        request = WeightTransferInitRequest(init_info={"spec": spec_to_plain(spec)})
        await self.arrival.join(spec, lambda: self._engine.init_weight_transfer_engine(request))

    async def receive(self, version: int) -> None:
        """All workers fill their staging areas; generation goes on."""
        self._require_running()
        await self.arrival.receive(version)

    async def swap(self, version: int, *, in_flight: bool, kv: KVAfterSwap) -> WeightEcho:
        """Make the staged weights live. Once begun it is finished, even if its caller is cancelled.

        ``in_flight`` False lets running sequences end first. With ``kv`` recompute, running sequences
        get the keys and values that the new weights give. Asleep, with room for weights, it has neither.
        """
        arrived = self.arrival.take(version)
        if version < self._live_version:
            raise GeneratorError(f"swap to version {version}, but {self._live_version} is live already")
        checksum = arrived.checksum
        self._require_running()
        swapping = asyncio.create_task(self._swap(version, in_flight, kv))
        swapping.add_done_callback(_retrieve)
        pause_s = await asyncio.shield(swapping)
        return WeightEcho(version, checksum, pause_s, arrived.receive_s)

    async def _swap(self, version: int, in_flight: bool, kv: KVAfterSwap) -> float:
        clock = asyncio.get_running_loop().time
        async with self._control:
            if self._sleep.asleep:
                self._sleep.require_room(version)
                await self._make_live(version, await self._count_tokens())
                self._sleep.loaded()
                self._swaps += 1
                return 0.0
            was_open = self._open.is_set()
            if not in_flight and not was_open:
                raise GeneratorError("a paused engine cannot finish what it has: resume it before the swap")
            self._open.clear()
            began = clock()
            keep = in_flight and kv == "keep"
            await self._with_engine(
                self._engine.pause_generation(mode="keep" if in_flight else "wait", clear_cache=not keep)
            )
            if not in_flight:
                began = clock()  # until now sequences went on to their end
            held = clock()
            self._meter.stand_still()
            counts = await self._count_tokens()
            if keep and self._settings.prefix_caching:
                await self._take_back([s for s, count in counts.items() if count == 0])
            await self._make_live(version, counts)
            if was_open:
                await self._with_engine(self._engine.resume_generation())
                self._open.set()
            took, self.held_s = clock() - began, clock() - held
            self._meter.go_on()
        self._paused_s += took
        self._swaps += 1
        return took

    async def _make_live(self, version: int, counts: dict[_Sequence, int]) -> None:
        """Load what is staged, while vLLM stands still with ``counts`` tokens of its sequences."""
        try:
            await self._with_engine(self._load(version))
        except Exception as error:
            self._end(f"loading version {version} failed half-way: {type(error).__name__}: {error}")
            raise GeneratorError(str(self._fault)) from error
        self._live_version = version
        for sequence, count in counts.items():
            sequence.starts.append((version, count))

    async def _load(self, version: int) -> None:
        call = self._engine.collective_rpc("asyncrl_load", args=(version, self._settings.shares_device))
        self.commit_times = await call
        await self._engine.update_weight_version(str(version))

    async def _count_tokens(self) -> dict[_Sequence, int]:
        """Tokens so far of every sequence that vLLM has not ended, while it stands still."""
        # What it sampled before it stopped has arrived, but may still wait for the output handler.
        while self._engine.engine_core.outputs_queue.qsize():
            self._require_running()  # a dead engine's output handler takes nothing any more
            await asyncio.sleep(0)
        return {self._sequences[uid]: state.detokenizer.num_output_tokens() for uid, state in self._states()}

    async def _take_back(self, sequences: list[_Sequence]) -> None:
        """Take back requests that have no token yet: ``generate`` hands them over again after the swap.

        Handed over under the old version's salt, their prompts could be served from its blocks.
        """
        if not sequences:
            return
        for sequence in sequences:
            sequence.again = True
        await self._with_engine(self._engine.abort([s.request.uid for s in sequences]))

    # The rest.

    def statistics(self) -> GeneratorStatistics:
        """A snapshot. Raises GeneratorError when the engine has died."""
        self._require_running()
        running = min(self._meter.running, len(self._sequences))
        states = self._engine.output_processor.request_states.values()
        budget = sum(s.request.max_tokens for s in self._sequences.values())
        sampled = sum(state.detokenizer.num_output_tokens() for state in states)
        return GeneratorStatistics(
            live_version=self._live_version,
            running=running,
            waiting=len(self._sequences) - running,
            outstanding_tokens=max(0, budget - sampled),
            tokens=self._meter.tokens,
            prefill_tokens=self._meter.prefill_tokens,
            busy_s=self._meter.busy_s,
            slot_s=self._meter.slot_s,
            paused_s=self._paused_s,
            swaps=self._swaps,
            full_s=self._meter.full_s,
            full_tokens=self._meter.full_tokens,
        )

    async def check_health(self) -> None:
        """Return while the engine can sample; raise GeneratorError once it cannot."""
        self._require_running()

    def _require_running(self) -> None:
        if self._fault is not None:
            raise GeneratorError(self._fault)
        if self._engine is None:
            raise GeneratorError("the engine was not started: await start() first")

    async def _with_engine(self, call: Coroutine[Any, Any, T]) -> T:
        """The call's result, or GeneratorError as soon as the engine dies or is closed."""
        assert self._ended is not None
        task = asyncio.ensure_future(call)
        either: set[asyncio.Future[Any]] = {task, self._ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})  # its sequence is freed before its caller goes on
            _retrieve(task)
            raise
        if task.done():
            return task.result()
        task.cancel()
        raise GeneratorError(self._fault or "the engine ended")


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Look at a task's exception, so that asyncio does not report it as never looked at."""
    if not task.cancelled():
        task.exception()
