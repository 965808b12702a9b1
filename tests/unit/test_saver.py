"""Checkpoints taken beside each other's tidying up, over real folders."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from asyncrl.checkpoint.saver import Issued, Saver
from asyncrl.checkpoint.state import RunState
from asyncrl.checkpoint.store import Best, CheckpointStore
from asyncrl.config_load import parse_config
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.types import Metrics

from .controller_harness import BASE
from .resume_harness import OF, state_at


class SlowToPrune(CheckpointStore):
    """Holds its ``held``-th pruning up, after it was told what to keep, until something was sealed."""

    def __init__(self, folder: Path, held: int) -> None:
        super().__init__(folder)
        self.calls = 0
        self.holding_up = threading.Event()
        self._held = held
        self._sealed = threading.Event()

    def seal(self, *arguments: Any, **settings: Any) -> Path:
        sealed = super().seal(*arguments, **settings)
        if self.holding_up.is_set():
            self._sealed.set()
        return sealed

    def prune(self, keep_last: int, keep: Collection[int] = ()) -> None:
        self.calls += 1
        if self.calls == self._held:
            self.holding_up.set()
            self._sealed.wait(0.5)
        super().prune(keep_last, keep)


async def nothing() -> None:
    return None


def saver_of(setting: str, store: CheckpointStore, learner: ScriptedLearner) -> Saver:
    return Saver(
        parse_config(BASE, [setting]).checkpoint,
        store,
        learner,
        resolve=list,
        lines_on_disk=nothing,
        config_text="{}",
        of=OF,
    )


async def test_weights_in_question_outlast_a_tidying_that_began_before_they_were(tmp_path: Path) -> None:
    store = SlowToPrune(tmp_path / "checkpoints", held=2)  # the first is that of taking the weights of step 1
    learner = ScriptedLearner(max_staleness=1)
    await learner.start()
    saver = saver_of("checkpoint.every=0", store, learner)

    def captured(step: int) -> tuple[RunState, list[Issued]]:
        return state_at(step), []

    def evaluation(tasks: asyncio.TaskGroup, known: asyncio.Future[Metrics]) -> asyncio.Task[Metrics]:
        async def wait() -> Metrics:
            return await known

        return tasks.create_task(wait())

    first, second = (asyncio.get_running_loop().create_future() for _ in range(2))
    async with asyncio.TaskGroup() as tasks:
        learner.version = 1
        await saver.take(tasks, lambda: captured(1), kind="weights", evaluation=evaluation(tasks, first))
        await saver.written()
        first.set_result({"eval/reward_mean": 0.25, "eval/policy_version": 1.0})
        await asyncio.to_thread(store.holding_up.wait, 30)
        learner.version = 2
        await saver.take(tasks, lambda: captured(2), kind="weights", evaluation=evaluation(tasks, second))
        await saver.written()
        assert store.weights_steps() == [1, 2]
        second.set_result({"eval/reward_mean": 0.5, "eval/policy_version": 2.0})
    assert store.best() == Best(2, 0.5)
    assert store.weights_steps() == [2]


@pytest.mark.parametrize("cut_short", [False, True])
async def test_an_export_that_was_cut_short_is_made_again(tmp_path: Path, cut_short: bool) -> None:
    """By what the manifest says: a folder may be left of a process that ended between the two."""
    store = CheckpointStore(tmp_path / "checkpoints")
    learner = ScriptedLearner(max_staleness=1)
    await learner.start()
    learner.version = 3
    part = store.begin(3)
    folder = store.seal(part, 3, 3, [])
    if cut_short:
        (folder / "hf").mkdir()
    saver = saver_of("checkpoint.hf=last", store, learner)
    for _ in range(2):
        await saver.export(3)
        assert (folder / "hf" / "version").read_text() == "3"
        learner.version = 4  # were it exported once more, it would show
