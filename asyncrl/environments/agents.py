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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.environments.protocol import Message, Step, as_step
from asyncrl.environments.tools import Settle
from asyncrl.errors import ConfigError
from asyncrl.functions import load_function
from asyncrl.sections.rewards import COMMAND

_NO_KEY = {"OPENAI_API_KEY": "none"}
"""What OpenAI's clients want to have; the address alone counts."""
_TAIL_CHARACTERS = 2000


class Agent:
    """Whatever an agent is, its environment begins with a row, and has one step."""

    def __init__(self) -> None:
        self._task: Mapping[str, Any] = {}

    def reset(self, row: Mapping[str, Any], prompt: Sequence[Message]) -> Step:
        self._task = row
        return Step()

    def finish(self, reason: str) -> Step:
        return Step(done=True)

    def close(self) -> None:
        """It leaves nothing behind."""


class FunctionAgent(Agent):
    """Calls ``function`` with a task, an address and ``args``."""

    def __init__(self, function: Callable[..., Any], args: Mapping[str, Any], settle: Settle) -> None:
        super().__init__()
        self._function = function
        self._args = args
        self._settle = settle

    def step(self, where: Message) -> Step:
        return _ended(self._settle(self._function(dict(self._task), where["base_url"], **self._args)))


class CommandAgent(Agent):
    """Runs ``command`` in the folder of the run."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__()
        self._command = list(command)
        self._process: subprocess.Popen[str] | None = None
        self._over = False

    def step(self, where: Message) -> Step:
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


def load_agent(
    path: str, args: Mapping[str, Any], command: Sequence[str]
) -> Callable[[Settle], FunctionAgent | CommandAgent]:
    """What makes the agents of ``path``. Raises ConfigError for one that is not there, or not callable so."""
    if path == COMMAND:
        return lambda settle: CommandAgent(command)
    function = _loaded(path)
    try:
        inspect.signature(function).bind({}, "", **args)
    except TypeError as error:
        raise ConfigError(
            f"{path}: {error}; expected a function of task and base_url, and of args {dict(args)}"
        ) from error
    return lambda settle: FunctionAgent(function, args, settle)


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


def _ended(reward: Any) -> Step:
    return as_step({"done": True, "reward": reward})
