"""The format of a checkpoint's folder: what is whole is read, and everything else is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.checkpoint.files import measure, write_file
from asyncrl.checkpoint.manifest import MANIFEST, read_manifest, verify
from asyncrl.checkpoint.store import Best, CheckpointStore
from asyncrl.errors import CheckpointError

FILES = {"state.json": b'{"step": 3}\n', "ready.msgpack": bytes(range(256)) * 40, "empty": b""}


def save(store: CheckpointStore, step: int, *, weights_only: bool = False) -> Path:
    part = store.begin(step)
    (part / "learner").mkdir()
    entries = [write_file(part, name, data) for name, data in FILES.items()]
    tensors = write_file(part, "learner/rank-0.safetensors", b"\1\2\3" * 1000)
    return store.seal(part, step, step, [*entries, tensors], weights_only=weights_only)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(CheckpointStore(tmp_path_factory.mktemp("run") / "checkpoints"), 3)


def test_what_was_sealed_is_whole(whole: Path) -> None:
    manifest = verify(whole)
    assert (manifest.step, manifest.policy_version) == (3, 3)
    assert {e.path for e in manifest.files} == {*FILES, "learner/rank-0.safetensors"}
    assert whole.name == "step_3"
    assert [p.name for p in whole.parent.iterdir()] == ["step_3"], "nothing temporary is left"


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_byte_changed_anywhere_is_refused_with_the_name_of_the_file(
    whole: Path, data: st.DataObject
) -> None:
    files = sorted(p for p in whole.rglob("*") if p.is_file() and p.stat().st_size)
    path = data.draw(st.sampled_from(files), label="file")
    original = path.read_bytes()
    place = data.draw(st.integers(0, len(original) - 1), label="place")
    change = data.draw(st.integers(1, 255), label="change")
    damaged = bytearray(original)
    damaged[place] ^= change
    path.write_bytes(damaged)
    try:
        with pytest.raises(CheckpointError, match=path.name):
            verify(whole)
    finally:
        path.write_bytes(original)
    verify(whole)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_of_another_length_is_refused_with_its_name(whole: Path, data: st.DataObject) -> None:
    files = sorted(p for p in whole.rglob("*") if p.is_file())
    path = data.draw(st.sampled_from(files), label="file")
    original = path.read_bytes()
    length = data.draw(
        st.integers(0, len(original) + 20).filter(lambda n: n != len(original)), label="length"
    )
    path.write_bytes((original + b"\n" * 20)[:length])
    try:
        with pytest.raises(CheckpointError, match=path.name):
            verify(whole)
    finally:
        path.write_bytes(original)


def test_a_missing_file_and_a_missing_manifest_are_refused(whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "step_3"))
    (copy / "ready.msgpack").unlink()
    with pytest.raises(CheckpointError, match=r"ready\.msgpack cannot be read: No such file"):
        verify(copy)
    (copy / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        verify(copy)


def test_a_format_of_the_future_says_so(whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "step_3"))
    document = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps({**document, "format_version": 99}))
    with pytest.raises(CheckpointError, match="format version 99, this asyncrl reads 1"):
        read_manifest(copy)


@given(data=st.binary(max_size=200))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_in_place_of_a_manifest_raise_anything_else(tmp_path: Path, data: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(data)
    with pytest.raises(CheckpointError):
        read_manifest(tmp_path)


def test_a_folder_counts_only_once_it_is_sealed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.steps() == []
    part = store.begin(1)
    write_file(part, "state.json", b"{}")
    (store.folder / "step_7").mkdir()  # an export, or what an interrupted removal left
    assert store.steps() == []
    store.clear_parts()
    assert not part.exists()
    save(store, 2)
    save(store, 10)
    assert store.steps() == [2, 10]


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in range(1, 7):
        save(store, step)
    store.prune(2, keep={3})
    assert store.steps() == [3, 5, 6]
    store.prune(1)
    assert store.steps() == [6]


def test_one_whose_removal_was_cut_short_is_none_and_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2):
        save(store, step)

    def cut_short(path: Path) -> None:
        raise OSError("cut short")

    with monkeypatch.context() as patch:
        patch.setattr("asyncrl.checkpoint.store.shutil.rmtree", cut_short)
        with pytest.raises(OSError, match="cut short"):
            store.prune(1)
    assert store.steps() == [2]
    again = CheckpointStore(tmp_path / "checkpoints")
    again.clear_parts()
    assert [path.name for path in again.folder.iterdir()] == ["step_2"]


def test_weights_alone_are_no_checkpoint_and_stay_while_they_are_wanted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        save(store, step, weights_only=True)
    save(store, 2)
    assert (store.steps(), store.weights_steps()) == ([2], [1, 2, 3])
    assert [store.holding(step) for step in (2, 3, 4)] == [store.path(2), store.weights_path(3), None]
    store.prune(1, keep={2, 3})
    assert (store.steps(), store.weights_steps()) == ([2], [3]), "the checkpoint of 2 has its weights"
    store.set_aside(after=2)
    assert (store.steps(), store.weights_steps()) == ([2], [])
    assert (store.folder / "weights_3.rolled_back" / MANIFEST).exists()


def test_going_back_sets_later_checkpoints_and_their_best_aside(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        save(store, step)
    store.set_best(Best(2, 0.5))
    store.set_aside(after=2)
    assert store.steps() == [1, 2]
    assert store.best() == Best(2, 0.5)
    store.set_aside(after=1)
    assert store.steps() == [1]
    assert store.best() is None
    assert (store.folder / "step_3.rolled_back" / MANIFEST).exists()


def test_a_step_that_is_taken_again_replaces_the_damaged_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    folder = save(store, 1)
    (folder / "empty").write_bytes(b"no more")
    save(store, 1)
    verify(store.path(1))


def test_a_folder_that_is_added_belongs_to_the_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    folder = save(store, 4)
    for content in (b"first", b"second, longer"):
        part = store.begin(4)
        write_file(part, "config.json", content)
        store.extend(4, part, "hf")
        manifest = verify(folder)
        assert measure(folder, "hf/config.json") in manifest.files
        assert (folder / "hf" / "config.json").read_bytes() == content
    assert len(manifest.files) == len(FILES) + 2
