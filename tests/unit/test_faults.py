"""Faults that no other test makes, and the table of them all: each test that it names is there."""

from __future__ import annotations

import ast
import asyncio
import errno
import itertools
import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from asyncrl.checkpoint.files import write_file
from asyncrl.generators.local import LocalReplica
from asyncrl.generators.pool import GeneratorPool
from asyncrl.generators.scripted import ScriptedGenerator
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.rollout import RolloutHost
from asyncrl.run import root_cause
from asyncrl.run_folder import RunFolder
from asyncrl.simulate.clock import VirtualClockLoop, run_virtual
from asyncrl.types import Metrics

from .controller_harness import ScriptedScorer
from .resume_harness import assert_one_history, leg
from .resume_harness import config_in as checkpointed
from .test_halves import config_in, content, go, lines

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "faults.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_test_that_the_table_names_is_there() -> None:
    named = NAMED.findall(TABLE.read_text(encoding="utf-8"))
    assert named
    for file in {file for file, _ in named}:
        body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        found = {f.name for f in body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert {name for of, name in named if of == file} <= found, f"{TABLE.name} names others in {file}"


def test_every_row_of_the_table_names_a_test_or_says_that_there_is_none() -> None:
    rows = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    for row in rows[2:]:
        *_, tests, _ = row.split("|")
        assert NAMED.search(tests) or tests.strip().startswith("not tested"), row


class SlowToAnswer(LocalReplica):
    """Answers a ping after half a second."""

    async def ping(self) -> None:
        await asyncio.sleep(0.5)
        await super().ping()


def test_a_controller_that_stood_still_takes_no_generator_for_dead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As after SIGSTOP for a minute: the answer and its deadline come due in the same moment."""

    async def main() -> tuple[str, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        host = RolloutHost(ScriptedGenerator(), ScriptedScorer(), lambda ids: "")
        pool = GeneratorPool([SlowToAnswer("generator 0", host)])
        await pool.start()
        pool.let_in(pool.joining, 0)
        supervisor = asyncio.ensure_future(pool.supervise())
        await asyncio.sleep(1.25)  # a ping is under way
        loop._now += 60.0
        await asyncio.sleep(3.0)
        (member,) = pool.members
        supervisor.cancel()
        return member.state, loop.time()

    state, ended = run_virtual(main())
    assert (state, ended) == ("live", 64.25)
    assert "this process stood still for 56.8 s: generator 0 is asked again" in caplog.text


def test_a_wall_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("run.steps=6", "schedule.pipeline_depth=1", "checkpoint.every=2")

    def trained(name: str) -> tuple[Any, list[float]]:
        config = config_in(tmp_path, *settings, name=name)
        learner = ScriptedLearner(max_staleness=2, step_s=1.0)
        go(config, learner)
        return content(learner.batches), [line["time"] for line in lines(config, "metrics.jsonl")]

    undisturbed = trained("undisturbed")
    jumps = itertools.cycle((0.0, 86_400.0, -1e9, 4e9))
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + next(jumps))
    assert trained("disturbed") == undisturbed


def test_a_write_that_the_system_ends_half_way_costs_a_checkpoint_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a limit on the size of files, which ends a write as a full disk does: with a part of it there."""
    config = checkpointed(tmp_path, "run.steps=5")
    write = ScriptedLearner.write_state

    async def write_state(self: ScriptedLearner, folder: Path) -> Any:
        if self._copied_state == 2:
            (folder / "learner").mkdir()
            write_file(folder / "learner", "version", bytes(1 << 21))
        return await write(self, folder)

    monkeypatch.setattr(ScriptedLearner, "write_state", write_state)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        leg(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "the checkpoint of step 2 could not be written: [Errno 27] File too large" in caplog.text
    assert not [p for p in (config.run.folder / "checkpoints").iterdir() if "part" in p.name]
    assert_one_history(config)


class OnADiskThatFills(RunFolder):
    """From step 4 on, no byte more of one of its files finds room: what the system says then is real."""

    name = ""

    def metrics(self, record: Metrics) -> None:
        if record["step"] == 4:
            self._submit(self._fill)
        super().metrics(record)

    def _fill(self) -> None:
        file = self._metrics if self.name == "metrics.jsonl" else self._ledger
        file.flush()
        with open("/dev/full", "w") as full:
            os.dup2(full.fileno(), file.fileno())


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_lines_that_find_no_room_end_the_run_which_goes_on_once_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = checkpointed(tmp_path, "run.steps=9", "checkpoint.every=2")
    with monkeypatch.context() as patch:
        patch.setattr(OnADiskThatFills, "name", name)
        patch.setattr("tests.unit.resume_harness.RunFolder", OnADiskThatFills)
        with pytest.raises((OSError, ExceptionGroup)) as caught:
            leg(config)
    found = root_cause(caught.value)
    assert isinstance(found, OSError)
    assert found.errno == errno.ENOSPC
    final = leg(config)
    assert final.resumed is not None
    assert final.resumed.state.step in (2, 4), "nothing was sealed over lines that were lost"
    assert_one_history(config)
