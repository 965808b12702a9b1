"""Rewards of one or more runs over their steps, and their evaluations, as a PNG.

    python scripts/plot_rewards.py runs/quickstart [runs/sync ...] [--output rewards.png] [--smooth 5]

A thin line is the mean reward of each step's batch, the thick one its mean over the last ``--smooth``
steps; points are evaluations on held-out prompts. Needs matplotlib (``asyncrl[dev]``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SIZE = (8.0, 4.5)
"""Inches, at 150 dots each."""


@dataclass(frozen=True, slots=True)
class Curve:
    """What one run's ``metrics.jsonl`` says of rewards, in the order of its steps."""

    name: str
    steps: tuple[int, ...]
    rewards: tuple[float, ...]
    eval_steps: tuple[int, ...]
    eval_rewards: tuple[float, ...]


def read_curve(folder: Path) -> Curve:
    """The curve of a run folder. Raises ValueError, saying which file, if there is nothing to draw."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(f"found no {file}; expected the folder of a run, <run.dir>/<run.name>")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    trained = [(line["step"], line["reward/mean"]) for line in lines if "reward/mean" in line]
    evaluated = [(line["step"], line["eval/reward_mean"]) for line in lines if "eval/reward_mean" in line]
    if not trained and not evaluated:
        raise ValueError(f"found {len(lines)} lines in {file}, none with a reward; expected at least 1")
    steps, rewards = zip(*trained, strict=True) if trained else ((), ())
    eval_steps, eval_rewards = zip(*evaluated, strict=True) if evaluated else ((), ())
    return Curve(folder.resolve().name, steps, rewards, eval_steps, eval_rewards)


def trailing_means(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to ``window - 1`` before it."""
    return [statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def draw(curves: Sequence[Curve], output: Path, *, smooth: int = 5, title: str | None = None) -> None:
    """Write the picture; its format is that of the file's suffix."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=SIZE, dpi=150, layout="constrained")
    axes = figure.subplots()
    for i, curve in enumerate(curves):
        color = f"C{i}"
        if curve.steps:
            axes.plot(curve.steps, curve.rewards, color=color, linewidth=0.8, alpha=0.35)
            label = (
                f"{curve.name}: training, mean of {smooth} steps" if smooth > 1 else f"{curve.name}: training"
            )
            means = trailing_means(curve.rewards, smooth)
            axes.plot(curve.steps, means, color=color, linewidth=2.0, label=label)
        if curve.eval_steps:
            style = {"marker": "o", "markersize": 7, "markeredgecolor": "white", "linestyle": "--"}
            label = f"{curve.name}: held-out prompts"
            axes.plot(curve.eval_steps, curve.eval_rewards, color=color, linewidth=1.0, label=label, **style)
    _annotate_ends(axes, curves)
    axes.set_xlabel("step (policy updates)")
    axes.set_ylabel("mean reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.04, y=0.08)
    if all(reward >= 0 for curve in curves for reward in (*curve.rewards, *curve.eval_rewards)):
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(title)
    axes.legend(frameon=False)
    figure.savefig(output)


def _annotate_ends(axes: object, curves: Sequence[Curve]) -> None:
    """The first and the last evaluation of each run in figures: they are what is quoted."""
    for i, curve in enumerate(curves):
        points = list(zip(curve.eval_steps, curve.eval_rewards, strict=True))
        for step, reward in dict.fromkeys(points[:1] + points[-1:]):
            axes.annotate(  # type: ignore[attr-defined]  # matplotlib is imported where it is needed
                f"{reward:.2f}",
                (step, reward),
                xytext=(0, 9),
                textcoords="offset points",
                ha="center",
                color=f"C{i}",
            )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--output", type=Path, default=Path("rewards.png"), help="default rewards.png")
    parser.add_argument("--smooth", type=int, default=5, help="steps in a mean (default 5; 1: no mean)")
    parser.add_argument("--title")
    options = parser.parse_args(arguments)
    if options.smooth < 1:
        parser.error(f"--smooth: found {options.smooth}; expected at least 1")
    try:
        curves = [read_curve(folder) for folder in options.runs]
    except ValueError as error:
        parser.error(str(error))
    draw(curves, options.output, smooth=options.smooth, title=options.title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
