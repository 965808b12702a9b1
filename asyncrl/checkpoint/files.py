"""Files that outlast a crash, each with its size and the checksum of the bytes that were meant.

Invariants:
- The checksum is of what was handed over, not of what a disk gave back.
- A file whose ``written`` block was left without an exception is on disk: its bytes by then, its name once
  ``sync_folder`` of its folder has returned.
- Writing, syncing and checksums of large buffers leave the interpreter to other threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a folder."""

    path: str
    """Relative to the folder, with forward slashes."""
    nbytes: int
    xxh3: str
    """XXH3-128 of its bytes: 32 hexadecimal digits."""


class HashingWriter:
    """Writes to ``file`` and keeps the checksum of what it wrote."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self.nbytes = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._file.write(view)
        self.nbytes += len(view)

    def entry(self, path: str) -> FileEntry:
        """What was written, under the name ``path``."""
        return FileEntry(path, self.nbytes, self._digest.hexdigest())


@contextmanager
def written(path: Path) -> Iterator[HashingWriter]:
    """A new file to write to, on disk when the block is left. Raises FileExistsError, OSError."""
    with path.open("xb") as file:
        yield HashingWriter(file)
        file.flush()
        os.fsync(file.fileno())


def write_file(folder: Path, name: str, data: bytes | memoryview) -> FileEntry:
    """Write one whole file into ``folder``, durably."""
    with written(folder / name) as writer:
        writer.write(data)
    return writer.entry(name)


def replace_file(path: Path, data: bytes) -> None:
    """Write ``path`` so that there is the old file or the new one at any moment, and never a part of one."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    write_file(part.parent, part.name, data)
    os.replace(part, path)
    sync_folder(path.parent)


def measure(folder: Path, path: str) -> FileEntry:
    """Read a file and say what it holds. Raises OSError where it cannot be read."""
    digest, nbytes = xxhash.xxh3_128(), 0
    with (folder / path).open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            nbytes += len(chunk)
    return FileEntry(path, nbytes, digest.hexdigest())


def adopt(folder: Path, name: str) -> list[FileEntry]:
    """What others wrote under ``folder / name``: on disk on return, paths relative to ``folder``."""
    found = []
    for path in sorted((folder / name).rglob("*")):
        if path.is_dir():
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
        found.append(measure(folder, path.relative_to(folder).as_posix()))
    return found


def make_folder(folder: Path) -> None:
    """Make ``folder``, if it is not there, and what it lies in, so that their names outlast a crash."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(made):
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in ``folder`` on disk, as far as the system can say so of a folder."""
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
