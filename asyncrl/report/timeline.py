"""The end of a run's timeline as a chart: a row a track, as Perfetto would show it.

Invariants:
- The last minute, or the last steps where these took longer, or as much of their end as can be drawn: the
  note says which.
"""

from __future__ import annotations

import plotly.graph_objects as go

from asyncrl.recorded import RecordedRun
from asyncrl.report.charts import Chart
from asyncrl.timeline import TraceEvent
from asyncrl.trace_reading import read_trace

_LAST_S = 60.0
_LAST_STEPS = 3
_MOST_EVENTS = 4000
_MOST_TRACKS = 96
_ROW_PX = 10

_BY_NAME = {
    "train": "#10b981",
    "wait_for_batch": "#ef4444",
    "wait_for_policy": "#f87171",
    "weight_sync": "#f59e0b",
    "weight_sync_stall": "#fbbf24",
    "failed": "#dc2626",
}
_VERSIONS = ("#3b82f6", "#0ea5e9", "#6366f1", "#14b8a6", "#8b5cf6", "#64748b")
_OTHER = "#94a3b8"


def timeline_chart(label: str, run: RecordedRun) -> Chart | None:
    """The end of the run's timeline; None where it has none."""
    last_s = max(_LAST_S, sum(line["timing_s/step"] for line in run.steps[-_LAST_STEPS:]))
    trace = read_trace(run.trace, last_s=last_s)
    if not trace.events:
        return None
    events = trace.events[-_MOST_EVENTS:]
    tracks = trace.tracks[:_MOST_TRACKS]
    shown = set(tracks)
    end = max(event.end for event in events)
    is_whole = len(events) == len(trace.events)
    begun = min(event.start if is_whole else event.end for event in events)
    seconds = min(last_s, end - begun)
    note = f"The last {seconds:.0f} s. Answers are coloured by the version that sampled them."
    if len(tracks) < len(trace.tracks):
        note += f" The first {len(tracks)} of {len(trace.tracks)} tracks."
    note += " All of it is in trace.json, for Perfetto."
    drawn = [event for event in events if (event.process, event.track) in shown]
    figure = _figure(drawn, tracks, end, seconds)
    return Chart(f"Timeline of {label}", note, figure, wide=True)


def _figure(
    events: list[TraceEvent], tracks: tuple[tuple[str, str], ...], end: float, seconds: float
) -> go.Figure:
    names = _row_names(tracks)
    figure = go.Figure(
        go.Bar(
            orientation="h",
            base=[round(event.start - end, 4) for event in events],
            x=[round(event.end - event.start, 4) for event in events],
            y=[names[event.process, event.track] for event in events],
            marker={"color": [_color(event) for event in events], "line": {"width": 0}},
            customdata=[_hover(event) for event in events],
            hovertemplate="%{customdata}<extra></extra>",
            showlegend=False,
        )
    )
    figure.update_layout(
        template=go.layout.Template(),
        height=90 + max(160, _ROW_PX * len(tracks)),
        margin={"l": 96, "r": 12, "t": 8, "b": 44},
        bargap=0.12,
        barmode="overlay",
        xaxis={"title": {"text": "seconds before the end"}, "range": [-seconds, 0]},
        yaxis={
            "type": "category",
            "categoryorder": "array",
            "categoryarray": list(names.values())[::-1],
            "automargin": True,
            "tickfont": {"size": 8},
            "tickvals": [
                name for name, labelled in zip(names.values(), _labelled(tracks), strict=True) if labelled
            ],
        },
    )
    return figure


def _row_names(tracks: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], str]:
    """Names of rows, each once: the process's is part of it where two processes have one track name."""
    times = [track for _, track in tracks]
    return {
        (process, track): track if times.count(track) == 1 else f"{process} {track}"
        for process, track in tracks
    }


def _labelled(tracks: tuple[tuple[str, str], ...]) -> list[bool]:
    """Whether each row's name is written beside it: of the many slots, every eighth."""
    slots = [track.startswith("slot") for _, track in tracks]
    return [not is_slot or sum(slots[:row]) % 8 == 0 for row, is_slot in enumerate(slots)]


def _color(event: TraceEvent) -> str:
    if event.name in _BY_NAME:
        return _BY_NAME[event.name]
    if event.process == "learner":
        return _BY_NAME["train"]
    versions = event.facts.get("versions")
    if isinstance(versions, dict) and versions:
        return _VERSIONS[max(map(int, versions)) % len(_VERSIONS)]
    return _OTHER


def _hover(event: TraceEvent) -> str:
    facts = "".join(
        f"<br>{key} {event.facts[key]}" for key in ("uid", "sample", "tokens", "reward") if key in event.facts
    )
    return f"{event.name}, {event.end - event.start:.3f} s{facts}".replace("<br>uid ", "<br>")
