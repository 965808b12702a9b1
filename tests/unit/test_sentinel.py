"""What a run leaves behind is ended, and nothing else; with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from asyncrl.sentinel import Belonging, Sentinel

# A child that nobody would wait for: in a session of its own, its parent gone, deaf to SIGTERM.
ORPHAN = (
    "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "os.setsid(); open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(1000)"
)
CONTROLLER = """
import os, signal, subprocess, sys, time
from asyncrl.sentinel import Sentinel
sentinel = Sentinel(grace_s=float(sys.argv[3]))
if sys.argv[4] == "fork" and os.fork() == 0:
    time.sleep(1000)  # holds on to the pipe; a fork has its parent's environment of the start, so no mark
subprocess.Popen(["sh", "-c", f"{sys.executable} -c \\"$0\\" {sys.argv[1]} &", sys.argv[2]])
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(0.01)
if sys.argv[4] == "in order":
    sentinel.close()
    sys.exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def stranger() -> psutil.Process:
    process = subprocess.Popen(["sleep", "1000"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


@pytest.mark.parametrize("end", ["killed", "in order", "fork"])
def test_what_a_controller_leaves_behind_ends(tmp_path: Path, stranger: psutil.Process, end: str) -> None:
    file = tmp_path / "orphan.pid"
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", CONTROLLER, str(file), ORPHAN, "0.2", end]
    controller = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "ASYNCRL_TEST": mark}
    )
    _, text = controller.communicate(timeout=60) if end != "fork" else (None, "")
    assert controller.wait(60) == (0 if end == "in order" else -signal.SIGKILL)
    orphan = int(file.read_text())
    _gone(lambda: not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE)
    if end != "fork":
        assert "killed 1 process(es) that the run had left behind: " in text
    assert stranger.is_running()
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get("ASYNCRL_TEST") == mark:
            process.kill()  # the fork


def test_what_ends_by_itself_is_given_the_time(capfd: pytest.CaptureFixture[str]) -> None:
    with Sentinel(grace_s=30):
        child = subprocess.Popen(["sleep", "0.3"])
        (mark,) = {p.environ()["ASYNCRL_RUN_MARK"] for p in psutil.Process().children() if p.pid == child.pid}
        assert [p.pid for p in Belonging(os.getpid(), mark).alive()] == [child.pid]
    assert child.wait() == 0
    assert "killed" not in capfd.readouterr().err
    assert "ASYNCRL_RUN_MARK" not in os.environ


def test_who_writes_in_a_watched_folder_belongs_to_the_run(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "logs-of-others").mkdir()
    file = logs / "agent.log"
    own = (logs / "driver.log").open("w")  # this process writes there too, and lives on
    with own, Sentinel(grace_s=0.1) as sentinel:
        sentinel.watch(str(logs))
        bare = {k: v for k, v in os.environ.items() if k != "ASYNCRL_RUN_MARK"}
        with file.open("w") as log, (tmp_path / "logs-of-others" / "log").open("w") as other:
            writer = subprocess.Popen(["sleep", "1000"], stdout=log, env=bare)
            stranger = subprocess.Popen(["sleep", "1000"], stdout=other, env=bare)
        with file.open() as log:
            reader = subprocess.Popen(["sleep", "1000"], stdin=log, env=bare)
    assert writer.wait(10) == -signal.SIGKILL
    for process in (stranger, reader):
        assert process.poll() is None
        process.kill()
        process.wait()


def test_a_run_outlives_its_sentinel(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Sentinel() as sentinel:
        (process,) = [p for p in psutil.Process().children() if any("sentinel.py" in a for a in p.cmdline())]
        process.kill()
        process.wait(10)
        sentinel.watch(str(tmp_path))
    assert "the sentinel of this run has ended" in caplog.text


def test_a_run_inside_a_run_has_a_mark_of_its_own() -> None:
    with Sentinel(grace_s=30):
        outer = os.environ["ASYNCRL_RUN_MARK"]
        with Sentinel(grace_s=30):
            assert os.environ["ASYNCRL_RUN_MARK"] != outer
        assert os.environ["ASYNCRL_RUN_MARK"] == outer


def _gone(is_gone: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_gone():
        assert time.monotonic() < deadline
        time.sleep(0.02)
