"""What a person sees while a run goes on: a live table on a terminal, lines anywhere else."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from asyncrl.config import Config

log = logging.getLogger(__name__)

_SMOOTHING = 0.7


class Display(Protocol):
    """Shows phases and steps."""

    def phase(self, name: str) -> None: ...

    def step(self, record: Mapping[str, Any]) -> None: ...

    def evaluation(self, result: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def make_display(config: Config, console: Console) -> Display:
    """The display that ``log.display`` asks for; auto: live on a terminal, lines elsewhere."""
    kind = config.log.display
    if kind == "auto":
        kind = "rich" if console.is_terminal else "lines"
    if kind == "rich":
        return LiveDisplay(config, console)
    return LineDisplay(config) if kind == "lines" else NoDisplay()


def waiting(record: Mapping[str, Any]) -> str:
    """Who waited for whom during a step, in words."""
    step_s = record.get("timing_s/step") or 0.0
    if step_s <= 0:
        return ""
    batch = record["timing_s/wait_for_batch"] / step_s
    policy = record["timing_s/wait_for_policy"] / step_s
    return f"learner waited {batch:.0%}, generators waited {policy:.0%}"


def lag(record: Mapping[str, Any], bound: int) -> str:
    """Lag of the trained groups, with the bound that it never exceeds."""
    if "staleness/mean" not in record:
        return ""
    return f"mean {record['staleness/mean']:.2f}, max {record['staleness/max']:.0f} of {bound}"


class NoDisplay:
    """Shows nothing; the files hold everything."""

    def phase(self, name: str) -> None:
        """Nothing to show."""

    def step(self, record: Mapping[str, Any]) -> None:
        """Nothing to show."""

    def evaluation(self, result: Mapping[str, Any]) -> None:
        """Nothing to show."""

    def close(self) -> None:
        """Nothing to close."""


class LineDisplay:
    """One log line a phase and a step."""

    def __init__(self, config: Config) -> None:
        self._steps = config.run.steps
        self._bound = config.schedule.max_staleness

    def phase(self, name: str) -> None:
        log.info("%s", name)

    def step(self, record: Mapping[str, Any]) -> None:
        parts = [f"step {record['step']:.0f}/{self._steps}"]
        if "reward/mean" in record:
            parts += [
                f"reward {record['reward/mean']:.3f}",
                f"{record.get('perf/tokens_per_s', 0):,.0f} tok/s",
                f"lag {lag(record, self._bound)}",
                waiting(record),
            ]
        log.info(" | ".join(part for part in parts if part))

    def evaluation(self, result: Mapping[str, Any]) -> None:
        version, prompts = result["eval/policy_version"], result["eval/prompts"]
        log.info("eval reward %.3f at version %d, %d prompts", result["eval/reward_mean"], version, prompts)

    def close(self) -> None:
        """Lines need no end."""


class LiveDisplay:
    """A progress bar over a small table, redrawn in place."""

    def __init__(self, config: Config, console: Console) -> None:
        self._bound = config.schedule.max_staleness
        self._phase = ""
        self._record: dict[str, Any] = {}
        self._reward: float | None = None
        self._evaluations: list[float] = []
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task(config.run.name, total=config.run.steps)
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=False)
        self._live.start()

    def phase(self, name: str) -> None:
        self._phase = name

    def step(self, record: Mapping[str, Any]) -> None:
        self._record.update(record)
        if "reward/mean" in record:
            new = record["reward/mean"]
            old = self._reward
            self._reward = new if old is None else _SMOOTHING * old + (1 - _SMOOTHING) * new
        self._progress.update(self._task, completed=record["policy_version"])

    def evaluation(self, result: Mapping[str, Any]) -> None:
        self._evaluations.append(result["eval/reward_mean"])

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        record = self._record
        if self._phase:
            table.add_row("phase", self._phase)
        if self._reward is not None:
            table.add_row("reward", f"{self._reward:.3f} (smoothed over steps)")
        if self._evaluations:
            path = " → ".join(f"{value:.3f}" for value in _ends(self._evaluations))
            table.add_row("eval reward", path)
        if "perf/tokens_per_s" in record:
            tokens, samples = record["perf/tokens_per_s"], record["perf/samples_per_s"]
            table.add_row("throughput", f"{tokens:,.0f} trained tokens/s, {samples:,.1f} samples/s")
            table.add_row("lag", lag(record, self._bound))
            table.add_row("waiting", waiting(record))
            table.add_row(
                "groups",
                f"{record['ledger/trained']:.0f} trained, {record['ledger/filtered']:.0f} filtered, "
                f"{record['ledger/dropped']:.0f} dropped, {record['ledger/failed']:.0f} failed; "
                f"{record['queue/outstanding']:.0f} outstanding, {record['queue/ready']:.0f} ready",
            )
        return Group(self._progress, table)


def _ends(values: list[float]) -> list[float]:
    """The first value and the last few."""
    return values if len(values) <= 4 else [values[0], *values[-3:]]
