"""Calling a reward function by the names of its parameters.

A parameter can be named after any column of the row, or:

=================== =====================================================
``prompt``          the rendered prompt, text
``completion``      the answer, text; ``solution_str`` is another name for it
``completion_ids``  the answer's token ids, a list
``finish_reason``   ``stop``, ``length`` or ``abort``
``row``             all columns, a dict; ``info`` too, where no column has that name
``ground_truth``    where no column has that name, ``reward_model["ground_truth"]``
=================== =====================================================

``**kwargs`` receives every column. These names win over columns, except where it says otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SAMPLE_NAMES = ("prompt", "completion", "solution_str", "completion_ids", "finish_reason", "row")


@dataclass(frozen=True, slots=True)
class Sample:
    """What there is to know of one answer."""

    row: Mapping[str, Any]
    prompt: str
    completion: str
    completion_ids: Sequence[int]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Signature:
    """What a function takes. ``required`` parameters have no default and are not in its args."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_columns: bool
    """Whether it has ``**kwargs``."""
    is_async: bool
    unknown_args: tuple[str, ...] = ()
    """Configured args that it has no parameter for."""

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Self:
        """Undo what msgpack makes of ``dataclasses.asdict``: tuples arrive as lists."""
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(**plain)

    def problems(self, columns: Iterable[str]) -> list[str]:
        """Why it cannot be called on a row with these columns; empty if it can."""
        available = available_names(columns)
        listed = ", ".join(sorted(available))
        return [
            f"reward function {self.name!r}: nothing to pass for its parameter {parameter!r}; expected one "
            f"of the names {listed}, or a value in its args"
            for parameter in self.required
            if parameter not in available
        ] + [
            f"reward function {self.name!r}: found {argument!r} in its args; expected one of its parameters "
            f"{', '.join((*self.required, *self.optional)) or '(it has none)'}"
            for argument in self.unknown_args
        ]

    def arguments(self, values: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments out of ``values``. Raises KeyError for a required name that is missing."""
        arguments = dict(columns) if self.takes_columns else {}
        arguments.update({name: values[name] for name in self.required})
        arguments.update({name: values[name] for name in self.optional if name in values})
        return arguments


def signature_of(function: Callable[..., Any], name: str, args: Mapping[str, Any]) -> Signature:
    """Read a function's parameters; ``args`` are the configured keyword arguments.

    Raises TypeError for a positional-only parameter without a default, which no name can reach.
    """
    parameters = inspect.signature(function).parameters
    required: list[str] = []
    optional: list[str] = []
    for parameter in parameters.values():
        has_default = parameter.default is not inspect.Parameter.empty
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY and not has_default:
            raise TypeError(
                f"reward function {name!r}: its parameter {parameter.name!r} is positional-only; expected "
                "parameters that can be passed by name"
            )
        if parameter.kind in _NAMED and parameter.name not in args:
            (optional if has_default else required).append(parameter.name)
    takes_columns = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    named = {p.name for p in parameters.values() if p.kind in _NAMED}
    return Signature(
        name=name,
        required=tuple(required),
        optional=tuple(optional),
        takes_columns=takes_columns,
        is_async=_is_async(function),
        unknown_args=() if takes_columns else tuple(sorted(set(args) - named)),
    )


def available_names(columns: Iterable[str]) -> set[str]:
    """Names that a parameter can have, for rows with these columns."""
    names = {*_SAMPLE_NAMES, "info", *columns}
    return names | {"ground_truth"} if "reward_model" in names else names


def named_values(sample: Sample) -> dict[str, Any]:
    """Every name that a parameter can have, with its value for ``sample``."""
    row = sample.row
    values: dict[str, Any] = {"info": row, **row}
    rule = row.get("reward_model")
    if "ground_truth" not in row and isinstance(rule, Mapping) and "ground_truth" in rule:
        values["ground_truth"] = rule["ground_truth"]
    values.update(
        prompt=sample.prompt,
        completion=sample.completion,
        solution_str=sample.completion,
        completion_ids=sample.completion_ids,
        finish_reason=sample.finish_reason,
        row=row,
    )
    return values


def _is_async(function: Callable[..., Any]) -> bool:
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004
    )
