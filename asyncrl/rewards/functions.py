"""A reward function as the worker calls it, whatever the user wrote: one face for all forms.

Invariant: n samples give n values or an exception; a function of one sample is only ever given one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from asyncrl.errors import ConfigError
from asyncrl.functions import load_function
from asyncrl.rewards.binder import Logged, Sample, Signature, group_values, named_values, signature_of
from asyncrl.rewards.builtin import BUILTIN
from asyncrl.rewards.remote import RemoteReward, is_url
from asyncrl.rewards.results import Value, of_group, of_sample
from asyncrl.rewards.rubrics import RubricReward, is_rubric

Reader = Callable[[Any], list[Value]]
"""From what a function returned to a value a sample. Raises ValueError saying what is wrong with it."""


class Function(Protocol):
    """One configured reward function, loaded."""

    @property
    def signature(self) -> Signature: ...

    def start(self, samples: Sequence[Sample]) -> tuple[Any, Reader]:
        """Call it: what it returned (of an async one, what to await), and how that is read.

        The user's exceptions come through.
        """
        ...


class BoundFunction:
    """A callable of the user's, bound by the names of its parameters."""

    def __init__(self, call: Callable[..., Any], name: str, args: Mapping[str, Any]) -> None:
        self.signature = signature_of(call, name, args)
        self._call = call
        self._args = args

    def start(self, samples: Sequence[Sample]) -> tuple[Any, Reader]:
        signature = self.signature
        if not signature.takes_group:
            sample = samples[0]
            arguments = signature.arguments(named_values(sample), sample.row)
            return self._call(**{**arguments, **self._args}), lambda result: [of_sample(result)]
        logged = Logged()
        arguments = signature.arguments(group_values(samples, signature.call, logged), {})
        result = self._call(**{**arguments, **self._args})
        return result, partial(of_group, count=len(samples), logged=logged)


class _Ready:
    """A reward that makes its values itself."""

    def __init__(self, signature: Signature, run: Callable[[Sequence[Sample]], Any]) -> None:
        self.signature = signature
        self._run = run

    def start(self, samples: Sequence[Sample]) -> tuple[Any, Reader]:
        return self._run(samples), lambda values: list(values)


def load(
    path: str, name: str | None, args: Mapping[str, Any], folder: Path, timeout_s: float = 10.0
) -> Function:
    """Find and inspect one function. Raises ConfigError."""
    label = name or path.rpartition(":")[2]
    try:
        if is_url(path):
            remote = RemoteReward(path, **{"timeout_s": timeout_s, **args})
            return _Ready(_open_signature(name or "remote", is_async=True, group=True), remote.run_async)
        if path in BUILTIN:
            return BoundFunction(BUILTIN[path], label, args)
        if ":" not in path and "." not in path:
            raise ConfigError(
                f"found {path!r}; expected package.module:function, file.py:function, a URL, or one of the "
                f"built-in {', '.join(BUILTIN)}"
            )
        found = load_function(path, folder, is_wanted=lambda thing: callable(thing) or is_rubric(thing))
        if is_rubric(found):
            rubric = RubricReward(found)
            signature = _open_signature(label, is_async=rubric.is_async, group=rubric.takes_group)
            return _Ready(signature, rubric.run_async if rubric.is_async else rubric.run)
        return BoundFunction(found, label, args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _open_signature(name: str, *, is_async: bool, group: bool) -> Signature:
    """Of something that takes whatever there is."""
    call: Any = "trl" if group else "sample"
    return Signature(name, (), (), True, is_async, call=call, accepts_any=True)
