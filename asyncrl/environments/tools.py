"""Tools: typed Python functions that the model may call, and the environment that answers its calls.

A tool's name, parameters and text come from the function itself: annotations, defaults, docstring. The
model calls it with ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen do;
another way of writing calls is a function of the user's (``parse`` in the environment's args).

Invariants:
- Arguments are checked against the annotations before the function sees them.
- What goes wrong in a call is the model's to see, as text: an unknown name, a bad argument, an exception.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.functions import load_function

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"^\s*(\w+)(?:\s*\([^)]*\))?:\s*(.+)$")
_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model wrote; ``arguments`` is None where they could not be read."""

    name: str
    arguments: Mapping[str, Any] | None


Reader = Callable[[str], list[ToolCall]]
"""From a message's text to the calls in it, in their order."""

Settle = Callable[[Any], Any]
"""From what a user's function returned to its value, awaited if it has to be."""


class ToolEnvironment:
    """Answers each tool call of a message; a message without one ends the trajectory.

    ``tools``: ``file.py:function`` or ``package.module:function``. ``parse``: the same, of a function from a
    message's text to a list of (name, arguments).
    """

    def __init__(self, tools: Sequence[str], parse: str | None = None, settle: Settle | None = None) -> None:
        functions = [load_function(path, Path.cwd()) for path in tools]
        self._tools = {function.__name__: function for function in functions}
        self._read = reader(parse, Path.cwd())
        self._settle = settle or alone

    def reset(self, task: Mapping[str, Any]) -> None:
        return None

    def step(self, message: Mapping[str, Any]) -> list[dict[str, str]] | None:
        calls = self._read(str(message["content"]))
        return [
            {"role": "tool", "content": answer(self._tools, call, self._settle)} for call in calls
        ] or None


def answer(tools: Mapping[str, Callable[..., Any]], call: ToolCall, settle: Settle) -> str:
    """What a call came to, as text for the model; tools may be async."""
    if call.arguments is None:
        return "error: the call is not JSON with a name and arguments"
    if call.name not in tools:
        return f"error: found no tool {call.name!r}; there are {', '.join(tools)}"
    function = tools[call.name]
    try:
        return _text(settle(function(**checked(function, call.arguments))))
    except Exception as error:  # noqa: BLE001 what a tool raises is its answer to the model
        return f"error: {type(error).__name__}: {error}"


def reader(parse: str | None, folder: Path) -> Reader:
    """How calls are read: by the function ``parse``, or as Hermes and Qwen write them. Raises ConfigError."""
    if parse is None:
        return tool_calls
    function = load_function(parse, folder)
    return lambda text: [ToolCall(name, arguments) for name, arguments in function(text)]


def tool_calls(text: str) -> list[ToolCall]:
    """The calls in a message, in their order."""
    return [read_call(body) for body in CALL.findall(text)]


def read_call(body: str) -> ToolCall:
    """What stands between the marks of a call."""
    try:
        call = json.loads(body)
    except ValueError:
        return ToolCall("", None)
    if not isinstance(call, dict):
        return ToolCall("", None)
    arguments = call.get("arguments", {})
    return ToolCall(str(call.get("name")), arguments if isinstance(arguments, dict) else None)


def checked(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``arguments`` as the function's annotations want them. Raises TypeError that says what does not fit."""
    hints = typing.get_type_hints(function)
    bound = inspect.signature(function).bind(**arguments)
    for name, value in bound.arguments.items():
        kinds = _kinds(hints.get(name, Any))
        if float in kinds and type(value) is int:
            bound.arguments[name] = float(value)
        elif kinds and type(value) not in kinds:  # not isinstance: True is no integer of a tool's
            expected = " or ".join(_TYPES.get(kind, "null") for kind in kinds)
            raise TypeError(f"{name}: found {value!r}; expected {expected}")
    return dict(bound.arguments)


def schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The tool as chat templates know it: JSON schema of a function.

    Raises ConfigError for a parameter without an annotation, or of a type that JSON has not.
    """
    hints = typing.get_type_hints(function)
    summary, texts = _documented(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        kinds = _kinds(hints.get(parameter.name, Any))
        if not kinds:
            raise ConfigError(
                f"tool {function.__name__!r}: found no usable type of its parameter {parameter.name!r}; "
                "expected an annotation of str, int, float, bool, list or dict"
            )
        names = [_TYPES.get(kind, "null") for kind in kinds]
        entry: dict[str, Any] = {"type": names[0] if len(names) == 1 else names}
        if parameter.name in texts:
            entry["description"] = texts[parameter.name]
        properties[parameter.name] = entry
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": summary, "parameters": parameters},
    }


def _kinds(hint: Any) -> list[type]:
    """The plain types that a hint allows; empty for one that allows anything or something else."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [_kinds(part) for part in typing.get_args(hint)]
        return [kind for kinds in inner for kind in kinds] if all(inner) else []
    if origin is typing.Literal:
        return list(dict.fromkeys(type(value) for value in typing.get_args(hint)))
    plain = origin or hint
    return [plain] if plain in _TYPES or plain is type(None) else []


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """A docstring's text before ``Args:``, and what that says of each parameter."""
    summary, _, rest = text.partition("Args:")
    section = re.split(r"^\s*(?:Returns|Raises|Yields|Examples?):", rest, maxsplit=1, flags=re.MULTILINE)[0]
    found = (_PARAMETER.match(line) for line in section.splitlines())
    return " ".join(summary.split()), {m[1]: m[2].strip() for m in found if m}


def alone(value: Any) -> Any:
    """``value``, awaited in a loop of its own if it has to be."""

    async def awaited() -> Any:
        return await value

    return asyncio.run(awaited()) if inspect.isawaitable(value) else value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
