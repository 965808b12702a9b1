"""Environments of other projects, as their users write them, through the worker that runs them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import DataSection, EnvironmentSection
from asyncrl.environments.forms import recognise, tool_schemas
from asyncrl.environments.multi_turn import MultiTurn
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.environments.protocol import Step, as_opening, as_outcome, as_step
from asyncrl.environments.turns import TurnEncoder
from asyncrl.errors import ConfigError, EnvironmentRaisedError, EnvironmentValueError
from asyncrl.models.tokenizer import character_tokenizer
from asyncrl.types import Task
from tests.unit.test_environments import ScriptedModel

USER_CODE = '''
import asyncio, itertools

class Wordle:
    """TRL's."""
    def reset(self, word, **row) -> str | None:
        self.word, self.guesses = word, 0
        return " Guess it."

    def guess(self, letters: str) -> str:
        """Guess the word.

        Args:
            letters: Five of them.
        """
        self.guesses += 1
        return "right" if letters == self.word else "wrong"

    async def give_up(self) -> str:
        """End it."""
        await asyncio.sleep(0)
        return self.word

    def get_reward(self) -> float:
        return 1.0 / self.guesses if self.guesses else 0.0

    def _helper(self): ...

def make_wordle() -> Wordle:
    return Wordle()

def make_unannotated():
    return Wordle()

class Multiply:
    """skyrl_gym's."""
    def __init__(self, env_config, extras):
        self.truth, self.turns = extras["reward_spec"]["ground_truth"], 0
        self.most, self.bonus = extras["max_turns"], env_config.bonus

    def init(self, prompt):
        return [{"role": "system", "content": "s"}, *prompt], {}

    def step(self, action):
        self.turns += 1
        if action == "cut":
            return {"observations": [], "reward": 0.0, "done": False, "metadata": {},
                    "postprocessed_action": "c"}
        right = action == self.truth
        return {"observations": [] if right else [{"role": "user", "content": "again"}],
                "reward": 1.0 if right else self.bonus,
                "done": right or self.turns == self.most, "metadata": {}}

    def get_metrics(self):
        return {"turns": self.turns, "name": "text"}

    def close(self): ...

class Rubric:
    def __init__(self, funcs, weights):
        self.funcs, self.weights = funcs, weights

class OldVerifiers:
    """Of verifiers before 0.1.8."""
    made = itertools.count()
    def __init__(self, rubric=None):
        self.number = next(OldVerifiers.made)
        self.rubric = rubric or Rubric([self.right, self.short], [1.0, 0.5])
    def right(self, completion, answer, state, **kwargs):
        return float(completion[-1]["content"] == answer)
    async def short(self, completion):
        return 1.0 if len(completion) < 4 else 0.0
    def setup_state(self, state, **kwargs):
        state["heard"] = 0
        return state
    async def is_completed(self, messages, state, **kwargs):
        if messages[-1]["content"] == "raise": raise ZeroDivisionError("on purpose")
        return messages[-1]["content"] == state["answer"]
    def env_response(self, messages, state, **kwargs):
        state["heard"] += 1
        return [{"role": "user", "content": f"{self.number}:{state['heard']}:{state['turn']}"}], state

def load_environment(**kwargs):
    return OldVerifiers(**kwargs)

def whole_groups():
    return OldVerifiers(Rubric([lambda completions: [0.0]], [1.0]))

class Ended:
    """Ours, with a word at the end."""
    def reset(self, task):
        return {"prompt": "instead"}
    def step(self, message):
        if message["content"] == "own": return {"done": True, "reward": 3}
        return "go on"
    def finish(self, reason):
        return {"reward": 0.5, "metrics": {"was_cut": reason == "length"}}

class OwnLoop:
    """Sync code that runs a loop of its own."""
    def reset(self, task): ...
    def step(self, message):
        async def value():
            return "from a loop"
        return asyncio.run(value())
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "user.py").write_text(USER_CODE)
    return tmp_path


@asynccontextmanager
async def pool_of(folder: Path, path: str, **section: Any) -> AsyncIterator[EnvironmentPool]:
    pool = EnvironmentPool(EnvironmentSection(path=path, **section), folder=folder)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


PROMPT = [{"role": "user", "content": "go"}]


def call(name: str, arguments: str = "{}") -> dict[str, str]:
    return said(f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>')


async def test_trl(folder: Path) -> None:
    async with (
        pool_of(folder, "user.py:Wordle") as pool,
        pool.session("a") as session,
        pool.session("b") as other,
    ):
        opening = await session.reset({"word": "crane", "prompt": PROMPT}, PROMPT)
        assert opening == Step(({"role": "user", "content": "go Guess it."},), replaces=True)
        await other.reset({"word": "other"}, PROMPT)
        assert (await session.step(call("guess", '{"letters": "house"}'))).messages == (
            {"role": "tool", "content": "wrong"},
        )
        assert (await session.step(call("give_up"))).messages[0]["content"] == "crane"
        assert "found no tool '_helper'" in (await session.step(call("_helper"))).messages[0]["content"]
        assert (
            (await session.step(call("guess", '{"letters": 5}'))).messages[0]["content"].startswith("error")
        )
        await session.step(call("guess", '{"letters": "crane"}'))
        assert await session.step(said("It is crane.")) == Step(done=True)
        assert (await session.finish("stop")).reward == 0.5
        assert (await other.finish("length")).reward == 0.0


@pytest.mark.parametrize(
    ("path", "form"), [("Wordle", "auto"), ("make_wordle", "auto"), ("make_unannotated", "trl")]
)
def test_the_tools_of_trl_are_shown_in_the_prompt(folder: Path, path: str, form: Any) -> None:
    section = EnvironmentSection(path=f"user.py:{path}", form=form)
    tools = [tool["function"] for tool in tool_schemas(section, folder)]
    assert [(tool["name"], tool["description"]) for tool in tools] == [
        ("give_up", "End it."),
        ("guess", "Guess the word."),
    ]
    assert tools[1]["parameters"]["properties"] == {
        "letters": {"type": "string", "description": "Five of them."}
    }
    assert tool_schemas(EnvironmentSection(path="user.py:Ended"), folder) == []


async def test_skyrl(folder: Path) -> None:
    row = {"prompt": PROMPT, "env_class": "x", "reward_spec": {"ground_truth": "42"}}
    section = {"args": {"bonus": 0.25}, "max_turns": 4}
    async with pool_of(folder, "user.py:Multiply", **section) as pool, pool.session("a") as session:
        opening = await session.reset(row, PROMPT)
        assert opening.messages == ({"role": "system", "content": "s"}, *PROMPT)
        assert opening.replaces
        assert await session.step(said("41")) == Step(({"role": "user", "content": "again"},), False, 0.25)
        with pytest.raises(EnvironmentValueError, match=r"postprocessed_action.*Set rollout\.stop"):
            await session.step(said("cut"))
        assert await session.step(said("42")) == Step((), True, 1.25)
        assert await session.finish("stop") == Step(done=True, metrics={"turns": 3})


async def test_old_verifiers(folder: Path) -> None:
    row = {"prompt": PROMPT, "answer": "42"}
    async with pool_of(folder, "user.py:load_environment") as pool:
        async with pool.session("a") as session, pool.session("b") as other:
            assert await session.reset(row, PROMPT) == Step()
            await other.reset(row, PROMPT)
            assert (await session.step(said("x"))).messages == ({"role": "user", "content": "0:1:1"},)
            assert (await other.step(said("x"))).messages[0]["content"] == "0:1:1", "one, with a state each"
            assert await session.step(said("42")) == Step(done=True)
            assert await session.finish("stop") == Step(
                done=True, reward=1.5, metrics={"right": 1.0, "short": 1.0}
            )
            with pytest.raises(EnvironmentRaisedError, match="on purpose"):
                await other.step(said("raise"))
        async with pool.session("c") as session:
            await session.reset(row, PROMPT)
            await session.step(said("x"))
            await session.step(said("y"))
            assert (await session.finish("length")).reward == 0.0


async def test_ours_may_have_the_last_word(folder: Path) -> None:
    section = EnvironmentSection(path="user.py:Ended", max_turns=2)
    tokenizer = character_tokenizer(256)
    encoder = TurnEncoder(DataSection(train="x"), tokenizer)  # type: ignore[arg-type]
    async with pool_of(folder, "user.py:Ended") as pool:
        play = MultiTurn(pool, section, encoder, lambda ids: str(tokenizer.decode(ids)), 16)
        task = Task(0, "train-0", "go", tuple(tokenizer("go")["input_ids"]), {"prompt": "go"})
        result = await play(task, ScriptedModel(["a", "b"], most=40))
        assert tokenizer.decode(result.prompt_ids) == "instead"
        assert dict(result.rewards) == {"environment": 0.5, "environment/was_cut": 1.0}
        result = await play(task, ScriptedModel(["own"], most=40))
        assert dict(result.rewards) == {"environment": 0.5, "environment/was_cut": 0.0}
    async with pool_of(folder, "user.py:OwnLoop") as pool, pool.session("a") as session:
        await session.reset({})
        assert (await session.step(said("x"))).messages[0]["content"] == "from a loop"
        assert await session.finish("stop") == Step(done=True)


@pytest.mark.parametrize(
    ("path", "section", "text"),
    [
        ("user.py:make_unannotated", {}, "set environment.form to trl"),
        ("user.py:whole_groups", {}, "functions of whole groups"),
        ("user.py:Wordle", {"form": "asyncrl"}, "found no method step; expected reset and step"),
        ("user.py:load_environment", {"args": {"rubrik": 1}}, "unexpected keyword argument 'rubrik'"),
    ],
)
async def test_what_cannot_be_taken(folder: Path, path: str, section: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        async with pool_of(folder, path, **section):
            pass


def test_what_an_environment_may_say_at_its_begin_and_end() -> None:
    assert as_opening(None) == Step()
    assert as_opening("x") == Step(({"role": "user", "content": "x"},))
    assert as_outcome(None) == Step(done=True)
    assert as_outcome({"metrics": {"a": 1}}) == Step(done=True, metrics={"a": 1.0})
    assert as_step({"done": True, "metrics": {"a": 2}}).metrics == {"a": 2.0}
    for wrong in ({"score": 1}, {"reward": float("nan")}, {"metrics": {"a": "x"}}, {"metrics": 1}, "1"):
        with pytest.raises(ValueError, match="expected"):
            as_outcome(wrong)
    with pytest.raises(ValueError, match="empty prompt"):
        as_opening({"prompt": []})


def test_our_own_form_comes_first() -> None:
    class Both:
        def reset(self) -> None: ...
        def step(self) -> None: ...
        def init(self) -> None: ...
        def env_response(self) -> None: ...
        def get_reward(self) -> None: ...

    assert recognise(Both) == recognise(Both()) == "asyncrl"
