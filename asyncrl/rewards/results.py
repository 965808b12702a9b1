"""What reward functions return, in all the ways in which users write it, as numbers.

Invariants:
- A value is one finite number, or None where the function does not apply: anything else raises ValueError.
- What a function says beside its reward becomes numbers by name; what is no number is left out of them.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.rewards.binder import Logged

Value = tuple[float | None, dict[str, float]]
"""The reward, and what else was said of the sample."""


def as_value(result: Any) -> float | None:
    """A function's result as one finite number; None stays None. Raises ValueError saying why not."""
    if result is None:
        return None
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(
                f"found a dict with {', '.join(map(str, result)) or 'nothing'}; expected 'score' in it"
            )
        return as_value(result["score"])
    if isinstance(result, (list, tuple)):
        raise ValueError(
            f"found {len(result)} values, {_short(result)}; expected 1 number for the 1 completion"
        )
    if not isinstance(result, numbers.Real) and getattr(result, "ndim", None) == 0:
        result = result.item()  # a scalar of numpy or torch
    if inspect.iscoroutine(result):
        result.close()
        raise ValueError("found a coroutine; expected a number: write the function as async def")
    if not isinstance(result, numbers.Real):
        raise ValueError(f"found {_short(result)} ({type(result).__name__}); expected a finite number")
    try:
        value = float(result)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"found {value}; expected a finite number")
    return value


def of_sample(result: Any) -> Value:
    """What a function of one sample returned: a number, None, or verl's dict with ``score``."""
    extras: dict[str, float] = {}
    if isinstance(result, Mapping):
        extras = {str(k): x for k, v in result.items() if k != "score" and (x := _number(v)) is not None}
    return as_value(result), extras


def of_group(result: Any, count: int, logged: Logged) -> list[Value]:
    """What a function of a group of ``count`` returned: a list, or OpenRLHF's dict with ``rewards``."""
    columns = dict(logged.extras)
    constants = dict(logged.metrics)
    if isinstance(result, Mapping):
        if "rewards" not in result:
            raise ValueError(
                f"found a dict with {', '.join(map(str, result)) or 'nothing'}; expected 'rewards' in it"
            )
        logs = result.get("extra_logs") or {}
        for name, given in {**logs, "scores": result.get("scores")}.items():
            listed = _listed(given)
            if isinstance(listed, list):
                columns[str(name)] = listed
            else:
                constants[str(name)] = listed
        result = result["rewards"]
    values = _listed(result)
    if not isinstance(values, list):
        values = [values]
    if len(values) != count:
        raise ValueError(
            f"found {len(values)} values, {_short(values)}; expected {count}, one a completion of the group"
        )
    shared = {name: x for name, v in constants.items() if (x := _number(v)) is not None}
    return [(as_value(value), {**_row(columns, i, count), **shared}) for i, value in enumerate(values)]


def _row(columns: Mapping[str, Sequence[Any]], index: int, count: int) -> dict[str, float]:
    whole = {name: column for name, column in columns.items() if len(column) == count}
    return {name: x for name, column in whole.items() if (x := _number(column[index])) is not None}


def _listed(values: Any) -> Any:
    """Tensors and tuples as lists, scalars as they are."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    return list(values) if isinstance(values, tuple) else values


def _number(value: Any) -> float | None:
    """``value`` if it is one finite number."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    return float(value) if math.isfinite(value) else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."
