"""Whatever bytes a reader is given, it reads them or raises one of asyncrl's own errors.

Files are damaged past their checksums: each is sealed again, as another version might have written it.
What the codec of groups and the config's values do is in their own tests.
"""

from __future__ import annotations

import copy
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.checkpoint.files import measure
from asyncrl.checkpoint.groups import encode_ready, read_ready
from asyncrl.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from asyncrl.checkpoint.resume import prepare
from asyncrl.checkpoint.state import RunState
from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.config import SourceSection
from asyncrl.config_load import load_config
from asyncrl.data import load_prompts
from asyncrl.data.sources import open_source
from asyncrl.errors import CheckpointError, CodecError, ConfigError, DataError, UsageError
from asyncrl.halves.recording import open_recording
from asyncrl.learners.state_files import Part, SavedState, Slab, write_state
from asyncrl.models.tokenizer import character_tokenizer
from asyncrl.queues import codec
from asyncrl.queues.annotations import ANNOTATION_MAGIC, decode_annotation, encode_annotation
from asyncrl.recorded import read_run
from asyncrl.snapshot import PartialGroup, decode_partial, encode_snapshot
from asyncrl.types import Completion

from .resume_harness import OF, config_in, leg
from .test_codec import group, trajectory
from .test_data import config_of
from .test_halves import config_in as half_in
from .test_halves import go
from .test_ready_groups import ready_group

FEW = settings(max_examples=40, deadline=None)
KEYS = st.sampled_from(["prompt", "question", "answer", "metadata", "role", "content", "data_source"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["\ud800", "2024-13-45", "${x}", "", -1, 2**70, 10**30])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
DEEP = (
    "[" * 5000,
    '{"a":' * 5000,
    '{"prompt": ' + "[" * 600 + "]" * 600 + "}",
    '{"prompt": 1' + "0" * 5000 + "}",
)


def dumped(value: Any) -> bytes:
    """As JSON, halves of characters included."""
    return json.dumps(value).encode()


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """``good`` with bytes changed, cut off or put in."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        new = draw(st.binary(max_size=4))
        data[place : place + draw(st.integers(0, 8))] = new
    return bytes(data)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to everything inside ``value``."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


@st.composite
def another(draw: st.DrawFn, good: Any, junk: st.SearchStrategy[Any] = JSON) -> Any:
    """``good`` with one thing in it changed or taken out."""
    value = copy.deepcopy(good)
    *above, key = draw(st.sampled_from([*places(good)]))
    holder = value
    for step in above:
        holder = holder[step]
    if draw(st.booleans()) or isinstance(holder, list):
        holder[key] = draw(junk)
    else:
        del holder[key]
    return value


# --- data ---


def read_all(folder: Path, name: str) -> None:
    rows = open_source(SourceSection(path=name), folder)
    for index in range(len(rows)):
        msgpack.packb(rows[index])  # what is accepted can travel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@FEW
@given(
    st.lists(JSON.map(dumped) | st.binary(max_size=30), max_size=4), st.sampled_from([b"\n", b"\r\n", b""])
)
def test_lines_of_anything(folder: Path, lines: list[bytes], end: bytes) -> None:
    (folder / "rows.jsonl").write_bytes(end.join([*lines, b""]))
    with suppress(UsageError):
        read_all(folder, "rows.jsonl")
        load_prompts(config_of(train="rows.jsonl"), character_tokenizer(256), folder)


@pytest.mark.parametrize("text", DEEP)
def test_lines_that_parsers_give_up_on(folder: Path, text: str) -> None:
    (folder / "deep.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"deep\.jsonl line 1"):
        read_all(folder, "deep.jsonl")


def parquet_of(table: pa.Table) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, compression="none")
    return out.getvalue()


PARQUET = parquet_of(pa.table({"prompt": ["a", "b", None], "n": [1, 2, 3], "inner": [{"x": [1.0]}] * 3}))


@FEW
@given(damaged(PARQUET) | st.binary(max_size=40))
def test_parquet_that_is_damaged(folder: Path, data: bytes) -> None:
    (folder / "rows.parquet").write_bytes(data)
    with suppress(DataError):
        read_all(folder, "rows.parquet")


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"\xff\xfe"]).view(pa.string()),
        pa.array([2**62], pa.timestamp("us")),
        pa.array([1], pa.timestamp("ns")),
        pa.array([1], pa.duration("s")),
    ],
    ids=["no UTF-8", "beyond the calendar", "nanoseconds", "duration"],
)
def test_values_of_parquet_that_python_has_no_form_for(folder: Path, column: pa.Array) -> None:
    (folder / "odd.parquet").write_bytes(parquet_of(pa.table({"prompt": column})))
    with suppress(DataError):
        read_all(folder, "odd.parquet")


# --- config ---

PIECES = [
    "run:",
    " ",
    "\n",
    "- ",
    "{",
    "}",
    "[",
    "]",
    "a: ",
    "b",
    "&a ",
    "*a",
    "!!set ",
    "!!binary ",
    "${",
    "=",
    "? ",
    "0x",
    "1_0:60",
    "2024-13-45",
    "'",
    '"',
    "\t",
    "null",
    "#",
    "|",
    ">",
    "%",
    "@",
    "<<: ",
    "\x00",
    "é",
]
YAML = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@FEW
@given(YAML | st.text(max_size=40))
def test_a_config_of_any_text(folder: Path, text: str) -> None:
    (folder / "any.yaml").write_text(text, errors="surrogatepass")
    with pytest.raises(ConfigError):
        load_config(folder / "any.yaml")


@pytest.mark.parametrize(
    "text", ["[" * 5000, "a: &a [*a]", "run: 1" + "0" * 5000, "run: {steps: 2024-13-45}"]
)
def test_a_config_that_parsers_give_up_on(folder: Path, text: str) -> None:
    (folder / "deep.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load_config(folder / "deep.yaml")


@FEW
@given(YAML | st.text(max_size=20))
def test_any_override(folder: Path, text: str) -> None:
    (folder / "empty.yaml").write_text("")
    with pytest.raises(ConfigError):
        load_config(folder / "empty.yaml", [f"run.name={text}", text])


# --- records ---

MSGPACK = st.recursive(
    (st.none() | st.booleans() | st.floats() | st.text(max_size=4) | st.binary(max_size=4))
    | st.integers(-(2**63), 2**64 - 1),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def resealed(record: bytes, document: Any, magic: bytes) -> bytes:
    body = msgpack.packb(document)
    return codec._header(body, magic) + body


READY_RECORD = encode_ready(ready_group(1), 2)
READY_DOCUMENT = codec.unframe(READY_RECORD, b"ARLR")


@FEW
@given(another(READY_DOCUMENT, MSGPACK) | MSGPACK)
def test_ready_groups(document: Any) -> None:
    file = io.BytesIO(resealed(READY_RECORD, document, b"ARLR"))
    with suppress(CodecError):
        for ready, start in read_ready(file):
            encode_ready(ready, start)
            assert min(ready.expiry, start) >= 0


ANNOTATION = encode_annotation(3, [2, 1], {"x": [np.zeros(2, np.float32), np.ones(1, np.float32)]})


@FEW
@given(another(codec.unframe(ANNOTATION, ANNOTATION_MAGIC), MSGPACK) | MSGPACK)
def test_annotations(document: Any) -> None:
    with suppress(CodecError):
        decode_annotation(resealed(ANNOTATION, document, ANNOTATION_MAGIC), 3, [2, 1])


BEGUN = Completion(*(np.zeros(2, t) for t in (np.int32, np.float32, np.int32)), "abort")
SNAPSHOT = encode_snapshot({("train-7", 7): PartialGroup(group(trajectory(0)), {1: BEGUN})})


@FEW
@given(damaged(SNAPSHOT) | another(msgpack.unpackb(SNAPSHOT), MSGPACK).map(msgpack.packb))
def test_snapshots(payload: bytes) -> None:
    with suppress(CodecError):
        decode_partial(payload, ("train-7", 7), 4)


# --- checkpoints ---


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped in its middle, with groups that were ready."""
    config = config_in(tmp_path_factory.mktemp("run"), *SETTINGS)
    leg(config, stop_at_step=3)
    return config.run.folder


SETTINGS = (
    "run.steps=6",
    "schedule.pipeline_depth=2",
    "schedule.max_staleness=3",
    "checkpoint.every=1",
    "eval.every=0",
)


@contextmanager
def copied(run: Path, folder: Path) -> Iterator[Path]:
    """A copy of ``run``, for the block alone."""
    place = folder / "copy" / "r"
    shutil.rmtree(place.parent, ignore_errors=True)
    yield Path(shutil.copytree(run, place))


def seal(checkpoint: Path) -> None:
    """Make the manifest that of the files as they are."""
    before = read_manifest(checkpoint)
    files = tuple(measure(checkpoint, entry.path) for entry in before.files)
    (checkpoint / MANIFEST).write_bytes(Manifest(before.step, before.policy_version, files).encode())


def newest(run: Path) -> Path:
    store = CheckpointStore(run / "checkpoints")
    return store.path(store.steps()[-1])


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_a_checkpoint_whose_files_say_anything(run: Path, folder: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["state.json", "config.yaml", "ready.msgpack"]))
    good = (newest(run) / name).read_bytes()
    bad = damaged(good) | JSON.map(dumped) | st.binary(max_size=20)
    if name == "state.json":
        bad |= another(json.loads(good)).map(dumped)
    if name == "config.yaml":
        bad |= another(yaml.safe_load(good)).map(dumped)
    with copied(run, folder) as place:
        (newest(place) / name).write_bytes(data.draw(bad))
        seal(newest(place))
        with suppress(UsageError):
            prepare(config_in(place.parent, *SETTINGS), OF)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(["metrics.jsonl", "ledger.jsonl", "checkpoints/best.json"]), st.data())
def test_a_run_whose_lines_say_anything(run: Path, folder: Path, name: str, data: st.DataObject) -> None:
    with copied(run, folder) as place:
        path = place / name
        good = path.read_bytes() if path.exists() else b'{"step": 1, "eval/reward_mean": 0.5}'
        line = another(json.loads(good.split(b"\n")[0])).map(dumped)
        bad = damaged(good) | line.map(lambda bad: bad + b"\n" + good)
        path.write_bytes(data.draw(bad))
        read_run(place)
        with suppress(UsageError):
            prepare(config_in(place.parent, *SETTINGS), OF)


@FEW
@given(st.data())
def test_a_state_of_any_values(run: Path, data: st.DataObject) -> None:
    good = json.loads((newest(run) / "state.json").read_bytes())
    try:
        state = RunState.decode(dumped(data.draw(another(good))), "state.json")
    except CheckpointError:
        return
    assert RunState.decode(state.encode(), "again") == state


HALVES = [Slab(0, 0, 2), Slab(0, 2, 4)]
PARTS = [Part("a", (2, 3), 0, 6, 1), *(Part("b", (4, 2), 0, 4, 0, half) for half in HALVES)]


@FEW
@given(st.data())
def test_state_of_ranks(folder: Path, data: st.DataObject) -> None:
    place = folder / "ranks"
    shutil.rmtree(place, ignore_errors=True)
    tensors = [(f"{kind}/{part.name}", torch.zeros(part.numel)) for part in PARTS[:1] for kind in part.kinds]
    write_state(place, 0, 2, PARTS[:1], tensors)
    for rank, part in enumerate(PARTS[1:]):
        write_state(place, rank, 3, [part], [(f"weight/{part.name}", torch.zeros(4))])
    (place / "rank-00000-of-00002.json").rename(place / "rank-00002-of-00003.json")
    (place / "rank-00000-of-00002.safetensors").rename(place / "rank-00002-of-00003.safetensors")
    file = data.draw(st.sampled_from(sorted(place.iterdir())))
    good = file.read_bytes()
    bad: st.SearchStrategy[bytes] = damaged(good)
    if file.suffix == ".json":
        bad |= another(json.loads(good)).map(dumped)
    file.write_bytes(data.draw(bad))
    with suppress(CheckpointError):
        saved = SavedState(place)
        for name in saved.parameters:
            if saved.parameters[name].numel < 100:  # else the model's shapes would have refused it
                saved.read("weight", name)


# --- recordings ---


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = half_in(tmp_path_factory.mktemp("recorded"), "run.rollout_only=true", "run.steps=2")
    go(config)
    return config.run.folder


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_recordings(recorded: Path, folder: Path, data: st.DataObject) -> None:
    with copied(recorded, folder) as place:
        name = data.draw(st.sampled_from(["config.yaml", "metrics.jsonl", "rollouts/step_000001.msgpack"]))
        good = (place / name).read_bytes()
        bad = damaged(good)
        if name == "config.yaml":
            bad |= another(yaml.safe_load(good)).map(dumped)
        (place / name).write_bytes(data.draw(bad))
        config = half_in(place.parent, f"run.replay={place}", "run.steps=2", name="replayed")
        with suppress(UsageError):
            recording = open_recording(config, Path())
            for ordinal in range(len(recording)):
                recording.group(ordinal)
