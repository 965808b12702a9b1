"""What one run's lines of metrics say of its speed, over a window of steps.

Invariants:
- The warm-up is left out, and so is the end, where nothing new is started: the steps between are a steady
  state, in which as much is sampled as is trained.
- Nothing is measured here that ``metrics.jsonl`` does not hold, so that a simulated run is measured as a
  real one.
- All phases are seconds a step. In synchronous mode they follow each other, and add up to the step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import UsageError

Line = Mapping[str, Any]
"""A line of metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class Window:
    """The steps that count, in every run of a comparison alike."""

    warm_up: int
    """Steps left out before it."""
    steps: int
    """Steps in it."""
    cool_down: int
    """Steps left out after it: the last D + 1, in which admission has ended."""

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return self.warm_up + self.steps + self.cool_down

    def of(self, lines: Sequence[Line]) -> list[Line]:
        """Its lines. UsageError where the run has fewer."""
        end = self.warm_up + self.steps
        found = [line for line in lines if self.warm_up < line["step"] <= end and "timing_s/step" in line]
        if len(found) != self.steps:
            raise UsageError(
                f"found {len(found)} steps with a time between steps {self.warm_up + 1} and {end}; "
                f"expected {self.steps}: the run ended early"
            )
        return found


@dataclass(frozen=True, slots=True)
class Figures:
    """One run over its window."""

    steps: int
    wall_s: float
    tokens: float
    """Response tokens with loss_mask 1 of groups that were trained."""
    samples: float
    sampled: float
    """Response tokens that the engines sampled."""
    generate_s: float
    """A step: time with rollouts under way, from the first admission to the last score."""
    train_s: float
    weight_sync_s: float
    """A step: from the start of a push until the version was live."""
    stall_s: float
    """A step: the part of it that the learner stood still for."""
    wait_for_batch_s: float
    wait_for_policy_s: float
    generator_busy: float
    learner_busy: float
    occupancy: float
    """Share of all slots, over all of the time, that held a sequence."""
    full: float
    """Share of the time in which a replica had all slots taken."""
    full_tokens: float
    """Tokens of all replicas in that time."""
    lag_mean: float
    lag_max: float
    length_bias: float | None
    rewards: tuple[tuple[float, float], ...]
    """(seconds since the window's start, mean reward) of each step."""

    @property
    def step_s(self) -> float:
        return self.wall_s / self.steps

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.wall_s

    @property
    def other_s(self) -> float:
        """A step: what none of the phases accounts for; 0 where they overlap."""
        return max(0.0, self.step_s - self.generate_s - self.train_s - self.weight_sync_s)

    @property
    def sampled_per_step(self) -> float:
        return self.sampled / self.steps

    @property
    def full_rate(self) -> float | None:
        """Tokens/s of all replicas with all slots taken; None where that was less than 1 % of the time."""
        return self.full_tokens / (self.full * self.wall_s) if self.full >= 0.01 else None

    @property
    def busy_rate(self) -> float:
        """Tokens/s of all replicas while they sampled, however many slots were taken."""
        busy_s = self.generator_busy * self.wall_s
        return self.sampled / busy_s if busy_s > 0 else 0.0

    def reward_around(self, position: int, width: int = 5) -> float:
        """Mean reward of the ``width`` steps that end with the window's step ``position``, from 1."""
        steps = self.rewards[max(0, position - width) : position]
        return statistics.fmean(reward for _, reward in steps)

    def steps_within(self, seconds: float) -> int:
        """How many of its steps ended in the first ``seconds`` of the window; at least one."""
        return max(1, sum(moment <= seconds + 1e-9 for moment, _ in self.rewards))


def measure(lines: Sequence[Line], window: Window) -> Figures:
    """The figures of a run. UsageError where it does not reach the window's end."""
    steps = window.of(lines)
    versions = {line["step"]: line["policy_version"] for line in lines}
    seconds = [line["timing_s/step"] for line in steps]
    wall_s = sum(seconds)

    def moved(line: Line) -> bool:
        """A skipped update trains nothing."""
        return bool(line["policy_version"] > versions.get(line["step"] - 1, 0))

    def total(name: str, *, trained_only: bool = False) -> float:
        """Of a rate: what it comes to."""
        pairs = zip(steps, seconds, strict=True)
        return float(sum(line.get(name, 0.0) * s for line, s in pairs if moved(line) or not trained_only))

    def a_step(name: str) -> float:
        return float(sum(line[f"timing_s/{name}"] for line in steps) / len(steps))

    rewards, elapsed = [], 0.0
    for line, s in zip(steps, seconds, strict=True):
        elapsed += s
        if "reward/mean" in line:
            rewards.append((elapsed, float(line["reward/mean"])))
    lags = [line["staleness/mean"] for line in steps if "staleness/mean" in line]
    full_tokens = sum(
        line["generator/full"] * line["generator/full_tokens_per_s"] * s
        for line, s in zip(steps, seconds, strict=True)
        if "generator/full" in line
    )
    return Figures(
        steps=len(steps),
        wall_s=wall_s,
        tokens=total("perf/tokens_per_s", trained_only=True),
        samples=total("perf/samples_per_s", trained_only=True),
        sampled=total("generator/tokens_per_s"),
        generate_s=wall_s / len(steps) - a_step("wait_for_policy"),
        train_s=a_step("train"),
        weight_sync_s=a_step("weight_sync"),
        stall_s=a_step("weight_sync_stall") + a_step("wait_for_push"),
        wait_for_batch_s=a_step("wait_for_batch"),
        wait_for_policy_s=a_step("wait_for_policy"),
        generator_busy=total("perf/generator_busy") / wall_s,
        learner_busy=total("perf/learner_busy") / wall_s,
        occupancy=total("generator/occupancy") / wall_s,
        full=total("generator/full") / wall_s,
        full_tokens=full_tokens,
        lag_mean=statistics.fmean(lags) if lags else 0.0,
        lag_max=max((line.get("staleness/max", 0.0) for line in steps), default=0.0),
        length_bias=steps[-1].get("bias/length_trained_over_dispatched"),
        rewards=tuple(rewards),
    )
