"""How annotations travel: named float32 arrays about a group, one (T,) array for each trajectory.

A record of the codec with a magic of its own, "ARLA". Its body is a msgpack map; the arrays of one name
lie in it one after the other, as bytes.

Invariants:
- Decoding what was encoded gives back the arrays bit for bit; they are read-only views of the record.
- Every name has the same lengths: those of the group's trajectories, in their order.
- A value that is not finite is refused on both sides: a role that computes NaN is broken, and the
  learner must not hear of it through a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from asyncrl.errors import CodecError
from asyncrl.queues.codec import frame, unframe
from asyncrl.types import Float32Array

ANNOTATION_MAGIC: Final = b"ARLA"
_DTYPE = np.dtype("<f4")

Arrays = Mapping[str, Sequence[Float32Array]]
"""By name, an array (T,) for each trajectory."""


def encode_annotation(ordinal: int, lengths: Sequence[int], arrays: Arrays) -> bytes:
    """One record about the group ``ordinal``, also without any array.

    ``lengths``: response tokens of each of the group's trajectories. CodecError for an array that is not one
    dimension of float32, of another length, or not finite.
    """
    columns = {}
    for name, column in arrays.items():
        found = [_length(name, array) for array in column]
        if found != list(lengths):
            raise CodecError(f"{name} has the lengths {found}, expected {list(lengths)}")
        joined = np.concatenate(column, dtype=_DTYPE) if column else np.empty(0, _DTYPE)
        require_finite(name, joined)
        columns[name] = joined.tobytes()
    document = {"ordinal": ordinal, "lengths": list(lengths), "columns": columns}
    return frame(document, f"the annotation of group {ordinal}", ANNOTATION_MAGIC)


def decode_annotation(payload: bytes, ordinal: int, lengths: Sequence[int]) -> dict[str, list[Float32Array]]:
    """The arrays of one record, by name. CodecError if it is damaged, or not about this very group.

    ``lengths``: response tokens of each of the group's trajectories.
    """
    document = unframe(payload, ANNOTATION_MAGIC)
    if not isinstance(document, dict) or set(document) != {"ordinal", "lengths", "columns"}:
        raise CodecError("an annotation's body is not a map of ordinal, lengths and columns")
    if document["ordinal"] != ordinal:
        raise CodecError(f"an annotation of group {document['ordinal']!r} came with group {ordinal}")
    if document["lengths"] != list(lengths):
        raise CodecError(
            f"the annotation of group {ordinal} is for trajectories of {document['lengths']!r} tokens, "
            f"the group has {list(lengths)}"
        )
    columns = document["columns"]
    if not isinstance(columns, dict):
        raise CodecError(f"columns is a {type(columns).__name__}, expected a map")
    return {_name(name): _split(name, raw, lengths) for name, raw in columns.items()}


def _split(name: str, raw: Any, lengths: Sequence[int]) -> list[Float32Array]:
    expected = sum(lengths) * _DTYPE.itemsize
    if not isinstance(raw, bytes) or len(raw) != expected:
        found = f"{len(raw)} bytes" if isinstance(raw, bytes) else type(raw).__name__
        raise CodecError(f"column {name} has {found}, expected {expected} bytes")
    joined = np.frombuffer(raw, _DTYPE)
    require_finite(name, joined)
    return np.split(joined, np.cumsum(lengths)[:-1]) if lengths else []


def _length(name: str, array: Any) -> int:
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != _DTYPE:
        found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise CodecError(f"an array of {name} is {found}, expected one dimension of float32")
    return len(array)


def require_finite(name: str, values: Sequence[float] | Float32Array) -> None:
    """CodecError where one of the ``values`` of ``name`` is not finite."""
    bad = int(np.count_nonzero(~np.isfinite(values)))
    if bad:
        raise CodecError(f"{name} has {bad} of {len(values)} values that are not finite, expected none")


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise CodecError(f"a column is called {value!r}, expected text")
    return value
