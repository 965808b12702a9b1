"""``asyncrl tune`` as a user starts it: a real calibration, the search, and the best two for real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from asyncrl.config_load import load_config

from .runs import START_TIMEOUT_S, TINY, share_models


def test_tune_measures_searches_and_verifies(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    share_models(tmp_path)
    command = [sys.executable, "-m", "asyncrl.cli", "tune", "--config", str(file), f"run.dir={tmp_path}"]
    command += ["--verify", "--steps", "2", "--repeats", "1", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * START_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert "The calibration misses the run that it came from by" in " ".join(done.stderr.split())
    calibration = document["calibration"]
    assert calibration["tokens_per_s"] > 0
    # Steps of milliseconds on a shared machine: only that both are of one size.
    assert -0.7 < calibration["error"] < 2.0
    assert calibration["lag_mean"] == calibration["simulated_lag_mean"] == 0.0
    settings = document["recommended"]["settings"]
    load_config(file, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    assert all(run["tokens_per_s"] > 0 for run in document["verified"].values())
    assert set(document["verified"]) == {"recommended", "second"}
    (folder,) = tmp_path.glob("tiny-tune-*")
    assert (folder / "calibration" / "trace.json").stat().st_size > 0
