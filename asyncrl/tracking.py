"""Trackers: where the lines of metrics.jsonl go besides.

Invariants:
- A tracker is opened, written and closed by one thread, and gets the lines in their order.
- It gets numbers only, by name. Its package is imported when it is opened.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from asyncrl.checkpoint.files import replace_file
from asyncrl.config import Config


class Tracker(Protocol):
    """Keeps scalars by name and step."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in ``folder``, written with the ``tensorboard`` package alone (no torch import).

    ``after``: the step that a resumed run goes on from; what was shown of later ones is taken back.
    """

    def __init__(self, folder: Path, after: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))
        if after is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(session_log=start, step=after + 1, wall_time=time.time()))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in scalars.items()]
        self._writer.add_event(Event(summary=Summary(value=values), step=step, wall_time=time.time()))

    def close(self) -> None:
        self._writer.close()


_WANDB_ID = "wandb-id"
"""The file in a run's folder that says which run of Weights & Biases it is."""


class WandB:
    """A run of Weights & Biases, with its local files in ``folder``.

    A folder is one run there, however often it is resumed. Of a step that was rolled back and taken again it
    keeps what it was told first: its steps only rise.

    Its own environment variables hold: ``WANDB_MODE=offline`` keeps all of it on this machine, and
    ``WANDB_PROJECT`` names the project (default: asyncrl).
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "asyncrl"),
            name=name,
            dir=folder,
            config=dict(config),
            id=_kept_id(folder / _WANDB_ID),
            resume="allow",
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def _kept_id(path: Path) -> str:
    """The id in the file; a new one, which it holds from then on, where there is none."""
    if path.exists():
        return path.read_text(encoding="ascii").strip()
    new = secrets.token_hex(8)
    replace_file(path, f"{new}\n".encode("ascii"))
    return new


def open_tracker(name: str, folder: Path, config: Config, after: int | None = None) -> Tracker:
    """The tracker of that name in ``log.trackers``, for the run with its files in ``folder``.

    ``after``: the step that a resumed run goes on from.
    """
    if name == "wandb":
        return WandB(folder, config.run.name, config.model_dump(mode="json"))
    return TensorBoard(folder / "tb", after)
