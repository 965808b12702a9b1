"""Runs of one config in several modes, put side by side: speed-up, ideal, and what share was reached.

Invariants:
- The object that ``as_json`` gives is consistent in itself: ``speedup`` is the quotient of two figures in it.
- The ideal is computed from the synchronous runs' own phases. An efficiency above 1 is a measurement
  error, and said to be one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.bench.figures import Figures
from asyncrl.bench.modes import NAMES


@dataclass(frozen=True, slots=True)
class Mode:
    """All runs of one mode, in the order in which they ran; figures are medians over them."""

    name: str
    runs: tuple[Figures, ...]

    def median(self, figure: Callable[[Figures], float]) -> float:
        return statistics.median(figure(run) for run in self.runs)

    def spread(self, figure: Callable[[Figures], float]) -> tuple[float, float]:
        """The smallest and the largest."""
        values = [figure(run) for run in self.runs]
        return min(values), max(values)

    @property
    def full_rate(self) -> float | None:
        """Tokens/s of all replicas with all slots taken, over all runs in which they were."""
        rates = [rate for run in self.runs if (rate := run.full_rate) is not None]
        return statistics.median(rates) if rates else None


def ideal_speedup(generate: float, train: float, push: float, generate_saturated: float) -> float:
    """(G + T + W) / max(G_sat, T + W), all in seconds a step: nothing waits, and all slots are full."""
    bound = max(generate_saturated, train + push)
    return (generate + train + push) / bound if bound > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The modes that were run."""

    modes: Mapping[str, Mode]

    @classmethod
    def of(cls, runs: Mapping[str, Sequence[Figures]]) -> Comparison:
        """By mode, the figures of its runs."""
        return cls({name: Mode(name, tuple(figures)) for name, figures in runs.items()})

    @property
    def rate_is_saturated(self) -> bool:
        """Whether an engine was ever seen with all slots taken for long enough to have a rate."""
        return any(mode.full_rate is not None for mode in self.modes.values())

    @property
    def saturated_rate(self) -> float:
        """Tokens/s of all replicas with all slots full: of synchronous runs, where nothing competes with the
        engine, else of others. Where slots were never all full, the best mean rate that was seen."""
        ordered = sorted(self.modes.values(), key=lambda mode: mode.name != "sync")
        rates = (mode.full_rate for mode in ordered)
        found = next((rate for rate in rates if rate is not None), None)
        return found or max(mode.median(lambda run: run.busy_rate) for mode in self.modes.values())

    def saturated_s(self, mode: Mode) -> float:
        """G_sat: seconds a step that ``mode``'s tokens take with all slots full."""
        rate = self.saturated_rate
        return mode.median(lambda run: run.sampled_per_step) / rate if rate > 0 else 0.0

    def _quotient(self, name: str, over: str) -> float | None:
        if not {name, over} <= self.modes.keys() or not self._rate(over):
            return None
        return self._rate(name) / self._rate(over)

    def _rate(self, name: str) -> float:
        return self.modes[name].median(lambda run: run.tokens_per_s)

    @property
    def speedup(self) -> float | None:
        """async over sync, in trained tokens/s; None where one was not run, or sync trained nothing."""
        return self._quotient("async", "sync")

    @property
    def speedup_vs_colocated(self) -> float | None:
        return self._quotient("async", "colocated")

    @property
    def paired_speedups(self) -> list[float]:
        """async over sync, run by run: what the machine does to both cancels out."""
        if not {"async", "sync"} <= self.modes.keys():
            return []
        pairs = zip(self.modes["async"].runs, self.modes["sync"].runs, strict=True)
        return [overlapped.tokens_per_s / sync.tokens_per_s for overlapped, sync in pairs if sync.tokens]

    @property
    def ideal_speedup(self) -> float | None:
        """By the synchronous runs' phases; None without them."""
        sync = self.modes.get("sync")
        if sync is None:
            return None
        return ideal_speedup(
            sync.median(lambda run: run.generate_s),
            sync.median(lambda run: run.train_s),
            sync.median(lambda run: run.weight_sync_s),
            self.saturated_s(sync),
        )

    @property
    def overlap_efficiency(self) -> float | None:
        """Share of the ideal that was reached."""
        speedup, ideal = self.speedup, self.ideal_speedup
        return None if speedup is None or ideal is None else speedup / ideal

    def as_json(self, config: Mapping[str, Any], machine: Mapping[str, Any]) -> dict[str, Any]:
        """The object of ``--json``; null for what was not run."""
        ran = {name: self._mode_json(mode) for name, mode in self.modes.items()}
        return {
            "config": dict(config),
            "machine": dict(machine),
            "modes": {name: ran.get(name) for name in NAMES},
            "speedup": self.speedup,
            "speedup_vs_colocated": self.speedup_vs_colocated,
            "ideal_speedup": self.ideal_speedup,
            "overlap_efficiency": self.overlap_efficiency,
        }

    def _mode_json(self, mode: Mode) -> dict[str, Any]:
        return {
            "steps": mode.runs[0].steps,
            "wall_s": mode.median(lambda run: run.wall_s),
            "tokens_per_s": mode.median(lambda run: run.tokens_per_s),
            "samples_per_s": mode.median(lambda run: run.samples_per_s),
            "phase_s": {
                "generate": mode.median(lambda run: run.generate_s),
                "generate_saturated": self.saturated_s(mode),
                "train": mode.median(lambda run: run.train_s),
                "weight_sync": mode.median(lambda run: run.weight_sync_s),
                "other": mode.median(lambda run: run.other_s),
            },
            "generator_busy": mode.median(lambda run: run.generator_busy),
            "learner_busy": mode.median(lambda run: run.learner_busy),
            "staleness": {
                "mean": mode.median(lambda run: run.lag_mean),
                "max": max(run.lag_max for run in mode.runs),
            },
            "reward_last": mode.median(lambda run: run.reward_around(run.steps)),
        }
