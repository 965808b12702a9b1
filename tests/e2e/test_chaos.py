"""A short run of benchmarks/chaos.py, which is for minutes and hours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .runs import START_TIMEOUT_S, TINY, share_models

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


def test_a_run_that_is_killed_is_started_again_and_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    share_models(tmp_path)
    command = [sys.executable, str(SCRIPT), "--config", str(file), "--minutes", "0", "--out", str(tmp_path)]
    command += ["--only", "controller killed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * START_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "chaos.json").read_text())
    assert [(fault["fault"], fault["starts"]) for fault in report["faults"]] == [("controller killed", 1)]
    assert (report["lost"], report["repeated"], report["failed"], report["processes_left"]) == (0, 0, 0, 0)
