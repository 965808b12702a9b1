"""A run's folder and its trackers: the real packages write, and what they wrote is read back."""

from __future__ import annotations

import json
import os
import stat
from functools import partial
from pathlib import Path

import pytest

from asyncrl.checkpoint.files import write_file
from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.config import Config
from asyncrl.config_load import parse_config
from asyncrl.run_folder import RunFolder, claimed
from asyncrl.tracking import open_tracker
from asyncrl.types import Metrics

from .controller_harness import BASE

LINES: list[Metrics] = [
    {"step": 0, "policy_version": 0, "time": 1.5},
    {"step": 1, "policy_version": 1, "time": 2.5, "reward/mean": 0.25},
    {"step": 2, "policy_version": 2, "time": 3.5, "reward/mean": 0.75, "model/checksum": "ab12"},  # type: ignore[dict-item]
]


def write(folder: Path, *trackers: str) -> None:
    config: Config = parse_config(BASE, [f"log.trackers=[{','.join(trackers)}]"])
    files = RunFolder(
        folder,
        resolve=list,
        rollouts_every=0,
        trackers=[partial(open_tracker, name, folder, config) for name in config.log.trackers],
    )
    for line in LINES:
        files.metrics(line)
    files.close()


def test_every_line_is_in_metrics_jsonl_and_its_numbers_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, "tensorboard")
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == LINES
    board = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert set(board.Tags()["scalars"]) == {"policy_version", "reward/mean"}
    assert [(e.step, e.value) for e in board.Scalars("reward/mean")] == [(1, 0.25), (2, 0.75)]


async def test_lines_are_not_called_safe_after_a_write_that_failed(tmp_path: Path) -> None:
    """Or a checkpoint would be sealed over a line that was lost."""
    (tmp_path / "rollouts").write_text("in the way")
    files = RunFolder(tmp_path, resolve=list, rollouts_every=1)
    files.trained(1, [])
    files.metrics(LINES[0])
    with pytest.raises(OSError, match="rollouts"):
        await files.on_disk()
    with pytest.raises(OSError, match="rollouts"):
        files.close()


async def test_the_names_of_what_a_run_makes_outlast_a_power_cut_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose bytes are on disk is lost all the same while its name is not."""
    synced: dict[int, set[str]] = {}
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            synced[os.fstat(descriptor).st_ino] = set(os.listdir(descriptor))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    config = parse_config(BASE, [f"run.dir={tmp_path}/new/runs", "run.name=r"])
    with claimed(config) as folder:
        files = RunFolder(folder, resolve=list, rollouts_every=1)
        files.metrics(LINES[0])
        files.trained(1, [])
        await files.on_disk()
        store = CheckpointStore(folder / "checkpoints")
        part = store.begin(1)
        store.seal(part, 1, 1, [write_file(part, "state.json", b"{}")])
        files.close()
    made = [tmp_path, *(path for path in (tmp_path / "new").rglob("*") if path.is_dir()), tmp_path / "new"]
    # The lock is of this process alone.
    missing = [set(os.listdir(path)) - synced.get(path.stat().st_ino, set()) - {".lock"} for path in made]
    assert missing == [set()] * len(made)


def test_nothing_in_a_runs_folder_can_be_written_by_everybody(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        config = parse_config(BASE, [f"run.dir={tmp_path}/new/runs", "run.name=r"])
        with claimed(config) as folder:
            files = RunFolder(folder, resolve=list, rollouts_every=1)
            files.metrics(LINES[0])
            files.trained(1, [])
            files.close()
            part = CheckpointStore(folder / "checkpoints").begin(1)
            write_file(part, "state.json", b"{}")
        made = list((tmp_path / "new").rglob("*"))
        assert {path.name for path in made} >= {"runs", "r", "metrics.jsonl", "rollouts", "state.json"}
        assert not [path for path in made if path.stat().st_mode & stat.S_IWOTH]
        assert all(path.stat().st_mode & stat.S_IWGRP for path in made), "the group is the user's business"
        os.umask(0o077)
        with claimed(config):
            assert os.umask(0) == 0o077, "a stricter umask stays"
    finally:
        os.umask(before)


def test_steps_that_a_resume_takes_back_are_not_shown_twice(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from asyncrl.tracking import TensorBoard

    for after, value in ((None, 0.25), (1, 0.75)):
        board = TensorBoard(tmp_path, after)
        for step in range(0 if after is None else after + 1, 4):
            board.log(step, {"reward/mean": value})
        board.close()
    found = EventAccumulator(str(tmp_path)).Reload().Scalars("reward/mean")
    assert [(event.step, event.value) for event in found] == [(0, 0.25), (1, 0.25), (2, 0.75), (3, 0.75)]


def test_wandb_keeps_the_numbers_on_this_machine_when_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write(tmp_path, "wandb")
    (record,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    stored = record.read_bytes()
    assert b"reward/mean" in stored
    assert b"0.75" in stored
    assert b"ab12" not in stored, "the checksum is no number"


def test_a_tracker_that_cannot_be_opened_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "tb").write_text("in the way")
    with pytest.raises(FileExistsError):
        write(tmp_path, "tensorboard")
