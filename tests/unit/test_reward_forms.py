"""Rewards as users of other projects have them: their files as they are, run in the real worker processes."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config import RewardFunctionSection
from asyncrl.errors import ConfigError, RewardRaisedError, RewardTimeoutError, RewardValueError
from asyncrl.generators.build import PoolScorer
from asyncrl.rewards.binder import Sample
from asyncrl.rewards.builtin import format_match, length, math_verify, reasoning_gym
from asyncrl.rewards.pool import RewardPool, RewardScore
from asyncrl.types import Task, Trajectory

VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str.strip() == ground_truth
    return {"score": 1.0 if right else 0.1, "acc": right, "pred": solution_str, "info": bool(extra_info)}

async def compute_score_async(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0, **kwargs):
    assert data_source == "openai/gsm8k"
    return float(solution_str == ground_truth) + bonus
"""

TRL = '''
def accuracy(completions, solution, **kwargs):
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    kwargs["log_extra"]("length", [len(text) for text in texts])
    kwargs["log_extra"]("text", texts)
    kwargs["log_metric"]("longest", max(map(len, texts)))
    return [None if text == "skip" else float(text == s) for text, s in zip(texts, solution)]

def shapes(prompts, completions, completion_ids, trainer_state, **kwargs):
    return [[type(prompts[0]).__name__, type(c).__name__, len(ids)] == kwargs["expected"][0]
            for c, ids in zip(completions, completion_ids)]

async def rank(prompts, completions, **kwargs):
    """Who is longest: a matter of the whole group."""
    longest = max(map(len, completions))
    return [float(len(c) == longest) for c in completions]

def short(completions, **kwargs):
    return [1.0]
'''

OPENRLHF = """
import torch

def reward_func(queries, prompts, labels, **kwargs):
    rewards = torch.tensor([float(q == p + l) for q, p, l in zip(queries, prompts, labels)])
    logs = {"seen": torch.ones(len(queries)), "n": 3.0}
    return {"rewards": rewards, "scores": rewards * 0.5, "extra_logs": logs}

def old_reward_func(queries, prompts, labels):
    return torch.tensor([len(q) for q in queries])
"""

VERIFIERS = '''
class Parser:
    def parse_answer(self, completion):
        return (completion[-1]["content"] if isinstance(completion, list) else completion).strip()

def correct(completion, answer, parser):
    return 1.0 if parser.parse_answer(completion) == answer else 0.0

async def tidy(prompt, completion, state, info, task):
    assert state["answer"] and info == {"level": 3} and task == "sums"
    return 0.5 if completion == state["completion"] else 0.0

def broken(completion, **kwargs):
    raise RuntimeError("no rubric for this")

def ranks(completions, answers):
    return [float(i) for i, _ in enumerate(completions)]

class Rubric:
    """As far as a reward needs it: funcs, weights, parser."""
    def __init__(self, funcs, weights, parser=None):
        self.funcs, self.weights, self.parser = funcs, weights, parser

class RubricGroup:
    def __init__(self, rubrics):
        self.rubrics = rubrics

rubric = Rubric([correct, tidy], [1.0, 0.2], Parser())
failing = Rubric([broken], [1.0])
whole = RubricGroup([Rubric([correct], [2.0], Parser()), Rubric([ranks], [1.0])])
unpaired = Rubric([correct], [1.0, 2.0])
'''

MESSAGES = [{"role": "user", "content": "1+1="}]
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": MESSAGES,
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"verl": VERL, "trl": TRL, "openrlhf": OPENRLHF, "rubrics": VERIFIERS}.items():
        (tmp_path / f"{name}_file.py").write_text(text)
    return tmp_path


@asynccontextmanager
async def pool_of(folder: Path, *functions: Any, timeout_s: float = 60.0) -> AsyncIterator[RewardPool]:
    sections = [RewardFunctionSection.model_validate(f) for f in functions]
    # OpenRLHF's functions import torch, which can take its time.
    pool = RewardPool(sections, workers=1, timeout_s=timeout_s, folder=folder, start_timeout_s=300)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def sample(row: dict[str, Any], completion: str) -> Sample:
    return Sample(row, "1+1=", completion, list(range(len(completion))), "stop")


async def score(pool: RewardPool, row: dict[str, Any], completion: str) -> RewardScore:
    one = sample(row, completion)
    return await pool.score(one.row, one.prompt, one.completion, one.completion_ids, one.finish_reason)


async def score_group(pool: RewardPool, row: dict[str, Any], *completions: str) -> list[Any]:
    return await pool.score_group([sample(row, c) for c in completions], [{}] * len(completions))


async def test_verl(folder: Path) -> None:
    functions = (
        "verl_file.py:compute_score",
        {"path": "verl_file.py:compute_score_async", "weight": 2.0, "args": {"bonus": 0.25}},
    )
    async with pool_of(folder, *functions) as pool:
        assert not pool.scores_groups
        found = await score(pool, VERL_ROW, "2")
    assert found.parts == {"compute_score": 1.0, "compute_score_async": 1.25}
    assert found.total == 3.5
    assert found.extras == {"compute_score/acc": 1.0, "compute_score/info": 1.0}, "text is no metric"


async def test_trl_functions_see_the_whole_group(folder: Path) -> None:
    functions = ({"path": "trl_file.py:accuracy", "weight": 2.0}, "trl_file.py:rank")
    async with pool_of(folder, *functions) as pool:
        assert pool.scores_groups
        row = {"prompt": "1+1=", "solution": "2"}
        assert (await score(pool, row, "2")).parts == {}, "not before the group is whole"
        first, second, third = await score_group(pool, row, "2", "skip", "33")
    assert first.parts == {"accuracy": 1.0, "rank": 0.0}
    assert second.parts == {"rank": 1.0}, "None is not applicable, and no 0.0"
    assert [s.total for s in (first, second, third)] == [2.0, 1.0, 0.0]
    assert first.extras == {"accuracy/length": 1.0, "accuracy/longest": 4.0}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("1+1=", ["str", "str", 1]), (MESSAGES, ["list", "list", 1])],
    ids=["text", "chat"],
)
async def test_trl_functions_get_messages_where_the_prompt_is_messages(
    folder: Path, prompt: Any, expected: list[Any]
) -> None:
    row = {"prompt": prompt, "solution": "2", "expected": expected}
    async with pool_of(folder, "trl_file.py:shapes", "trl_file.py:accuracy") as pool:
        scores = await score_group(pool, row, "2", "2")
    assert [s.parts for s in scores] == [{"shapes": 1.0, "accuracy": 1.0}] * 2


async def test_an_answer_that_no_function_applies_to_fails_alone(folder: Path) -> None:
    async with pool_of(folder, "trl_file.py:accuracy") as pool:
        good, bad = await score_group(pool, {"solution": "2"}, "2", "skip")
    assert good.total == 1.0
    assert isinstance(bad, RewardValueError)


async def test_one_value_too_few_is_said_with_both_numbers(folder: Path) -> None:
    async with pool_of(folder, "trl_file.py:short") as pool:
        with pytest.raises(RewardValueError, match=r"short.*found 1 values.*expected 2"):
            await score_group(pool, {}, "a", "b")


async def test_openrlhf(folder: Path) -> None:
    functions = ("openrlhf_file.py:reward_func", {"path": "openrlhf_file.py:old_reward_func", "weight": 0})
    async with pool_of(folder, *functions) as pool:
        scores = await score_group(pool, {"input": "1+1=", "label": "2"}, "2", "4")
    assert [s.parts for s in scores] == [
        {"reward_func": 1.0, "old_reward_func": 5.0},
        {"reward_func": 0.0, "old_reward_func": 5.0},
    ]
    assert scores[0].extras == {"reward_func/scores": 0.5, "reward_func/seen": 1.0, "reward_func/n": 3.0}


async def test_a_rubric_of_verifiers(folder: Path) -> None:
    row = {"prompt": MESSAGES, "answer": "2", "info": {"level": 3}, "task": "sums"}
    async with pool_of(folder, {"path": "rubrics_file.py:rubric", "weight": 10.0}) as pool:
        right, wrong = await score(pool, row, "2"), await score(pool, row, "3")
    assert right.parts == {"rubric": pytest.approx(1.1)}
    assert right.total == pytest.approx(11.0)
    assert right.extras == {"rubric/correct": 1.0, "rubric/tidy": 0.5}
    assert wrong.parts == {"rubric": pytest.approx(0.1)}


async def test_a_group_of_rubrics_and_a_rubric_that_fails(folder: Path) -> None:
    async with pool_of(folder, "rubrics_file.py:whole") as pool:
        scores = await score_group(pool, {"answer": "2"}, "2", "3")
    assert [s.total for s in scores] == [2.0, 1.0]
    async with pool_of(folder, "rubrics_file.py:failing") as pool:
        with pytest.raises(RewardRaisedError, match="no rubric for this"):
            await score(pool, {"answer": "2"}, "2")
    with pytest.raises(ConfigError, match="found 1 functions and 2 weights"):
        async with pool_of(folder, "rubrics_file.py:unpaired"):
            pass


# --- a server ---


class Server(http.server.ThreadingHTTPServer):
    """A user's reward server: ``plan`` says what it does with the requests, one after the other."""

    def __init__(self, *plan: str) -> None:
        self.plan = list(plan)
        self.bodies: list[dict[str, Any]] = []
        self.held = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/get_reward"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        step = self.server.plan.pop(0) if self.server.plan else "answer"
        if step == "hang":
            self.server.held.wait(60)
            return
        if step == "cut":
            self.connection.close()
            return
        rewards = [float(q.endswith(label)) for q, label in zip(body["query"], body["labels"], strict=True)]
        text = {"answer": json.dumps({"rewards": rewards, "extra_logs": {"n": rewards}}), "junk": "<html>"}
        status = {"500": 500, "400": 400}.get(step, 200)
        payload = text.get(step, "{}").encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def serving(*plan: str) -> Iterator[Server]:
    server = Server(*plan)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.held.set()
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_reward_server_is_asked_in_openrlhfs_form(folder: Path) -> None:
    with serving("500", "cut") as server:
        async with pool_of(folder, {"path": server.url, "weight": 3.0}) as pool:
            right, wrong = await score_group(pool, {"input": "1+1=", "label": "2"}, "2", "4")
    assert (right.total, wrong.total) == (3.0, 0.0), "a status of 500 and a lost connection are tried again"
    assert right.extras == {"remote/n": 1.0}
    assert server.bodies == [{"query": ["1+1=2", "1+1=4"], "prompts": ["1+1="] * 2, "labels": ["2", "2"]}] * 3


@pytest.mark.parametrize(
    ("plan", "error", "text"),
    [
        (["400"], RewardRaisedError, "found status 400"),
        (["junk"], RewardRaisedError, "not JSON"),
        (["other"], RewardRaisedError, "expected 'rewards' in it"),
        (["500"] * 2, RewardRaisedError, "no answer in 2 tries"),
        (["hang"], RewardTimeoutError, "had not answered after"),
    ],
)
async def test_a_server_that_fails_is_a_failure_and_no_reward(
    folder: Path, plan: list[str], error: type[Exception], text: str
) -> None:
    with serving(*plan) as server:
        timeout_s = 2.0 if plan == ["hang"] else 60.0
        section = {"path": server.url, "args": {"retries": 1, "timeout_s": 60}}
        async with pool_of(folder, section, timeout_s=timeout_s) as pool:
            with pytest.raises(error, match=text):
                await score_group(pool, {"label": "2"}, "2")
            server.held.set()
            assert (await score_group(pool, {"label": "2"}, "2"))[0].total == 1.0


# --- in a rollout ---


async def test_both_kinds_add_up_in_the_scorer_of_a_rollout(folder: Path) -> None:
    async with pool_of(folder, {"path": "last_number", "weight": 0.5}, "trl_file.py:rank") as pool:
        scorer = PoolScorer(pool)
        task = Task(0, "train-0", "1+1=", (1, 2), {"prompt": "1+1=", "answer": "2"})
        found = [await pool.score(task.row, task.prompt, text, [], "stop") for text in ("2", "22")]
        answers = [("2", (), trajectory(found[0])), ("22", (), trajectory(found[1]))]
        scores = await scorer.score_group(task, answers)
    assert [(f.total, s.total) for f, s in zip(found, scores, strict=True)] == [(0.5, 0.0), (0.0, 1.0)]


def trajectory(score: RewardScore) -> Trajectory:
    ids = np.zeros(2, np.int32)
    floats = np.zeros(2, np.float32)
    return Trajectory(0, 0, ids, ids, ids == 0, floats, ids, score.total, "stop", score.parts)


# --- built in ---


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so $\frac{1}{2}$", "0.5", 1.0),
        ("the answer is 12", "12", 1.0),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        ("13", "12", 0.0),
        ("no idea", "12", 0.0),
    ],
)
def test_math_verify(completion: str, answer: str, expected: float) -> None:
    pytest.importorskip("math_verify")
    assert math_verify(completion, answer) == expected


def test_format_length_and_reasoning_gym() -> None:
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    assert format_match("<think>\na\n</think>\n<answer>4</answer>\n", pattern) == 1.0
    assert format_match("<answer>4</answer>", pattern) == 0.0
    assert [length([0] * n, at_most=4, at_least=2) for n in (0, 1, 2, 4, 5, 8, 9)] == [
        0,
        0.5,
        1,
        1,
        0.75,
        0,
        0,
    ]
    row = {"answer": "7", "metadata": {"source_dataset": "chain_sum"}}
    assert reasoning_gym(" 7\n", row) == 1.0
    assert reasoning_gym("8", row) < 0.1
