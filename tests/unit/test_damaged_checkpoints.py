"""Damage of any kind, anywhere in a checkpoint: refused by the file's name, and the one before is taken."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.checkpoint.manifest import MANIFEST
from asyncrl.checkpoint.resume import newest_checkpoint, read_checkpoint
from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.errors import CheckpointError

from .resume_harness import assert_one_history, config_in, leg

PLACES = 200
SETTINGS = (
    "run.steps=6",
    "schedule.pipeline_depth=2",
    "schedule.max_staleness=3",
    "checkpoint.every=1",
    "checkpoint.hf=every",
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    """That of a run which was stopped in its middle, with groups that were ready: two checkpoints."""
    config = config_in(tmp_path_factory.mktemp("run"), *SETTINGS)
    leg(config, stop_at_step=3)
    return CheckpointStore(config.run.folder / "checkpoints")


@pytest.fixture(scope="module")
def files(store: CheckpointStore) -> list[Path]:
    """All files of the newest checkpoint, none of them empty."""
    newest = store.path(store.steps()[-1])
    found = sorted(path for path in newest.rglob("*") if path.is_file())
    names = {path.relative_to(newest).as_posix() for path in found}
    assert names == {
        MANIFEST,
        "state.json",
        "ready.msgpack",
        "config.yaml",
        "learner/version",
        "hf/version",
    }
    assert all(path.stat().st_size for path in found)
    return found


@contextmanager
def holding(path: Path, data: bytes | None) -> Iterator[None]:
    """The file has other bytes inside the block, or is not there."""
    original = path.read_bytes()
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(original)


def assert_passed_over(store: CheckpointStore, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest checkpoint is refused, its file is named, and the one before is the newest."""
    *_, before, newest = store.steps() if path.exists() else [*store.steps(), *store.without_manifest()]
    with pytest.raises(CheckpointError, match=re.escape(str(path.parent if not path.exists() else path))):
        read_checkpoint(store.path(newest))
    caplog.clear()
    found = newest_checkpoint(store)
    assert found is not None
    assert found.state.step == before
    assert path.name in caplog.text


def test_a_bit_that_changed_at_any_of_many_places(
    store: CheckpointStore, files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(0)
    for number in range(PLACES):
        path = files[number % len(files)]
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        with holding(path, bytes(data)):
            assert_passed_over(store, path, caplog)
    whole = newest_checkpoint(store)
    assert whole is not None
    assert whole.state.step == store.steps()[-1]


def test_a_file_that_was_cut_off(
    store: CheckpointStore, files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    for path in files:
        data = path.read_bytes()
        for length in {0, len(data) // 2, len(data) - 1}:
            with holding(path, data[:length]):
                assert_passed_over(store, path, caplog)


def test_a_file_that_is_missing(
    store: CheckpointStore, files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    for path in files:
        if path.name == MANIFEST:
            continue
        with holding(path, None), pytest.raises(CheckpointError, match=re.escape(str(path))):
            read_checkpoint(path.parents[len(path.relative_to(store.folder).parts) - 2])
    (manifest,) = (path for path in files if path.name == MANIFEST)
    with holding(manifest, None):
        assert_passed_over(store, manifest, caplog)


@pytest.mark.parametrize("damage", ["changed", "cut off", "no manifest"])
def test_the_run_goes_on_from_the_one_before(tmp_path: Path, damage: str) -> None:
    config = config_in(tmp_path, *SETTINGS)
    leg(config, stop_at_step=3)
    store = CheckpointStore(config.run.folder / "checkpoints")
    before, newest = store.steps()[-2:]
    folder = store.path(newest)
    if damage == "changed":
        data = (folder / "ready.msgpack").read_bytes()
        (folder / "ready.msgpack").write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif damage == "cut off":
        (folder / "state.json").write_bytes((folder / "state.json").read_bytes()[:-2])
    else:
        (folder / MANIFEST).unlink()
    final = leg(config)
    assert final.resumed is not None
    assert final.resumed.state.step == before
    assert_one_history(config)
