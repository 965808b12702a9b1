"""skyrl_gym's environments: ``init(prompt)``, ``step(action)``, ``close()``, made with a row's ``extras``.

Rewards of steps are summed, as SkyRL sums them for a trajectory's advantage.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.environments.adapters.base import close
from asyncrl.environments.protocol import BadAnswerError, Message, Step, as_messages, as_outcome, as_step
from asyncrl.environments.tools import Settle
from asyncrl.errors import ConfigError
from asyncrl.functions import load_function

Make = Callable[[str | None, dict[str, Any]], Any]
"""From a row's ``env_class`` and its extras to an environment."""

_NO_EXTRAS = ("prompt", "env_class")
_KEYS = {"observations", "reward", "done"}


class SkyRLEnvironment:
    """One of skyrl_gym's, made at its reset, when its row is known."""

    def __init__(self, make: Make, settle: Settle, max_turns: int) -> None:
        self._make = make
        self._settle = settle
        self._max_turns = max_turns
        self._made: Any = None
        self._reward = 0.0

    def reset(self, row: Mapping[str, Any], prompt: Sequence[Message]) -> Step:
        extras = {key: value for key, value in row.items() if key not in _NO_EXTRAS}
        self._made = self._make(row.get("env_class"), {**extras, "max_turns": self._max_turns})
        messages, _ = self._settle(self._made.init(copy.deepcopy([dict(m) for m in prompt])))
        if list(messages) == [dict(m) for m in prompt]:
            return Step()
        return Step(tuple(dict(m) for m in messages), replaces=True)

    def step(self, message: Message) -> Step:
        result = self._settle(self._made.step(message["content"]))
        if not isinstance(result, Mapping) or not set(result) >= _KEYS:
            raise BadAnswerError(
                f"step: found {sorted(result) if isinstance(result, Mapping) else type(result).__name__}; "
                "expected a dict with observations, reward and done"
            )
        if result.get("postprocessed_action") not in (None, message["content"]):
            raise BadAnswerError(
                "step: found a postprocessed_action that is not the model's message; expected none: what was "
                "sampled stays as it was sampled. Set rollout.stop to end turns where it would cut them"
            )
        outcome = as_step({"done": True, "reward": result["reward"]})
        self._reward += outcome.reward or 0.0
        done = bool(result["done"])
        return Step(() if done else as_messages(result["observations"]), done, self._reward)

    def finish(self, reason: str) -> Step:
        function = getattr(self._made, "get_metrics", None)
        numbers = {} if function is None else self._settle(function())
        return as_outcome({"metrics": {k: v for k, v in numbers.items() if isinstance(v, (int, float))}})

    def close(self) -> None:
        if self._made is not None:
            close(self._made, self._settle)


def of_class(found: Callable[..., Any], args: Mapping[str, Any]) -> Make:
    """What makes ``found``: with ``extras``, and ``args`` as its ``env_config``, where it takes them."""
    parameters = inspect.signature(found).parameters
    whole = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    def make(env_class: str | None, extras: dict[str, Any]) -> Any:
        given = {"env_config": _config(args), "extras": extras}
        return found(**{name: value for name, value in given.items() if whole or name in parameters})

    return make


def by_row(name: str | None, args: Mapping[str, Any], folder: Path) -> Make:
    """What makes the registered environment ``name``, or without one that which a row's ``env_class`` names.

    ``args``: ``register`` maps more ids to ``file.py:Class`` or ``package.module:Class``, ``config`` maps ids
    to their ``env_config``. Raises ConfigError for an id that is not registered, and without the package.
    """
    try:
        import skyrl_gym
    except ImportError as error:
        raise ConfigError(f"environment.path skyrl_gym: {error}; expected the package skyrl-gym") from error
    unknown = sorted(set(args) - {"register", "config"})
    if unknown:
        raise ConfigError(f"args: found {', '.join(unknown)}; expected register, config or both")
    for env_id, path in args.get("register", {}).items():
        found = load_function(path, folder)
        # As SkyRL calls an entry point, so that its own classes and functions are both fine.
        skyrl_gym.register(id=env_id, entry_point=found)
    configs = args.get("config", {})

    def make(env_class: str | None, extras: dict[str, Any]) -> Any:
        env_id = name or env_class
        if env_id not in skyrl_gym.registry:
            raise BadAnswerError(
                f"env_class: found {env_id!r}; expected one of {', '.join(skyrl_gym.registry)}, or another "
                "in environment.args.register"
            )
        return skyrl_gym.make(env_id, env_config=_config(configs.get(env_id, {})), extras=extras)

    if name is not None and name not in skyrl_gym.registry:
        raise ConfigError(
            f"environment.path: found no registered id {name!r}; expected one of "
            f"{', '.join(skyrl_gym.registry)}, or another in args.register"
        )
    return make


def _config(values: Mapping[str, Any]) -> Any:
    """``values`` with the access by attribute that its environments are used to."""
    from omegaconf import OmegaConf

    return OmegaConf.create(dict(values))
