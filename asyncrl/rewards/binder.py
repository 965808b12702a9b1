"""Calling a reward function by the names of its parameters: its own signature says whose it is.

A function of one sample can name any column of the row, or:

=================== =====================================================
``prompt``          the rendered prompt, text
``completion``      the answer, text; ``solution_str`` is another name for it
``messages``        the answer as chat messages, those of tools and environment among them
``completion_ids``  the answer's token ids, a list
``finish_reason``   ``stop``, ``length`` or ``abort``
``row``             all columns, a dict; ``info`` too, where no column has that name
``ground_truth``    where no column has that name, what the data's form knows it by
``answer``          where no column has that name, the same
=================== =====================================================

A function of a whole group has ``prompts``, ``completions`` or ``queries`` among its required parameters.
It can name any column, and gets a list with one value a sample, or:

=================== =====================================================
``prompts``         TRL: the rows' own prompts, text or messages. OpenRLHF: the rendered ones
``completions``     the answers: messages where the row's prompt is messages, else text
``completion_ids``  their token ids
``queries``         OpenRLHF: rendered prompt and answer, one text
``labels``          OpenRLHF: the ground truths
``log_extra``       TRL: ``log_extra(column, values)``, numbers a sample, kept beside its reward
``log_metric``      TRL: ``log_metric(name, value)``, one number
``trainer_state``   TRL: always None
=================== =====================================================

``**kwargs`` receives every column. These names win over columns, except where it says otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SAMPLE_NAMES = ("prompt", "completion", "solution_str", "messages", "completion_ids", "finish_reason", "row")
_GROUP_MARKS = frozenset({"prompts", "completions", "queries"})
_GROUP_NAMES = ("prompts", "completions", "completion_ids", "log_extra", "log_metric", "trainer_state")
_OPENRLHF_NAMES = ("queries", "prompts", "labels")

Call = Literal["sample", "trl", "openrlhf"]
"""What a function is called with: one sample, or a group in the way of a project."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What there is to know of one answer."""

    row: Mapping[str, Any]
    prompt: str
    completion: str
    completion_ids: Sequence[int]
    finish_reason: str
    messages: Sequence[Mapping[str, Any]] = ()
    """The answer's messages; empty: one of the assistant, the completion."""

    @property
    def turns(self) -> list[Mapping[str, Any]]:
        return list(self.messages) or [{"role": "assistant", "content": self.completion}]


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
    call: Call = "sample"
    accepts_any: bool = False
    """It takes what there is, whatever the columns: a rubric, or a server."""

    @property
    def takes_group(self) -> bool:
        return self.call != "sample"

    @property
    def wants_ids(self) -> bool:
        """Whether it may look at token ids."""
        return self.accepts_any or self.takes_group or "completion_ids" in (*self.required, *self.optional)

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Self:
        """Undo what msgpack makes of ``dataclasses.asdict``: tuples arrive as lists."""
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(**plain)

    def problems(self, columns: Iterable[str]) -> list[str]:
        """Why it cannot be called on a row with these columns; empty if it can."""
        if self.accepts_any:
            return []
        available = available_names(columns, self.call)
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
        """Keyword arguments out of ``values``. Raises KeyError for a required name that is missing.

        A group function with ``**kwargs`` gets all of ``values``: TRL's own names among them.
        """
        arguments = dict(values if self.takes_group else columns) if self.takes_columns else {}
        missing = [name for name in self.required if name not in values]
        if missing:
            raise KeyError(f"this row has no column for the parameter {missing[0]!r}")
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
        is_async=is_async(function),
        unknown_args=() if takes_columns else tuple(sorted(set(args) - named)),
        call=_call(required),
    )


def _call(required: Sequence[str]) -> Call:
    if "queries" in required:
        return "openrlhf"
    return "trl" if _GROUP_MARKS & set(required) else "sample"


def available_names(columns: Iterable[str], call: Call = "sample") -> set[str]:
    """Names that a parameter can have, for rows with these columns."""
    if call == "openrlhf":
        return {*_OPENRLHF_NAMES, *columns}
    if call == "trl":
        return {*_GROUP_NAMES, *columns}
    names = {*_SAMPLE_NAMES, "info", *columns}
    return names | {"ground_truth", "answer"} if names & {"reward_model", "ground_truth"} else names


def truth_of(row: Mapping[str, Any], *others: str) -> Any:
    """The row's ground truth, by that name or where verl has it, or else the first of the columns ``others``.

    None where it has none of them.
    """
    if "ground_truth" in row:
        return row["ground_truth"]
    rule = row.get("reward_model")
    if isinstance(rule, Mapping) and "ground_truth" in rule:
        return rule["ground_truth"]
    return next((row[key] for key in others if key in row), None)


def named_values(sample: Sample) -> dict[str, Any]:
    """Every name that a parameter can have, with its value for ``sample``."""
    row = sample.row
    values: dict[str, Any] = {"info": row, **row}
    truth = truth_of(row)
    if truth is not None:
        values.setdefault("ground_truth", truth)
        values.setdefault("answer", truth)
    values.update(
        prompt=sample.prompt,
        completion=sample.completion,
        solution_str=sample.completion,
        messages=sample.turns,
        completion_ids=sample.completion_ids,
        finish_reason=sample.finish_reason,
        row=row,
    )
    return values


@dataclass(slots=True)
class Logged:
    """What a group function logs while it runs."""

    extras: dict[str, Sequence[Any]] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extras[column] = list(values)

    def log_metric(self, name: str, value: Any) -> None:
        self.metrics[name] = value


def group_values(samples: Sequence[Sample], call: Call, logged: Logged) -> dict[str, Any]:
    """Every name that a parameter of a group function can have, a list with one value a sample."""
    if call == "openrlhf":
        return {
            **_columns(samples),
            "queries": [s.prompt + s.completion for s in samples],
            "prompts": [s.prompt for s in samples],
            "labels": [truth_of(s.row, "label", "answer") for s in samples],
        }
    return {
        **_columns(samples),
        "prompts": [s.row.get("prompt", s.prompt) for s in samples],
        "completions": [s.turns if _is_chat(s) else s.completion for s in samples],
        "completion_ids": [list(s.completion_ids) for s in samples],
        "log_extra": logged.log_extra,
        "log_metric": logged.log_metric,
        "trainer_state": None,
    }


def _is_chat(sample: Sample) -> bool:
    return isinstance(sample.row.get("prompt"), (list, tuple))


def _columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for sample in samples for name in sample.row)
    return {name: [sample.row.get(name) for sample in samples] for name in names}


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004
    )
