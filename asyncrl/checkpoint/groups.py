"""Ready groups on disk: each a record of the codec that holds the group's and its annotations' records.

Invariants:
- Payloads are stored as they are, with their own checksums; metas are made from them again.
- A file holds the groups in the order in which they landed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any, BinaryIO, Final

from pydantic import NonNegativeInt, TypeAdapter

from asyncrl.errors import CodecError
from asyncrl.queues.codec import checksum, decode_group, frame, group_meta, read_records, unframe
from asyncrl.types import Annotation, AnnotationMeta, ReadyGroup, SampleFailure

READY: Final = "ready.msgpack"
_MAGIC: Final = b"ARLR"
_FAILURES: Final = TypeAdapter(list[SampleFailure])
_META: Final = TypeAdapter(AnnotationMeta)
_VERSION: Final = TypeAdapter(NonNegativeInt)


def encode_ready(group: ReadyGroup, start_version: int) -> bytes:
    """One record of a group whose payloads are bytes; ``start_version``: the version it was issued at."""
    document = {
        "payload": group.payload,
        "failures": [asdict(failure) for failure in group.meta.failures],
        "start_version": start_version,
        "expiry": group.expiry,
        "annotations": [
            {"payload": annotation.payload, **asdict(annotation.meta)} for annotation in group.annotations
        ],
    }
    return frame(document, f"the ready group {group.meta.ordinal}", _MAGIC)


def read_ready(file: BinaryIO) -> Iterator[tuple[ReadyGroup, int]]:
    """Each group of a file, its payloads bytes, and the version that it was issued at. Raises CodecError."""
    for record in read_records(file, _MAGIC):
        try:
            yield _decode(unframe(record, _MAGIC))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CodecError(f"the record of a ready group is none: {error!r}") from error


def with_payloads(groups: Iterable[ReadyGroup], payloads: Iterable[Any]) -> list[ReadyGroup]:
    """The groups with other payloads: of each group its own, then those of its annotations."""
    left = iter(payloads)
    return [
        replace(
            group,
            payload=next(left),
            annotations=tuple(replace(annotation, payload=next(left)) for annotation in group.annotations),
        )
        for group in groups
    ]


def payloads_of(groups: Iterable[ReadyGroup]) -> list[Any]:
    """All payloads, in the order in which ``with_payloads`` takes them."""
    return [p for g in groups for p in (g.payload, *(annotation.payload for annotation in g.annotations))]


def _decode(record: dict[str, Any]) -> tuple[ReadyGroup, int]:
    payload = record["payload"]
    failures = _FAILURES.validate_python(record["failures"])
    annotations = []
    for stored in record["annotations"]:
        found = stored.pop("payload")
        meta = _META.validate_python(stored)
        if checksum(found) != meta.checksum:
            raise CodecError(f"the annotation of {meta.role} has another checksum than its meta")
        annotations.append(Annotation(meta, found))
    ready = ReadyGroup(
        meta=group_meta(decode_group(payload), payload, failures),
        payload=payload,
        expiry=_VERSION.validate_python(record["expiry"]),
        annotations=tuple(annotations),
    )
    return ready, _VERSION.validate_python(record["start_version"])
