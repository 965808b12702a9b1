"""The lines of a run's files, and the batches that it kept, brought back to a checkpoint.

Invariants:
- Every line that is taken out of ``<name>.jsonl`` is in ``<name>.rolled_back.jsonl`` before it is gone there.
- What is no line is taken out likewise: a last one that was cut off while it was written, or what a disk made
  of one that it had not been told to keep.
- The file is replaced as a whole: a crash leaves the old one or the new one.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.checkpoint.files import replace_file, sync_folder

log = logging.getLogger(__name__)

Line = dict[str, Any]


def roll_back(path: Path, keep: Callable[[Line], bool]) -> list[Line]:
    """Move the lines of ``path`` that ``keep`` refuses to ``<name>.rolled_back.jsonl``; returns the others.

    Without a file there are none. Calling it again changes nothing more.
    """
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    kept, raw_kept, moved, damaged = [], [], [], 0
    for raw in lines:
        line = _parsed(raw)
        if line is not None and keep(line):
            kept.append(line)
            raw_kept.append(raw)
        else:
            moved.append(raw)
            damaged += line is None
    if torn:
        moved.append(torn)
        damaged += 1
    if moved:
        aside = path.with_name(f"{path.stem}.rolled_back{path.suffix}")
        log.info("%d lines of %s go to %s, %d of them damaged", len(moved), path.name, aside.name, damaged)
        _append(aside, moved)
        replace_file(path, b"".join(raw + b"\n" for raw in raw_kept))
    return kept


def roll_back_rollouts(folder: Path, after: int) -> None:
    """Rename the batches in ``folder`` that were trained in steps after this one, to ``*.rolled_back``."""
    moved = 0
    for path in sorted(folder.glob("step_*.msgpack")):
        number = path.stem.removeprefix("step_")
        if number.isdecimal() and int(number) > after:
            path.replace(path.with_name(f"{path.name}.rolled_back"))
            moved += 1
    if moved:
        sync_folder(folder)
        log.info("%d batches in %s are now *.rolled_back", moved, folder)


def _parsed(raw: bytes) -> Line | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _append(path: Path, lines: list[bytes]) -> None:
    with path.open("ab") as file:
        file.writelines(line + b"\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
