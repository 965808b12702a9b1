"""Trackers over a resume: one folder is one run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.tracking import open_tracker

from .controller_harness import config


class RecordedRun:
    """What ``wandb.init`` was asked for, and what the run was told."""

    def __init__(self, **asked: Any) -> None:
        self.asked = asked
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = False

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.logged.append((step, scalars))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedRun]:
    """Those that were opened, by a stand-in for the package."""
    opened: list[RecordedRun] = []

    def init(**asked: Any) -> RecordedRun:
        opened.append(RecordedRun(**asked))
        return opened[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return opened


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(tmp_path: Path, runs: list[RecordedRun]) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    for folder, after in ((first, None), (first, 4), (other, None)):
        folder.mkdir(exist_ok=True)
        tracker = open_tracker("wandb", folder, config("run.name=r"), after)
        tracker.log(1, {"reward/mean": 0.5})
        tracker.close()
    ids = [run.asked["id"] for run in runs]
    assert ids[0] == ids[1] != ids[2]
    assert all(len(i) == 16 and i.isalnum() for i in ids)
    assert {run.asked["resume"] for run in runs} == {"allow"}
    assert [run.asked["dir"] for run in runs] == [first, first, other]
    assert all(run.logged == [(1, {"reward/mean": 0.5})] and run.finished for run in runs)
