"""What the page says of each run in a word: where it stands, how fast it was, what waited for what.

Invariants:
- Sums over all steps that have the figure. A figure that no step has is None, never made up.
- A share of the time is one of the time of those steps that have it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.recorded import Record, RecordedRun

LAST_STEPS = 5
"""Steps that the last reward is a mean of."""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of a curve, in order."""

    x: tuple[float, ...]
    y: tuple[float, ...]


def label_runs(runs: Sequence[RecordedRun]) -> list[str]:
    """A name for each run: its folder's, with as much of the path before it as tells them apart."""
    paths = [run.folder.resolve().parts for run in runs]
    labels = []
    for number, path in enumerate(paths):
        others = [other for other in paths if other != path]
        depth = 1
        while depth < len(path) and any(other[-depth:] == path[-depth:] for other in others):
            depth += 1
        again = f" ({paths[:number].count(path) + 1})" if path in paths[:number] else ""
        labels.append("/".join(path[-depth:]) + again)
    return labels


def seconds_at(run: RecordedRun) -> dict[int, float]:
    """Seconds of wall time from the line before the first step to each step, by step."""
    timed = [line for line in run.lines if "time" in line]
    start = timed[0]["time"] if timed else 0.0
    return {line["step"]: line["time"] - start for line in timed}


def samples_at(run: RecordedRun) -> dict[int, float]:
    """Trained samples up to each step, by step."""
    found, samples = {}, 0.0
    for line in run.lines:
        samples += line.get("perf/samples_per_s", 0.0) * line.get("timing_s/step", 0.0)
        found[line["step"]] = samples
    return found


def series(run: RecordedRun, name: str, along: dict[int, float] | None = None) -> Series:
    """A metric over the steps, or over what ``along`` gives for each."""
    points = [
        (float(line["step"]) if along is None else along[line["step"]], float(line[name]))
        for line in run.lines
        if isinstance(line.get(name), int | float) and (along is None or line["step"] in along)
    ]
    return Series(tuple(x for x, _ in points), tuple(y for _, y in points))


def trailing_mean(values: Sequence[float], window: int = LAST_STEPS) -> tuple[float, ...]:
    """Mean of each value and of up to ``window - 1`` before it."""
    return tuple(statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values)))


def share(steps: Sequence[Record], *phases: str) -> float | None:
    """Share of the steps' time that went to all of ``phases`` together."""
    timed = [line for line in steps if any(f"timing_s/{phase}" in line for phase in phases)]
    seconds = sum(line["timing_s/step"] for line in timed)
    if not seconds:
        return None
    return float(sum(line.get(f"timing_s/{p}", 0.0) for line in timed for p in phases) / seconds)


def rate(steps: Sequence[Record], name: str) -> float | None:
    """A rate, or a share, over all of the steps' time."""
    timed = [line for line in steps if name in line]
    seconds = sum(line["timing_s/step"] for line in timed)
    return float(sum(line[name] * line["timing_s/step"] for line in timed) / seconds) if seconds else None


def lag_counts(run: RecordedRun) -> Counter[int]:
    """Trained groups by their lag, in policy versions."""
    return Counter(line["lag"] for line in run.retired if isinstance(line.get("lag"), int))


def summary_rows(run: RecordedRun) -> dict[str, str]:
    """Label and text of each row of the summary; a dash for what the run does not say."""
    steps = run.steps
    rewards = series(run, "reward/mean").y
    held_out = series(run, "eval/reward_mean").y
    lags = lag_counts(run)
    seconds = seconds_at(run)
    wanted = run.setting("run", "steps")
    done = max((line["step"] for line in run.lines), default=0)
    versions = max((line.get("policy_version", 0) for line in run.lines), default=0)
    bias = series(run, "bias/length_trained_over_dispatched").y
    end = "" if wanted is None else f" of {wanted}"
    if isinstance(wanted, int) and versions < wanted:
        end += ", not at its end"
    rows = {
        "steps": f"{done}{end}",
        "wall time": _duration(max(seconds.values())) if seconds else "–",
        "trained tokens/s": _number(rate(steps, "perf/tokens_per_s"), ",.0f"),
        "samples/s": _number(rate(steps, "perf/samples_per_s"), ",.1f"),
        f"reward, last {LAST_STEPS} steps": _number(
            statistics.fmean(rewards[-LAST_STEPS:]) if rewards else None, ".3f"
        ),
        "held-out reward": f"{held_out[0]:.3f} → {held_out[-1]:.3f}" if held_out else "–",
        "lag, mean and largest": f"{_mean(lags):.2f}, {max(lags)}" if lags else "–",
        "learner waited for rollouts": _number(share(steps, "wait_for_batch"), ".0%"),
        "generators waited for the policy": _number(share(steps, "wait_for_policy"), ".0%"),
        "learner busy": _number(rate(steps, "perf/learner_busy"), ".0%"),
        "generators busy": _number(rate(steps, "perf/generator_busy"), ".0%"),
        "slots taken": _number(rate(steps, "generator/occupancy"), ".0%"),
        "length, trained over sampled": _number(bias[-1] if bias else None, ".3f"),
    }
    if run.unreadable:
        rows["lines that were cut off"] = str(run.unreadable)
    return rows


def _mean(counts: Counter[int]) -> float:
    return sum(value * count for value, count in counts.items()) / counts.total()


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
