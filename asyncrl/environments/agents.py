"""Users' agents in the process that runs them, as environments whose one step is the whole agent.

An agent is a function ``agent(task, base_url, **args) -> reward | None``, plain or async, with the row of the
data set and the address of the policy; or a command, which finds the address in ``OPENAI_BASE_URL`` and the
row, as JSON, on its standard input. A last line of its output such as ``{"reward": 1.0}`` is its reward.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.functions import load_function

_NO_KEY = {"OPENAI_API_KEY": "none"}
"""What OpenAI's clients want to have; the address alone counts."""
_TAIL_CHARACTERS = 2000


class FunctionAgent:
    """Calls ``path`` with a task, an address and ``args``."""

    def __init__(self, path: str, args: Mapping[str, Any]) -> None:
        self._function = _loaded(path)
        self._args = args
        self._task: Mapping[str, Any] = {}

    @classmethod
    def check(cls, path: str, args: Mapping[str, Any]) -> None:
        """Raise ConfigError where there is no such function, or it cannot be called so."""
        function = _loaded(path)
        try:
            inspect.signature(function).bind({}, "", **args)
        except TypeError as error:
            raise ConfigError(
                f"{path}: {error}; expected a function of task and base_url, and of args {dict(args)}"
            ) from error

    def reset(self, task: Mapping[str, Any]) -> None:
        self._task = task

    def step(self, where: Mapping[str, str]) -> Any:
        result = self._function(dict(self._task), where["base_url"], **self._args)
        return _awaited(result) if inspect.isawaitable(result) else _ended(result)


class CommandAgent:
    """Runs ``command`` in the folder of the run."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._task: Mapping[str, Any] = {}
        self._process: subprocess.Popen[str] | None = None
        self._over = False

    def reset(self, task: Mapping[str, Any]) -> None:
        self._task = task

    def step(self, where: Mapping[str, str]) -> Any:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**_NO_KEY, **os.environ, "OPENAI_BASE_URL": where["base_url"]},
        )
        if self._over:
            self._process.kill()
        said, complained = self._process.communicate(json.dumps(self._task, default=str))
        if self._process.returncode:
            raise RuntimeError(
                f"the command ended with code {self._process.returncode}:\n{complained[-_TAIL_CHARACTERS:]}"
            )
        return _ended(_reward_of(said))

    def interrupt(self) -> None:
        """Nobody waits for it any more; may come from another thread."""
        self._over = True
        if self._process is not None:
            self._process.kill()


def _loaded(path: str) -> Callable[..., Any]:
    for name, value in _NO_KEY.items():
        os.environ.setdefault(name, value)  # before the import: modules make their clients there
    return load_function(path, Path.cwd())


def _reward_of(output: str) -> Any:
    lines = output.split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    try:
        found = json.loads(last)
    except ValueError:
        return None
    return found.get("reward") if isinstance(found, dict) else None


async def _awaited(result: Awaitable[Any]) -> Any:
    return _ended(await result)


def _ended(reward: Any) -> dict[str, Any]:
    return {"done": True, "reward": reward}
