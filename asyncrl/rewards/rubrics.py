"""Rubrics of verifiers (v0): several functions and their weights in one object, called as one reward.

A function names what it wants: ``prompt`` and ``completion`` (chat messages where the row's prompt is a
chat, else text), ``answer``, ``state``, ``info``, ``task``, ``parser``, and what else the rubric was given.
Plural names ask for the whole group. The weighted sum is the reward; each one's own value is kept beside it.

Invariant: an exception in a function is a failure of the sample. verifiers itself would make it 0.0.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from asyncrl.rewards.binder import Sample, is_async, truth_of
from asyncrl.rewards.results import Value, as_value

_PLURALS = {
    "prompts": "prompt",
    "completions": "completion",
    "answers": "answer",
    "states": "state",
    "infos": "info",
    "tasks": "task",
}


def is_rubric(thing: Any) -> bool:
    """Whether it has functions and weights as a rubric has them, or rubrics of its own."""
    return hasattr(thing, "rubrics") or (_functions(thing) is not None and _weights(thing) is not None)


class RubricReward:
    """A rubric as a reward function. Raises ValueError for one whose functions and weights do not pair."""

    def __init__(self, rubric: Any) -> None:
        self._terms = list(_terms(rubric))
        self.is_async = any(is_async(function) for function, _, _ in self._terms)
        self.takes_group = any(
            set(inspect.signature(function).parameters) & set(_PLURALS) for function, _, _ in self._terms
        )

    def run(self, samples: Sequence[Sample]) -> list[Value]:
        """The value of each sample, of a rubric without an async function."""
        states = [_state(sample) for sample in samples]
        results = [self._started(term, states) for term in self._terms]
        return self._summed(results, len(samples))

    async def run_async(self, samples: Sequence[Sample]) -> list[Value]:
        """The value of each sample."""
        return await self.of_states([_state(sample) for sample in samples])

    async def of_states(self, states: Sequence[Mapping[str, Any]]) -> list[Value]:
        """The value of each rollout, by the names that functions know it by."""
        results = []
        for term in self._terms:
            started = self._started(term, states)
            results.append([await x if isinstance(x, Awaitable) else x for x in started])
        return self._summed(results, len(states))

    def _started(self, term: Term, states: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The results of one function, or what to await for them, one a sample."""
        function, _, attributes = term
        parameters = inspect.signature(function).parameters
        whole = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        if set(parameters) & set(_PLURALS):
            columns = {plural: [state[name] for state in states] for plural, name in _PLURALS.items()}
            found = function(**_chosen({**attributes, **columns}, parameters, whole))
            if isinstance(found, Awaitable):
                raise ValueError(
                    f"{function.__name__}: found an async function of a group; expected a sync one"
                )
            if len(found) != len(states):
                raise ValueError(f"{function.__name__}: found {len(found)} values; expected {len(states)}")
            return list(found)
        return [function(**_chosen({**attributes, **state}, parameters, whole)) for state in states]

    def _summed(self, results: Sequence[Sequence[Any]], count: int) -> list[Value]:
        values: list[Value] = []
        for i in range(count):
            parts = {}
            total = 0.0
            for (function, weight, _), of_all in zip(self._terms, results, strict=True):
                value = as_value(of_all[i])
                if value is not None:
                    parts[function.__name__] = value
                    total += weight * value
            values.append((total if parts else None, parts))
        return values


Term = tuple[Callable[..., Any], float, Mapping[str, Any]]
"""A function, its weight, and the attributes of its rubric that it can name."""


def _terms(rubric: Any) -> Iterator[Term]:
    if hasattr(rubric, "rubrics"):  # a RubricGroup
        for inner in rubric.rubrics:
            yield from _terms(inner)
        return
    functions, weights = _functions(rubric) or (), _weights(rubric) or ()
    if len(functions) != len(weights):
        raise ValueError(
            f"found {len(functions)} functions and {len(weights)} weights; expected a weight each"
        )
    attributes = {"parser": getattr(rubric, "parser", None), **getattr(rubric, "class_objects", {})}
    for function, weight in zip(functions, weights, strict=True):
        yield function, float(weight), attributes


def _functions(rubric: Any) -> Sequence[Callable[..., Any]] | None:
    return next(
        (f for name in ("funcs", "reward_funcs") if (f := getattr(rubric, name, None)) is not None), None
    )


def _weights(rubric: Any) -> Sequence[float] | None:
    return next(
        (w for name in ("weights", "reward_weights") if (w := getattr(rubric, name, None)) is not None), None
    )


def _chosen(
    values: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], whole: bool
) -> dict[str, Any]:
    """The keyword arguments that ``parameters`` ask for. Raises KeyError for one that has no value."""
    if whole:
        return dict(values)
    missing = [
        name for name, p in parameters.items() if p.default is inspect.Parameter.empty and name not in values
    ]
    if missing:
        raise KeyError(
            f"nothing to pass for the parameter {missing[0]!r}; expected one of {', '.join(values)}"
        )
    return {name: values[name] for name in parameters if name in values}


def _state(sample: Sample) -> dict[str, Any]:
    """What verifiers knows of one rollout, by the names that it has there."""
    row = sample.row
    chat = isinstance(row.get("prompt"), (list, tuple))
    truth = row["answer"] if "answer" in row else truth_of(row)
    named = {
        "prompt": row["prompt"] if chat else sample.prompt,
        "completion": sample.turns if chat else sample.completion,
        "answer": "" if truth is None else truth,
        "info": row.get("info") or {},
        "task": row.get("task", "default"),
    }
    return {**named, "state": {**row, **named, "is_truncated": sample.finish_reason == "length"}}
