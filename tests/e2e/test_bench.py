"""``asyncrl bench`` as a user starts it: real runs, the promised object, and a timeline of each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from .runs import START_TIMEOUT_S, TINY, share_models

WARM_UP, STEPS = 1, 2
MODE_KEYS = {
    "steps",
    "wall_s",
    "tokens_per_s",
    "samples_per_s",
    "phase_s",
    "generator_busy",
    "learner_busy",
    "staleness",
    "reward_last",
}


def durations(trace: Path) -> tuple[dict[str, float], set[str]]:
    """Seconds by name of event, and the names of all tracks."""
    lasted: dict[str, float] = defaultdict(float)
    tracks = set()
    for event in json.loads(trace.read_text()):
        if event["ph"] == "X":
            lasted[event["name"]] += event["dur"] / 1e6
            assert event["dur"] >= 0
        elif event["name"] == "thread_name":
            tracks.add(event["args"]["name"])
    return lasted, tracks


def test_bench_compares_real_runs(tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    share_models(tmp_path)
    command = [sys.executable, "-m", "asyncrl.cli", "bench", "--config", str(config), "--json", "-"]
    command += ["--modes", "sync,async,colocated"]
    command += ["--steps", str(STEPS), "--warm-up", str(WARM_UP), "--repeats", "1", f"run.dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * START_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert "times as fast as sync" in " ".join(done.stderr.split())

    assert document["config"]["run"]["name"] == "tiny"
    assert document["machine"]["cores"] >= 1
    sync, overlapped, colocated = (document["modes"][name] for name in ("sync", "async", "colocated"))
    assert document["speedup_vs_colocated"] == pytest.approx(
        overlapped["tokens_per_s"] / colocated["tokens_per_s"]
    )
    for mode in (sync, overlapped, colocated):
        assert set(mode) == MODE_KEYS
        assert mode["steps"] == STEPS
        # 2 groups of 4 answers a step.
        assert mode["samples_per_s"] * mode["wall_s"] == pytest.approx(8 * STEPS)
        assert mode["phase_s"]["train"] > 0
    assert document["speedup"] == pytest.approx(overlapped["tokens_per_s"] / sync["tokens_per_s"])
    assert document["overlap_efficiency"] == pytest.approx(document["speedup"] / document["ideal_speedup"])
    assert sync["staleness"] == colocated["staleness"] == {"mean": 0.0, "max": 0.0}
    phases = sync["phase_s"]
    parts = phases["generate"] + phases["train"] + phases["weight_sync"] + phases["other"]
    assert parts == pytest.approx(sync["wall_s"] / STEPS, rel=0.01)

    (folder,) = tmp_path.glob("tiny-bench-*")
    assert json.loads((folder / "bench.json").read_text()) == document
    config_of_colocated = yaml.safe_load((folder / "colocated-0" / "config.yaml").read_text())
    assert config_of_colocated["generators"]["replicas"] == config_of_colocated["learner"]["ranks"] == 2
    for name in ("sync-0", "async-0"):
        check_timeline(folder / name)
        assert [p.name for p in (folder / name / "checkpoints").iterdir()] == ["step_0"]


def check_timeline(run: Path) -> None:
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(lines) >= 1 + WARM_UP + STEPS
    lasted, tracks = durations(run / "trace.json")
    for phase in ("train", "wait_for_batch", "wait_for_policy", "weight_sync", "checkpoint"):
        total = sum(line.get(f"timing_s/{phase}", 0.0) for line in lines)
        assert lasted[phase] == pytest.approx(total, abs=1e-4), phase
    assert {"slot 0", "rank 0", "reward worker 0", "weight_sync"} <= tracks
    assert len([track for track in tracks if track.startswith("slot")]) <= 8
    updates = sum(seconds for name, seconds in lasted.items() if name.startswith("update "))
    assert 0 < updates <= lasted["train"] + 1e-3
