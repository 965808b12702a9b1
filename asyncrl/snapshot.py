"""Snapshots: what the groups of a replica have so far, kept where the replica's death does not reach it.

A replica is asked for one every few seconds. Scalars tell the controller whose groups are in it and how far
they are; the rest is bytes that only another replica reads, which a group is handed to with what was left.

Invariants:
- A group that is continued is the same group: finished trajectories stay as they are, rewards included,
  and begun answers keep the versions and log-probs of the engine that sampled them.
- So it holds tokens as old as its first start, and keeps its start version (``StalenessBudget.reissue`` is
  for groups that start from nothing). A snapshot of a group whose start version is another is refused.
- Groups that have nothing yet take no place in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args

import msgpack
import numpy as np

from asyncrl.errors import CodecError
from asyncrl.queues.codec import decode_group, encode_group
from asyncrl.types import Completion, FinishReason, Group, Task

GroupKey = tuple[str, int]
"""uid and ordinal of a group's task."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The scalars of what a group has so far."""

    samples: int
    """Finished and begun ones."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the groups of one replica had at one moment."""

    groups: Mapping[GroupKey, Progress] = field(default_factory=dict)
    payload: Any = b""
    """Of all groups: bytes, or a Ray reference to them that outlives the replica."""

    def salvage(self, key: GroupKey) -> Salvage | None:
        """What is left of a group once the replica is dead; None where the group is not in here."""
        progress = self.groups.get(key)
        return None if progress is None else Salvage(progress, self.payload)


@dataclass(frozen=True, slots=True)
class Salvage:
    """What was left of one group whose replica died: its part of a snapshot's payload."""

    progress: Progress
    payload: Any


@dataclass(frozen=True, slots=True)
class PartialGroup:
    """What one group has so far."""

    group: Group
    """Its finished trajectories."""
    begun: Mapping[int, Completion] = field(default_factory=dict)
    """First turns by sample; with ``finish_reason`` abort they are to be continued, else to be scored."""

    @property
    def progress(self) -> Progress:
        parts = [*(t.token_ids for t in self.group.answers), *(c.token_ids for c in self.begun.values())]
        return Progress(len(parts), sum(len(ids) for ids in parts))


def key_of(task: Task) -> GroupKey:
    return task.uid, task.ordinal


_COLUMNS: Final = {"token_ids": "<i4", "logprobs": "<f4", "versions": "<i4"}


def encode_snapshot(groups: Mapping[GroupKey, PartialGroup]) -> bytes:
    """A record of msgpack for each group, in one msgpack list, so that one is read without the others."""
    parts = [[*key, msgpack.packb(_encode(partial))] for key, partial in groups.items()]
    payload: bytes = msgpack.packb(parts)
    return payload


def decode_partial(payload: bytes, key: GroupKey, start_version: int) -> PartialGroup:
    """The part of one group. CodecError where it is not in there, or started at another version."""
    try:
        parts = {(uid, ordinal): part for uid, ordinal, part in msgpack.unpackb(payload)}
        finished, begun = msgpack.unpackb(parts[key])
        group = decode_group(finished)
        completions = {sample: _decode(*columns) for sample, *columns in begun}
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException) as error:
        raise CodecError(f"no snapshot of {key[0]} in {len(payload)} bytes: {error!r}") from error
    if group.start_version != start_version:
        raise CodecError(
            f"{key[0]} is continued with start version {start_version}, but started at "
            f"{group.start_version}: a group that keeps tokens keeps its admission"
        )
    return PartialGroup(group, completions)


def _encode(partial: PartialGroup) -> list[Any]:
    begun = [
        [sample, answer.finish_reason]
        + [np.asarray(getattr(answer, name), dtype).tobytes() for name, dtype in _COLUMNS.items()]
        for sample, answer in partial.begun.items()
    ]
    return [encode_group(partial.group), begun]


def _decode(reason: FinishReason, *raw: bytes) -> Completion:
    ids, logprobs, versions = (
        np.frombuffer(part, dtype) for part, dtype in zip(raw, _COLUMNS.values(), strict=True)
    )
    if not len(ids) == len(logprobs) == len(versions) or reason not in get_args(FinishReason):
        raise ValueError(f"{len(ids)}, {len(logprobs)} and {len(versions)} values, ended with {reason!r}")
    return Completion(ids, logprobs, versions, reason)
