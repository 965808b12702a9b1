"""A run's folder: config.yaml, metrics.jsonl, ledger.jsonl, rollouts/, trace.json, trackers; off the loop.

Invariants:
- Everything is written by one thread in the order in which it was handed over; the event loop never
  waits for a disk.
- A failed write ends the run: ``check`` and ``close`` raise it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from asyncrl.checkpoint.files import make_folder, sync_folder
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.inherited import close_to_others
from asyncrl.ledger import Retired
from asyncrl.queues.codec import append_record
from asyncrl.timeline import EventTimeline, NoTimeline, Timeline
from asyncrl.trace_file import TraceFile, TraceRecorder
from asyncrl.tracking import Tracker
from asyncrl.types import Metrics, ReadyGroup


@contextmanager
def claimed(config: Config) -> Iterator[Path]:
    """The run's folder, made where it is not there, for this process alone until the block is left. What is
    written in it from here on can be written by owner and group at most.

    Raises ConfigError if it cannot be had. Whether what is in it can be gone on from is not its business.
    """
    folder = config.run.folder
    close_to_others()
    try:
        make_folder(folder)
        lock = (folder / ".lock").open("ab")
    except OSError as error:
        raise ConfigError(
            f"the run folder {folder} cannot be written: {error.strerror}; set run.dir to one that can"
        ) from error
    with lock:  # the system lets go of it however this process ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run.name: found {folder}, which another process is writing to; wait for its end, or choose "
                "another run.name"
            ) from None
        yield folder


class RunFolder:
    """Writes what the controller reports."""

    def __init__(
        self,
        folder: Path,
        *,
        resolve: Callable[[Sequence[Any]], list[bytes]],
        rollouts_every: int,
        trackers: Sequence[Callable[[], Tracker]] = (),
        trace_bytes: int = 0,
        clock_offset_s: float = 0.0,
    ) -> None:
        """``trace_bytes``: how long trace.json may get; 0: there is none. ``clock_offset_s`` is added to the
        times of its events."""
        self.folder = folder
        self._resolve = resolve
        self._rollouts_every = rollouts_every
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="run folder")
        self._metrics: TextIO = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._ledger: TextIO = (folder / "ledger.jsonl").open("a", encoding="utf-8")
        sync_folder(folder)
        self._trackers: list[Tracker] = []
        self._failure: BaseException | None = None
        self.timeline: Timeline = NoTimeline()
        """What the run has to report to for trace.json."""
        self._trace: TraceRecorder | None = None
        if trace_bytes:
            self._trace_file = TraceFile(
                folder / "trace.json", offset=clock_offset_s, limit_bytes=trace_bytes
            )
            self._trace = TraceRecorder(self._trace_file, self._submit)
            self.timeline = EventTimeline(self._trace.add)
        for open_tracker in trackers:
            self._submit(lambda opens: self._trackers.append(opens()), open_tracker)

    def metrics(self, record: Metrics) -> None:
        """A line of metrics.jsonl, on disk once the thread got to it."""
        self._submit(self._write_metrics, dict(record))
        if self._trace is not None:
            self._trace.flush()

    def retired(self, retired: Retired) -> None:
        """A line of ledger.jsonl."""
        self._submit(self._ledger.write, json.dumps(retired.as_json()) + "\n")

    def trained(self, step: int, groups: Sequence[ReadyGroup]) -> None:
        """Keep the groups of each ``log.rollouts_every``-th step in ``rollouts/``."""
        if self._rollouts_every and step % self._rollouts_every == 0:
            self._submit(self._write_rollouts, step, [group.payload for group in groups])

    async def on_disk(self) -> None:
        """Return once all lines that were handed over so far outlast a power cut.

        Raises OSError, or the first failed write.
        """
        await asyncio.to_thread(self._thread.submit(self._sync).result)

    def _sync(self) -> None:
        self.check()  # a line that was lost before is not on disk either
        for file in (self._metrics, self._ledger):
            file.flush()
            os.fsync(file.fileno())

    def check(self) -> None:
        """Raise the first failed write, if there was one."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Write out what is left. Raises the first failed write."""
        if self._trace is not None:
            self._trace.flush()
            self._submit(self._trace_file.close)
        self._submit(self._ledger.close)
        self._submit(self._metrics.close)
        self._submit(self._close_trackers)
        self._thread.shutdown(wait=True)
        self.check()

    def _submit(self, write: Callable[..., object], *args: object) -> None:
        self._thread.submit(write, *args).add_done_callback(self._note_failure)

    def _note_failure(self, done: Future[object]) -> None:
        if self._failure is None:
            self._failure = done.exception()

    def _write_metrics(self, record: Mapping[str, Any]) -> None:
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        self._ledger.flush()
        step = int(record["step"])
        scalars = {
            name: value
            for name, value in record.items()
            if isinstance(value, float | int) and name not in ("step", "time")
        }
        for tracker in self._trackers:
            tracker.log(step, scalars)

    def _close_trackers(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def _write_rollouts(self, step: int, payloads: Sequence[Any]) -> None:
        folder = self.folder / "rollouts"
        make_folder(folder)
        part = folder / f"step_{step:06d}.msgpack.part"
        with part.open("wb") as file:
            for payload in self._resolve(payloads):
                append_record(file, payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, part.with_suffix(""))
        sync_folder(folder)
