"""``trace.json`` read back: whole, or its end alone.

Invariants:
- A trace that a killed run left, or that is still written, is read up to its last whole event.
- Memory does not grow with the file where only its end is asked for.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.timeline import TraceEvent

_MOST_LAST = 100_000
"""Events that the end of a trace is looked for in: enough for a minute of a large run."""
_NAMING = b'"ph":"M"'


@dataclass(slots=True)
class _Names:
    """Processes and tracks by their numbers, and the place that each has among the others."""

    text: dict[tuple[int, int], str] = field(default_factory=dict)
    place: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> None:
        key = (record["pid"], record["tid"])
        if record["name"] in ("process_name", "thread_name"):
            self.text[key] = str(record["args"]["name"])
        elif record["name"] in ("process_sort_index", "thread_sort_index"):
            self.place[key] = int(record["args"]["sort_index"])


@dataclass(frozen=True, slots=True)
class Trace:
    """Events of a timeline in the order in which they ended, in seconds of the trace's own clock."""

    events: tuple[TraceEvent, ...]
    tracks: tuple[tuple[str, str], ...]
    """(process, track) of all that occur in ``events``, as a viewer orders them."""


def read_trace(path: Path, *, last_s: float | None = None) -> Trace:
    """All events, or those that ended in the last ``last_s`` seconds; none where there is no file."""
    names = _Names()
    raw: deque[bytes] = deque(maxlen=None if last_s is None else _MOST_LAST)
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                if _NAMING not in line:
                    raw.append(line)
                elif (record := _record(line)) is not None:
                    names.add(record)
    records = [record for line in raw if (record := _record(line)) is not None and record["ph"] == "X"]
    events = [(_key(record), _event(record, names)) for record in records]
    if last_s is not None and events:
        until = max(event.end for _, event in events)
        events = [(key, event) for key, event in events if event.end > until - last_s]
    events.sort(key=lambda pair: pair[1].end)
    return Trace(tuple(event for _, event in events), _ordered({key for key, _ in events}, names))


def _record(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None for a bracket, and for what was torn off."""
    text = line.strip().removesuffix(b",")
    if not text.startswith(b"{"):
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"ph", "name", "pid", "tid"} <= record.keys() else None


def _key(record: dict[str, Any]) -> tuple[int, int]:
    return record["pid"], record["tid"]


def _event(record: dict[str, Any], names: _Names) -> TraceEvent:
    pid, tid = _key(record)
    return TraceEvent(
        process=names.text.get((pid, 0), str(pid)),
        track=names.text.get((pid, tid), str(tid)),
        name=str(record["name"]),
        start=record["ts"] / 1e6,
        end=(record["ts"] + record["dur"]) / 1e6,
        facts=record.get("args", {}),
    )


def _ordered(keys: Iterable[tuple[int, int]], names: _Names) -> tuple[tuple[str, str], ...]:
    """Processes by their place and name, and in each of them its tracks."""

    def place(key: tuple[int, int]) -> tuple[int, str, int, str]:
        process = (key[0], 0)
        return (
            names.place.get(process, 0),
            names.text.get(process, str(key[0])),
            names.place.get(key, 0),
            names.text.get(key, str(key[1])),
        )

    return tuple((process, track) for _, process, _, track in sorted(map(place, keys)))
