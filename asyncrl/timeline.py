"""The timeline of a run: who did what when, as ``trace.json`` shows it in Perfetto or chrome://tracing.

Invariants:
- An event is added to its track once, when it has ended; none is changed afterwards.
- Events of a phase add up to that phase's ``timing_s`` in the metrics: both come from one call.
- All times are seconds by the clock of the controller's loop. What another process measured by a clock of
  its own is moved over before it gets here (``shifted``).
"""

from __future__ import annotations

import time
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from asyncrl.types import GroupMeta, TrajectoryMeta


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that lasted, on a track of a process, real or not."""

    process: str
    track: str
    name: str
    """What Perfetto gives one colour: of slots, the versions that sampled."""
    start: float
    end: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON."""


class Timeline(Protocol):
    """Hears of everything that a timeline shows. Calls are synchronous, cheap, and never block."""

    def phase(self, name: str, start: float, end: float, facts: Mapping[str, Any]) -> None:
        """The controller accounted this time as ``timing_s/<name>``."""
        ...

    def ranks(self, version: int, spans: Sequence[tuple[float, float]]) -> None:
        """Each learner rank's own part (start, end) of the update from ``version``, by rank."""
        ...

    def group(self, replica: str, meta: GroupMeta) -> None:
        """A replica finished a group: what its slots and reward workers were busy with."""
        ...


class NoTimeline:
    """Shows nothing."""

    def phase(self, name: str, start: float, end: float, facts: Mapping[str, Any]) -> None:
        """Nothing to show."""

    def ranks(self, version: int, spans: Sequence[tuple[float, float]]) -> None:
        """Nothing to show."""

    def group(self, replica: str, meta: GroupMeta) -> None:
        """Nothing to show."""


class EventTimeline:
    """Makes events of what it hears, and hands each to ``sink``."""

    def __init__(self, sink: Callable[[TraceEvent], None]) -> None:
        self._sink = sink

    def phase(self, name: str, start: float, end: float, facts: Mapping[str, Any]) -> None:
        if end > start:
            self._sink(TraceEvent("controller", name, name, start, end, facts))

    def ranks(self, version: int, spans: Sequence[tuple[float, float]]) -> None:
        for rank, (start, end) in enumerate(spans):
            facts = {"version": version}
            self._sink(TraceEvent("learner", f"rank {rank}", f"update {version}", start, end, facts))

    def group(self, replica: str, meta: GroupMeta) -> None:
        answers = meta.samples if meta.baseline is None else (*meta.samples, meta.baseline)
        by_sample = {trajectory.sample: trajectory for trajectory in answers}
        for span in meta.spans:
            trajectory = by_sample.get(span.sample)
            facts = {"uid": meta.uid, "ordinal": meta.ordinal, "sample": span.sample}
            name = "failed"
            if trajectory is not None:
                name = _versions(trajectory)
                facts |= {
                    "tokens": trajectory.response_tokens,
                    "versions": {str(version): count for version, count in trajectory.trained},
                    "reward": trajectory.reward,
                }
            self._sink(TraceEvent(replica, span.track, name, span.begun, span.ended, facts))


def _versions(trajectory: TrajectoryMeta) -> str:
    """``version 3``, or ``versions 3 to 5``: answers of equal versions have equal names."""
    oldest, newest = trajectory.oldest_version, trajectory.newest_version
    if oldest is None:
        return "untrained"
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"


class Lanes:
    """Numbers for tracks, so that what ran at the same time is on different ones, as few as there can be.

    For intervals in the order of their ends: each goes to the lane that was free for the shortest time.
    """

    def __init__(self) -> None:
        self._free: list[tuple[float, int]] = []  # since when each lane is free, ascending

    def assign(self, begun: float, ended: float) -> int:
        """The lane of an interval; one that touches another's end may follow it."""
        index = bisect_right(self._free, (begun, len(self._free))) - 1
        lane = self._free.pop(index)[1] if index >= 0 else len(self._free)
        insort(self._free, (ended, lane))
        return lane


class Tracks:
    """Names of tracks: whoever does several things at a time gets as many."""

    def __init__(self) -> None:
        self._lanes: defaultdict[str, Lanes] = defaultdict(Lanes)

    def assign(self, who: str, begun: float, ended: float, *, numbered: bool) -> str:
        """``slot 0``, ``slot 1``, ... where ``numbered``; else ``who``, and ``who (2)`` beside it."""
        lane = self._lanes[who].assign(begun, ended)
        if numbered:
            return f"{who} {lane}"
        return who if lane == 0 else f"{who} ({lane + 1})"


def unix_offset() -> float:
    """Seconds to add to this process's monotonic clock, which is its loop's, for the time of day."""
    return time.time() - time.monotonic()


def shifted(meta: GroupMeta, seconds: float) -> GroupMeta:
    """``meta`` with its spans on another clock, which is ahead by ``seconds``."""
    spans = tuple(replace(s, begun=s.begun + seconds, ended=s.ended + seconds) for s in meta.spans)
    return replace(meta, spans=spans)
