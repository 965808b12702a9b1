"""A small process that outlives the controller, and ends what the controller's processes left behind.

Ray's processes notice the death of whoever started them one by one, each in its own way, some by way of
others that are dead too. So a process of ours waits for the controller's end, and looks after them.

Invariants:
- Once the controller is gone, however it went, nothing that it started since ``Sentinel`` was made is alive
  after ``grace_s`` and the time that SIGKILL takes: not their children either, whoever their parent is now.
- Nobody else's process is touched: what a run starts bears the run's mark in its environment. Those that give
  themselves a title, as Ray's and vLLM's do, may have written it over that; they have their log open for
  writing, in a folder that ``watch`` named.
- What can end by itself has ``grace_s`` for it, since some of it cleans up (shared memory, above all).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

log = logging.getLogger(__name__)

MARK = "ASYNCRL_RUN_MARK"
"""The variable that tells the processes of a run."""
_GRACE_S = 10.0
_KILL_TIMEOUT_S = 20.0


class Sentinel:
    """Inside ``with Sentinel():``, whatever this process starts ends with it; at the end, all has ended.

    Make it before anything is started, and from no more than one thread at a time: the mark is a variable of
    this process's environment.
    """

    def __init__(self, grace_s: float = _GRACE_S) -> None:
        self._longest_s = grace_s + _KILL_TIMEOUT_S
        self._outer = os.environ.pop(MARK, None)
        mark = uuid.uuid4().hex
        # Without a mark, a sentinel of whoever started this process leaves it alone, to do its work.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, mark, str(os.getpid()), str(grace_s)],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=subprocess.DEVNULL,
            cwd=Path(__file__).parent,
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )
        os.environ[MARK] = mark

    def watch(self, folder: str) -> None:
        """Who has a file in ``folder`` open for writing belongs to the run too."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(os.fsencode(folder) + b"\n")
        except BrokenPipeError:
            log.warning(
                "the sentinel of this run has ended (exit code %s): should this process be killed, others "
                "may be left behind",
                self._process.poll(),
            )

    def close(self) -> None:
        """Return once nothing that was started is left; what had not ended was killed. Safe to call twice."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(self._longest_s)
        except subprocess.TimeoutExpired:
            log.warning("processes of this run are left that SIGKILL did not end in %g s", _KILL_TIMEOUT_S)
            self._process.kill()
        os.environ.pop(MARK, None)
        if self._outer is not None:
            os.environ[MARK] = self._outer

    def __enter__(self) -> Sentinel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Belonging:
    """What tells the processes of one run; ``parent``, who started them all, is none of them."""

    parent: int
    mark: str
    folders: tuple[str, ...] = ()

    def alive(self) -> list[psutil.Process]:
        """Those that have not ended; a zombie has."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.status() != psutil.STATUS_ZOMBIE and self._has(process):
                    found.append(process)
        return found

    def _has(self, process: psutil.Process) -> bool:
        if process.pid == self.parent:
            return False
        if process.environ().get(MARK) == self.mark:
            return True
        if not self.folders:
            return False
        # Where the system does not say how a file is open, a reader counts as a stranger.
        written = [file.path for file in process.open_files() if getattr(file, "mode", "r") != "r"]
        return any(path.startswith(self.folders) for path in written)


def _end_all(run: Belonging, grace_s: float) -> list[str]:
    """Wait until nothing of ``run`` is alive, and kill what is after ``grace_s``; its names."""
    deadline = time.monotonic() + grace_s
    while (left := run.alive()) and time.monotonic() < deadline:
        # Not for longer: one that has ended may stay a zombie as long as its parent is busy.
        psutil.wait_procs(left, timeout=0.1)
    killed = []
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    # Again and again, for what they had started meanwhile.
    while (left := run.alive()) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                name = " ".join(process.cmdline())[:80].strip() or process.name()
                process.kill()
                killed.append(name)
        psutil.wait_procs(left, timeout=0.1)
    return killed


def _wait_for_end(parent: int) -> list[str]:
    """Return when ``parent`` closes the pipe or dies; the folders that it named on the pipe before."""
    pipe = sys.stdin.fileno()
    ends, gone = [pipe], False
    if hasattr(os, "pidfd_open"):  # a child that it forked may hold the pipe open
        try:
            ends.append(os.pidfd_open(parent))
        except ProcessLookupError:
            gone = True
        except OSError as error:  # a sandbox may not allow it
            log.debug("pidfd_open: %s; the pipe alone tells of the controller's end", error)
        gone = gone or os.getppid() != parent
    said = b""
    while True:
        ready, _, _ = select.select(ends, [], [], 0 if gone else None)
        if pipe not in ready:
            break
        data = os.read(pipe, 1 << 16)
        if not data:
            break
        said += data
    return [os.fsdecode(line) for line in said.split(b"\n")[:-1]]


def _main() -> None:
    mark, parent, grace_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    logging.basicConfig(format="asyncrl: %(message)s", level=logging.INFO)
    folders = _wait_for_end(parent)
    # With a separator: no other folder's name begins like that.
    run = Belonging(parent, mark, tuple(os.path.join(os.path.realpath(folder), "") for folder in folders))
    killed = _end_all(run, grace_s)
    if killed:
        log.info("killed %d process(es) that the run had left behind: %s", len(killed), "; ".join(killed))


if __name__ == "__main__":
    _main()
