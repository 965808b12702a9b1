"""Environments of the real packages, skyrl_gym and verifiers; ``make test-environments`` has them.

Each is skipped where its package is not installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import EnvironmentSection
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.environments.protocol import Step
from asyncrl.errors import ConfigError, EnvironmentRaisedError, EnvironmentValueError


def needs(module: str) -> pytest.MarkDecorator:
    parent = module.partition(".")[0]
    missing = importlib.util.find_spec(parent) is None or importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed: make test-environments")


SKYRL = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Multiply(BaseTextEnv):
    def __init__(self, env_config, extras={}):
        super().__init__()
        self.truth, self.max_turns = extras["reward_spec"]["ground_truth"], extras["max_turns"]
        self.bonus = env_config.get("bonus", 0.0)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        done = self.turns >= self.max_turns or action == self.truth
        return BaseTextEnvStepOutput(
            observations=[] if done else [{"role": "user", "content": "again"}],
            reward=float(action == self.truth) + self.bonus, done=done, metadata={})
"""

VERIFIERS = '''
import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": "q", "answer": "7"}])

class Game(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["left"] = 3

    async def env_response(self, messages, state):
        state["left"] -= 1
        if messages[-1]["content"] == "end":
            state["final_env_response"] = [vf.UserMessage(content="bye")]
            return state["final_env_response"]
        return [vf.UserMessage(content=f"left {state['left']}")]

    @vf.stop
    async def is_right(self, state):
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1]["content"] == "7"

def right(completion, answer):
    said = [message["content"] for message in completion if message["role"] == "assistant"]
    if "raise" in said: raise ZeroDivisionError("on purpose")
    return float(answer in said)

async def heard(state):
    return float(state["left"])

def game():
    return Game(dataset=ROWS, rubric=vf.Rubric(funcs=[right, heard], weights=[1.0, 0.0]), max_turns=3)

def double(x: int) -> int:
    """Twice x."""
    return 2 * x

def tools():
    return vf.ToolEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[right]), tools=[double])

def single():
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[right]))
'''

TASKS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        if trace.last_reply == "raise": raise ZeroDivisionError("on purpose")
        return float(self.data.answer == trace.last_reply)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)

class InABox(Sum):
    @vf.reward
    async def files(self, trace, runtime) -> float:
        return 1.0
"""

PROMPT = [{"role": "user", "content": "q"}]


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


async def play(folder: Path, row: dict[str, Any], words: Sequence[str], **section: Any) -> list[Step]:
    """All that an environment says to these words, its opening and its last word included."""
    pool = EnvironmentPool(EnvironmentSection(**section), folder=folder)
    await pool.start()
    try:
        async with pool.session("train-0") as session:
            steps = [await session.reset({"prompt": PROMPT, **row}, PROMPT)]
            steps += [await session.step(said(word)) for word in words]
            return [*steps, await session.finish("stop" if steps[-1].done else "length")]
    finally:
        await pool.close()


def heard(steps: Sequence[Step]) -> list[str]:
    return [message["content"] for step in steps for message in step.messages]


@needs("skyrl_gym")
@pytest.mark.parametrize(
    ("path", "args", "env_class"),
    [
        ("user.py:Multiply", {"bonus": 0.25}, "of no concern"),
        (
            "skyrl_gym",
            {"register": {"multiply": "user.py:Multiply"}, "config": {"multiply": {"bonus": 0.25}}},
            "multiply",
        ),
    ],
)
async def test_skyrl_gym_by_class_and_by_the_rows_id(
    tmp_path: Path, path: str, args: dict[str, Any], env_class: str
) -> None:
    (tmp_path / "user.py").write_text(SKYRL)
    row = {"env_class": env_class, "reward_spec": {"method": "rule", "ground_truth": "42"}}
    steps = await play(tmp_path, row, ["1", "42"], path=path, args=args)
    assert steps[0] == Step()
    assert heard(steps) == ["again"]
    assert [step.reward for step in steps] == [None, 0.25, 1.5, None]
    assert steps[2].done
    steps = await play(tmp_path, row, ["1", "2", "3"], path=path, args=args, max_turns=3)
    assert steps[3].done, "its max_turns is the config's"


@needs("skyrl_gym")
async def test_skyrl_gyms_own_environments(tmp_path: Path) -> None:
    row = {"env_class": "gsm8k_multi_turn", "reward_spec": {"ground_truth": "7"}, "extra_info": {}}
    steps = await play(tmp_path, row, ["#### 6", "#### 7"], path="skyrl_gym", max_turns=4)
    assert [step.reward for step in steps[1:3]] == [pytest.approx(0.05), pytest.approx(1.05)]
    assert steps[3].metrics == {"steps": 2.0}
    steps = await play(tmp_path, row, ["#### 7"], path="skyrl_gym:gsm8k")
    assert (steps[1].done, steps[1].reward) == (True, 1.0)
    with pytest.raises(ConfigError, match="found no registered id 'gsm9k'; expected one of aime, gsm8k"):
        await play(tmp_path, row, [], path="skyrl_gym:gsm9k")
    with pytest.raises(EnvironmentValueError, match="env_class: found 'gsm9k'"):
        await play(tmp_path, {**row, "env_class": "gsm9k"}, [], path="skyrl_gym")


@needs("verifiers.envs")
async def test_verifiers_multi_turn(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(VERIFIERS)
    row = {"answer": "7"}
    steps = await play(tmp_path, row, ["6", "7"], path="user.py:game")
    assert heard(steps) == ["left 2"]
    assert [step.done for step in steps] == [False, False, True, True]
    assert steps[-1].reward == 1.0
    assert {"right": 1.0, "heard": 2.0, "num_turns": 2.0}.items() <= steps[-1].metrics.items()
    assert (await play(tmp_path, row, ["6", "end"], path="user.py:game"))[2].done, (
        "its final response ends it"
    )
    assert (await play(tmp_path, row, ["1", "2", "3"], path="user.py:game"))[3].done, "its max_turns"
    with pytest.raises(EnvironmentRaisedError, match="on purpose"):
        await play(tmp_path, row, ["raise", "7"], path="user.py:game")


@needs("verifiers.envs")
async def test_verifiers_tools_and_single_turn(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(VERIFIERS)
    calls = ['<tool_call>{"name": "double", "arguments": {"x": 21}}</tool_call>', "7"]
    steps = await play(tmp_path, {"answer": "7"}, calls, path="user.py:tools")
    assert heard(steps) == ["42"]
    assert steps[2].done
    assert (steps[3].reward, steps[3].metrics["double_calls"]) == (1.0, 1.0)
    steps = await play(tmp_path, {"answer": "7"}, ["6"], path="user.py:single")
    assert steps[1].done
    assert steps[2].reward == 0.0


@needs("verifiers.v1")
async def test_verifiers_tasks(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(TASKS)
    steps = await play(tmp_path, {"answer": "7"}, ["7"], path="user.py:Sum")
    assert steps[1] == Step(done=True)
    assert (steps[2].reward, steps[2].metrics) == (2.0, {"right": 1.0, "turns": 1.0})
    assert (await play(tmp_path, {"answer": "7"}, ["6"], path="user.py:Sum"))[2].reward == 0.0
    with pytest.raises(EnvironmentRaisedError, match="on purpose"):
        await play(tmp_path, {"answer": "7"}, ["raise"], path="user.py:Sum")
    with pytest.raises(ConfigError, match="InABox with files, which needs a runtime"):
        await play(tmp_path, {"answer": "7"}, [], path="user.py:InABox")
