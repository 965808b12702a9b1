"""A generator that samples nothing: lengths, speed and failures from a script or a distribution.

For tests and simulation of everything around a generator. Not a model of one engine in detail:
prefill is a delay, and all running sequences advance at one speed.

Invariants:
- Time is the event loop's alone (``loop.time``, ``loop.call_at``, ``asyncio.sleep``), so it runs
  under a virtual clock; each request costs O(1) events, whatever its length.
- Tokens are measured in *work*, which rises at one rate for all running sequences. The time at
  which a token would have been sampled decides its version, so an in-flight swap splits them there.
- Everything is reproducible: what a request gives depends on its ``DrawKey`` and the script.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from asyncrl.errors import GeneratorError
from asyncrl.generators.base import Asleep, GeneratorStatistics, KVAfterSwap
from asyncrl.generators.draws import draw_stream
from asyncrl.generators.requests import whole_answer
from asyncrl.types import Completion, FinishReason, Float32Array, GenerationRequest, Int32Array
from asyncrl.weight_sync.base import PushGroupSpec, WeightEcho
from asyncrl.weight_sync.scripted import scripted_logprobs

Length = Callable[[GenerationRequest], int]
"""Tokens that a request samples where ``max_new_tokens`` does not end it before."""


def constant_length(tokens: int) -> Length:
    """Every answer has ``tokens`` tokens."""
    return lambda request: tokens


def log_normal_length(median: float, sigma: float) -> Length:
    """Long-tailed lengths, at least 1: the logarithm is normal around log(median)."""

    def length(request: GenerationRequest) -> int:
        normal = draw_stream(request.key).standard_normal()
        return max(1, round(median * math.exp(sigma * normal)))

    return length


def scripted_length(by_sample: Mapping[tuple[int, int], int], default: int) -> Length:
    """Lengths by (ordinal, sample)."""
    return lambda request: by_sample.get((request.key.ordinal, request.key.sample), default)


@dataclass(frozen=True, slots=True)
class Failure:
    """What goes wrong in a request, once its answer has ``after_tokens`` tokens.

    ``raise``: its ``generate`` raises GeneratorError. ``die``: the whole generator breaks, all its
    requests with it. ``hang``: it never ends, and holds its slot until it is aborted or cancelled.
    """

    kind: Literal["raise", "die", "hang"]
    after_tokens: int = 0


@dataclass(eq=False, slots=True)
class _Sequence:
    request: GenerationRequest
    done: asyncio.Future[Completion]
    length: int
    reason: FinishReason
    failure: Failure | None
    begun: float = 0.0
    """Work at which its first token began; with a prefix, at which it would have."""
    pace: float = 1.0
    """Work that one of its tokens takes."""
    admitted_at: float = 0.0
    """When it got its slot, by the loop's clock."""


@dataclass(slots=True)
class _Clock:
    """Work done so far, and the integrals over time that statistics report."""

    at: float
    work: float = 0.0
    busy_s: float = 0.0
    slot_s: float = 0.0
    paused_s: float = 0.0
    full_s: float = 0.0
    full_tokens: float = 0.0
    prefill_s: float = 0.0
    """Time that is still owed to prompts: no sequence moves until it has passed."""


def _one_speed(running: int) -> float:
    return 1.0


@dataclass(eq=False)
class ScriptedGenerator:
    """A public double of a generator; satisfies the whole ``Generator`` Protocol.

    ``token_s`` seconds a token, times ``slowdown(n)`` with n sequences running; ``first_token_s``
    more for the first of each (prefill), slowed down alike. ``duration_s``, where given, is the
    time in seconds that a request's tokens take in all instead, at slowdown 1. ``prefill_s`` is the time
    for which everything stands still as a request gets its slot.
    """

    slots: int = 64
    length: Length = field(default_factory=lambda: constant_length(16))
    token_s: float = 0.01
    first_token_s: float = 0.0
    slowdown: Callable[[int], float] = _one_speed
    duration_s: Callable[[GenerationRequest], float] | None = None
    prefill_s: Callable[[GenerationRequest], float] | None = None
    failure: Callable[[GenerationRequest], Failure | None] = lambda request: None
    start_s: float = 0.0
    join_s: float = 0.0
    receive_s: float = 0.0
    swap_s: float = 0.0
    recompute_s: float = 0.0
    """Longer pause of a swap, or of waking, that recomputes keys and values with sequences running."""
    shared: bool = False
    """Its weights are a learner's: it starts asleep, receives nothing, and swaps asleep alone."""
    beside: bool = False
    """It takes turns with a learner on its device: it starts asleep, and asleep it has no weights until it
    has made room for them and was sent some."""
    sleep_s: float = 0.0
    room_s: float = 0.0
    wake_s: float = 0.0
    checksum: Callable[[int], str] = lambda version: f"scripted-{version}"
    """What this receiver echoes; give a wrong one to script a damaged push."""
    score_s: float = 0.0
    logprobs: Callable[[int, Sequence[int]], Float32Array] = scripted_logprobs
    """What ``score`` gives, by version and tokens; give others to script an engine that computes wrongly."""
    vocab_size: int = 256

    def __post_init__(self) -> None:
        if self.slots < 1 or self.token_s <= 0:
            raise ValueError(f"slots {self.slots} and token_s {self.token_s}: expected >= 1 and > 0")
        self._waiting: OrderedDict[str, _Sequence] = OrderedDict()
        self._running: dict[str, _Sequence] = {}
        self._due: list[tuple[float, int, _Sequence]] = []  # by work; ended ones are skipped
        self._admitted = 0
        self._timer: asyncio.TimerHandle | None = None
        self._clock: _Clock | None = None
        self._slowed = 1.0
        self._holds = 0
        """Reasons to stand still: pause() and swaps under way."""
        self._paused = False
        self.asleep = self.shared or self.beside
        self._room = self._weights = not self.beside
        """Whether it has memory for weights, and whether they are in it."""
        self._holds += self.asleep
        self._drained: asyncio.Future[None] | None = None
        """Set while a swap waits for the running sequences; admits none meanwhile."""
        self._swap_lock = asyncio.Lock()
        self._broken: str | None = None
        self._frozen: asyncio.Future[None] | None = None
        self._staged: int | None = None
        self._boundaries: list[float] = []
        self._versions: list[int] = [0]
        self._tokens = 0
        self._prefill_tokens = 0
        self._swaps = 0
        self.scored: list[int] = []
        """Versions that ``score`` was asked of, in order."""

    @property
    def live_version(self) -> int:
        return self._versions[-1]

    @property
    def is_alive(self) -> bool:
        return self._broken is None

    @property
    def is_sampling(self) -> bool:
        return bool(self._running) and not self._holds and self.is_alive

    def slow_down(self, times: float) -> None:
        """From now on every token takes so many times as long."""
        if self._clock is None or self._broken is not None:
            self._slowed = times
            return
        self._advance()
        self._slowed = times
        self._reschedule()

    async def start(self) -> None:
        await asyncio.sleep(self.start_s)
        self._clock = _Clock(at=asyncio.get_running_loop().time())

    async def generate(self, request: GenerationRequest) -> Completion:
        """Token ids derived from the key, at the log-prob of a uniform choice."""
        self._advance()
        if request.uid in self._running or request.uid in self._waiting:
            raise GeneratorError(f"request {request.uid} is already running: uids must be unique")
        length, limit = self.length(request), request.sampling.max_new_tokens
        sequence = _Sequence(
            request=request,
            done=asyncio.get_running_loop().create_future(),
            length=max(min(length, limit), request.given + 1),
            reason="stop" if length <= limit else "length",
            failure=self.failure(request),
        )
        self._waiting[request.uid] = sequence
        self._reschedule()
        try:
            return await sequence.done
        finally:
            # Still there only if the awaiting task was cancelled.
            if self._waiting.get(request.uid) is sequence:
                del self._waiting[request.uid]
            if self._running.get(request.uid) is sequence:
                self._advance()
                self._leave(sequence)
                self._reschedule()

    async def partials(self) -> dict[str, Completion]:
        """What running requests would have by now, by uid."""
        await self._thaw()
        self._advance()
        sampled = {uid: self._sampled(sequence) for uid, sequence in self._running.items()}
        return {
            uid: self._answer(sequence, sampled[uid], "abort")
            for uid, sequence in self._running.items()
            if sampled[uid] > sequence.request.given
        }

    async def abort(self, uid: str) -> None:
        """End a request now, with the tokens that it would have by now."""
        self._advance()
        sequence = self._running.get(uid)
        if sequence is not None:
            self._finish(sequence, self._sampled(sequence), "abort")
        elif uid in self._waiting:
            waiting = self._waiting.pop(uid)
            self._settle(waiting, waiting.request.given, "abort")
        self._reschedule()

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        """Takes ``score_s``, generation going on."""
        self._require_alive()
        version = self.live_version
        await asyncio.sleep(self.score_s)
        await self._thaw()
        self._require_alive()
        self.scored.append(version)
        return self.logprobs(version, token_ids)

    async def pause(self) -> None:
        self._advance()
        self._holds += not self._paused
        self._paused = True
        self._reschedule()

    async def resume(self) -> None:
        self._advance()
        self._holds -= self._paused
        self._paused = False
        self._reschedule()

    async def join(self, spec: PushGroupSpec) -> None:
        """Takes ``join_s``; no process group is made."""
        self._require_alive()
        await asyncio.sleep(self.join_s)
        await self._thaw()

    async def receive(self, version: int) -> None:
        """Takes ``receive_s``, generation going on."""
        self._require_alive()
        await asyncio.sleep(self.receive_s)
        await self._thaw()
        self._require_alive()
        self._staged = version

    async def swap(self, version: int, *, in_flight: bool, kv: KVAfterSwap) -> WeightEcho:
        """Stands still for ``swap_s``; the next token is of ``version``."""
        async with self._swap_lock:
            self._advance()
            if self.shared and not self.asleep:
                raise GeneratorError(f"swap to version {version} of shared weights while awake")
            if not self.shared and self._staged != version:
                raise GeneratorError(f"swap to version {version}, but {self._staged} was received last")
            if not self._room:
                raise GeneratorError(f"swap to version {version} asleep, without room for weights")
            if version < self.live_version:
                raise GeneratorError(f"swap to version {version}, but {self.live_version} is live already")
            if not in_flight and self._running:
                await self._drain()
            recompute = kv == "recompute" and self._running and not self.asleep
            pause = self.swap_s + (self.recompute_s if recompute else 0.0)
            self._holds += 1
            self._reschedule()
            try:
                await asyncio.sleep(pause)
                await self._thaw()
                clock = self._advance()
                self._boundaries.append(clock.work)
                self._versions.append(version)
                self._weights = True
                self._swaps += 1
            finally:
                self._holds -= 1
                self._reschedule()
        return WeightEcho(version, self.checksum(version), pause_s=pause, receive_s=self.receive_s)

    async def sleep(self) -> Asleep:
        """Takes ``sleep_s``, in which it stands still already."""
        self._advance()
        self._holds += not self.asleep
        self.asleep = True
        self._room = self._weights = not self.beside
        self._reschedule()
        await asyncio.sleep(self.sleep_s)
        await self._thaw()
        return Asleep(sequences=len(self._running), freed_bytes=0)

    async def make_room(self) -> None:
        """Takes ``room_s``."""
        if not self.asleep or self._room:
            raise GeneratorError(f"asked to make room for weights {'asleep' if self.asleep else 'awake'}")
        await asyncio.sleep(self.room_s)
        await self._thaw()
        self._room = True

    async def wake(self) -> None:
        """Takes ``wake_s``, and ``recompute_s`` more with sequences running."""
        if not self.asleep:
            return
        if not self._weights:
            raise GeneratorError(f"asked to wake at version {self.live_version} without weights")
        await asyncio.sleep(self.wake_s + (self.recompute_s if self._running else 0.0))
        await self._thaw()
        self._advance()
        self._holds -= 1
        self.asleep = False
        self._reschedule()

    async def _drain(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()
        try:
            await self._drained
        finally:
            self._drained = None
            self._reschedule()

    async def check_health(self) -> None:
        self._require_alive()
        await self._thaw()

    def statistics(self) -> GeneratorStatistics:
        started = self._broken is None and self._clock is not None
        clock = self._advance() if started else self._clock
        sampled = {uid: self._sampled(sequence) for uid, sequence in self._running.items()}
        left = sum(s.request.sampling.max_new_tokens - sampled[uid] for uid, s in self._running.items())
        fresh = sum(sampled[uid] - s.request.given for uid, s in self._running.items())
        return GeneratorStatistics(
            live_version=self.live_version,
            running=len(self._running),
            waiting=len(self._waiting),
            outstanding_tokens=left + sum(s.request.max_tokens for s in self._waiting.values()),
            tokens=self._tokens + fresh,
            prefill_tokens=self._prefill_tokens,
            busy_s=clock.busy_s if clock else 0.0,
            slot_s=clock.slot_s if clock else 0.0,
            paused_s=clock.paused_s if clock else 0.0,
            swaps=self._swaps,
            full_s=clock.full_s if clock else 0.0,
            full_tokens=round(clock.full_tokens) if clock else 0,
        )

    async def close(self) -> None:
        self._break("the generator was closed")

    def die(self, message: str = "the scripted generator died") -> None:
        """Break now: every request fails with GeneratorError, and every later call."""
        self._break(message)

    def freeze(self) -> None:
        """Hang from now on, as a stopped process does: nothing goes on or answers until ``close``."""
        self._advance()
        self._frozen = asyncio.get_running_loop().create_future()
        self._frozen.add_done_callback(lambda frozen: frozen.exception())  # perhaps nobody waits
        self._holds += 1
        self._reschedule()

    async def _thaw(self) -> None:
        """Return at once, or never where frozen: only its end ends that."""
        if self._frozen is not None:
            await asyncio.shield(self._frozen)

    def _break(self, message: str) -> None:
        if self._broken is not None:
            return
        self._broken = message
        if self._timer is not None:
            self._timer.cancel()
        futures: list[asyncio.Future[Any]] = [
            sequence.done for sequence in (*self._waiting.values(), *self._running.values())
        ]
        if self._drained is not None:
            futures.append(self._drained)
        if self._frozen is not None:
            futures.append(self._frozen)
        self._waiting.clear()
        self._running.clear()
        for future in futures:
            if not future.done():
                future.set_exception(GeneratorError(message))

    def _require_alive(self) -> _Clock:
        if self._broken is not None:
            raise GeneratorError(self._broken)
        if self._clock is None:
            raise GeneratorError("the generator was not started: await start() first")
        return self._clock

    # Work and time.

    def _rate(self) -> float:
        """Work a second, now."""
        running = len(self._running)
        if self._holds or not running:
            return 0.0
        return 1.0 / (self.token_s * self.slowdown(running) * self._slowed)

    def _advance(self) -> _Clock:
        """Bring the clock up to now. Call before anything that changes the rate."""
        clock = self._require_alive()
        now = asyncio.get_running_loop().time()
        passed, clock.at = now - clock.at, now
        if self._holds:
            clock.paused_s += passed
        elif self._running:
            running, before = len(self._running), clock.work
            prefilled = min(passed, clock.prefill_s)
            clock.prefill_s -= prefilled
            clock.work += (passed - prefilled) * self._rate()
            if self._due:
                clock.work = min(clock.work, self._due[0][0])  # the timer may fire late, never past
            clock.busy_s += passed
            clock.slot_s += passed * running
            if running == self.slots:
                clock.full_s += passed
                clock.full_tokens += (clock.work - before) * running
        return clock

    def _sampled(self, sequence: _Sequence) -> int:
        assert self._clock is not None
        done = (self._clock.work - sequence.begun) / sequence.pace
        return min(max(sequence.request.given, math.floor(done + 1e-9)), sequence.length)

    def _reschedule(self) -> None:
        """Admit what fits, and set the one timer to the next end of a sequence."""
        if self._broken is not None:
            return
        clock = self._require_alive()
        while self._waiting and len(self._running) < self.slots and not self._holds and self._drained is None:
            self._admit(self._waiting.popitem(last=False)[1], clock)
        if self._drained is not None and not self._running and not self._drained.done():
            self._drained.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._due and self._running.get(self._due[0][2].request.uid) is not self._due[0][2]:
            heapq.heappop(self._due)
        rate = self._rate()
        if self._due and rate:
            wait = clock.prefill_s + (self._due[0][0] - clock.work) / rate
            self._timer = asyncio.get_running_loop().call_at(clock.at + wait, self._on_timer)

    def _admit(self, sequence: _Sequence, clock: _Clock) -> None:
        request = sequence.request
        if self.duration_s is not None:
            sequence.pace = self.duration_s(request) / (self.token_s * max(1, sequence.length))
        sequence.begun = clock.work + self.first_token_s / self.token_s - request.given * sequence.pace
        if self.prefill_s is not None:
            clock.prefill_s += self.prefill_s(request)
        sequence.admitted_at = clock.at
        self._running[request.uid] = sequence
        self._prefill_tokens += len(request.prompt_ids) + request.given
        failure, tokens = sequence.failure, sequence.length
        if failure is not None:
            tokens = max(request.given, min(failure.after_tokens, tokens))
        if failure is None or failure.kind != "hang":
            self._admitted += 1
            heapq.heappush(self._due, (sequence.begun + tokens * sequence.pace, self._admitted, sequence))

    def _on_timer(self) -> None:
        self._timer = None
        self._advance()
        target, _, sequence = heapq.heappop(self._due)
        assert self._clock is not None
        self._clock.work = target
        if sequence.failure is None:
            self._finish(sequence, sequence.length, sequence.reason)
        elif sequence.failure.kind == "die":
            self._break(f"the scripted generator died in request {sequence.request.uid}")
        else:
            self._leave(sequence)
            error = GeneratorError(f"request {sequence.request.uid} was scripted to fail")
            if not sequence.done.done():
                sequence.done.set_exception(error)
        self._reschedule()

    def _leave(self, sequence: _Sequence) -> None:
        self._tokens += self._sampled(sequence) - sequence.request.given
        del self._running[sequence.request.uid]

    def _finish(self, sequence: _Sequence, tokens: int, reason: FinishReason) -> None:
        self._leave(sequence)
        self._settle(sequence, tokens, reason)

    def _settle(self, sequence: _Sequence, tokens: int, reason: FinishReason) -> None:
        if not sequence.done.done():
            sequence.done.set_result(self._answer(sequence, tokens, reason))

    def _answer(self, sequence: _Sequence, tokens: int, reason: FinishReason) -> Completion:
        """The first ``tokens`` of an answer, those of its prefix included."""
        request, given = sequence.request, sequence.request.given
        assert self._clock is not None
        first = request.key.ordinal * 7919 + request.key.sample * 104729 + request.key.attempt
        sampled = Completion(
            token_ids=((first + np.arange(given, tokens)) % self.vocab_size).astype(np.int32),
            logprobs=np.full(tokens - given, -math.log(self.vocab_size), dtype=np.float32),
            versions=self._versions_of(sequence, given, tokens),
            finish_reason=reason,
            stay=(sequence.admitted_at, self._clock.at),
        )
        return whole_answer(request, sampled)

    def _versions_of(self, sequence: _Sequence, given: int, tokens: int) -> Int32Array:
        """Of tokens ``given`` to ``tokens`` - 1, (tokens - given,).

        Token i is sampled at work begun + (i + 1) * pace; a swap at that very work comes after it.
        """
        begun, pace = sequence.begun - 1e-9, sequence.pace
        # Most answers are of one version, and a long simulation has thousands.
        first = bisect_left(self._boundaries, begun + (given + 1) * pace)
        last = bisect_left(self._boundaries, begun + tokens * pace)
        if first >= last:
            return np.full(tokens - given, self._versions[first], dtype=np.int32)
        sampled_at = begun + np.arange(given + 1, tokens + 1) * pace
        era = np.searchsorted(np.asarray(self._boundaries[first:last]), sampled_at, side="left")
        return np.asarray(self._versions[first : last + 1], dtype=np.int32)[era]
