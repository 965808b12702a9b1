"""TensorBoard event files, written with the ``tensorboard`` package alone (no torch import)."""

from __future__ import annotations

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class ScalarBoard:
    """Scalars by name and step."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=float(value))])
        self._writer.add_event(Event(summary=summary, step=step, wall_time=time.time()))

    def close(self) -> None:
        self._writer.close()
