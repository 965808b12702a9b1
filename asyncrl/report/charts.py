"""The charts of the page, as plotly figures.

Invariants:
- One colour a run, the same in all charts, and readable on white and on black. Text, grid and background get
  theirs from the page.
- Every chart is of all runs; one that no run has points for is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from asyncrl.recorded import RecordedRun
from asyncrl.report.summary import (
    LAST_STEPS,
    lag_counts,
    samples_at,
    seconds_at,
    series,
    share,
    trailing_mean,
)

COLORS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#06b6d4", "#ca8a04", "#ec4899")
Along = Callable[[RecordedRun], Mapping[int, float] | None]

_LEARNER_PHASES = {
    "update": ("train",),
    "waited for rollouts": ("wait_for_batch",),
    "push": ("weight_sync_stall", "wait_for_push"),
    "checkpoint, evaluation": ("checkpoint", "eval", "turns"),
}
_PHASE_COLORS = ("#10b981", "#ef4444", "#f59e0b", "#8b5cf6", "#94a3b8")


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with what stands above it."""

    title: str
    note: str
    figure: go.Figure
    wide: bool = False
    """Takes a row of the page to itself."""


def make_charts(runs: Mapping[str, RecordedRun]) -> list[Chart]:
    """All charts of the runs by their labels; those that have something to show."""
    reward = f"Mean reward of each step's batch; the line is the mean of {LAST_STEPS} steps."
    charts = [
        _rewards(runs, "Reward by step", "policy updates", reward, lambda run: None),
        _rewards(runs, "Reward by samples", "trained samples", "The same, over trained samples.", samples_at),
        _rewards(
            runs,
            "Reward by wall time",
            "seconds",
            "The same, over time since the start model's line.",
            seconds_at,
        ),
        _held_out(runs),
        _lines(
            runs,
            "Throughput",
            "Response tokens of trained groups a second of wall time, by step.",
            "perf/tokens_per_s",
            "tokens/s",
        ),
        _lags(runs),
        _learner_time(runs),
        _generator_time(runs),
        _lines(
            runs,
            "Length bias",
            "Mean length of trained answers over that of all sampled ones, since the start. Below 1, long "
            "answers are missing from training.",
            "bias/length_trained_over_dispatched",
            "trained / sampled",
            level=1.0,
        ),
    ]
    return [chart for chart in charts if chart is not None]


def color_of(number: int) -> str:
    """The colour of the run with this number."""
    return COLORS[number % len(COLORS)]


def _figure(x: str, y: str, *, height: int = 320) -> go.Figure:
    return go.Figure(
        layout={
            "template": go.layout.Template(),
            "height": height,
            "margin": {"l": 56, "r": 12, "t": 8, "b": 44},
            "xaxis": {"title": {"text": x}, "automargin": True},
            "yaxis": {"title": {"text": y}, "automargin": True},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
            "showlegend": True,
        }
    )


def _rewards(runs: Mapping[str, RecordedRun], title: str, x: str, note: str, along: Along) -> Chart | None:
    figure = _figure(x, "mean reward")
    for number, (label, run) in enumerate(runs.items()):
        places = along(run)
        found = series(run, "reward/mean", None if places is None else dict(places))
        if not found.x:
            continue
        figure.add_scatter(
            x=found.x,
            y=found.y,
            mode="markers",
            marker={"color": color_of(number), "size": 4, "opacity": 0.45},
            name=label,
            legendgroup=label,
            showlegend=False,
        )
        figure.add_scatter(
            x=found.x,
            y=trailing_mean(found.y),
            mode="lines+markers" if len(found.x) == 1 else "lines",
            line={"color": color_of(number), "width": 2.5},
            name=label,
            legendgroup=label,
        )
    return Chart(title, note, figure) if figure.data else None


def _held_out(runs: Mapping[str, RecordedRun]) -> Chart | None:
    figure = _figure("policy updates", "mean reward")
    for number, (label, run) in enumerate(runs.items()):
        found = series(run, "eval/reward_mean")
        if found.x:
            figure.add_scatter(
                x=found.x,
                y=found.y,
                mode="lines+markers",
                line={"color": color_of(number), "width": 2, "dash": "dot"},
                marker={"size": 8},
                name=label,
            )
    note = "Evaluations on prompts that are not trained on, each of one version of the policy."
    return Chart("Held-out reward", note, figure) if figure.data else None


def _lines(
    runs: Mapping[str, RecordedRun], title: str, note: str, metric: str, y: str, *, level: float | None = None
) -> Chart | None:
    figure = _figure("policy updates", y)
    for number, (label, run) in enumerate(runs.items()):
        found = series(run, metric)
        if found.x:
            figure.add_scatter(
                x=found.x,
                y=found.y,
                mode="lines+markers" if len(found.x) == 1 else "lines",
                line={"color": color_of(number), "width": 2},
                name=label,
            )
    if not figure.data:
        return None
    if level is None:
        figure.update_yaxes(rangemode="tozero")
    else:
        figure.add_hline(y=level, line={"color": "#94a3b8", "width": 1, "dash": "dash"})
    return Chart(title, note, figure)


def _lags(runs: Mapping[str, RecordedRun]) -> Chart | None:
    figure = _figure("lag in policy versions", "share of trained groups")
    for number, (label, run) in enumerate(runs.items()):
        counts = lag_counts(run)
        if counts:
            lags = range(min(counts), max(counts) + 1)
            figure.add_bar(
                x=list(lags),
                y=[counts[lag] / counts.total() for lag in lags],
                customdata=[counts[lag] for lag in lags],
                hovertemplate="lag %{x}: %{y:.1%}, %{customdata} groups",
                marker={"color": color_of(number)},
                name=label,
            )
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(tickformat=".0%")
    bounds = {
        label: bound
        for label, run in runs.items()
        if (bound := run.setting("schedule", "max_staleness")) is not None
    }
    said = ", ".join(f"{bound} in {label}" for label, bound in bounds.items())
    note = "Trained groups by the lag of their oldest token, from ledger.jsonl." + (
        f" The bound is {said}." if said else ""
    )
    return Chart("Lag", note, figure) if figure.data else None


def _stacked(
    runs: Mapping[str, RecordedRun], parts: Sequence[tuple[str, str, Sequence[float | None]]]
) -> go.Figure:
    """A bar a run, of parts (name, colour, share by run)."""
    figure = _figure("share of the time", "", height=190 + 44 * len(runs))
    for name, color, shares in parts:
        figure.add_bar(
            y=list(runs),
            x=list(shares),
            orientation="h",
            marker={"color": color},
            name=name,
            hovertemplate="%{y}: %{x:.1%}",
        )
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_xaxes(tickformat=".0%", range=[0, 1])
    figure.update_yaxes(autorange="reversed", type="category")
    return figure


def _learner_time(runs: Mapping[str, RecordedRun]) -> Chart | None:
    shares = {
        name: [share(run.steps, *phases) for run in runs.values()] for name, phases in _LEARNER_PHASES.items()
    }
    if all(found is None for found in shares["update"]):
        return None
    parts = [
        (name, color, found) for (name, found), color in zip(shares.items(), _PHASE_COLORS, strict=False)
    ]
    rest = [
        None if run_shares[0] is None else max(0.0, 1 - sum(part or 0.0 for part in run_shares))
        for run_shares in zip(*shares.values(), strict=True)
    ]
    figure = _stacked(runs, [*parts, ("other", _PHASE_COLORS[-1], rest)])
    note = "Where its time went, over all steps. Much waiting for rollouts: give the generators more."
    return Chart("Learner's time", note, figure)


def _generator_time(runs: Mapping[str, RecordedRun]) -> Chart | None:
    idle = [share(run.steps, "wait_for_policy") for run in runs.values()]
    if all(found is None for found in idle):
        return None
    busy = [None if found is None else max(0.0, 1 - found) for found in idle]
    figure = _stacked(
        runs,
        [
            ("rollouts under way", _PHASE_COLORS[0], busy),
            ("waited for the policy", _PHASE_COLORS[1], idle),
        ],
    )
    note = "Waiting for the policy: the budget admitted nothing. Give the learner more, or allow more lag."
    return Chart("Generators' time", note, figure)
