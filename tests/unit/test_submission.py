"""What is sent to a cluster, what is refused before, and how a job's end becomes an exit code."""

from __future__ import annotations

import logging
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from asyncrl.cli import app
from asyncrl.config_load import parse_config
from asyncrl.errors import ConfigError
from asyncrl.submission import entrypoint, exit_code, follow, require_portable

from .controller_harness import BASE


def test_the_job_runs_the_same_command_in_its_copy_of_the_folder(tmp_path: Path) -> None:
    command = entrypoint(tmp_path / "configs" / "a run.yaml", tmp_path, ["run.name=it's", "run.steps=3"])
    words = shlex.split(command)
    assert words[-4:] == ["--config", "configs/a run.yaml", "run.name=it's", "run.steps=3"]


def test_what_would_be_lost_or_not_found_on_the_cluster_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "run.yaml"
    lasting = parse_config(BASE, [f"run.dir={tmp_path}/runs"])
    require_portable(lasting, inside, tmp_path)
    with pytest.raises(
        ConfigError, match=r"run\.dir: found 'runs' with --address; expected an absolute path"
    ):
        require_portable(parse_config(BASE), inside, tmp_path)
    with pytest.raises(ConfigError, match="outside of the working folder"):
        require_portable(lasting, tmp_path.parent / "run.yaml", tmp_path)


def test_a_cluster_that_does_not_answer_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(
        "{model: {path: none}, data: {train: a.jsonl}, reward: {functions: [exact_match]}}"
    )
    arguments = ["train", "--config", "run.yaml", f"run.dir={tmp_path}/runs"]
    result = CliRunner().invoke(app, [*arguments, "--address", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "where no job server answers" in result.output
    assert "asyncrl[cluster]" in result.output


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        ("SUCCEEDED", 0, 0),
        ("FAILED", 2, 2),
        ("FAILED", None, 1),
        ("STOPPED", None, 143),
        ("RUNNING", None, 1),
    ],
)
def test_the_end_of_a_job_is_an_exit_code(status: str, code: int | None, expected: int) -> None:
    details = SimpleNamespace(driver_exit_code=code, status=status, message="why", submission_id="job-1")
    assert exit_code(details, "auto") == expected


class Interrupted:
    """A job client whose terminal is left while the log is shown."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        yield "a line\n"
        raise self._error


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 0), (RuntimeError("cut off"), 1)])
def test_letting_go_of_the_log_says_how_to_get_back_to_it(
    error: BaseException, code: int, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, logger="asyncrl")
    assert follow(Interrupted(error), "job-1", "http://head:8265") == code
    assert capsys.readouterr().out == "a line\n"
    assert "ray job stop --address http://head:8265 job-1" in caplog.text
    assert "ray job logs --follow --address http://head:8265 job-1" in caplog.text
