"""The metrics of one step, under the names that people know from verl.

Invariants:
- Everything here is computed from scalars (metas, counts, timings); no tensor is touched.
- ``staleness/*`` uses ``types.group_lag`` and ``types.token_lag``, as admission and the learner do.
- A figure that does not exist for a step is left out, never made up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from asyncrl.generators.base import GeneratorStatistics
from asyncrl.timeline import NoTimeline, Timeline
from asyncrl.types import GroupMeta, Metrics, TrajectoryMeta, group_lag, token_lag
from asyncrl.waiting import now


@dataclass(slots=True)
class PhaseTimes:
    """Seconds that the running step has spent so far, by phase. One object for the whole run."""

    wait_for_batch: float = 0.0
    """The learner waited for rollouts."""
    wait_for_policy: float = 0.0
    """No rollout ran, because the budget admitted none."""
    train: float = 0.0
    weight_sync: float = 0.0
    """Pushes, from their start until the version was live; with overlap, of those that ended in this step."""
    weight_sync_stall: float = 0.0
    """The learner stood still for a push: all of it, or with overlap the time of copying out."""
    wait_for_push: float = 0.0
    """With overlap: the learner waited for the push before to end."""
    weight_pause: float = 0.0
    """Longest standstill of a generator for the swap."""
    eval: float = 0.0
    """A push, or colocated an update, waited for an evaluation to end."""
    checkpoint: float = 0.0
    """The learner stood still for the copy of a checkpoint, or for the files of the one before."""
    timeline: Timeline = field(default_factory=NoTimeline)
    """Hears of every piece of each phase."""

    def spent(self, phase: str, since: float, until: float | None = None, **facts: float) -> None:
        """The time from ``since`` to ``until`` (now), by the loop's clock, went to ``phase``."""
        end = now() if until is None else until
        setattr(self, phase, getattr(self, phase) + end - since)
        self.timeline.phase(phase, since, end, facts)

    def take(self, step_s: float) -> Metrics:
        """``timing_s/...`` of a step of ``step_s`` that ends now; the next one starts at zero."""
        taken = {"timing_s/step": step_s}
        for name in PHASES:
            taken[f"timing_s/{name}"] = getattr(self, name)
            setattr(self, name, 0.0)
        return taken

    def add_to(self, record: Metrics) -> None:
        """Add what was spent outside of any step to a line that stands beside it."""
        for name in PHASES:
            if seconds := getattr(self, name):
                record[f"timing_s/{name}"] = record.get(f"timing_s/{name}", 0.0) + seconds
                setattr(self, name, 0.0)


PHASES = tuple(phase.name for phase in fields(PhaseTimes) if phase.name != "timeline")
"""Names of the phases, as ``timing_s/<name>`` in the metrics."""


@dataclass(slots=True)
class LengthBias:
    """Mean length of trained answers over that of all finished ones, since the start."""

    trained_tokens: int = 0
    trained: int = 0
    finished_tokens: int = 0
    finished: int = 0

    def state(self) -> dict[str, int]:
        """The sums, as ``LengthBias(**state)`` takes them."""
        return {name: getattr(self, name) for name in self.__slots__}

    def add_finished(self, meta: GroupMeta) -> None:
        self.finished += len(meta.samples)
        self.finished_tokens += sum(t.sampled_tokens for t in meta.trajectories)

    def add_trained(self, metas: Sequence[GroupMeta]) -> None:
        self.trained += sum(len(meta.samples) for meta in metas)
        self.trained_tokens += sum(t.sampled_tokens for meta in metas for t in meta.trajectories)

    def metrics(self) -> Metrics:
        if not self.trained_tokens or not self.finished_tokens:
            return {}
        ratio = (self.trained_tokens / self.trained) / (self.finished_tokens / self.finished)
        return {"bias/length_trained_over_dispatched": ratio}


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of a non-empty sequence."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def batch_metrics(version: int, metas: Sequence[GroupMeta]) -> Metrics:
    """Rewards, lengths and lags of the groups that the step ``version`` -> ``version + 1`` trains."""
    trajectories: list[TrajectoryMeta] = [t for meta in metas for t in meta.samples]
    rewards = [t.reward for t in trajectories]
    lengths = [t.sampled_tokens for t in trajectories]
    lags = [lag for meta in metas if (lag := group_lag(version, meta)) is not None]
    metrics: Metrics = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        "prompt_length/mean": statistics.fmean(t.prompt_tokens for t in trajectories),
        "prompt_length/max": float(max(t.prompt_tokens for t in trajectories)),
        "response_length/mean": statistics.fmean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/clip_ratio": statistics.fmean(t.finish_reason == "length" for t in trajectories),
        "response_length/rows_mean": sum(len(meta.trajectories) for meta in metas) / len(trajectories),
        "reward/zero_variance_groups": statistics.fmean(len(set(meta.rewards)) == 1 for meta in metas),
    }
    names = {name for t in trajectories for name in t.rewards}
    if len(names) > 1:
        for name in sorted(names):
            values = [t.rewards[name] for t in trajectories if name in t.rewards]
            metrics[f"reward/{name}_mean"] = statistics.fmean(values)
    if lags:
        metrics["staleness/mean"] = statistics.fmean(lags)
        metrics["staleness/p95"] = float(percentile(lags, 0.95))
        metrics["staleness/max"] = float(max(lags))
        metrics["staleness/token_mean"] = token_lag_mean(version, trajectories)
    return metrics


def token_lag_mean(version: int, trajectories: Sequence[TrajectoryMeta]) -> float:
    """Mean lag over all trained tokens, of which there is at least one."""
    trained = [pair for t in trajectories for pair in t.trained]
    tokens = sum(count for _, count in trained)
    return sum(count * token_lag(version, sampled) for sampled, count in trained) / tokens


def throughput_metrics(metas: Sequence[GroupMeta], step_s: float, train_s: float) -> Metrics:
    """Trained tokens (loss_mask 1) and samples a second of wall time."""
    if step_s <= 0:
        return {}
    return {
        "perf/tokens_per_s": sum(meta.loss_tokens for meta in metas) / step_s,
        "perf/samples_per_s": sum(len(meta.samples) for meta in metas) / step_s,
        "perf/learner_busy": train_s / step_s,
    }


@dataclass(slots=True)
class GeneratorUse:
    """Turns the generators' counters into shares of the last step."""

    slots: int
    _before: Mapping[str, GeneratorStatistics] = field(default_factory=dict)

    def begin(self, before: Mapping[str, GeneratorStatistics]) -> None:
        """The first step starts here."""
        self._before = before

    def metrics(self, after: Mapping[str, GeneratorStatistics], step_s: float) -> Metrics:
        """``after`` by a name that a restarted replica does not share with the one before it."""
        before, self._before = self._before, after
        if before.keys() != after.keys() or not after or step_s <= 0:
            return {}  # a replica came or went: no difference to take
        pairs = [(statistics, before[name]) for name, statistics in after.items()]
        busy = sum(n.busy_s - b.busy_s for n, b in pairs) / len(after)
        slot = sum(n.slot_s - b.slot_s for n, b in pairs) / len(after)
        sampled = sum(n.tokens - b.tokens for n, b in pairs)
        metrics = {
            "perf/generator_busy": busy / step_s,
            "generator/occupancy": slot / (self.slots * step_s),
            "generator/tokens_per_s": sampled / step_s,
        }
        full_s = sum(n.full_s - b.full_s for n, b in pairs) / len(after)
        if full_s > 0:
            full_tokens = sum(n.full_tokens - b.full_tokens for n, b in pairs)
            metrics["generator/full"] = full_s / step_s
            metrics["generator/full_tokens_per_s"] = full_tokens / full_s
        return metrics


class StepMeter:
    """Measures the steps of a run, one after the other."""

    def __init__(self, slots: int, timeline: Timeline | None = None) -> None:
        self.times = PhaseTimes(timeline=timeline or NoTimeline())
        self.bias = LengthBias()
        self._use = GeneratorUse(slots)
        self._since = 0.0

    def begin(self, moment: float, statistics: Mapping[str, GeneratorStatistics]) -> None:
        """The first step starts at ``moment`` (seconds), with these counts of the generators."""
        self._since = moment
        self._use.begin(statistics)

    def end_step(
        self, moment: float, statistics: Mapping[str, GeneratorStatistics], metas: Sequence[GroupMeta]
    ) -> Metrics:
        """Where the time of a step went that trained ``metas`` and ends at ``moment``; the next begins."""
        step_s = moment - self._since
        self._since = moment
        return {
            **throughput_metrics(metas, step_s, self.times.train),
            **self.times.take(step_s),
            **self._use.metrics(statistics, step_s),
            **self.bias.metrics(),
        }
