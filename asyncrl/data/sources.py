"""Rows from a file, the hub, a reasoning-gym family or a function: random access by index.

Invariants:
- A row is a dict of plain values (None, bool, int, float, str, bytes, list, dict) that msgpack packs.
- Row i is the same row on every access and in every run, so that its index can name it.
- Whatever cannot be read is a DataError that names the place: file and line, or source and row.
"""

from __future__ import annotations

import datetime
import decimal
import json
import mmap
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from asyncrl.config import SourceSection
from asyncrl.errors import ConfigError, DataError
from asyncrl.functions import load_function
from asyncrl.hub import endpoint, hub_is_offline

Row = dict[str, Any]

_GYM_ROWS = 1000
_DEEPEST = 100  # msgpack packs 511, less what rows travel in
_INT_RANGE = range(-(1 << 63), 1 << 64)  # what msgpack carries


class Rows(Protocol):
    """A finite list of rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def where(self, index: int) -> str:
        """The place of a row, for messages, e.g. ``train.jsonl line 17``."""
        ...


def parts(source: SourceSection, key: str) -> Iterator[tuple[str, SourceSection]]:
    """The sources with rows of their own that ``source`` is made of, each with its key in the config."""
    if not source.mixture:
        yield key, source
    for number, part in enumerate(source.mixture):
        yield f"{key}.mixture[{number}]", part


def open_source(source: SourceSection, folder: Path) -> Rows:
    """Open what ``source`` names; relative paths are taken from ``folder``.

    Raises DataError for a source that is missing, unreadable or empty, and ConfigError for a python
    function that cannot be found. ``holdout`` and ``mixture`` have no rows of their own and are not for this
    function.
    """
    if source.path is not None:
        rows = _open_file(folder / source.path, source.path, source.size)
    elif source.hub is not None:
        rows = _open_hub(source)
    elif source.reasoning_gym is not None:
        rows = _open_gym(source.reasoning_gym, source)
    elif source.python is not None:
        rows = _open_function(source.python, source, folder)
    else:
        raise ValueError("a source with holdout or a mixture has no rows of its own")
    if len(rows) == 0:
        raise DataError(f"{_name(source)}: found 0 rows; expected at least 1")
    return rows


class SequenceRows:
    """Rows of anything that has a length and gives a mapping for an index."""

    def __init__(self, rows: Sequence[Any], name: str, size: int | None = None) -> None:
        self._rows = rows
        self._name = name
        self._length = len(rows) if size is None else min(size, len(rows))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        return plain_row(self._rows[index], self.where(index))

    def where(self, index: int) -> str:
        return f"{self._name} row {index}"


class JsonlRows:
    """A .jsonl file, mapped: only where lines begin is kept (16 bytes a line); they are parsed on access."""

    def __init__(self, file: Path, name: str, size: int | None = None) -> None:
        self._name = name
        starts: list[int] = []
        lines: list[int] = []
        offset = 0
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if size is not None and len(starts) == size:
                    break
                if line.strip():
                    starts.append(offset)
                    lines.append(number)
                offset += len(line)
            # An empty file cannot be mapped, and has no row to read.
            self._text = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if starts else b""
        self._starts = np.array([*starts, offset], np.int64)
        self._lines = np.array(lines, np.int64)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Row:
        try:
            # Blank lines may follow; json takes white space around a value.
            value = json.loads(self._text[self._starts[index] : self._starts[index + 1]])
        except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, a number of thousands of digits
            raise DataError(f"{self.where(index)} is not JSON: {error}") from error
        return plain_row(value, self.where(index))

    def where(self, index: int) -> str:
        return f"{self._name} line {self._lines[index]}"


class ParquetRows:
    """A .parquet file as one Arrow table; only the rows that are asked for become Python values."""

    def __init__(self, file: Path, name: str, size: int | None = None) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._name = name
        try:
            table = pq.read_table(file, memory_map=True)
        except (pa.ArrowException, ValueError, OSError) as error:
            raise DataError(f"{name} is not a readable parquet file: {error}") from error
        self._table = table if size is None else table.slice(0, size)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        try:
            (row,) = self._table.slice(index, 1).to_pylist()
        except Exception as error:
            # Text that is no UTF-8, a date beyond the calendar: each type has a kind of its own.
            raise DataError(f"{self.where(index)} cannot be read: {type(error).__name__}: {error}") from error
        return plain_row(row, self.where(index))

    def where(self, index: int) -> str:
        return f"{self._name} row {index}"


def plain_row(row: Any, where: str) -> Row:
    """``row`` with every value made plain. Raises DataError for a row or a value that cannot be."""
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: found {type(row).__name__}; expected an object with named columns")
    return {_text(str(key), where): plain(value, f"{where}, column {key!r}") for key, value in row.items()}


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """``value`` as msgpack and JSON know it: arrays as lists, dates and decimals as text.

    Raises DataError for what has no such form, or is nested ``_DEEPEST`` deep.
    """
    if value is None or isinstance(value, (bool, float, bytes)):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int):
        return int(value) if value in _INT_RANGE else str(value)
    if depth == _DEEPEST:
        raise DataError(f"{where}: found values nested {_DEEPEST} deep; expected fewer: flatten them")
    if isinstance(value, Mapping):
        return {_text(str(key), where): plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return [plain(item, where, depth + 1) for item in items]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist(), where, depth + 1)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (decimal.Decimal, uuid.UUID)):
        return str(value)
    raise DataError(
        f"{where}: found a {type(value).__name__}; expected text, numbers, lists or objects: "
        "leave the column out, or convert it"
    )


def _text(value: str, where: str) -> str:
    """``value``, if it is Unicode: JSON knows halves of characters, which UTF-8 and msgpack do not."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: found text that is no Unicode: {error}") from error
    return value


def _name(source: SourceSection) -> str:
    return str(source.path or source.hub or source.reasoning_gym or source.python)


def _open_file(file: Path, name: str, size: int | None) -> Rows:
    kinds: dict[str, Callable[[Path, str, int | None], Rows]] = {
        ".jsonl": JsonlRows,
        ".ndjson": JsonlRows,
        ".parquet": ParquetRows,
    }
    if file.suffix not in kinds:
        raise DataError(f"{name}: found the suffix {file.suffix!r}; expected one of {', '.join(kinds)}")
    if not file.is_file():
        state = "a folder" if file.is_dir() else "no such file"
        raise DataError(f"{name}: found {state} at {file}; expected a .jsonl or .parquet file")
    try:
        return kinds[file.suffix](file, name, size)
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error}") from error


def _open_hub(source: SourceSection) -> Rows:
    assert source.hub is not None
    offline = not Path(source.hub).exists() and hub_is_offline()  # the library takes a folder for a name
    import datasets

    settings = {"download_config": datasets.DownloadConfig(local_files_only=True)} if offline else {}
    try:
        rows = datasets.load_dataset(
            source.hub, source.hub_config, split=source.split, **{**settings, **source.args}
        )
    except Exception as error:
        # The library raises many kinds: no such set, no such split, a bad script, a lost connection.
        if offline:
            raise DataError(
                f"hub data set {source.hub!r} (configuration {source.hub_config or 'default'}, split "
                f"{source.split!r}) is not in the hub's local cache, and the hub at {endpoint()} cannot be "
                "reached or is switched off: connect, or give the rows as a .jsonl or .parquet file, with "
                f"path instead of hub ({type(error).__name__}: {error})"
            ) from error
        raise DataError(
            f"hub data set {source.hub!r} (configuration {source.hub_config or 'default'}, split "
            f"{source.split!r}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return SequenceRows(rows, f"{source.hub}[{source.split}]", source.size)


def _open_gym(family: str, source: SourceSection) -> Rows:
    import difflib

    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if family not in DATASETS:
        near = ", ".join(difflib.get_close_matches(family, DATASETS, n=3)) or "see reasoning_gym's list"
        raise DataError(f"reasoning_gym: found no family {family!r}; nearest names: {near}")
    try:
        rows = reasoning_gym.create_dataset(
            family, seed=source.seed, size=source.size or _GYM_ROWS, **source.args
        )
    except Exception as error:
        # A family's own checks are assertions and type errors of its constructor.
        raise DataError(
            f"reasoning_gym family {family!r} refuses args {source.args}: {type(error).__name__}: {error}"
        ) from error
    return SequenceRows(rows, family)


def _open_function(path: str, source: SourceSection, folder: Path) -> Rows:
    function = load_function(path, folder)
    try:
        made = function(**source.args)
        if not isinstance(made, Iterable):
            raise DataError(f"{path}: found {type(made).__name__}; expected an iterable of dicts")
        rows = list(islice(made, source.size))
    except (DataError, ConfigError):
        raise
    except Exception as error:
        raise DataError(f"{path} failed with args {source.args}: {type(error).__name__}: {error}") from error
    return SequenceRows(rows, path)
