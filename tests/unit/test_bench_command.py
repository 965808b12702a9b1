"""The order and the ends of bench's runs; simulated runs stand in for what takes minutes (see e2e)."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.bench import runs
from asyncrl.bench.command import run_bench
from asyncrl.config import Config
from asyncrl.config_load import load_config
from asyncrl.errors import BenchRunError, ConfigError, UsageError
from asyncrl.simulate.run import simulate
from asyncrl.simulate.workload import parse_simulation

from .controller_harness import config
from .test_simulate import WORKLOAD


def bench(
    settings: Config,
    *modes: str,
    repeats: int = 2,
    json_file: Path | None = None,
    html_file: Path | None = None,
) -> tuple[int, str]:
    screen = StringIO()
    code = run_bench(
        settings,
        modes,
        steps=3,
        repeats=repeats,
        warm_up=1,
        json_file=json_file,
        console=Console(file=screen, width=120),
        html_file=html_file,
    )
    return code, screen.getvalue()


def test_runs_are_interleaved_and_leave_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def train(config_file: Path, folder: Path, name: str, overrides: Sequence[str]) -> None:
        asked = load_config(config_file, [*overrides, f"run.dir={folder}", f"run.name={name}"])
        assert asked.run.steps == 1 + 3 + 2
        assert asked.eval.every == asked.log.rollouts_every == asked.checkpoint.every == 0
        assert not asked.checkpoint.at_end
        assert not asked.checkpoint.keep_best
        assert asked.checkpoint.resume == "never"
        # A model that an earlier run made in run.dir is there for these too.
        assert (Path(asked.run.dir) / ".models").resolve() == (tmp_path / ".models").resolve()
        ran.append(asked.run.name)
        depth, bound = asked.schedule.pipeline_depth, asked.schedule.max_staleness
        schedule = {"pipeline_depth": depth, "max_staleness": bound}
        values = WORKLOAD | {"schedule": schedule, "run": {"steps": asked.run.steps}}
        if asked.placement.mode == "colocated":
            assert asked.generators.replicas == asked.learner.ranks == 2
            values |= {"placement": {"mode": "colocated"}}
        simulate(parse_simulation(values), out=asked.run.folder)

    monkeypatch.setattr(runs, "train_once", train)
    settings = config(f"run.dir={tmp_path}", "run.name=mine", "run.seed=5", "schedule.max_staleness=3")
    html_file = tmp_path / "report.html" if find_spec("plotly") else None
    code, screen = bench(
        settings, "sync", "async", "colocated", json_file=tmp_path / "out.json", html_file=html_file
    )
    assert code == 0
    assert ran == ["sync-0", "async-0", "colocated-0", "sync-1", "async-1", "colocated-1"]
    assert "reward after equal time" in screen
    assert "async is 2.00 times as fast as sync (pairs: 2.00, 2.00)" in screen
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["config"]["run"]["seed"] == 5
    assert document["speedup"] == pytest.approx(2.0)
    # The stand-ins of both take 2 s a step: a rollout, then an update.
    assert document["modes"]["colocated"]["wall_s"] == document["modes"]["sync"]["wall_s"]
    assert document["speedup_vs_colocated"] == pytest.approx(2.0)
    assert "async is 2.00 times as fast as colocated" in screen
    if html_file is not None:
        assert "<title>sync-0 against async-0 against colocated-0</title>" in html_file.read_text()
    (folder,) = tmp_path.glob("mine-bench-*")
    assert json.loads((folder / "bench.json").read_text()) == document
    figures = json.loads((folder / "runs.json").read_text())
    assert [run["steps"] for run in figures["sync"] + figures["async"]] == [3] * 4


def test_a_run_that_cannot_start_says_why(tmp_path: Path) -> None:
    settings = config(f"run.dir={tmp_path}")  # its data are not there
    with pytest.raises(
        UsageError, match=r"(?s)the run of sync-0 ended with exit code 2, after:.*none\.jsonl"
    ):
        bench(settings, "sync")


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A shell script in place of the interpreter that runs ``asyncrl train``."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(runs.sys, "executable", str(path))


def test_a_run_that_fails_is_an_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "echo it broke; exit 1")
    with pytest.raises(BenchRunError, match=r"(?s)exit code 1, after:.*it broke"):
        bench(config(f"run.dir={tmp_path}"), "sync")


@pytest.mark.parametrize("end", ["trap 'exit 143' TERM", "trap 'exit 0' TERM", ""])
def test_a_signal_goes_on_to_the_run_and_ends_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """However the run takes it; the stand-in has the signal sent, and ends by itself after ten seconds."""
    before = signal.getsignal(signal.SIGTERM)
    stand_in(tmp_path, monkeypatch, f"{end}\nkill -TERM $PPID\nsleep 10 & wait $!")
    assert bench(config(f"run.dir={tmp_path}"), "sync", "async") == (143, "")
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_no_mode_can_run_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        bench(config(f"run.dir={tmp_path}/file"), "sync")
    with pytest.raises(ConfigError, match="pipeline_depth: found 0"):
        bench(config("schedule.pipeline_depth=0", "schedule.max_staleness=0"), "sync", "async")
