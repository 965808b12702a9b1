"""The manifest: which files a checkpoint has, and that they are the ones that were written.

``manifest.json`` is written last. It names every file with its size and checksum, and ends with a checksum of
itself.

Invariants:
- A folder is a checkpoint only with a manifest that fits it: a byte changed or cut off anywhere, the
  manifest's own included, is a CheckpointError with the name of the file.
- Files beside those that the manifest names are none of its business: they are not read on resume.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from asyncrl.checkpoint.files import FileEntry, measure
from asyncrl.errors import CheckpointError

MANIFEST: Final = "manifest.json"
_FORMAT: Final = "asyncrl checkpoint"
FORMAT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one checkpoint holds."""

    step: int
    """Updates tried before it was taken."""
    policy_version: int
    files: tuple[FileEntry, ...]

    def encode(self) -> bytes:
        """The bytes of ``manifest.json``, which depend on nothing else."""
        document = {
            "format": _FORMAT,
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "policy_version": self.policy_version,
            "files": {
                e.path: {"bytes": e.nbytes, "xxh3": e.xxh3} for e in sorted(self.files, key=lambda e: e.path)
            },
        }
        own = xxhash.xxh3_128_hexdigest(_dump(document))
        return _dump({**document, "xxh3": own})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of ``folder``, its files not yet looked at. Raises CheckpointError."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it was not written to its end; choose another checkpoint"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        document = json.loads(data)
        if document["format"] == _FORMAT and document["format_version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format version {document['format_version']!r}, this asyncrl reads "
                f"{FORMAT_VERSION}: resume with the version of asyncrl that wrote it"
            )
        manifest = _decode(document)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not a manifest of asyncrl's") from error
    # Byte for byte, so that a change which JSON does not mind is noticed too.
    if manifest.encode() != data:
        raise CheckpointError(f"{path} is damaged: its {len(data)} bytes are not those that were written")
    return manifest


def verify(folder: Path) -> Manifest:
    """The manifest of ``folder``, after every file was read and compared. Raises CheckpointError."""
    manifest = read_manifest(folder)
    for expected in manifest.files:
        try:
            found = measure(folder, expected.path)
        except OSError as error:
            raise CheckpointError(f"{folder / expected.path} cannot be read: {error.strerror}") from error
        if found.nbytes != expected.nbytes:
            raise CheckpointError(
                f"{folder / expected.path} has {found.nbytes} bytes, {MANIFEST} says {expected.nbytes}: "
                "it was cut off or changed"
            )
        if found != expected:
            raise CheckpointError(
                f"{folder / expected.path} is damaged: its checksum is {found.xxh3}, {MANIFEST} says "
                f"{expected.xxh3}"
            )
    return manifest


def _decode(document: Any) -> Manifest:
    entries: Sequence[tuple[str, Any]] = list(document["files"].items())
    return Manifest(
        int(document["step"]),
        int(document["policy_version"]),
        tuple(FileEntry(path, int(of["bytes"]), str(of["xxh3"])) for path, of in entries),
    )


def _dump(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()
