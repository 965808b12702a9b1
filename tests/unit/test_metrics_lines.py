"""Lines of metrics.jsonl: in order, each once, and with the figures of their evaluation."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.metrics_lines import MetricsLines
from asyncrl.types import Metrics


def line(version: int) -> Metrics:
    return {"policy_version": version}


async def evaluation(result: asyncio.Future[Metrics]) -> Metrics:
    return await result


async def test_a_line_that_waits_holds_up_those_after_it() -> None:
    handed: list[Metrics] = []
    lines = MetricsLines(handed.append, last_version=9)
    result: asyncio.Future[Metrics] = asyncio.Future()
    task = asyncio.create_task(evaluation(result))
    lines.add(line(0))
    lines.add(line(1), task)
    lines.add(line(2))
    lines.flush()
    assert handed == [line(0)]
    result.set_result({"eval/reward_mean": 0.5})
    await task
    lines.flush()
    assert handed == [line(0), {**line(1), "eval/reward_mean": 0.5}, line(2)]
    lines.close()
    assert len(handed) == 3


async def test_the_last_version_s_line_takes_figures_until_the_end() -> None:
    handed: list[Metrics] = []
    lines = MetricsLines(handed.append, last_version=3)
    lines.add(line(3))
    lines.flush()
    assert handed == []
    lines.last["reward/mean"] = 1.0
    lines.close()
    assert handed == [{**line(3), "reward/mean": 1.0}]


async def test_what_an_evaluation_found_is_known_after_its_line_was_handed_over() -> None:
    lines = MetricsLines(lambda record: None, last_version=9)
    assert lines.last_evaluation() is None
    result: asyncio.Future[Metrics] = asyncio.Future()
    result.set_result({"eval/reward_mean": 0.5})
    task = asyncio.create_task(evaluation(result))
    await task
    lines.add(line(1), task)
    lines.flush()
    assert lines.last_evaluation() == {"eval/reward_mean": 0.5}


async def test_given_up_and_failed_evaluations_leave_their_lines_bare() -> None:
    handed: list[Metrics] = []
    lines = MetricsLines(handed.append, last_version=9)
    failed: asyncio.Future[Metrics] = asyncio.Future()
    failed.set_exception(ValueError("no"))
    tasks = [asyncio.create_task(evaluation(f)) for f in (failed, asyncio.Future())]
    await asyncio.wait(tasks[:1])
    for version, task in enumerate(tasks):
        lines.add(line(version), task)
    lines.give_up_evaluations()
    await asyncio.wait(tasks)
    assert tasks[1].cancelled()
    assert lines.last_evaluation() is None
    lines.flush()
    assert handed == [line(0), line(1)]
    with pytest.raises(ValueError, match="no"):
        tasks[0].result()
