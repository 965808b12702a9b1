"""Agents as rollouts: functions and commands in a process of their own, and everything that they do wrong."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from asyncrl.config import Config, EnvironmentSection
from asyncrl.config_load import parse_config
from asyncrl.credit import CreditAssignment
from asyncrl.environments.pool import EnvironmentPool
from asyncrl.errors import (
    CodecError,
    ConfigError,
    EnvironmentFaultError,
    EnvironmentRaisedError,
    EnvironmentTimeoutError,
    EnvironmentValueError,
    EnvironmentWorkerError,
    GeneratorError,
)
from asyncrl.learners.advantages import from_user
from asyncrl.learners.base import TrainSample
from asyncrl.metrics import batch_metrics
from asyncrl.queues.codec import decode_group, encode_group, group_meta
from asyncrl.roles.scoring import with_scores
from asyncrl.serve.rollout import AgentRollout
from asyncrl.types import Completion, Group, Task, Trajectory
from asyncrl.waiting import Deadlines

from .test_serve import Talker, serving, until

USER_CODE = """
import json, os, sys, time, urllib.error, urllib.request

def say(base_url, *messages):
    body = json.dumps({"messages": [{"role": "user", "content": m} for m in messages]}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def play(task, base_url, word="x"):
    return float(say(base_url, task["prompt"], word) == "yes")

async def awaited(task, base_url):
    say(base_url, "x")

def silent(task, base_url): return 1.0
def raises(task, base_url): raise ZeroDivisionError("on purpose")
def dies(task, base_url): os._exit(7)
def odd(task, base_url): say(base_url, "x"); return "good"
def hangs(task, base_url): say(base_url, "x"); time.sleep(1000)
def greedy(task, base_url):
    while True: say(base_url, "x")
def patient(task, base_url):
    try:
        while True: say(base_url, "x")
    except urllib.error.HTTPError as error:
        return float(json.load(error)["error"]["code"] == "turns_exhausted")
def late(task, base_url):
    say(base_url, "x")
    while True:
        time.sleep(0.05)
        say(base_url, "x")

if __name__ == "__main__":
    task = json.load(sys.stdin)
    if task.get("fails"): sys.exit("on purpose")
    if task.get("hangs"): time.sleep(1000)
    print("thinking ...")
    print(json.dumps({"reward": play(task, os.environ["OPENAI_BASE_URL"])}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "user.py").write_text(USER_CODE)
    return tmp_path


@asynccontextmanager
async def agent_of(folder: Path, path: str = "play", **section: Any) -> AsyncIterator[AgentRollout]:
    path = path if path == "command" else f"user.py:{path}"
    settings = EnvironmentSection(kind="agent", path=path, **section)
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    pool = EnvironmentPool(settings, folder=folder)
    await pool.start()
    try:
        async with serving(path=path, **section) as (server, _):
            yield AgentRollout(pool, settings, server, Deadlines())
    finally:
        await pool.close()
        assert not {p.pid for p in psutil.Process().children(recursive=True)} - before


def task_of(**row: Any) -> Task:
    return Task(0, "train-0", "go", (1, 2), {"prompt": "go", **row})


async def test_functions_plain_and_async_become_trajectories_with_their_rewards(folder: Path) -> None:
    model = Talker("yes", "no")
    async with agent_of(folder, args={"word": "now"}) as play:
        results = [await play(task_of(), model) for _ in range(2)]
    assert [dict(r.rewards) for r in results] == [{"environment": 1.0}, {"environment": 0.0}]
    assert model.contexts() == ["u:go;u:now;a:"] * 2
    assert model.tokenizer.decode(results[0].token_ids) == "yes"
    async with agent_of(folder, "awaited") as play:
        assert dict((await play(task_of(), Talker("yes"))).rewards) == {}


async def test_a_command_finds_address_and_task_and_prints_its_reward(folder: Path) -> None:
    command = (sys.executable, "user.py")
    async with agent_of(folder, "command", command=command) as play:
        result = await play(task_of(), Talker("yes"))
        assert dict(result.rewards) == {"environment": 1.0}
        with pytest.raises(EnvironmentRaisedError, match=r"(?s)user\.py.*ended with code 1.*on purpose"):
            await play(task_of(fails=True), Talker("yes"))
        hung = asyncio.create_task(play(task_of(hangs=True), Talker("yes")))
        await until(lambda: len(commands()) == 1)
        hung.cancel()
        await until(lambda: not commands())


def commands() -> list[int]:
    """Commands that run."""
    children = psutil.Process().children(recursive=True)
    return [p.pid for p in children if p.status() != "zombie" and p.cmdline()[1:] == ["user.py"]]


@pytest.mark.parametrize(
    ("path", "error", "text"),
    [
        ("silent", EnvironmentValueError, "ended without an answered call; expected at least 1"),
        ("raises", EnvironmentRaisedError, r"(?s)agent 'user\.py:raises'.*on purpose"),
        ("dies", EnvironmentWorkerError, "ended with code 7"),
        ("odd", EnvironmentValueError, "reward: found 'good'; expected one finite number"),
    ],
)
async def test_a_fault_is_its_trajectorys_alone(
    folder: Path, path: str, error: type[EnvironmentFaultError], text: str
) -> None:
    async with agent_of(folder, path) as play:
        for _ in range(2):
            with pytest.raises(error, match=text):
                await play(task_of(), Talker("yes"))


async def test_an_agent_that_hangs_is_left_behind_once_its_time_is_up(folder: Path) -> None:
    async with agent_of(folder, "hangs", max_time_s=0.3, timeout_s=1.0) as play:
        with pytest.raises(EnvironmentTimeoutError, match=r"max_time_s = 0\.3 s and .*timeout_s = 1 s more"):
            await play(task_of(), Talker("yes"))


@pytest.mark.parametrize(
    ("path", "settings", "rewards"),
    [
        ("greedy", {"max_turns": 2}, {}),
        ("patient", {"max_turns": 2}, {"environment": 1.0}),
        ("late", {"max_turns": 1000, "max_time_s": 0.5}, {}),
    ],
)
async def test_one_that_fails_for_a_budget_has_ended_there(
    folder: Path, path: str, settings: dict[str, Any], rewards: dict[str, float]
) -> None:
    model = Talker(*["yes"] * 1000)
    async with agent_of(folder, path, **settings) as play:
        result = await play(task_of(), model)
    assert (result.finish_reason, dict(result.rewards)) == ("length", rewards)
    assert len(result.earlier) == len(model.asked) - 1, "each call began a row, for none had heard the last"


async def test_a_dead_engine_fails_the_rollout_and_not_the_agent(folder: Path) -> None:
    class Dead(Talker):
        async def complete(self, *args: Any, **more: Any) -> Completion:
            raise GeneratorError("the engine died")

    async with agent_of(folder) as play:
        with pytest.raises(GeneratorError, match="the engine died"):
            await play(task_of(), Dead())


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"path": "user.py:missing"}, "found no 'missing'"),
        (
            {"path": "user.py:play", "args": {"wrod": 1}},
            "unexpected keyword argument 'wrod'.*task and base_url",
        ),
    ],
)
async def test_agents_that_cannot_be_called_are_found_before_the_run(
    folder: Path, section: dict[str, Any], text: str
) -> None:
    pool = EnvironmentPool(EnvironmentSection(kind="agent", **section), folder=folder)
    with pytest.raises(ConfigError, match=text):
        await pool.start()


# --- the config ---


def config_of(*overrides: dict[str, Any], **environment: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"create": {}},
        "data": {"train": "x", "max_prompt_tokens": 64},
        "environment": {"kind": "agent", "path": "a.py:f", **environment},
    }
    for override in overrides:
        values |= override
    return parse_config(values)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tools": ["a.py:f"]}, "expected none: an agent offers its own"),
        ({"path": "command"}, "expected path 'command' and a command"),
        ({"command": ["x"]}, "expected path 'command' and a command"),
        ({"path": "command", "command": ["x"], "args": {"a": 1}}, "write them into the command"),
        ({"kind": "turns", "command": ["x"]}, "expected kind 'agent', or no command"),
        ({"serve": {"port": 70000}}, "65535"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config_of(**settings)


def test_one_port_is_for_one_generator_and_pairs_are_of_single_rows() -> None:
    with pytest.raises(ConfigError, match=r"serve\.port: found 8000 for 2 generators"):
        config_of({"generators": {"replicas": 2}}, serve={"port": 8000})
    with pytest.raises(ConfigError, match="whose samples may have several rows"):
        config_of({"algorithm": {"loss": "dpo", "correction": "none"}})


# --- rows of a sample, on their way to the learner ---


def row_of(sample: int, row: int, reward: float, tokens: int = 4) -> Trajectory:
    ids = np.arange(tokens, dtype=np.int32)
    return Trajectory(
        sample,
        0,
        ids,
        ids,
        np.arange(tokens) != 1,
        np.full(tokens, -1.0, np.float32),
        np.full(tokens, row, np.int32),
        reward,
        "stop",
        {"environment": reward},
        environment_tokens=1,
        row=row,
    )


GROUP = Group(0, "train-0", 0, (row_of(0, 0, 1.0), row_of(0, 1, 1.0), row_of(0, 2, 1.0), row_of(1, 0, 0.0)))


def test_rows_travel_and_a_sample_counts_once_in_rewards_and_advantages() -> None:
    payload = encode_group(GROUP)
    decoded = decode_group(payload)
    assert [(t.sample, t.row) for t in decoded.trajectories] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    meta = group_meta(decoded, payload)
    assert (meta.rewards, meta.reward_mean) == ((1.0, 0.0), 0.5)
    assert meta.samples[0].trained == ((0, 3), (1, 3), (2, 3))
    assert [t.sampled_tokens for t in meta.samples] == [9, 3]
    assert (meta.oldest_version, meta.newest_version) == (0, 2)
    metrics = batch_metrics(2, [meta])
    assert (metrics["reward/mean"], metrics["response_length/rows_mean"]) == (0.5, 2.0)
    (advantages,) = CreditAssignment(config_of()).advantages([meta], [(0.25, 0.25, 0.5, 1.5)])
    (alone,) = CreditAssignment(config_of()).advantages(
        [replace(meta, trajectories=meta.samples)], [(1.0, 1.5)]
    )
    assert advantages == (alone[0], alone[0], alone[0], alone[1])
    assert advantages[0] > 0 > advantages[3]


def test_a_users_advantage_sees_samples_and_not_rows() -> None:
    seen: list[Any] = []

    def advantage(rewards: Any, lengths: Any) -> list[float]:
        seen.append((list(rewards), list(lengths)))
        return [2.0, -2.0]

    samples = [TrainSample(0, t, t.reward) for t in GROUP.trajectories]
    assert [s.advantage for s in from_user(samples, advantage)] == [2.0, 2.0, 2.0, -2.0]
    assert seen == [([1.0, 0.0], [9, 3])]


def test_a_reward_models_score_is_that_of_the_row_that_was_rewarded() -> None:
    scored, failures = with_scores(GROUP, [1.0, 50.0, 60.0, 2.0], weight=1.0)
    assert [t.reward for t in scored.trajectories] == [2.0, 2.0, 2.0, 2.0]
    assert failures == ()
    scored, failures = with_scores(GROUP, [float("nan"), 50.0, 60.0, 2.0], weight=1.0)
    assert [(t.sample, t.row) for t in scored.trajectories] == [(1, 0)], "its rows go with it"
    assert len(failures) == 1


@pytest.mark.parametrize(
    "rows", [(row_of(0, 1, 1.0),), (row_of(0, 0, 1.0), row_of(1, 1, 1.0)), (row_of(0, 0, 1.0),) * 2]
)
def test_rows_without_their_sample_are_refused(rows: tuple[Trajectory, ...]) -> None:
    with pytest.raises(CodecError, match="expected"):
        encode_group(replace(GROUP, trajectories=rows))
