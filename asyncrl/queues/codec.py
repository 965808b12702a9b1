"""How groups travel: one header and one msgpack body, numpy arrays as raw bytes, never pickle.

::

    magic "ARLG" | format version u16 | header check u16 | body length u32 | CRC-32 of the body u32 | body

all little-endian. The body is a msgpack map; the arrays of a group's trajectories lie in it by column,
one after the other, as [dtype, length, bytes], so that checks and copies run once a group. A record is
self-delimiting: a file of records is just one after the other.

Invariants:
- ``decode_group(encode_group(g))`` equals ``g`` bit for bit; its arrays are read-only views of the body.
- What cannot be a group of asyncrl's is refused, on both sides, with CodecError and nothing else:
  lengths that differ, another dtype, a log-prob that is not finite or above 0 (beyond rounding), a
  negative token id or version, a trained token older than its group's start, a reward that is not finite.
- Bytes that were changed anywhere are refused; a header check of its own tells a cut-off record
  (``TornRecordError``) from a damaged one.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, BinaryIO, Final, get_args

import msgpack
import numpy as np
import numpy.typing as npt

from asyncrl.errors import CodecError, TornRecordError
from asyncrl.types import FinishReason, Group, GroupMeta, SampleFailure, Trajectory

MAGIC: Final = b"ARLG"
FORMAT_VERSION: Final = 1
MAX_BODY_BYTES: Final = 2**30
"""Largest body that is written or read: far above any group, far below what exhausts memory."""
MAX_LOGPROB: Final = 1e-4
"""A log-prob above 0 by no more than this is rounding; above it, it is an error."""

_HEADER = struct.Struct("<4sHHII")
_INTEGER_MAX = 2**63 - 1
_FINISH_REASONS = get_args(FinishReason)

_RESPONSE_COLUMNS: Final = {"token_ids": "<i4", "loss_mask": "|b1", "logprobs": "<f4", "versions": "<i4"}
_COLUMNS: Final = {"prompt_ids": "<i4", **_RESPONSE_COLUMNS}
"""Every array of a trajectory and the one dtype that it may have."""


def encode_group(group: Group) -> bytes:
    """One record. CodecError if the group breaks an invariant; nothing is cast silently."""
    start_version = _integer(group.start_version, "start_version")
    for trajectory in group.answers:
        _check_arrays(trajectory)
    columns = {
        name: _join([getattr(trajectory, name) for trajectory in group.answers], dtype)
        for name, dtype in _COLUMNS.items()
    }
    lengths = [len(t.token_ids) for t in group.answers]
    _check_columns(columns, lengths, start_version)
    heads = [_encode_head(trajectory) for trajectory in group.answers]
    body = {
        "ordinal": _integer(group.ordinal, "ordinal"),
        "uid": _text(group.uid, "uid"),
        "start_version": start_version,
        "trajectories": heads,
        "columns": {name: [_COLUMNS[name], len(a), a.view(np.uint8).data] for name, a in columns.items()},
    }
    if group.baseline is not None:
        body["baseline"] = True  # the last of the trajectories
    _check_samples(heads)
    return frame(body, f"group {group.ordinal}")


def decode_group(payload: bytes | bytearray | memoryview) -> Group:
    """The group of one record. Its arrays are read-only: copy one before writing to it.

    CodecError for anything but exactly one whole, undamaged record of this format version.
    """
    return _decode_document(unframe(payload))


def frame(document: Mapping[str, Any], name: str, magic: bytes = MAGIC) -> bytes:
    """One record of a msgpack map; ``name`` says in a CodecError what could not be encoded."""
    try:
        packed: bytes = msgpack.packb(document)
    except (ValueError, TypeError, OverflowError) as error:
        raise CodecError(f"{name} cannot be encoded: {error}") from error
    if len(packed) > MAX_BODY_BYTES:
        raise CodecError(f"{name} takes {len(packed)} bytes, the limit is {MAX_BODY_BYTES}")
    return _header(packed, magic) + packed


def unframe(payload: bytes | bytearray | memoryview, magic: bytes = MAGIC) -> Any:
    """What one record holds. CodecError for anything but one whole, undamaged record of this magic."""
    view = memoryview(payload)
    if len(view) < _HEADER.size:
        raise CodecError(f"a record takes at least {_HEADER.size} bytes, found {len(view)}: it was cut off")
    length, crc = _read_header(bytes(view[: _HEADER.size]), "the record", magic)
    body = view[_HEADER.size :]
    if len(body) != length:
        what = "cut off" if len(body) < length else "followed by something else"
        raise CodecError(f"the record's body has {len(body)} bytes, its header says {length}: it was {what}")
    found = zlib.crc32(body)
    if found != crc:
        raise CodecError(f"the record's body has CRC-32 {found:#010x}, its header says {crc:#010x}: damaged")
    try:
        return msgpack.unpackb(body)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise CodecError(f"the record's body is not msgpack: {error}") from error


def checksum(payload: bytes | bytearray | memoryview) -> int:
    """CRC-32 of a whole record, header included."""
    return zlib.crc32(payload)


def group_meta(group: Group, payload: bytes, failures: Sequence[SampleFailure] = ()) -> GroupMeta:
    """The scalars of a group, and the checksum and size of its record ``payload``."""
    return GroupMeta(
        ordinal=group.ordinal,
        uid=group.uid,
        start_version=group.start_version,
        trajectories=tuple(trajectory.meta() for trajectory in group.trajectories),
        baseline=None if group.baseline is None else group.baseline.meta(),
        checksum=checksum(payload),
        nbytes=len(payload),
        failures=tuple(failures),
    )


def append_record(file: BinaryIO, payload: bytes) -> None:
    """Append one encoded group to a file opened for binary writing. Does not flush."""
    file.write(payload)


def read_records(file: BinaryIO, magic: bytes = MAGIC) -> Iterator[bytes]:
    """Each record of a file from its current position on, undecoded.

    Raises TornRecordError, with the offset to cut the file at, where the file ends inside a record, as
    after a crash; CodecError where it is damaged. All records before that have been yielded by then.
    """
    offset = file.tell()
    while header := file.read(_HEADER.size):
        where = f"the record at byte {offset}"
        if len(header) < _HEADER.size:
            raise TornRecordError(f"{where} ends after {len(header)} bytes of its header", offset)
        length, _ = _read_header(header, where, magic)
        body = file.read(length)
        if len(body) < length:
            raise TornRecordError(f"{where} ends after {len(body)} of its body's {length} bytes", offset)
        yield header + body
        offset += len(header) + length


def _header(body: bytes, magic: bytes = MAGIC) -> bytes:
    length, crc = len(body), zlib.crc32(body)
    return _HEADER.pack(magic, FORMAT_VERSION, _header_check(FORMAT_VERSION, length, crc), length, crc)


def _header_check(version: int, length: int, crc: int) -> int:
    return zlib.crc32(struct.pack("<HII", version, length, crc)) & 0xFFFF


def _read_header(header: bytes, where: str, magic: bytes = MAGIC) -> tuple[int, int]:
    """Length and CRC-32 of the body that follows."""
    found, version, check, length, crc = _HEADER.unpack(header)
    if found != magic:
        raise CodecError(f"{where} starts with {found!r}, not {magic!r}: it was not written by asyncrl")
    if check != _header_check(version, length, crc):
        raise CodecError(f"the header of {where} is damaged: its check value is {check:#06x}")
    if version != FORMAT_VERSION:
        raise CodecError(
            f"{where} has format version {version}, this asyncrl reads {FORMAT_VERSION}:"
            " read it with the version of asyncrl that wrote it"
        )
    if length > MAX_BODY_BYTES:
        raise CodecError(f"{where} claims a body of {length} bytes, the limit is {MAX_BODY_BYTES}")
    return length, crc


def _encode_head(trajectory: Trajectory) -> list[Any]:
    """Everything of a trajectory but its arrays."""
    return [
        _integer(trajectory.sample, "sample"),
        _integer(trajectory.attempt, "attempt"),
        len(trajectory.prompt_ids),
        len(trajectory.token_ids),
        _number(trajectory.reward, "reward"),
        _finish_reason(trajectory.finish_reason),
        _numbers(trajectory.rewards, "rewards"),
        *([_foreign(trajectory)] if trajectory.environment_tokens or trajectory.row else []),
        *([_integer(trajectory.row, "row")] if trajectory.row else []),
    ]


def _foreign(trajectory: Trajectory) -> int:
    """``environment_tokens``, none of which is trained."""
    found, untrained = trajectory.environment_tokens, int(np.count_nonzero(~trajectory.loss_mask))
    if not 0 <= found <= untrained:
        raise CodecError(
            f"environment_tokens of sample {trajectory.sample} is {found}, expected 0 to the {untrained} "
            "tokens with loss_mask False"
        )
    return found


def _decode_document(document: Any) -> Group:
    keys: tuple[str, ...] = ("ordinal", "uid", "start_version", "trajectories", "columns")
    has_baseline = isinstance(document, dict) and "baseline" in document
    fields = _map(document, (*keys, "baseline") if has_baseline else keys, "the body")
    raw = _map(fields["columns"], tuple(_COLUMNS), "columns")
    columns = {name: _column(raw[name], dtype, name) for name, dtype in _COLUMNS.items()}
    heads = fields["trajectories"]
    if not isinstance(heads, list):
        raise CodecError(f"trajectories is a {type(heads).__name__}, expected a list")
    if has_baseline and (fields["baseline"] is not True or not heads):
        raise CodecError(
            f"baseline is {fields['baseline']!r} of {len(heads)} trajectories, expected true of at least 1"
        )
    for head in heads:
        if not isinstance(head, list) or len(head) not in (7, 8, 9):
            raise CodecError("a trajectory's head is not a list of 7 to 9 values")
        _integer(head[2], "prompt length")
        _integer(head[3], "response length")
    _check_samples(heads)
    start_version = _integer(fields["start_version"], "start_version")
    lengths = [head[3] for head in heads]
    prompts = sum(head[2] for head in heads)
    if len(columns["prompt_ids"]) != prompts:
        raise CodecError(
            f"prompt_ids holds {len(columns['prompt_ids'])} tokens, the lengths add up to {prompts}"
        )
    _check_columns(columns, lengths, start_version)

    trajectories = []
    prompt_start = start = 0
    for sample, attempt, prompt_length, length, reward, finish_reason, rewards, *more in heads:
        prompt_end, end = prompt_start + prompt_length, start + length
        trajectories.append(
            Trajectory(
                sample=_integer(sample, "sample"),
                attempt=_integer(attempt, "attempt"),
                prompt_ids=columns["prompt_ids"][prompt_start:prompt_end],
                token_ids=columns["token_ids"][start:end],
                loss_mask=columns["loss_mask"][start:end],
                logprobs=columns["logprobs"][start:end],
                versions=columns["versions"][start:end],
                reward=_number(reward, "reward"),
                finish_reason=_finish_reason(finish_reason),
                rewards=_numbers(rewards, "rewards"),
                environment_tokens=_integer(more[0], "environment_tokens") if more else 0,
                row=_integer(more[1], "row") if len(more) > 1 else 0,
            )
        )
        _foreign(trajectories[-1])
        prompt_start, start = prompt_end, end
    return Group(
        ordinal=_integer(fields["ordinal"], "ordinal"),
        uid=_text(fields["uid"], "uid"),
        start_version=start_version,
        trajectories=tuple(trajectories[:-1] if has_baseline else trajectories),
        baseline=trajectories[-1] if has_baseline else None,
    )


def _check_arrays(trajectory: Trajectory) -> None:
    """One dimension, the right dtype, and one length for the four arrays of the response."""
    for name, dtype in _COLUMNS.items():
        array = getattr(trajectory, name)
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != np.dtype(dtype):
            found = (
                f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            )
            raise CodecError(
                f"{name} of sample {trajectory.sample} is {found},"
                f" expected one dimension of {np.dtype(dtype)}"
            )
    lengths = {name: len(getattr(trajectory, name)) for name in _RESPONSE_COLUMNS}
    if len(set(lengths.values())) != 1:
        raise CodecError(f"the arrays of sample {trajectory.sample} differ in length: {lengths}")


def _join(arrays: Sequence[npt.NDArray[Any]], dtype: str) -> npt.NDArray[Any]:
    return np.concatenate(arrays, dtype=dtype) if arrays else np.empty(0, dtype)


def _column(raw: Any, dtype: str, name: str) -> npt.NDArray[Any]:
    """A read-only array over the bytes of one column."""
    if not (isinstance(raw, list) and len(raw) == 3 and raw[0] == dtype and isinstance(raw[2], bytes)):
        found = raw[0] if isinstance(raw, list) and raw else type(raw).__name__
        raise CodecError(f"column {name} is {found!r}, expected [{dtype!r}, length, bytes]")
    expected = _integer(raw[1], f"length of {name}") * np.dtype(dtype).itemsize
    if len(raw[2]) != expected:
        raise CodecError(f"column {name} has {len(raw[2])} bytes, expected {expected}")
    if dtype == "|b1":
        flags = np.frombuffer(raw[2], np.uint8)
        if len(flags) and flags.max() > 1:
            raise CodecError(f"column {name} holds the byte {flags.max()}, expected 0 or 1")
        return flags.view(np.bool_)
    return np.frombuffer(raw[2], dtype)


def _check_columns(
    columns: Mapping[str, npt.NDArray[Any]], lengths: Sequence[int], start_version: int
) -> None:
    """Lengths and ranges, over all trajectories of the group at once."""
    total = sum(lengths)
    for name in _RESPONSE_COLUMNS:
        if len(columns[name]) != total:
            raise CodecError(f"{name} holds {len(columns[name])} tokens, the lengths add up to {total}")
    for name in ("prompt_ids", "token_ids", "versions"):
        column = columns[name]
        if len(column) and column.min() < 0:
            raise CodecError(f"{name} holds {column.min()}, expected nothing below 0")
    if not total:
        return
    logprobs = columns["logprobs"]
    highest = logprobs.max()  # NaN where any is NaN
    if not highest <= MAX_LOGPROB or not math.isfinite(logprobs.min()):
        raise CodecError(
            f"logprobs lie between {logprobs.min()} and {highest}, expected finite values of at most 0"
        )
    versions = columns["versions"]
    if versions.min() < start_version:
        trained = versions[columns["loss_mask"]]
        if len(trained) and trained.min() < start_version:
            raise CodecError(
                f"a trained token is of version {trained.min()}, but its group started at {start_version}"
            )


def _check_samples(heads: Sequence[Sequence[Any]]) -> None:
    """Each sample once, or each of its rows, these together."""
    samples = [_integer(head[0], "sample") for head in heads]
    rows = [_integer(head[8], "row") if len(head) > 8 else 0 for head in heads]
    firsts = [sample for sample, row in zip(samples, rows, strict=True) if not row]
    if len(set(firsts)) != len(firsts):
        raise CodecError(f"a group holds samples {firsts}, expected each once")
    keys = list(zip(samples, rows, strict=True))
    for i, (sample, row) in enumerate(keys):
        if row and (i == 0 or samples[i - 1] != sample or rows[i - 1] >= row):
            raise CodecError(
                f"row {row} of sample {sample} follows {keys[i - 1] if i else 'nothing'} (sample, row), "
                "expected an earlier row of that sample"
            )


def _map(value: Any, keys: tuple[str, ...], name: str) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(keys):
        found = sorted(map(str, value)) if isinstance(value, dict) else type(value).__name__
        raise CodecError(f"{name} has {found}, expected the keys {sorted(keys)}")
    return value


def _integer(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _INTEGER_MAX:
        raise CodecError(f"{name} is {value!r}, expected an integer of at least 0")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise CodecError(f"{name} is {value!r}, expected a finite number")


def _numbers(value: Any, name: str) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise CodecError(f"{name} is a {type(value).__name__}, expected a mapping of names to numbers")
    return {_text(key, f"a name in {name}"): _number(item, f"{name}[{key!r}]") for key, item in value.items()}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise CodecError(f"{name} is {value!r}, expected a string")
    return value


def _finish_reason(value: Any) -> FinishReason:
    if value not in _FINISH_REASONS:
        raise CodecError(f"finish_reason is {value!r}, expected one of {', '.join(_FINISH_REASONS)}")
    reason: FinishReason = value
    return reason
