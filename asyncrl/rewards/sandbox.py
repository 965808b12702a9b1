"""Running a program that nobody has read: in a child process that can harm nothing and not stay.

Invariants:
- The child writes nothing outside a folder of its own, which is gone when ``run`` returns. It reads only that
  folder and what Python needs to run.
- It starts no process and no thread, opens no socket, signals nobody but itself, and has no privilege,
  also where it is run by root.
- Time, processor time, memory, file size and open files are bounded. It dies with the process that runs it.
- Where the kernel cannot promise this (no Landlock: Linux before 5.13; no seccomp; another system), ``run``
  refuses with a RuntimeError. Nothing is run unconfined.

Each of these is enforced by the kernel on the child itself; ``sandbox_child`` says how.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

_CHILD = Path(__file__).with_name("sandbox_child.py")
_REFUSED = 113
"""Exit code of a child that could not confine itself."""
_REAP_TIMEOUT_S = 10.0

Ending = Literal["exit", "signal", "timeout"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use."""

    time_s: float = 5.0
    """Seconds by the clock; processor time is bounded by the same, rounded up."""
    memory_mb: int = 512
    """Address space, in megabytes (2**20 bytes)."""
    file_mb: int = 16
    """Largest file, its output included; where the kernel allows it, all of its files together."""
    open_files: int = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended."""

    ending: Ending
    code: int
    """Exit code, or the signal's number."""
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.ending == "exit" and self.code == 0


def run(program: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run a Python program; returns when it has ended, at the latest after ``limits.time_s``.

    Raises RuntimeError where the kernel cannot confine it.
    """
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="asyncrl-code-") as folder:
        place = Path(folder)
        home = place / "home"
        home.mkdir()
        (place / "program.py").write_text(program, encoding="utf-8", errors="surrogatepass")
        (place / "stdin").write_text(stdin, encoding="utf-8", errors="surrogatepass")
        with (
            (place / "stdin").open("rb") as source,
            (place / "stdout").open("wb") as out,
            (place / "stderr").open("wb") as err,
        ):
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_CHILD), json.dumps(asdict(limits)), str(os.getpid())],
                cwd=home,
                env={
                    "PATH": "/usr/bin:/bin",
                    "LANG": "C.UTF-8",
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
                stdin=source,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            ending, code = _ended(child, limits.time_s)
        most = limits.file_mb << 20
        stdout, stderr = (_text(place / name, most) for name in ("stdout", "stderr"))
    if (ending, code) == ("exit", _REFUSED):
        raise RuntimeError(f"a program cannot be confined on this machine: {stderr.strip()}")
    return Outcome(ending, code, stdout, stderr)


def _ended(child: subprocess.Popen[bytes], time_s: float) -> tuple[Ending, int]:
    try:
        code = child.wait(time_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(_REAP_TIMEOUT_S)
        return "timeout", signal.SIGKILL
    except BaseException:
        child.kill()
        child.wait(_REAP_TIMEOUT_S)
        raise
    return ("signal", -code) if code < 0 else ("exit", code)


def _text(file: Path, most: int) -> str:
    with file.open("rb") as stream:
        return stream.read(most).decode(errors="replace")
