"""The face that every environment has inside the worker, and the one of asyncrl's own form behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from asyncrl.environments.protocol import Message, Step, as_opening, as_outcome, as_step
from asyncrl.environments.tools import Settle


class Adapter(Protocol):
    """One trajectory's environment. Raises BadAnswerError for what the user's returns and must not."""

    def reset(self, row: Mapping[str, Any], prompt: Sequence[Message]) -> Step:
        """Begin; ``prompt`` is the row's, as chat messages."""
        ...

    def step(self, message: Message) -> Step: ...

    def finish(self, reason: str) -> Step:
        """Called once after the last step; ``reason``: ``stop`` or ``length``."""
        ...

    def close(self) -> None: ...


class OwnEnvironment:
    """An object with ``reset`` and ``step``, as docs/environments.md says."""

    def __init__(self, made: Any, settle: Settle) -> None:
        self._made = made
        self._settle = settle

    def reset(self, row: Mapping[str, Any], prompt: Sequence[Message]) -> Step:
        return as_opening(self._settle(self._made.reset(row)))

    def step(self, message: Message) -> Step:
        return as_step(self._settle(self._made.step(message)))

    def finish(self, reason: str) -> Step:
        function = getattr(self._made, "finish", None)
        return Step(done=True) if function is None else as_outcome(self._settle(function(reason)))

    def close(self) -> None:
        close(self._made, self._settle)


def close(made: Any, settle: Settle) -> None:
    """Call its ``close``, if it has one."""
    function = getattr(made, "close", None)
    if function is not None:
        settle(function())
