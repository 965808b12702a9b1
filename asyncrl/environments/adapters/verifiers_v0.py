"""Environments of verifiers v0: ``MultiTurnEnv`` and what is derived from it.

One object serves all sessions of a process; what belongs to a rollout is in its state. The rubric scores the
state at the end. What its functions raise is a failure, where verifiers itself would make it 0.0.

Both ages of the interface are known: ``is_completed(state)`` with ``env_response`` returning messages, and
before 0.1.8 ``is_completed(messages, state)`` with ``env_response`` returning messages and the state.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.environments.protocol import BadAnswerError, Message, Step
from asyncrl.environments.tools import Reader, Settle
from asyncrl.errors import ConfigError
from asyncrl.rewards.binder import truth_of
from asyncrl.rewards.rubrics import RubricReward


class VerifiersEnvironment:
    """One rollout in the shared ``env``; ``read`` finds the calls in a message, where ``env`` has tools."""

    def __init__(self, env: Any, settle: Settle, read: Reader) -> None:
        self._env = env
        self._settle = settle
        self._read = read
        self._old = "messages" in inspect.signature(env.is_completed).parameters
        self._state: Any = None
        self._context: list[Any] = []
        self._cleaned = False

    def reset(self, row: Mapping[str, Any], prompt: Sequence[Message]) -> Step:
        truth = truth_of(row)
        begun = {
            "example_id": 0,
            "info": {},
            "answer": truth if truth is not None else "",
            **row,
            "prompt": [dict(message) for message in prompt],
        }
        self._state = self._begin(begun)
        changed = self._settle(self._env.setup_state(self._state))
        self._state = self._state if changed is None else changed
        messages = plain(self._state["prompt"])
        return Step() if messages == plain(prompt) else Step(messages, replaces=True)

    def step(self, message: Message) -> Step:
        said = self._said(message)
        return self._old_step(said) if self._old else self._new_step(said)

    def finish(self, reason: str) -> Step:
        state = self._state
        if not self._old:
            self._settle(self._env.render_completion(state))
        state["is_truncated"] = state.get("is_truncated", False) or reason == "length"
        self._clean_up()
        named = {
            **{key: state[key] for key in ("prompt", "completion", "answer")},
            "info": state.get("info") or {},
            "task": state.get("task", "default"),
            "state": state,
        }
        ((total, parts),) = self._settle(rubric_of(self._env).of_states([named]))
        return Step(done=True, reward=total, metrics=dict(parts))

    def close(self) -> None:
        if self._state is not None:
            self._clean_up()

    def _begin(self, row: Mapping[str, Any]) -> Any:
        if self._old:
            begun = {"completion": [], "responses": [], "turn": 0, "timing": {}, "id": row["example_id"]}
            return {"task": "default", **row, **begun}
        # It wants to know the model's client, and is never let near a model.
        return self._settle(self._env.init_state(dict(row), _client(), "asyncrl", None))

    def _said(self, message: Message) -> Any:
        raw: dict[str, Any] = dict(message)
        if any(getattr(self._env, name, None) for name in ("tool_defs", "oai_tools")):
            raw["tool_calls"] = [
                {
                    "id": f"call_{number}",
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": "" if call.arguments is None else json.dumps(call.arguments),
                    },
                }
                for number, call in enumerate(self._read(message["content"]))
            ]
        if self._old:
            return raw
        from verifiers.utils.message_utils import from_raw_message

        return from_raw_message(raw)

    def _old_step(self, said: Any) -> Step:
        state = self._state
        state["completion"].append(said)
        state["turn"] += 1
        context = [*state["prompt"], *state["completion"]]
        if self._settle(self._env.is_completed(context, state)):
            return Step(done=True)
        heard, self._state = self._settle(self._env.env_response(context, state))
        self._state["completion"] += heard
        return Step(plain(heard))

    def _new_step(self, said: Any) -> Step:
        env, state = self._env, self._state
        before = self._context or list(state["prompt"])
        turn = {
            "prompt": before,
            "completion": [said],
            "response": None,
            "tokens": None,
            "reward": None,
            "advantage": None,
            "is_truncated": False,
            "trajectory_id": state.get("trajectory_id"),
            "extras": {},
        }
        self._settle(env.add_trajectory_step(state, turn))
        if self._settle(env.is_completed(state)):
            return Step(done=True)
        self._context = list(self._settle(env.get_prompt_messages(state)))
        if state.get("final_env_response") is not None:
            return Step(done=True)
        history = plain([*before, said])
        whole = plain(self._context)
        if whole[: len(history)] != history:
            raise BadAnswerError(
                "step: found a get_prompt_messages that changes earlier messages; expected one that only "
                "appends: what was sampled stays as it was sampled"
            )
        return Step(whole[len(history) :])

    def _clean_up(self) -> None:
        """Its own handlers, once; they come before the rubric, as there."""
        function = getattr(self._env, "cleanup", None) or getattr(self._env, "_cleanup", None)
        if not self._cleaned and function is not None:
            self._cleaned = True
            self._settle(function(self._state))


def rubric_of(env: Any) -> RubricReward:
    """Its rubric as a reward of one rollout. Raises ConfigError for one that looks at whole groups."""
    reward = RubricReward(env.rubric)
    if reward.takes_group:
        raise ConfigError(
            "found a rubric with functions of whole groups; expected functions of one rollout: an "
            "environment knows its own alone. Name the rubric in reward.functions, and set "
            "environment.reward_weight to 0"
        )
    return reward


def plain(messages: Any) -> tuple[dict[str, str], ...]:
    """Messages of any age, dicts or objects, with roles and texts alone."""
    if isinstance(messages, str):
        return ({"role": "user", "content": messages},)
    return tuple({"role": str(message["role"]), "content": _text(message["content"])} for message in messages)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [
        getattr(part, "text", None) or (part.get("text") if isinstance(part, Mapping) else None)
        for part in content
    ]
    if any(part is None for part in parts):
        raise BadAnswerError("found a message with something other than text; expected text alone")
    return "".join(map(str, parts))


def _client() -> Any:
    try:
        from verifiers.types import ClientConfig
    except ImportError:
        return None  # where a state takes any client
    return ClientConfig()
