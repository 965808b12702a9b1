"""From a name or a user's path in the config to a function.

A user's function has the signature of the built-in ones: an advantage takes (rewards, lengths) of one
group and returns one number a sample; a loss takes (``LossInputs``, ``LossSettings``) and returns a
``TokenLoss``. What it returns is checked on every call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from asyncrl.algorithms.advantages import GroupAdvantage
from asyncrl.algorithms.losses import LOSSES, LossInputs, LossSettings, PolicyLoss, TokenLoss
from asyncrl.algorithms.names import is_path
from asyncrl.errors import ConfigError
from asyncrl.functions import load_function


def user_advantage(path: str, folder: Path) -> GroupAdvantage:
    """The user's advantage at ``path``, looked up from ``folder``; ConfigError if there is none.

    Called with a group of any size, also of one, and of equal rewards.
    """
    function = _loaded("algorithm.advantage", path, folder, "(rewards, lengths)")

    def checked(rewards: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
        try:
            found = function(list(rewards), list(lengths))
        except Exception as error:
            raise ConfigError(
                f"algorithm.advantage: {path} raised {type(error).__name__}: {error} for the rewards "
                f"{tuple(rewards)}"
            ) from error
        numbers = tuple(found) if hasattr(found, "__len__") else (found,)
        if len(numbers) != len(rewards):
            raise ConfigError(
                f"algorithm.advantage: {path} returned {len(numbers)} values for {len(rewards)} rewards; "
                "expected one a reward"
            )
        if not all(hasattr(n, "__float__") for n in numbers):
            raise ConfigError(f"algorithm.advantage: {path} returned {numbers!r:.200}; expected numbers")
        bad = [i for i, n in enumerate(numbers) if not isfinite(float(n))]
        if bad:
            raise ConfigError(
                f"algorithm.advantage: {path} returned {numbers[bad[0]]} for sample {bad[0]} of the rewards "
                f"{tuple(rewards)}; expected finite numbers"
            )
        return tuple(float(n) for n in numbers)

    return checked


def policy_loss(name: str, folder: Path) -> PolicyLoss:
    """The loss called ``name``, or the user's at that path; ConfigError if there is none."""
    if not is_path(name):
        return LOSSES[name]
    function = _loaded("algorithm.loss", name, folder, "(inputs, settings)")

    def checked(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
        found = function(inputs, settings)
        if not isinstance(found, TokenLoss):
            raise ConfigError(
                f"algorithm.loss: {name} returned {type(found).__name__}; expected an "
                "asyncrl.algorithms.losses.TokenLoss"
            )
        if found.loss.shape != inputs.mask.shape:
            raise ConfigError(
                f"algorithm.loss: {name} returned a loss of shape {tuple(found.loss.shape)}; expected one "
                f"number a token, {tuple(inputs.mask.shape)}"
            )
        return found

    return checked


def _loaded(key: str, path: str, folder: Path, arguments: str) -> Callable[..., Any]:
    try:
        function = load_function(path, folder)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"{key}: {path}{inspect.signature(function)} cannot be called with the two arguments "
            f"{arguments}: {error}"
        ) from error
    except ValueError:
        pass  # a C function shows no signature: its first call will tell
    return function
