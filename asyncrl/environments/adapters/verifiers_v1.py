"""Tasks of verifiers v1: a row is a task's data, and the task's own ``@reward`` methods score the one answer.

What a v1 task needs a harness, a runtime or tool servers for is refused: those bring a loop of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.environments.protocol import Message, Step
from asyncrl.environments.tools import Settle
from asyncrl.errors import ConfigError


class VerifiersTask:
    """One trajectory at a task of the class ``task_type``: its first message is the answer."""

    def __init__(self, task_type: Any, settle: Settle) -> None:
        self._type = task_type
        self._settle = settle
        self._task: Any = None
        self._prompt: Sequence[Message] = ()
        self._answer: Message | None = None

    def reset(self, row: Mapping[str, Any], prompt: Sequence[Message]) -> Step:
        self._task = self._type(self._type.data_type()(**row))
        self._prompt = prompt
        return Step()

    def step(self, message: Message) -> Step:
        self._answer = message
        return Step(done=True)

    def finish(self, reason: str) -> Step:
        if self._answer is None:
            return Step(done=True)
        trace = _trace(self._task, [*self._prompt, self._answer])
        trace.stop_condition = "max_output_tokens" if reason == "length" else None
        self._settle(self._task.score(trace))
        metrics = {
            **{name: float(reward.score) for name, reward in trace.rewards.items() if reward is not None},
            **{name: float(value) for name, value in trace.metrics.items() if value is not None},
        }
        return Step(done=True, reward=float(trace.reward), metrics=metrics)

    def close(self) -> None: ...


def require_offline(task_type: Any) -> None:
    """Raise ConfigError for tasks that cannot be scored from a conversation alone."""
    from verifiers.v1.task import Task

    name = task_type.__name__
    replaced = [hook for hook in ("setup", "finalize") if getattr(task_type, hook) is not getattr(Task, hook)]
    wanting = [
        function.__name__
        for _, function in inspect.getmembers(task_type, inspect.isfunction)
        if getattr(function, "reward", False) and _needs_runtime(function)
    ]
    if replaced or wanting:
        raise ConfigError(
            f"environment: found the verifiers task {name} with {', '.join(replaced + wanting)}, which "
            "needs a runtime; expected rewards of the trace alone"
        )
    if task_type.toolsets(task_type.config_type()()):
        raise ConfigError(
            f"environment: found the verifiers task {name} with tool servers; expected none: give the model "
            "tools as functions, with environment.path tools"
        )


def _needs_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _trace(task: Any, messages: Sequence[Message]) -> Any:
    """The conversation as verifiers records one; the last message alone is sampled."""
    from verifiers.v1 import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

    kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    nodes = [
        MessageNode(
            parent=number - 1 if number else None,
            message=kinds[message["role"]](content=message["content"]),
            sampled=number == len(messages) - 1,
        )
        for number, message in enumerate(messages)
    ]
    return Trace(
        task=TraceTask(type=type(task).__name__, data=task.data),
        agent=AgentInfo(config=AgentConfig()),
        nodes=nodes,
    )
