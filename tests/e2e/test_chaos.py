"""A short run of benchmarks/chaos.py, which is for minutes and hours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from .runs import START_TIMEOUT_S, TINY, share_models

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


FAULTS = ("controller killed", "Ray's node killed", "Ray's head killed")
LOOKS_FOR_ITS_HEAD_S = 10
"""Ray's own setting: a minute, where nobody says another."""


def test_a_run_that_is_killed_with_or_by_its_ray_is_started_again_and_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    share_models(tmp_path)
    command = [sys.executable, str(SCRIPT), "--config", str(file), "--each", "--out", str(tmp_path)]
    command += ["--most-s", "2", "--only", *FAULTS]
    environment = {**os.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": str(LOOKS_FOR_ITS_HEAD_S)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=4 * START_TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "chaos.json").read_text())
    assert [(fault["fault"], fault["starts"]) for fault in report["faults"]] == [(name, 1) for name in FAULTS]
    assert (report["lost"], report["repeated"], report["failed"], report["processes_left"]) == (0, 0, 0, 0)
