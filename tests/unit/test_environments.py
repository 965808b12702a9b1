"""Environments: what they may return, tokens of several turns, budgets, and what their processes survive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from asyncrl.algorithms.aggregation import StepCounts
from asyncrl.config import AlgorithmSection, DataSection, EnvironmentSection
from asyncrl.config_load import parse_config
from asyncrl.environments.multi_turn import MultiTurn
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.environments.protocol import Step, as_step
from asyncrl.environments.tools import ToolEnvironment, checked, schema, tool_calls
from asyncrl.environments.turns import TurnEncoder
from asyncrl.errors import (
    ConfigError,
    EnvironmentRaisedError,
    EnvironmentTimeoutError,
    EnvironmentValueError,
    EnvironmentWorkerError,
)
from asyncrl.learners.base import TrainSample
from asyncrl.learners.collate import collate
from asyncrl.learners.objective import Objective, Tally
from asyncrl.learners.policy import selected_logits
from asyncrl.models.tokenizer import EOS, character_tokenizer
from asyncrl.types import Completion, FinishReason, SamplingParams, Task, Trajectory
from tests.unit.recorded_batches import VOCABULARY
from tests.unit.test_loss_split import policy

USER_CODE = """
import asyncio, os, threading, time

class Echo:
    def __init__(self, greeting=None):
        self.greeting = greeting
    def reset(self, task):
        self.seen = 0
        self.thread = threading.get_ident()
        return self.greeting
    def step(self, message):
        assert threading.get_ident() == self.thread
        self.seen += 1
        word = message["content"]
        if word == "raise": raise ZeroDivisionError("on purpose")
        if word == "exit": os._exit(7)
        if word == "hang":
            while True: pass
        if word == "big": return "x" * (10 << 20)
        if word == "odd": return 3
        if word == "sleep": time.sleep(0.5)
        if word == "pid": return str(os.getpid())
        if word == "end": return {"done": True, "reward": self.seen}
        return f"{self.seen}:{word}"

class Slow:
    async def reset(self, task):
        return None
    async def step(self, message):
        await asyncio.sleep(0.5)
        return {"done": True, "reward": 1.0}

class NoStep:
    def reset(self, task): ...
"""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\\n{{ m['content'] }}<eos>\\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "user.py").write_text(USER_CODE)
    return tmp_path


@asynccontextmanager
async def pool_of(folder: Path, name: str = "Echo", **section: Any) -> AsyncIterator[EnvironmentPool]:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    pool = EnvironmentPool(EnvironmentSection(path=f"user.py:{name}", **section), folder=folder)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()
        assert not {p.pid for p in psutil.Process().children(recursive=True)} - before


def said(content: str) -> dict[str, str]:
    return heard(content, "assistant")


def heard(content: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": content}


# --- what a step may return ---


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ("seen", Step(({"role": "user", "content": "seen"},))),
        ({"role": "tool", "content": "4"}, Step(({"role": "tool", "content": "4"},))),
        (
            ["a", {"role": "tool", "content": "b"}],
            Step(({"role": "user", "content": "a"}, {"role": "tool", "content": "b"})),
        ),
        (None, Step(done=True)),
        (True, Step(done=True)),
        ({"done": True, "reward": 0}, Step(done=True, reward=0.0)),
        (
            {"done": False, "observation": "x", "reward": np.float32(2)},
            Step(({"role": "user", "content": "x"},), False, 2.0),
        ),
    ],
)
def test_steps(result: Any, expected: Step) -> None:
    assert as_step(result) == expected


@pytest.mark.parametrize(
    "result",
    [
        3,
        [],
        False,
        {"done": 1},
        {"done": False},
        {"reward": 1},
        {"role": "assistant", "content": "x"},
        {"role": "tool"},
    ],
)
def test_what_is_no_step_is_refused(result: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        as_step(result)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1", [1.0]])
def test_a_reward_is_one_finite_number(reward: Any) -> None:
    with pytest.raises(ValueError, match="expected one finite number"):
        as_step({"done": True, "reward": reward})


# --- processes ---


async def test_sessions_keep_their_state_and_do_not_wait_for_each_other(folder: Path) -> None:
    async with pool_of(folder, "Slow") as pool:

        async def play() -> float | None:
            async with pool.session("train-1") as session:
                await session.reset({})
                return (await session.step(said("x"))).reward

        began = time.monotonic()
        assert await asyncio.gather(*(play() for _ in range(40))) == [1.0] * 40
        assert time.monotonic() - began < 10, "40 times half a second, one after the other, are 20"
    async with (
        pool_of(folder, args={"greeting": "hello"}) as pool,
        pool.session("a") as a,
        pool.session("b") as b,
    ):
        assert (await a.reset({})).messages == ({"role": "user", "content": "hello"},)
        await b.reset({})
        assert (await a.step(said("x"))).messages[0]["content"] == "1:x"
        assert (await a.step(said("y"))).messages[0]["content"] == "2:y"
        assert (await b.step(said("z"))).messages[0]["content"] == "1:z"
        assert await a.step(said("end")) == Step(done=True, reward=3.0)


@pytest.mark.parametrize(
    ("word", "error", "text"),
    [
        ("raise", EnvironmentRaisedError, r"(?s)train-1: step.*user\.py.*on purpose"),
        ("big", EnvironmentValueError, "observation of 10485760 characters; expected at most .* = 100000"),
        ("odd", EnvironmentValueError, "found int; expected text"),
    ],
)
async def test_a_fault_is_its_own_sessions_alone(
    folder: Path, word: str, error: type[Exception], text: str
) -> None:
    async with pool_of(folder) as pool, pool.session("train-0") as other:
        await other.reset({})
        async with pool.session("train-1") as session:
            await session.reset({})
            with pytest.raises(error, match=text):
                await session.step(said(word))
        assert (await other.step(said("x"))).messages[0]["content"] == "1:x"


async def test_one_that_hangs_is_left_behind_and_its_neighbours_finish(folder: Path) -> None:
    async with pool_of(folder, timeout_s=3.0) as pool:
        async with pool.session("train-0") as neighbour:
            await neighbour.reset({})
            process = psutil.Process(int((await neighbour.step(said("pid"))).messages[0]["content"]))
            async with pool.session("train-1") as hung:
                await hung.reset({})
                with pytest.raises(
                    EnvironmentTimeoutError, match=r"train-1: step.*environment\.timeout_s = 3 s"
                ):
                    await hung.step(said("hang"))
            assert (await neighbour.step(said("x"))).messages[0]["content"] == "2:x"
            async with pool.session("train-2") as fresh:
                await fresh.reset({})
                assert int((await fresh.step(said("pid"))).messages[0]["content"]) != process.pid
        await asyncio.to_thread(process.wait, 10)


async def test_a_call_that_nobody_waits_for_any_more_does_not_burn_on(folder: Path) -> None:
    async with pool_of(folder, timeout_s=3.0) as pool:
        async with pool.session("train-0") as session:
            await session.reset({})
            process = psutil.Process(int((await session.step(said("pid"))).messages[0]["content"]))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await session.step(said("hang"))
        await asyncio.to_thread(process.wait, 30)


async def test_a_process_that_dies_fails_its_sessions_and_is_replaced(folder: Path) -> None:
    async with pool_of(folder) as pool:
        async with pool.session("train-0") as a, pool.session("train-1") as b:
            await a.reset({})
            await b.reset({})
            waiting = asyncio.ensure_future(b.step(said("sleep")))
            with pytest.raises(EnvironmentWorkerError, match="ended with code 7"):
                await a.step(said("exit"))
            with pytest.raises(EnvironmentWorkerError):
                await waiting
            with pytest.raises(EnvironmentWorkerError):
                await b.step(said("x"))
        async with pool.session("train-2") as session:
            await session.reset({})
            assert (await session.step(said("x"))).messages[0]["content"] == "1:x"


@pytest.mark.parametrize(
    ("path", "args", "text"),
    [
        ("user.py:NoStep", {}, "found no method step"),
        ("user.py:Missing", {}, "found no 'Missing'"),
        ("user.py:Echo", {"greting": "x"}, "unexpected keyword argument 'greting'"),
    ],
)
async def test_environments_that_cannot_be_made(
    folder: Path, path: str, args: dict[str, Any], text: str
) -> None:
    pool = EnvironmentPool(EnvironmentSection(path=path, args=args), folder=folder)
    with pytest.raises(ConfigError, match=text):
        await pool.start()


# --- turns, token by token ---


def test_tokens_between_turns_are_those_of_the_template() -> None:
    """Put together token by token, a conversation is what the template makes of all its messages."""
    tokenizer = character_tokenizer(512)
    tokenizer.chat_template = CHATML.replace("\\n", "\n")
    encoder = TurnEncoder(DataSection(train="x"), tokenizer)  # type: ignore[arg-type]
    opening = [{"role": "user", "content": "1+1"}]
    turns = [
        (said("call"), {"role": "tool", "content": "2"}),
        (said("so 2"), {"role": "user", "content": "and?"}),
    ]

    def encoded(text: str) -> list[int]:
        # Text never becomes a special token with this tokenizer, so the ends of turns are put in by hand.
        pieces = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in text.split(EOS)]
        return [i for n, piece in enumerate(pieces) for i in ([tokenizer.eos_token_id] if n else []) + piece]

    encoder._encoded = encoded  # type: ignore[method-assign]

    def rendered(messages: list[dict[str, str]]) -> list[int]:
        return encoded(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    ids = rendered(opening)
    conversation = list(opening)
    for message, observation in turns:
        sampled = [*encoded(message["content"]), tokenizer.eos_token_id]
        cut = sampled[:-1]
        ids += [*sampled, *encoder.between(sampled[-1], [observation])]
        assert encoder.between(cut[-1], [observation])[0] == tokenizer.eos_token_id, "the end is supplied"
        conversation += [message, observation]
    assert ids == encoded(
        tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    )


def test_a_template_that_rewrites_history_is_refused() -> None:
    tokenizer = character_tokenizer(512)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content if loop.last or m.role != 'assistant' else '' }}|{% endfor %}"
    )
    encoder = TurnEncoder(DataSection(train="x"), tokenizer)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected one that only appends"):
        encoder.between(None, [{"role": "user", "content": "x"}])


class ScriptedModel:
    """Says one word a turn, a character a token, each turn by the next version."""

    def __init__(self, words: Sequence[str], most: int, finish: FinishReason = "stop") -> None:
        self.words = list(words)
        self.sampling = SamplingParams(max_new_tokens=most)
        self.asked: list[tuple[tuple[int, ...], int]] = []
        self._tokenizer = character_tokenizer(256)
        self._finish = finish

    async def complete(self, prompt_ids: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        limits = sampling or self.sampling
        version = len(self.asked)
        self.asked.append((tuple(prompt_ids), limits.max_new_tokens))
        ids = self._tokenizer(self.words[version], add_special_tokens=False)["input_ids"][
            : limits.max_new_tokens
        ]
        size = len(ids)
        return Completion(
            np.asarray(ids, np.int32),
            np.full(size, -0.5, np.float32),
            np.full(size, version, np.int32),
            self._finish,
        )


def rollout_of(pool: EnvironmentPool, section: EnvironmentSection) -> tuple[MultiTurn, Any]:
    tokenizer = character_tokenizer(256)
    encoder = TurnEncoder(DataSection(train="x"), tokenizer)  # type: ignore[arg-type]
    return MultiTurn(pool, section, encoder, lambda ids: str(tokenizer.decode(ids)), 16), tokenizer


def task_of(tokenizer: Any, prompt: str = "go") -> Task:
    return Task(0, "train-0", prompt, tuple(tokenizer(prompt)["input_ids"]), {"prompt": prompt})


async def test_a_trajectory_is_what_was_sampled_with_the_environments_tokens_masked(folder: Path) -> None:
    async with pool_of(folder) as pool:
        play, tokenizer = rollout_of(pool, EnvironmentSection(path="user.py:Echo"))
        model = ScriptedModel(["abc", "d", "end"], most=40)
        result = await play(task_of(tokenizer), model)
    assert tokenizer.decode(result.token_ids) == "abc1:abcd2:dend"
    assert "".join("x" if m else "." for m in result.loss_mask) == "xxx.....x...xxx"
    assert result.versions.tolist() == [0] * 8 + [1] * 4 + [2] * 3
    assert result.logprobs.tolist() == [-0.5 if m else 0.0 for m in result.loss_mask]
    assert (result.finish_reason, dict(result.rewards)) == ("stop", {"environment": 3.0})
    assert [m["content"] for m in result.messages] == ["abc", "1:abc", "d", "2:d", "end"]
    contexts = ["go", "goabc1:abc", "goabc1:abcd2:d"]
    assert [tokenizer.decode(ids) for ids, _ in model.asked] == contexts
    assert [most for _, most in model.asked] == [40, 32, 28]


@pytest.mark.parametrize(
    ("settings", "words", "most", "text"),
    [
        ({"max_turns": 2}, ["a", "b"], 40, "a1:ab"),
        ({}, ["aaaa"], 10, "aaaa"),  # the observation would leave no token for another turn
        ({}, ["aaaa", "bbbb"], 12, "aaaa1:aaaabb"),
        ({"max_turn_tokens": 2, "max_turns": 2}, ["aaaa", "end"], 40, "aa1:aaen"),
        ({"max_time_s": 1e-9}, ["a"], 40, "a"),
    ],
)
async def test_a_budget_that_is_used_up_ends_it_with_what_there_is(
    folder: Path, settings: dict[str, Any], words: list[str], most: int, text: str
) -> None:
    section = EnvironmentSection(path="user.py:Echo", **settings)
    async with pool_of(folder) as pool:
        play, tokenizer = rollout_of(pool, section)
        result = await play(task_of(tokenizer), ScriptedModel(words, most))
    assert tokenizer.decode(result.token_ids) == text
    assert result.finish_reason == "length"


async def test_messages_of_reset_are_part_of_the_prompt(folder: Path) -> None:
    async with pool_of(folder, args={"greeting": "hi"}) as pool:
        play, tokenizer = rollout_of(pool, EnvironmentSection(path="user.py:Echo"))
        result = await play(task_of(tokenizer), ScriptedModel(["end"], most=40))
        assert tokenizer.decode(result.prompt_ids) == "go\nhi"
        assert result.loss_mask.all()
        with pytest.raises(EnvironmentValueError, match=r"prompt of 23 tokens.*data\.max_prompt_tokens = 16"):
            await play(task_of(tokenizer, "x" * 20), ScriptedModel(["end"], most=40))


async def test_no_gradient_comes_from_the_environments_tokens(folder: Path) -> None:
    """The gradient is that of a loss written out by hand over what was sampled, and nothing else."""
    async with pool_of(folder) as pool:
        play, tokenizer = rollout_of(pool, EnvironmentSection(path="user.py:Echo"))
        result = await play(task_of(tokenizer), ScriptedModel(["abc", "d", "end"], most=40))
    trajectory = Trajectory(
        0,
        0,
        result.prompt_ids % VOCABULARY,
        result.token_ids % VOCABULARY,
        result.loss_mask,
        result.logprobs,
        np.zeros_like(result.versions),
        1.0,
        "stop",
    )
    sample = TrainSample(0, trajectory, advantage=1.0)
    model = policy()

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    def by_hand(mask: np.ndarray) -> torch.Tensor:
        tokens = torch.tensor([*trajectory.prompt_ids.tolist(), *trajectory.token_ids.tolist()])
        logits = model(input_ids=tokens[None]).logits[0]
        start = len(trajectory.prompt_ids) - 1
        own = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0][start:]
        weights = (own.detach() - torch.from_numpy(trajectory.logprobs).double()).exp().clamp(max=2.0)
        return gradient(-(weights * own)[torch.from_numpy(mask)].sum() / int(result.loss_mask.sum()))

    batch = collate([sample], 0, torch.device("cpu"))
    algorithm = AlgorithmSection.model_validate({"correction": "tis"})
    counts = StepCounts(int(result.loss_mask.sum()), 1)
    objective = Objective(algorithm, temperature=1.0, max_staleness=2)
    logits = selected_logits(model, batch.input_ids, batch.positions)
    found = gradient(objective(logits, batch, counts, Tally(torch.device("cpu"))))
    torch.testing.assert_close(found, by_hand(result.loss_mask), atol=1e-9, rtol=1e-7)
    with_tools = by_hand(np.ones_like(result.loss_mask))
    assert (found - with_tools).abs().max() > 1e-3, "the environment's tokens would have had a gradient"


# --- tools ---


def multiply(a: int, b: float = 1.0) -> float:
    """Multiply two numbers.

    Args:
        a: The first one.
        b (float): The second one.

    Returns:
        Their product.
    """
    if a == 13:
        raise ValueError("unlucky")
    return a * b


def test_a_function_is_a_tool_by_its_annotations_and_docstring() -> None:
    assert schema(multiply) == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first one."},
                    "b": {"type": "number", "description": "The second one."},
                },
                "required": ["a"],
            },
        },
    }
    assert checked(multiply, {"a": 2, "b": 3}) == {"a": 2, "b": 3.0}
    for wrong in ({"a": "2"}, {"a": True}, {"b": 1.0}, {"a": 1, "c": 2}):
        with pytest.raises(TypeError):
            checked(multiply, wrong)
    with pytest.raises(ConfigError, match="no usable type of its parameter 'x'"):
        schema(lambda x: x)


def test_calls_are_answered_and_what_goes_wrong_is_said_to_the_model(tmp_path: Path) -> None:
    environment = ToolEnvironment([f"{__name__}.multiply"])
    for call, answer in (
        ('{"name": "multiply", "arguments": {"a": 3, "b": 2}}', "6.0"),
        ('{"name": "multiply", "arguments": {"a": 13}}', "error: ValueError: unlucky"),
        ('{"name": "divide", "arguments": {}}', "error: found no tool 'divide'; there are multiply"),
        ('{"name": "multiply", "arguments": {"a": "x"}}', "error: TypeError: a: found 'x'; expected integer"),
        ('{"name": ', "error: the call is not JSON with a name and arguments"),
    ):
        step = as_step(environment.step(said(f"Let me see. <tool_call>\n{call}\n</tool_call>")))
        assert step.messages == ({"role": "tool", "content": answer},)
    assert as_step(environment.step(said("It is 6."))).done
    assert len(tool_calls('<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}</tool_call>')) == 2


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"path": "tools"}, "found none with path 'tools'"),
        ({"path": "a.py:B", "tools": ["a.py:f"]}, "expected path 'tools', form 'verifiers', or no tools"),
    ],
)
def test_tools_go_with_the_built_in_environment(environment: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_config({"model": {"create": {}}, "data": {"train": "x"}, "environment": environment})


async def test_tools_run_in_the_worker(folder: Path) -> None:
    (folder / "mytools.py").write_text("def double(x: int) -> int:\n    'Double it.'\n    return 2 * x\n")
    section = EnvironmentSection(path="tools", tools=("mytools.py:double",))
    pool = EnvironmentPool(section, folder=folder)
    await pool.start()
    try:
        async with pool.session("train-0") as session:
            await session.reset({})
            call = '<tool_call>{"name": "double", "arguments": {"x": 21}}</tool_call>'
            assert (await session.step(said(call))).messages[0] == {"role": "tool", "content": "42"}
    finally:
        await pool.close()
