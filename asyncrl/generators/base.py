"""The Generator Protocol: what an engine does, whether embedded, vLLM or scripted.

An engine is a plain object inside one process; ``generators/actor.py`` makes it a Ray actor.

Invariants:
- ``Completion.versions[t]`` is the version whose weights sampled token t, and ``logprobs[t]`` its
  log-prob under the distribution that was really sampled from.
- ``live_version`` never goes down, and changes only inside ``swap``.
- Equal ``DrawKey`` and equal logits give an equal token.
- An answer that is continued from a prefix is as good as one that was never interrupted: its tokens are
  drawn from the same distributions, and each carries the version and the log-prob of its own engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from asyncrl.types import Completion, Float32Array, GenerationRequest
from asyncrl.weight_sync.base import PushGroupSpec, WeightEcho

KVAfterSwap = Literal["keep", "recompute"]


@dataclass(frozen=True, slots=True)
class GeneratorStatistics:
    """A snapshot; counters are since the start of the engine."""

    live_version: int
    running: int
    """Sequences in a slot now."""
    waiting: int
    """Requests that wait for a slot."""
    outstanding_tokens: int
    """Upper bound of tokens still to be sampled for running and waiting requests."""
    tokens: int
    """Response tokens sampled so far."""
    prefill_tokens: int
    busy_s: float
    """Seconds with at least one sequence in a slot and generation not paused."""
    slot_s: float
    """Integral over time of occupied slots: slot_s / (slots * busy_s) is the mean occupancy."""
    paused_s: float
    """Seconds that generation stood still for weight swaps."""
    swaps: int
    full_s: float = 0.0
    """The part of ``busy_s`` in which every slot was taken."""
    full_tokens: int = 0
    """Tokens sampled in ``full_s``: by it, the rate of the engine with all slots full."""


@dataclass(frozen=True, slots=True)
class Asleep:
    """What a generator that fell asleep keeps, and what it gave up."""

    sequences: int
    """Sequences that had begun, and go on once it wakes."""
    freed_bytes: int
    """Memory that was freed: of keys and values, and of weights that its own process held on a GPU."""


@runtime_checkable
class Sleeper(Protocol):
    """What a generator has to do beside the rest where it takes turns with a learner on one device."""

    async def sleep(self) -> Asleep:
        """Stop between two tokens and free the keys and values; running sequences stay for later.

        Asleep it takes requests and answers all other calls, but samples nothing.
        """
        ...

    async def wake(self) -> None:
        """Go on, with keys and values that the weights of now give; no effect on one that is awake."""
        ...


@runtime_checkable
class DeepSleeper(Sleeper, Protocol):
    """A sleeper whose weights go too: each time before it wakes it is sent them anew."""

    async def make_room(self) -> None:
        """Asleep, take memory for weights; ``receive`` and ``swap`` fill it, and then ``wake`` may come."""
        ...


class Generator(Protocol):
    """Samples continuations, and swaps weights between two tokens."""

    @property
    def live_version(self) -> int:
        """Version that the next token is sampled with."""
        ...

    async def start(self) -> None:
        """Load the model (version 0) and warm up."""
        ...

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one continuation; cancelling the awaiting task aborts the sequence."""
        ...

    async def partials(self) -> dict[str, Completion]:
        """What running requests have so far, by uid, with ``finish_reason`` abort: prefixes to go on from.

        Only those that have sampled something here, and none from an engine that promises bits: keys and
        values that are computed anew from a prefix may differ in the last ones. May take as long as one
        forward pass.
        """
        ...

    async def abort(self, uid: str) -> None:
        """End a request now; its ``generate`` returns what it has, ``finish_reason`` abort."""
        ...

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        """Log-probs (T - 1,) of tokens 1, 2, ... of T, each given those before it, at temperature 1.

        By the live weights, while generation goes on; the caller swaps none meanwhile. Raises RolloutError
        for tokens that can never be scored: fewer than two, too many, or outside the vocabulary.
        """
        ...

    async def pause(self) -> None:
        """Stop between two tokens; running sequences keep their state."""
        ...

    async def resume(self) -> None: ...

    async def join(self, spec: PushGroupSpec) -> None:
        """Join the process group that weights arrive on, leaving an earlier one."""
        ...

    async def receive(self, version: int) -> None:
        """Fill the staging area with ``version``'s weights while generation goes on."""
        ...

    async def swap(self, version: int, *, in_flight: bool, kv: KVAfterSwap) -> WeightEcho:
        """Make the staged weights live between two tokens.

        With ``in_flight`` False the engine first finishes every sequence that it has.
        """
        ...

    async def check_health(self) -> None:
        """Return while the engine can sample; raise GeneratorError once it cannot.

        Answers within a fraction of a second, whatever runs.
        """
        ...

    def statistics(self) -> GeneratorStatistics: ...

    async def close(self) -> None: ...
