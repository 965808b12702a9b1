"""trace.json: a valid trace at any moment, whose durations are those of the metrics."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from asyncrl.metrics import PHASES
from asyncrl.simulate.run import SimulatedRun, simulate
from asyncrl.simulate.workload import parse_simulation
from asyncrl.timeline import Lanes, TraceEvent
from asyncrl.trace_file import TraceFile, TraceRecorder

LARGE = 1 << 30


def event(number: int, track: str = "slot 0", process: str = "generator 0") -> TraceEvent:
    return TraceEvent(process, track, f"version {number}", float(number), number + 0.5, {"tokens": number})


def read(path: Path) -> list[dict[str, Any]]:
    """The events, as a viewer reads them: the array's end may be missing."""
    text = path.read_text()
    if not text.rstrip().endswith("]"):
        text += "]"
    events: list[dict[str, Any]] = json.loads(text)
    return events


def check_format(events: list[dict[str, Any]]) -> None:
    """What Chrome's trace event format asks of complete events and of names."""
    named = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    for e in events:
        assert e["ph"] in ("X", "M")
        assert all(isinstance(e[key], int) and e[key] >= 0 for key in ("pid", "tid"))
        assert isinstance(e["name"], str)
        assert isinstance(e["args"], dict)
        if e["ph"] == "X":
            assert all(isinstance(e[key], int | float) and e[key] >= 0 for key in ("ts", "dur"))
            assert ("thread_name", e["pid"], e["tid"]) in named
            assert ("process_name", e["pid"], 0) in named


def names(events: list[dict[str, Any]], kind: str) -> dict[Any, str]:
    return {
        e["pid"] if kind == "process" else (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["name"] == f"{kind}_name"
    }


def test_the_file_is_a_trace_after_every_write_and_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path, offset=0.0, limit_bytes=LARGE)
    for number in range(3):
        file.write([event(number), event(number, "slot 1")])
        events = read(path)
        check_format(events)
        assert len([e for e in events if e["ph"] == "X"]) == 2 * (number + 1)
    file.close()
    events = json.loads(path.read_text())
    check_format(events)
    assert [e["ts"] for e in events if e["ph"] == "X"] == [0, 0, 1e6, 1e6, 2e6, 2e6]
    assert {e["dur"] for e in events if e["ph"] == "X"} == {5e5}
    assert sorted(names(events, "thread").values()) == ["slot 0", "slot 1"]
    file.write([event(9)])
    assert json.loads(path.read_text()) == events


@pytest.mark.parametrize("end", ["closed", "killed", "torn", "empty"])
def test_a_file_that_is_there_is_continued(tmp_path: Path, end: str) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path, offset=0.0, limit_bytes=LARGE)
    if end != "empty":
        file.write([event(0), event(1)])
    if end in ("closed", "empty"):
        file.close()
    if end == "torn":
        with path.open("a") as torn:
            torn.write(',\n{"ph":"X","name":"version 7","pid":1,"ti')
    again = TraceFile(path, offset=100.0, limit_bytes=LARGE)
    again.write([event(2)])
    again.close()
    events = json.loads(path.read_text())
    check_format(events)
    before = [] if end == "empty" else [0.0, 1e6]
    assert [e["ts"] for e in events if e["ph"] == "X"] == [*before, 102e6]
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert len(tracks) == 1, "the same names have to have the same numbers"


def test_an_empty_trace_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    TraceFile(path, offset=0.0, limit_bytes=LARGE).close()
    assert json.loads(path.read_text()) == []


def test_the_file_ends_at_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path, offset=0.0, limit_bytes=2000)
    for number in range(100):
        file.write([event(number)])
    events = json.loads(path.read_text())
    assert 2000 <= path.stat().st_size < 2400
    assert len(events) < 30
    assert "trace.json has reached log.trace_mb" in caplog.text


def test_events_that_the_disk_cannot_keep_up_with_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path, offset=0.0, limit_bytes=LARGE)
    waiting: list[Any] = []
    recorder = TraceRecorder(file, lambda write, events: waiting.append((write, events)))
    for number in range(512 * 70):
        recorder.add(event(number))
    assert len(waiting) == 64
    assert recorder.left_out == 6 * 512
    assert caplog.text.count("does not keep up") == 1
    for write, events in waiting:
        write(events)
    recorder.add(event(1))
    recorder.flush()
    assert len(waiting) == 65
    assert recorder.left_out == 6 * 512
    os.truncate(path, 0)


def test_lanes_are_as_few_as_run_at_a_time() -> None:
    rng = random.Random(0)
    for _ in range(200):
        starts = [rng.uniform(0, 20) for _ in range(rng.randint(1, 40))]
        spans = sorted(((s, s + rng.expovariate(0.5)) for s in starts), key=lambda span: span[1])
        lanes, by_lane = Lanes(), defaultdict(list)
        for begun, ended in spans:
            by_lane[lanes.assign(begun, ended)].append((begun, ended))
        most = max(sum(b <= begun < e for b, e in spans) for begun, _ in spans)
        assert sorted(by_lane) == list(range(most))
        for lane in by_lane.values():
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(lane))


def test_what_touches_may_share_a_lane() -> None:
    lanes = Lanes()
    assert [lanes.assign(0.0, 1.0), lanes.assign(1.0, 2.0), lanes.assign(1.5, 3.0)] == [0, 0, 1]


def simulated(folder: Path, *overrides: str) -> tuple[SimulatedRun, list[dict[str, Any]]]:
    values = {
        "workload": {
            "lengths": {"log_normal": {"median": 20, "sigma": 1.0}},
            "generation": {"token_s": 0.1, "prompt_tokens": 4, "prefill_token_s": 0.001},
            "learner": {"step_s": 1.0},
            "push": {"send_s": 0.25, "pause_s": 0.125},
            "reward": {"score_s": 0.5},
        },
        "run": {"steps": 12},
        "rollout": {"group_size": 3, "groups_per_step": 2, "max_new_tokens": 200},
        "schedule": {"pipeline_depth": 1, "max_staleness": 2},
        "generators": {"replicas": 2, "slots": 4},
    }
    run = simulate(parse_simulation(values, overrides), out=folder)
    events = json.loads((folder / "trace.json").read_text())
    check_format(events)
    return run, events


@pytest.mark.parametrize("depth", [0, 1])
def test_phases_add_up_to_the_metrics(tmp_path: Path, depth: int) -> None:
    run, events = simulated(tmp_path, f"schedule.pipeline_depth={depth}")
    lasted: dict[str, float] = defaultdict(float)
    for e in events:
        if e["ph"] == "X":
            lasted[e["name"]] += e["dur"] / 1e6
    for phase in PHASES:
        if phase != "weight_pause":  # a part of each push, and an argument of it
            total = sum(line.get(f"timing_s/{phase}", 0.0) for line in run.lines)
            assert lasted[phase] == pytest.approx(total, abs=1e-4), phase
    pauses = [e["args"]["pause_s"] for e in events if e["name"] == "weight_sync"]
    assert sum(pauses) == pytest.approx(sum(line.get("timing_s/weight_pause", 0.0) for line in run.lines))
    assert lasted["train"] == pytest.approx(12.0)


def test_slots_ranks_and_workers_have_tracks_of_their_own(tmp_path: Path) -> None:
    run, events = simulated(tmp_path)
    processes, threads = names(events, "process"), names(events, "thread")
    tracks: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            tracks[processes[e["pid"]], threads[e["pid"], e["tid"]]].append(e)
    for replica in ("generator 0", "generator 1"):
        slots = {track for process, track in tracks if process == replica and track.startswith("slot")}
        assert slots == {f"slot {n}" for n in range(len(slots))}
        assert len(slots) <= 4
        assert (replica, "reward worker") in tracks
    assert len(tracks["learner", "rank 0"]) == 12
    for track in tracks.values():
        ordered = sorted(track, key=lambda e: e["ts"])
        for before, after in itertools.pairwise(ordered):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.2, "on one track, one thing at a time"
    sampled = [e for (_, track), found in tracks.items() if track.startswith("slot") for e in found]
    assert len(sampled) == 12 * 2 * 3
    assert all(sum(e["args"]["versions"].values()) == e["args"]["tokens"] for e in sampled)
    assert any(e["name"].startswith("versions") for e in sampled), "no answer crossed a version"
    # What slots held is what the engines' own counters say.
    held = sum(e["dur"] for e in sampled) / 1e6
    share = sum(
        line["generator/occupancy"] * line["timing_s/step"]
        for line in run.lines
        if "generator/occupancy" in line
    )
    assert held == pytest.approx(share * 2 * 4, rel=0.1)
