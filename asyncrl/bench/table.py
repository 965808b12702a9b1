"""A comparison as a person reads it: a table with a column a mode, the speed-up, and what limits it."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from asyncrl.bench.comparison import Comparison, Mode
from asyncrl.bench.figures import Figures
from asyncrl.bench.verdict import Verdict

Figure = Callable[[Figures], float]


def print_comparison(
    console: Console,
    comparison: Comparison,
    verdict: Verdict | None,
    title: str,
    *,
    learns: bool = True,
) -> None:
    """The table, then the speed-up against its ideal, then the verdict. ``learns``: rewards say something."""
    console.print(comparison_table(comparison, title, learns=learns))
    for line in conclusions(comparison, verdict):
        console.print(line, highlight=False)


def comparison_table(comparison: Comparison, title: str, *, learns: bool) -> Table:
    """Medians over the runs of each mode, with the smallest and the largest of the rates."""
    modes = list(comparison.modes.values())
    table = Table(title=title)
    table.add_column("")
    for mode in modes:
        table.add_column(mode.name, justify="right")
    shortest_s = min(run.wall_s for mode in modes for run in mode.runs)

    def row(label: str, cell: Callable[[Mode], str]) -> None:
        table.add_row(label, *(cell(mode) for mode in modes))

    row("trained tokens/s", lambda mode: _with_spread(mode, lambda run: run.tokens_per_s, ",.0f"))
    row("samples/s", lambda mode: _with_spread(mode, lambda run: run.samples_per_s, ",.1f"))
    row("step", lambda mode: _seconds(mode, lambda run: run.step_s))
    row("  rollouts under way", lambda mode: _seconds(mode, lambda run: run.generate_s))
    row("  rollouts, all slots full", lambda mode: f"{comparison.saturated_s(mode):.3g} s")
    row("  update", lambda mode: _seconds(mode, lambda run: run.train_s))
    row("  push", lambda mode: _seconds(mode, lambda run: run.weight_sync_s))
    row("  other", lambda mode: _seconds(mode, lambda run: run.other_s))
    row(
        "learner waited",
        lambda mode: _share(mode, lambda run: run.wait_for_batch_s / run.step_s),
    )
    row("generators waited", lambda mode: _share(mode, lambda run: run.wait_for_policy_s / run.step_s))
    row("generators busy", lambda mode: _share(mode, lambda run: run.generator_busy))
    row("slots taken", lambda mode: _share(mode, lambda run: run.occupancy))
    row("learner busy", lambda mode: _share(mode, lambda run: run.learner_busy))
    row("lag, mean and largest", _lag)
    row("length, trained over sampled", _length_bias)
    if learns:
        row(
            "reward after equal samples", lambda mode: _number(mode, lambda run: run.reward_around(run.steps))
        )
        row(
            "reward after equal time",
            lambda mode: _number(mode, lambda run: run.reward_around(run.steps_within(shortest_s))),
        )
    return table


def conclusions(comparison: Comparison, verdict: Verdict | None) -> list[str]:
    """What the table comes to, a sentence a line."""
    lines = []
    speedup, ideal = comparison.speedup, comparison.ideal_speedup
    if speedup is not None and ideal is not None:
        pairs = ", ".join(f"{pair:.2f}" for pair in comparison.paired_speedups)
        reached = speedup / ideal
        lines.append(
            f"async is {speedup:.2f} times as fast as sync (pairs: {pairs}); ideal is {ideal:.2f}, of which "
            f"{reached:.0%} was reached."
        )
        if reached > 1:
            lines.append(
                "More than the ideal is a measurement error: a mode that was disturbed, or too few steps. "
                "Measure again with more --steps or --repeats."
            )
    against = comparison.speedup_vs_colocated
    if against is not None:
        lines.append(f"async is {against:.2f} times as fast as colocated, which has the same devices.")
    if not comparison.rate_is_saturated:
        lines.append(
            "No run had all slots taken: the ideal is computed from the best rate that was seen, and may be "
            "lower than what full slots would give."
        )
    if verdict is not None:
        lines.append(verdict.sentence)
    return lines


def _with_spread(mode: Mode, figure: Figure, form: str) -> str:
    low, high = mode.spread(figure)
    middle = format(mode.median(figure), form)
    return middle if len(mode.runs) == 1 else f"{middle} ({low:{form}} to {high:{form}})"


def _seconds(mode: Mode, figure: Figure) -> str:
    return f"{round(mode.median(figure), 6):.3g} s"


def _share(mode: Mode, figure: Figure) -> str:
    return f"{mode.median(figure):.0%}"


def _number(mode: Mode, figure: Figure) -> str:
    return f"{mode.median(figure):.3f}"


def _lag(mode: Mode) -> str:
    largest = max(run.lag_max for run in mode.runs)
    return f"{mode.median(lambda run: run.lag_mean):.2f}, {largest:.0f}"


def _length_bias(mode: Mode) -> str:
    found = [run.length_bias for run in mode.runs if run.length_bias is not None]
    return f"{sum(found) / len(found):.3f}" if found else "-"
