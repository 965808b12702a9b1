"""``trace.json``: events in Chrome's trace event format, written as they come.

Invariants:
- The file is a JSON array that grows by whole events, each written in one piece. Viewers take an array
  without its end, so that what a killed run leaves is a valid trace.
- Memory does not grow with the run: events wait in a buffer of bounded size. Where the disk cannot keep up,
  events are left out and counted, and the log says so.
- A file that is there already is continued, also one that ends inside an event.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from asyncrl.timeline import TraceEvent

log = logging.getLogger(__name__)

_BATCH = 512
"""Events that are written together."""
_MOST_PENDING = 64
"""Batches that may wait for the disk."""
_TAIL_BYTES = 1 << 20
_NUMBER = re.compile(r"\d+")


class TraceFile:
    """Formats and writes events. Belongs to one thread. Times get ``offset`` seconds added.

    After ``limit_bytes`` the array is ended, and nothing more is written.
    """

    def __init__(self, path: Path, *, offset: float, limit_bytes: int) -> None:
        self._offset = offset
        self._limit = limit_bytes
        self._named: set[tuple[int, int]] = set()
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._size = _cut_end(self._fd)

    def write(self, events: Sequence[TraceEvent]) -> None:
        """Append all of them in one piece."""
        if self._fd is None or not events:
            return
        self._append([record for event in events for record in self._records(event)])
        if self._size >= self._limit:
            log.warning(
                "trace.json has reached log.trace_mb = %g: what comes after is not in it", self._limit / 2**20
            )
            self.close()

    def close(self) -> None:
        """End the array."""
        if self._fd is None:
            return
        os.write(self._fd, b"\n]\n" if self._size else b"[]\n")
        os.close(self._fd)
        self._fd = None

    def _append(self, records: Sequence[dict[str, Any]]) -> None:
        assert self._fd is not None
        lines = ",\n".join(json.dumps(record, separators=(",", ":")) for record in records)
        piece = ((",\n" if self._size else "[\n") + lines).encode()
        self._size += os.write(self._fd, piece)

    def _records(self, event: TraceEvent) -> list[dict[str, Any]]:
        # Numbers that follow from the names are the same when a file is continued.
        pid, tid = _identifier(event.process), _identifier(event.track)
        record = {
            "ph": "X",
            "name": event.name,
            "pid": pid,
            "tid": tid,
            "ts": round((event.start + self._offset) * 1e6, 1),
            "dur": round((event.end - event.start) * 1e6, 1),
            "args": dict(event.facts),
        }
        if (pid, tid) in self._named:
            return [record]
        names = []
        if all(named != pid for named, _ in self._named):
            names = _naming("process", event.process, pid, 0)
        self._named.add((pid, tid))
        return [*names, *_naming("thread", event.track, pid, tid), record]


class TraceRecorder:
    """Collects events on the event loop; ``submit`` has a call with its argument made in a thread."""

    def __init__(
        self, file: TraceFile, submit: Callable[[Callable[[list[TraceEvent]], None], list[TraceEvent]], None]
    ) -> None:
        self._file = file
        self._submit = submit
        self._buffer: list[TraceEvent] = []
        self._submitted = 0
        self._written = 0  # counted by the thread
        self.left_out = 0
        """Events that were not written because too many waited for the disk."""

    def add(self, event: TraceEvent) -> None:
        """One more event; written with others, or at the next ``flush``."""
        self._buffer.append(event)
        if len(self._buffer) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Have what there is written."""
        events, self._buffer = self._buffer, []
        if not events:
            return
        if self._submitted - self._written >= _MOST_PENDING:
            if not self.left_out:
                log.warning("the disk does not keep up with trace.json: events are left out of it")
            self.left_out += len(events)
            return
        self._submitted += 1
        self._submit(self._write, events)

    def _write(self, events: list[TraceEvent]) -> None:
        try:
            self._file.write(events)
        finally:
            self._written += 1


def _naming(kind: str, name: str, pid: int, tid: int) -> list[dict[str, Any]]:
    """What gives a process or a track its name, and its place among the others."""
    number = _NUMBER.search(name)
    place = int(number.group()) + 1 if number else 0
    return [
        {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}},
        {"ph": "M", "name": f"{kind}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": place}},
    ]


def _identifier(name: str) -> int:
    return crc32(name.encode()) & 0x7FFFFFFF


def _cut_end(fd: int) -> int:
    """Cut a file after its last whole event, and stand there; returns its size."""
    size = os.lseek(fd, 0, os.SEEK_END)
    start = max(0, size - _TAIL_BYTES)
    os.lseek(fd, start, os.SEEK_SET)
    tail = os.read(fd, size - start)
    ended = tail.rstrip().removesuffix(b"]").rstrip()
    # A line ends with an event's brace, or the brace and a comma: what comes after was torn off.
    whole = len(ended) if ended.endswith(b"}") else tail.rfind(b"},\n") + 1
    size = start + whole if whole > 0 else 0
    os.ftruncate(fd, size)
    os.lseek(fd, size, os.SEEK_SET)
    return size
