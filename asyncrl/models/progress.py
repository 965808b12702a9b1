"""How the warm start shows: a progress bar on a terminal, log lines anywhere else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)

LINES = 5
"""About so many lines for a whole warm start."""


@dataclass(frozen=True, slots=True)
class WarmStartProgress:
    """Where the warm start stands, measured on a sample of its prompts."""

    step: int
    steps: int
    loss: float
    """Nats a target token."""
    accuracy: float
    """Share of whole targets that sampling at temperature 1 is expected to hit."""


ProgressCallback = Callable[[WarmStartProgress], None]


@contextmanager
def show_progress(console: Console | None = None) -> Iterator[ProgressCallback]:
    """A callback for ``ensure_model`` that shows what it is told for as long as the block lasts."""
    console = console or Console()
    if console.is_terminal:
        with _bar(console) as callback:
            yield callback
    else:
        yield _log_lines()


@contextmanager
def _bar(console: Console) -> Iterator[ProgressCallback]:
    columns = (
        TextColumn("warm start"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} updates"),
        TextColumn("loss {task.fields[loss]:.3f}  right {task.fields[accuracy]:.0%}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("warm start", total=None, visible=False, loss=0.0, accuracy=0.0)

        def show(report: WarmStartProgress) -> None:
            progress.update(
                bar,
                completed=report.step,
                total=report.steps,
                loss=report.loss,
                accuracy=report.accuracy,
                visible=True,
            )

        yield show


def _log_lines() -> ProgressCallback:
    due = 0

    def show(report: WarmStartProgress) -> None:
        nonlocal due
        if report.step < due and report.step < report.steps:
            return
        due = report.step + max(1, report.steps // LINES)
        logger.info(
            "warm start: update %d of %d, loss %.3f, %.0f %% right",
            report.step,
            report.steps,
            report.loss,
            100 * report.accuracy,
        )

    return show
