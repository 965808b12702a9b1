"""What vLLM's own metrics say of an engine's use: a stat logger, told of every step.

It has the methods of vLLM's ``StatLoggerBase`` and is handed to ``AsyncLLM`` as a factory, so that it
needs no import of vllm.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Meter:
    """Integrates steps into counters. vLLM reports after each step; time between two reports counts as
    busy if sequences ran at the first of them."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = slots
        self._clock = clock
        self._since = clock()
        self.running = 0
        """Sequences in vLLM's batch at the last report."""
        self.tokens = 0
        self.prefill_tokens = 0
        """Prompt tokens that were computed: those found in the prefix cache are not."""
        self.busy_s = 0.0
        self.slot_s = 0.0
        self.full_s = 0.0
        """The part of ``busy_s`` in which every slot was taken."""
        self.full_tokens = 0
        """Tokens sampled in ``full_s``."""

    def begin(self) -> None:
        """A request was handed over; where none ran, the engine is busy from now on."""
        if self.running == 0:
            self._since, self.running = self._clock(), 1

    def stand_still(self) -> None:
        """Generation stops: count what went before."""
        self._count()

    def go_on(self) -> None:
        """Generation goes on: what lies between is nobody's."""
        self._since = self._clock()

    def leave_out(self, *, tokens: int, prefill_tokens: int) -> None:
        """Do not count these tokens, which no user asked for."""
        self.tokens -= tokens
        self.prefill_tokens -= prefill_tokens

    def reset(self) -> None:
        """Forget everything so far, as after a warm-up."""
        self.__init__(self._slots, self._clock)  # type: ignore[misc]

    # What vLLM calls.

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> Meter:
        """As the factory that vLLM wants."""
        return self

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            self.tokens += iteration_stats.num_generation_tokens
            if self.running == self._slots:
                self.full_tokens += iteration_stats.num_generation_tokens
            self.prefill_tokens += iteration_stats.prompt_token_stats.computed
        if scheduler_stats is not None:
            self._count()
            self.running = scheduler_stats.num_running_reqs

    def log_engine_initialized(self) -> None:
        pass

    def log(self) -> None:
        pass

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        pass

    def _count(self) -> None:
        now = self._clock()
        if self.running:
            self.busy_s += now - self._since
            self.slot_s += (now - self._since) * self.running
            if self.running == self._slots:
                self.full_s += now - self._since
        self._since = now
