"""What a user's environment is: an object with ``reset`` and ``step``, and nothing of asyncrl in it.

    class GuessingGame:
        def __init__(self, most=100): ...                     # args of the config

        def reset(self, task):                                # task: the row of the data set, a dict
            self.secret, self.left = task["secret"], 7
            return []                                         # messages to add to the row's prompt

        def step(self, message):                              # {"role": "assistant", "content": ...}
            guess = int(message["content"])
            self.left -= 1
            if guess == self.secret or not self.left:
                return {"done": True, "reward": float(guess == self.secret)}
            return "higher" if guess < self.secret else "lower"

        def finish(self, reason):                             # "stop", or "length" where a budget ended it
            return 0.0 if reason == "length" else None        # None: what was said before counts

One object is made for each trajectory, in a worker process; ``reset`` is called once, then ``step`` with each
of the model's messages, on one thread. If there are such methods, ``finish`` is called once after the last
step, whatever ended it, with ``stop`` or ``length``, and ``close`` at the very end. Any of them may
be ``async``. What they may return: ``as_opening``, ``as_step`` and ``as_outcome`` say it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = Mapping[str, Any]
"""``role`` and ``content``, both text."""

Observation = str | Message | Sequence[Message]
"""Text (a message of the user's), a message, or several."""


class BadAnswerError(ValueError):
    """What a user's environment returned is nothing that it may return."""


class Environment(Protocol):
    """What is called; the class itself need not name this Protocol."""

    def reset(self, task: Mapping[str, Any]) -> Observation | Awaitable[Observation | None] | None:
        """Begin with one row of the data; what is returned is added to the row's prompt."""
        ...

    def step(self, message: Message) -> Any:
        """Take the model's message; see ``as_step``. An exception fails the trajectory, not the run."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """What a step came to."""

    messages: tuple[dict[str, str], ...] = ()
    """What the model sees next; none where it is done."""
    done: bool = False
    reward: float | None = None
    """Of the whole trajectory so far: the last one given counts. None: no word of it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers about the trajectory so far, by name: the last ones given count."""
    replaces: bool = False
    """Of a ``reset``: ``messages`` are the whole prompt, in place of the row's."""


def as_step(result: Any) -> Step:
    """What ``step`` returned, as a Step. Raises BadAnswerError saying what is wrong with it.

    An observation (text, a message, a list of messages) goes on. A dict with ``done`` says whether it is
    over, with ``observation``, ``reward`` and ``metrics`` if there are such. None and True end it without a
    reward.
    """
    if isinstance(result, Step):
        return result
    if result is None or result is True:
        return Step(done=True)
    if isinstance(result, Mapping) and "role" not in result:
        unknown = sorted(set(map(str, result)) - {"done", "observation", "reward", "metrics"})
        if unknown or not isinstance(result.get("done"), bool):
            raise BadAnswerError(
                f"found a dict with {', '.join(map(str, result)) or 'nothing'}; expected done (true or "
                "false), and observation, reward and metrics if there are such"
            )
        seen = result.get("observation")
        messages = () if seen is None else as_messages(seen)
        if not messages and not result["done"]:
            raise BadAnswerError("found done False and no observation; expected one of them")
        return Step(messages, result["done"], _reward(result.get("reward")), _metrics(result.get("metrics")))
    messages = as_messages(result)
    if not messages:
        raise BadAnswerError("found an empty list; expected an observation, or a dict with done")
    return Step(messages)


def as_opening(result: Any) -> Step:
    """What ``reset`` returned. Raises BadAnswerError saying what is wrong with it.

    An observation is added to the row's prompt; a dict ``{"prompt": observation}`` takes its place.
    """
    if isinstance(result, Step):
        return result
    if isinstance(result, Mapping) and set(result) == {"prompt"}:
        messages = as_messages(result["prompt"])
        if not messages:
            raise BadAnswerError("found an empty prompt; expected at least one message")
        return Step(messages, replaces=True)
    return Step(as_messages(result))


def as_outcome(result: Any) -> Step:
    """What ``finish`` returned, as a Step that is done. Raises BadAnswerError saying what is wrong with it.

    A number is the reward of the trajectory; a dict has ``reward``, ``metrics`` or both; None is neither.
    """
    if isinstance(result, Step):
        return result
    if isinstance(result, Mapping):
        unknown = sorted(set(map(str, result)) - {"reward", "metrics"})
        if unknown:
            raise BadAnswerError(f"found a dict with {', '.join(unknown)}; expected reward, metrics or both")
        return Step(done=True, reward=_reward(result.get("reward")), metrics=_metrics(result.get("metrics")))
    return Step(done=True, reward=_reward(result))


def as_messages(observation: Any) -> tuple[dict[str, str], ...]:
    """An observation as messages; text is the user's. Raises BadAnswerError for anything else."""
    if observation is None:
        return ()
    if isinstance(observation, str):
        return ({"role": "user", "content": observation},)
    if isinstance(observation, Mapping):
        role, content = observation.get("role"), observation.get("content")
        if not isinstance(role, str) or not isinstance(content, str) or role == "assistant":
            raise BadAnswerError(
                f"found a message with role {role!r} and content of type {type(content).__name__}; expected "
                "text in both, and another role than assistant"
            )
        return ({"role": role, "content": content},)
    if isinstance(observation, (list, tuple)):
        return tuple(message for item in observation for message in as_messages(item))
    raise BadAnswerError(
        f"found {type(observation).__name__}; expected text, a message or a list of messages"
    )


def _reward(value: Any) -> float | None:
    return None if value is None else _number(value, "reward")


def _metrics(value: Any) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadAnswerError(f"metrics: found {type(value).__name__}; expected a dict of numbers by name")
    return {str(name): _number(number, f"metrics {name!r}") for name, number in value.items()}


def _number(value: Any, what: str) -> float:
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise BadAnswerError(f"{what}: found {value!r}; expected one finite number, or None")
    return float(value)
