"""Programs that mean harm, each really run: what holds them is the kernel, and it has to hold.

Where a program would be dangerous if it were not held, the smallest form of what it does is tried first.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.rewards.code import code_tests, extracted
from asyncrl.rewards.sandbox import Limits, run

QUICK = Limits(time_s=120.0)
"""For programs that end by themselves, however little of the processor they get."""


def trying(statement: str) -> str:
    """A program that says what became of one statement."""
    return (
        "import os, socket, subprocess, threading\n"
        f"try:\n    {statement}\nexcept BaseException as error:\n    print(type(error).__name__)\n"
        "else:\n    print('done')"
    )


def test_a_program_reads_computes_imports_and_prints() -> None:
    outcome = run("import json, sys\nprint(json.dumps(int(sys.stdin.read()) * 2))", "21", QUICK)
    assert (outcome.ending, outcome.code, outcome.stdout, outcome.stderr) == ("exit", 0, "42\n", "")
    outcome = run(
        "open('a', 'w').write('x'); import os; os.remove('a'); import numpy; raise SystemExit(3)",
        limits=QUICK,
    )
    assert (outcome.ending, outcome.code) == ("exit", 3), outcome.stderr
    outcome = run("import os; os.abort()", limits=QUICK)
    assert (outcome.ending, outcome.code) == ("signal", 6)


def test_no_process_and_no_thread_so_no_fork_bomb() -> None:
    for statement in ("os.fork()", "subprocess.run(['true'])", "threading.Thread(target=print).start()"):
        assert run(trying(statement), limits=QUICK).stdout in ("PermissionError\n", "RuntimeError\n"), (
            statement
        )
    before = set(psutil.Process().children(recursive=True))
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    outcome = run(bomb, limits=Limits(time_s=1.0))
    assert outcome.ending in ("timeout", "signal")
    assert not set(psutil.Process().children(recursive=True)) - before


def test_an_endless_loop_ends_and_so_does_a_sleep() -> None:
    for program in ("while True: pass", "import time; time.sleep(1000)"):
        began = time.monotonic()
        assert run(program, limits=Limits(time_s=0.5)).ending in ("timeout", "signal")
        assert time.monotonic() - began < 20


def test_eight_gigabytes_are_not_had() -> None:
    outcome = run("try:\n    x = bytearray(8 << 30)\nexcept MemoryError:\n    print('refused')", limits=QUICK)
    assert outcome.stdout == "refused\n"
    used = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    assert run(used, limits=QUICK).stderr.rstrip().endswith("MemoryError")


def test_files_outside_its_folder_are_out_of_reach(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("here")
    before = precious.stat()
    for statement in (
        f"os.remove({str(precious)!r})",
        f"os.rename({str(precious)!r}, 'mine')",
        f"open({str(precious)!r}, 'a')",
        f"open({str(precious)!r})",
        f"os.truncate({str(precious)!r}, 0)",
        f"os.chmod({str(precious)!r}, 0)",
        f"os.utime({str(precious)!r}, (0, 0))",
        f"os.rmdir({str(tmp_path)!r})",
        f"os.link({str(precious)!r}, 'link')",
        "open('../stdin')",
        "os.mkdir('/tmp/asyncrl-escaped')",
        "os.kill(os.getppid(), 0)",
    ):
        # Where it has a file system of its own, moving and linking fail for crossing over already.
        assert run(trying(statement), limits=QUICK).stdout in ("PermissionError\n", "OSError\n"), statement
    # Through a link of its own it is no nearer.
    linked = f"os.symlink({str(tmp_path)!r}, 'way'); os.remove('way/precious')"
    assert run(trying(linked), limits=QUICK).stdout == "PermissionError\n"
    after = precious.stat()
    for field in ("st_mode", "st_uid", "st_size", "st_mtime_ns", "st_nlink"):
        assert getattr(after, field) == getattr(before, field), field
    assert precious.read_text() == "here"


def test_no_network_not_even_on_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        for statement in (
            f"socket.create_connection(('127.0.0.1', {port}))",
            "socket.socket(socket.AF_UNIX)",
        ):
            assert run(trying(statement), limits=QUICK).stdout == "PermissionError\n"
        with pytest.raises(TimeoutError):
            server.accept()


def test_output_and_files_are_bounded() -> None:
    for target in ("print('x' * 1_000_000)", "open('big', 'ab').write(b'x' * 1_000_000)"):
        outcome = run(f"while True: {target}", limits=Limits(time_s=120, file_mb=2))
        assert not outcome.ok
        assert outcome.ending != "timeout"
        assert len(outcome.stdout) <= 2 << 20


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run("open('file', 'w').write('x'); import os; os.makedirs('a/b')", limits=QUICK)
    assert os.listdir(tmp_path) == []


def test_it_sees_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    assert "secret" not in run("import os; print(dict(os.environ))", limits=QUICK).stdout


# --- the reward ---

RIGHT = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
TESTS = ["assert double(2) == 4", "assert double(0) == 0"]


def test_programs_are_scored_by_the_share_of_tests_that_they_pass() -> None:
    assert code_tests(RIGHT, TESTS, time_s=120) == 1.0
    assert code_tests("def double(x): return 4", TESTS, time_s=120) == 0.5
    assert code_tests("def double(x): return", "\n".join(TESTS), time_s=120) == 0.0
    pairs = {"inputs": ["1\n", "5\n"], "outputs": ["2", "10\n"]}
    assert code_tests("print(2 * int(input()))", pairs, time_s=120) == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        "raise SystemExit",
        "import os\nos.kill(os.getppid(), 9)",
        "while True: pass",
        "x =",
        "",
    ],
)
def test_tricks_earn_nothing(program: str) -> None:
    assert code_tests(program, TESTS[:1], time_s=1.0) == 0.0


def test_the_last_block_counts_and_an_open_one_too() -> None:
    assert extracted("```\na\n``` then ```py\nb\n```") == "b\n"
    assert extracted("```python\nc") == "c"
    assert extracted("d = 1") == "d = 1"


@pytest.mark.parametrize("truth", ["", [], {}, 3, {"inputs": ["1"], "outputs": []}])
def test_a_row_without_tests_is_at_fault(truth: object) -> None:
    with pytest.raises(ValueError, match="expected test code"):
        code_tests("x", truth)
