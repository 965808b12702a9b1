"""A short run of benchmarks/kills.py, which is for a hundred kills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .runs import START_TIMEOUT_S, TINY, share_models

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kills.py"
KILLS = 5


def test_an_overlapped_run_killed_in_each_phase_trains_as_one_that_is_not(tmp_path: Path) -> None:
    """Every prompt once, and the bits that an undisturbed learner makes of the same batches."""
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    share_models(tmp_path)
    command = [sys.executable, str(SCRIPT), "--config", str(file), "--out", str(tmp_path), "--replay"]
    command += ["--kills", str(KILLS), "--spread", "2", "run.steps=12", "eval.every=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=12 * START_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "kills.json").read_text())
    phases = [kill["phase"] for kill in report["kills"]]
    assert phases == ["start-up", "rollout", "update", "push", "checkpoint"]
    assert report["runs"]
    assert [run["replayed"] for run in report["runs"]] == [run["checksum"] for run in report["runs"]]
