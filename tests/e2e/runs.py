"""Real runs as a user starts them: the ``asyncrl`` command in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

REWARDS = Path(__file__).with_name("rewards.py")
TINY = f"""\
run: {{name: tiny, steps: 4}}
model:
  create:
    {{hidden_size: 32, intermediate_size: 64, layers: 2, heads: 2, kv_heads: 1, warm_start: {{steps: 0}}}}
data:
  train: {{python: "asyncrl.examples.addition:rows", args: {{digits: 2, count: 100}}}}
  eval: {{holdout: 8}}
  max_prompt_tokens: 16
rollout: {{group_size: 4, groups_per_step: 2, max_new_tokens: 24}}
reward: {{functions: ['{REWARDS}:digits']}}
eval: {{every: 2}}
generators: {{slots: 8}}
learner: {{lr: 1.0e-3, micro_batch_tokens: 64}}
"""
MARK = "ASYNCRL_TEST_RUN"
START_TIMEOUT_S = 240


@dataclass
class Run:
    """One ``asyncrl train``, and everything that it started."""

    folder: Path
    process: subprocess.Popen[str]
    mark: str
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def ledger(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "ledger.jsonl").read_text().splitlines()]

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"no end after {timeout_s} s:\n{self.text}") from None

    def wait_for_steps(self, steps: int) -> None:
        """Until so many lines of metrics stand, the one before training included."""
        deadline = time.monotonic() + START_TIMEOUT_S
        path = self.folder / "metrics.jsonl"
        while not path.exists() or path.read_text().count("\n") <= steps:
            assert self.process.poll() is None, f"ended too soon:\n{self.text}"
            assert time.monotonic() < deadline, f"no step {steps} after {START_TIMEOUT_S} s:\n{self.text}"
            time.sleep(0.2)

    def processes(self) -> list[psutil.Process]:
        """Every living process that this run started, whoever its parent is now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and self._started(process):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def _started(self, process: psutil.Process) -> bool:
        """By the mark; or by a log in the folder of its Ray session, for one that wrote a title over that."""
        if process.environ().get(MARK) == self.mark:
            return True
        session = re.compile(rf"/session_[^/]*_{self.process.pid}/logs/")
        return any(file.mode != "r" and session.search(file.path) for file in process.open_files())

    def assert_nothing_left(self, within_s: float) -> None:
        gone, alive = psutil.wait_procs(self.processes(), timeout=within_s)
        left = [" ".join(p.cmdline())[:100] for p in self.processes()]
        assert not left, f"left behind after {within_s} s: {left}; {len(gone)} ended, {len(alive)} did not"

    def interrupt(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def start(tmp_path: Path, *overrides: str, config: str = TINY, name: str = "tiny") -> Run:
    """Start a run of ``config`` under ``tmp_path``, with the small model that all runs of the tests share."""
    share_models(tmp_path / "runs")
    file = tmp_path / f"{name}.yaml"
    file.write_text(config)
    mark = uuid.uuid4().hex
    log = tmp_path / f"{name}.log"
    command = [sys.executable, "-m", "asyncrl.cli", "train", "--config", str(file)]
    command += [f"run.dir={tmp_path / 'runs'}", f"run.name={name}", *overrides]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, text=True, env={**os.environ, MARK: mark}
        )
    return Run(tmp_path / "runs" / name, process, mark, log)


def share_models(run_dir: Path) -> None:
    """Have runs in ``run_dir`` find the models that runs of other tests have made: to make one takes about as
    long as all else before a short run's first step."""
    of_all = next((p for p in run_dir.parents if p.parent.name.startswith("pytest-of-")), run_dir.parent)
    (of_all / "models").mkdir(exist_ok=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    if not (run_dir / ".models").exists():
        (run_dir / ".models").symlink_to(of_all / "models", target_is_directory=True)


def finish(tmp_path: Path, *overrides: str, config: str = TINY, name: str = "tiny") -> Run:
    """Start a run and wait for its end, which has to be a good one."""
    run = start(tmp_path, *overrides, config=config, name=name)
    assert run.wait() == 0, run.text
    run.assert_nothing_left(within_s=15)
    return run


def assert_sound(run: Run, *, max_staleness: int, capacity: int) -> None:
    """What holds of every line of every run: the bound, the books, the queue's size, the canary."""
    states = ("running", "ready", "training", "trained", "filtered", "dropped", "failed")
    for line in run.metrics:
        assert line.get("staleness/max", 0) <= max_staleness
        assert line["ledger/submitted"] == sum(line[f"ledger/{state}"] for state in states)
        assert line["queue/outstanding"] <= capacity
    assert run.metrics[0]["weight_sync/canary_diff_max"] < 1e-3
    # Of a run that was stopped, what was not retired is the newest checkpoint's to issue again.
    newest = max((run.folder / "checkpoints").glob("step_*/state.json"), key=lambda p: int(p.parent.name[5:]))
    frontier = json.loads(newest.read_text())["frontier"]
    ordinals = sorted(end["ordinal"] for end in run.ledger)
    retired = [*range(frontier["lowest"]), *sorted(frontier["retired_above"])]
    assert ordinals == retired, "an ordinal was lost or retired twice"
