"""The commands: what they import, how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.cli import app
from asyncrl.config import Config
from asyncrl.errors import LearnerError
from asyncrl.stop_signals import StopSignals

HEAVY = {
    "torch",
    "ray",
    "transformers",
    "datasets",
    "deepspeed",
    "numpy",
    "pyarrow",
    "reasoning_gym",
    "rich.live",
}
CONFIG = """
model: {create: {}}
data: {train: rows.jsonl, max_prompt_tokens: 64}
reward: {functions: [exact_match]}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["train", "--config", "run.yaml", "run.steps=0"],
        ["check", "--config", "no.yaml"],
        ["bench", "--config", "run.yaml", "run.nmae=x"],
        ["simulate", "--workload", "no.yaml"],
        ["tune", "--config", "run.yaml", "run.nmae=x"],
        ["report", "no-such-run"],
        ["check", "--config", "run.yaml", "rollout.top_p=0.5"],
        ["doctor", "--config", "run.yaml", "run.nmae=x"],
    ],
)
def test_help_and_config_errors_import_nothing_heavy(folder: Path, arguments: list[str]) -> None:
    code = (
        "import sys\nfrom asyncrl.cli import main\nsys.argv[1:] = sys.argv[2:]\n"
        "try: main()\nfinally: print('MODULES', *sys.modules)"
    )
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", code, "asyncrl", *arguments], capture_output=True, text=True, timeout=60
    )
    after = os.times()
    # Processor time: the wall clock belongs to whoever shares the machine.
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent < 1.5
    assert done.returncode == (0 if "--help" in arguments else 2), done.stderr
    assert "Traceback" not in done.stderr
    modules = set(done.stdout.partition("MODULES ")[2].split())
    assert "asyncrl.errors" in modules
    assert not modules & HEAVY


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_check_prints_the_plan(folder: Path) -> None:
    code, output = run("check", "--config", "run.yaml", "run.name=mine")
    assert code == 0
    assert "plan of mine" in output


def test_doctor_prints_its_findings(folder: Path) -> None:
    code, output = run("doctor")
    assert code == 0
    assert "gloo" in output
    (folder / "file").touch()
    code, _ = run("doctor", "--config", "run.yaml", "run.dir=file/x")
    assert code == 1


def test_train_passes_the_config_on_and_its_exit_code_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Config] = []

    def train(config: Config, signals: StopSignals) -> int:
        seen.append(config)
        return 130

    monkeypatch.setattr("asyncrl.run.train", train)
    assert run("train", "--config", "run.yaml", "run.steps=3")[0] == 130
    assert seen[0].run.steps == 3


def test_a_failed_run_exits_with_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(config: Config, signals: StopSignals) -> int:
        raise LearnerError("rank 0 died")

    monkeypatch.setattr("asyncrl.run.train", train)
    code, output = run("train", "--config", "run.yaml")
    assert code == 1
    assert "LearnerError: rank 0 died" in output


@pytest.mark.parametrize("arguments", [["train"], ["nonsense"], ["check", "--config"], ["check", "--nope"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert run(*arguments)[0] == 2


def test_pickles_of_deepspeed_are_read_only_where_that_was_allowed(folder: Path) -> None:
    code, output = run("export", "saved", "--to", "out", "--deepspeed-of", "model")
    assert code == 2
    assert "give --allow-pickle if they are your own" in output
    code, output = run("export", "saved", "--to", "out", "--deepspeed-of", "model", "--allow-pickle")
    assert code == 2
    assert "found no file 'latest' in saved" in output
