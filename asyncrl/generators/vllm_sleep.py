"""How a vLLM engine leaves its device to a learner and comes back, one step after the other.

Awake -> asleep (no weights, no keys and values) -> with room for weights -> with weights -> awake. At vLLM's
deepest level of sleep no copy of the weights is kept: each waking comes with a push, which replaces them all.

Requests are kept. vLLM 0.32, asked to sleep in mode "keep", stops between two steps, puts running requests
back into its queue, drops their blocks and the prefix cache, and goes on by itself once all of its memory is
back. Sampled tokens, log-probs and version labels stay; the next step of a request computes its keys and
values anew, from its tokens and by the weights of then. Nothing has to be aborted or issued again.

Invariants:
- No step is skipped, and no step is taken twice.
- On a CPU vLLM goes through the same states, and ignores what they ask of memory.
"""

from __future__ import annotations

from typing import Any, Literal

from asyncrl.errors import GeneratorError

_LEVEL = 2
"""Discard the weights too, but for buffers, which no push replaces and which vLLM keeps on the host."""

_State = Literal["awake", "asleep", "with room for weights", "with weights"]


class VLLMSleep:
    """The state of one engine. ``llm`` is its ``AsyncLLM``; the caller makes one call at a time."""

    def __init__(self) -> None:
        self._state: _State = "awake"

    @property
    def asleep(self) -> bool:
        """Whether it is anything but awake."""
        return self._state != "awake"

    async def fall_asleep(self, llm: Any) -> int:
        """From awake, with all requests kept; returns the device memory that was freed, in bytes."""
        self._require("awake", "fall asleep")
        before = await _free_bytes(llm)
        await llm.sleep(level=_LEVEL, mode="keep")
        self._state = "asleep"
        return max(0, await _free_bytes(llm) - before)

    async def make_room(self, llm: Any) -> None:
        """From asleep: memory for weights, whose content is nothing yet."""
        self._require("asleep", "make room for weights")
        await llm.wake_up(tags=["weights"])
        self._state = "with room for weights"

    def require_room(self, version: int) -> None:
        """Raise GeneratorError unless ``version`` may be loaded now: once, or again."""
        if self._state not in ("with room for weights", "with weights"):
            raise GeneratorError(
                f"asked to load version {version} while {self._state}; expected make_room() before it"
            )

    def loaded(self) -> None:
        """All weights were loaded into the room that was made."""
        self._state = "with weights"

    async def wake(self, llm: Any) -> None:
        """From with weights: memory for keys and values, and vLLM goes on with its requests."""
        self._require("with weights", "wake")
        await llm.wake_up(tags=["kv_cache"])
        self._state = "awake"

    def _require(self, state: _State, doing: str) -> None:
        if self._state != state:
            raise GeneratorError(f"a vLLM engine was asked to {doing} while {self._state}; expected {state}")


async def _free_bytes(llm: Any) -> int:
    """Free device memory, of all its workers together."""
    return sum(await llm.collective_rpc("asyncrl_free_bytes"))
