"""TRL's environments: what ``environment_factory`` makes.

``reset(**row)`` may return text, which goes behind the prompt's last message; public methods are tools, and a
message without a call ends the trajectory; ``get_reward()``, if there is one, is asked at the end.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.environments.adapters.base import close
from asyncrl.environments.protocol import BadAnswerError, Message, Step, as_outcome
from asyncrl.environments.tools import Reader, Settle, answer

_NO_TOOLS = frozenset({"reset", "get_reward", "close"})


class TRLEnvironment:
    """One of TRL's, ``made`` for one trajectory; ``read`` finds the calls in a message."""

    def __init__(self, made: Any, settle: Settle, read: Reader) -> None:
        self._made = made
        self._settle = settle
        self._read = read
        self._tools = methods(made)

    def reset(self, row: Mapping[str, Any], prompt: Sequence[Message]) -> Step:
        text = self._settle(self._made.reset(**row))
        if text is None:
            return Step()
        if not isinstance(text, str):
            raise BadAnswerError(f"reset: found {type(text).__name__}; expected text, or None")
        last = {**prompt[-1], "content": prompt[-1]["content"] + text}
        return Step((*map(dict, prompt[:-1]), last), replaces=True)

    def step(self, message: Message) -> Step:
        calls = self._read(message["content"])
        answers = [answer(self._tools, call, self._settle) for call in calls]
        return Step(tuple({"role": "tool", "content": text} for text in answers), done=not calls)

    def finish(self, reason: str) -> Step:
        function = getattr(self._made, "get_reward", None)
        return Step(done=True) if function is None else as_outcome(self._settle(function()))

    def close(self) -> None:
        close(self._made, self._settle)


def methods(thing: Any) -> dict[str, Callable[..., Any]]:
    """The tools of an environment by name; of a class, its functions as if bound to an object."""
    if not inspect.isclass(thing):
        found = inspect.getmembers(thing, inspect.ismethod)
    else:
        found = [
            (name, types.MethodType(function, thing))
            for name, function in inspect.getmembers(thing, inspect.isfunction)
            if not isinstance(inspect.getattr_static(thing, name), staticmethod)
        ]
    return {name: function for name, function in found if name not in _NO_TOOLS and name[0] != "_"}
