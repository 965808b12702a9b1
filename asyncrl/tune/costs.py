"""What a run cost, from what it left in its folder: enough to simulate it, and others like it.

Invariants:
- All is measured in the run itself; nothing is known beforehand about models or machines.
- The first steps are left out, in which things are compiled and caches filled.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asyncrl.errors import UsageError
from asyncrl.recorded import Record, RecordedRun
from asyncrl.simulate.lengths import recorded_groups
from asyncrl.simulate.parts import token_seconds
from asyncrl.timeline import TraceEvent
from asyncrl.trace_reading import read_trace
from asyncrl.tune.rates import Stay, fit_token_seconds, slowdown

LEAST_STEPS = 6
_ELSEWHERE = ("wait_for_batch", "train", "weight_sync_stall", "wait_for_push", "eval", "checkpoint")
"""Phases of the learner's loop, one after the other; the rest of a step is the controller's own."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of everything that a simulation has to know, and the lengths of the answers."""

    token_s: Mapping[int, float]
    """Of one more token, by the number of running sequences of a replica."""
    update_s: float
    """Of an update, whatever its batch."""
    update_token_s: float
    """More for each token of the batch's answers, or if ``padded`` for each that is computed; all ranks
    together."""
    ranks: int
    """Learner ranks that these are of."""
    overhead_s: float
    """Of a step, that is neither waiting nor update nor push."""
    send_s: float
    """Of a push, generation going on."""
    pause_s: float
    """Of a push, with generation at a standstill."""
    copy_s: float
    """Of a push with ``weight_sync.overlap``, with the learner at a standstill."""
    score_s: float
    """From an answer's last token until it is scored and may complete a batch."""
    reward_mean: float
    lengths: tuple[int, ...]
    """Of all answers, in the order of prompts and samples."""
    prompt_tokens: int = 1
    """Of a prompt, on average; 1 where updates are not told by what they compute."""
    padded: bool = False
    """Whether updates are told by what they compute, prompts and padding included."""
    update_beside: float = 1.0
    """How many times as long an update takes beside generators that sample; 1 where that is not known."""
    token_beside: float = 1.0
    """How many times as long a token takes beside an update."""

    @property
    def most_running(self) -> int:
        """The most sequences of one replica that a speed was measured for."""
        return max(self.token_s)

    def workload(self, ranks: int) -> dict[str, Any]:
        """The ``workload`` block of these costs with ``ranks`` learner ranks, but for the lengths.

        The whole of an update is shared out among the ranks: of what does not shrink with them nothing is
        known.
        """
        share = self.ranks / ranks
        return {
            "lengths": {"values": [1]},
            "generation": {"token_s": self._extended(), "prompt_tokens": self.prompt_tokens},
            "learner": {
                "step_s": self.update_s * share + self.overhead_s,
                "token_s": self.update_token_s * share,
                "padded": self.padded,
            },
            "push": {"send_s": self.send_s, "pause_s": self.pause_s, "copy_s": self.copy_s},
            "contention": {"update": self.update_beside, "token": self.token_beside},
            "reward": {"mean": self.reward_mean, "score_s": self.score_s},
        }

    def _extended(self) -> dict[int, float]:
        """Beyond the last point as from the one before it, for twice as many sequences."""
        points = sorted(self.token_s.items())
        if len(points) < 2:
            return dict(points)
        (before, low), (last, high) = points[-2:]
        slope = max(0.0, (high - low) / (last - before))
        return {**self.token_s, 2 * last: high + slope * last}


def measure_costs(run: RecordedRun) -> Costs:
    """The costs of a split run. UsageError where its folder does not tell them."""
    steps = run.steps
    if len(steps) < LEAST_STEPS:
        raise UsageError(
            f"found {len(steps)} steps in {run.folder}; expected at least {LEAST_STEPS} to measure costs by: "
            "take a longer run"
        )
    if run.setting("placement", "mode") == "colocated":
        raise UsageError(
            f"placement.mode: found colocated in {run.folder}; expected a split run, in which both sides' "
            "costs can be told apart"
        )
    steps = steps[warm_up_steps(steps) :]
    events = read_trace(run.trace).events
    padded = all("perf/computed_tokens" in line for line in steps if "perf/tokens_per_s" in line)
    update_s, update_token_s = _fit_updates(steps, padded=padded)
    prompts = _mean(line["prompt_length/mean"] for line in steps if "prompt_length/mean" in line)
    pushed = [line for line in steps if line.get("timing_s/weight_sync", 0.0) > 0]
    pause_s = _mean(line.get("timing_s/weight_pause", 0.0) for line in pushed)
    overlapped = bool(run.setting("weight_sync", "overlap"))
    rewards = [line["reward/mean"] for line in steps if "reward/mean" in line]
    return Costs(
        token_s=_token_seconds(run, steps, events),
        update_s=update_s,
        update_token_s=update_token_s,
        ranks=int(run.setting("learner", "ranks") or 1),
        overhead_s=max(0.0, _mean(_unaccounted(line) for line in steps)),
        send_s=max(0.0, _mean(line["timing_s/weight_sync"] for line in pushed) - pause_s),
        pause_s=pause_s,
        copy_s=_mean(line.get("timing_s/weight_sync_stall", 0.0) for line in pushed) if overlapped else 0.0,
        score_s=_mean(e.end - e.start for e in events if e.track.startswith("reward worker"))
        + _delay(events),
        reward_mean=min(1.0, max(0.0, _mean(rewards))),
        lengths=_lengths(run, events),
        prompt_tokens=max(1, round(prompts)) if padded else 1,
        padded=padded,
    )


def with_contention(costs: Costs, overlapped: RecordedRun) -> Costs:
    """``costs``, of a synchronous run, with what the sides cost each other in ``overlapped``.

    Both runs are of one config but for the schedule. UsageError where the folder does not tell it.
    """
    steps = overlapped.steps[warm_up_steps(overlapped.steps) :]
    timed = [line for line in steps if "perf/tokens_per_s" in line]
    took = sum(line["timing_s/train"] for line in timed)
    alone = sum(
        costs.update_s + costs.update_token_s * tokens for tokens in _update_tokens(timed, costs.padded)
    )
    if not alone:
        raise UsageError(f"found no update in {overlapped.folder}; expected some to measure contention by")
    tokens = _tokens_took(overlapped, timed, costs.token_s)
    return replace(
        costs,
        update_beside=_times(took / alone, _mean(line["perf/generator_busy"] for line in timed)),
        token_beside=_times(tokens, _mean(line["perf/learner_busy"] for line in timed)),
    )


def _times(slower: float, share: float) -> float:
    """What is ``slower`` on average, as often as the other side was at work for ``share`` of the time."""
    return 1.0 + max(0.0, slower - 1.0) / min(1.0, max(share, 0.5))


def warm_up_steps(steps: Sequence[Record]) -> int:
    """Steps at the start that are left out."""
    return min(3, len(steps) // 4)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.fmean(found) if found else 0.0


def _unaccounted(line: Record) -> float:
    return float(line["timing_s/step"] - sum(line.get(f"timing_s/{phase}", 0.0) for phase in _ELSEWHERE))


def _fit_updates(steps: Sequence[Record], *, padded: bool) -> tuple[float, float]:
    """Seconds of an update, and of each token of its answers, or that it computes; neither is negative."""
    timed = [line for line in steps if "perf/tokens_per_s" in line]
    tokens = np.array(_update_tokens(timed, padded))
    seconds = np.array([line["timing_s/train"] for line in timed])
    if not timed or tokens.sum() <= 0:
        raise UsageError("found no step that trained a token; expected updates to measure")
    spread = tokens.std()
    slope = (
        float(np.cov(tokens, seconds, bias=True)[0, 1] / spread**2) if spread > 0.01 * tokens.mean() else 0.0
    )
    slope = min(max(slope, 0.0), float(seconds.sum() / tokens.sum()))
    return float(seconds.mean() - slope * tokens.mean()), slope


def _update_tokens(steps: Sequence[Record], padded: bool) -> list[float]:
    """What each update is told by."""
    if padded:
        return [line["perf/computed_tokens"] for line in steps]
    return [line["perf/tokens_per_s"] * line["timing_s/step"] for line in steps]


def _token_seconds(
    run: RecordedRun, steps: Sequence[Record], events: Sequence[TraceEvent]
) -> dict[int, float]:
    if replicas := _stays(events):
        return fit_token_seconds(replicas, _standstills(events))
    return _one_speed(run, steps)


def _tokens_took(run: RecordedRun, steps: Sequence[Record], token_s: Mapping[int, float]) -> float:
    """How many times ``token_s`` the tokens of a run took."""
    events = read_trace(run.trace).events
    if replicas := _stays(events):
        return slowdown(replicas, _standstills(events), token_s)
    ((running, seconds),) = _one_speed(run, steps).items()
    return seconds / token_seconds(token_s, running)


def _stays(events: Sequence[TraceEvent]) -> list[list[Stay]]:
    """Of the answers on each replica."""
    found: dict[str, list[Stay]] = defaultdict(list)
    for event in events:
        if event.track.startswith("slot") and "tokens" in event.facts:
            found[event.process].append(Stay(event.start, event.end, int(event.facts["tokens"])))
    return list(found.values())


def _standstills(events: Sequence[TraceEvent]) -> list[tuple[float, float]]:
    """(start, end) of what pushes held generation up for."""
    pushes = [event for event in events if event.name == "weight_sync"]
    return [(event.end - event.facts.get("pause_s", 0.0), event.end) for event in pushes]


def _one_speed(run: RecordedRun, steps: Sequence[Record]) -> dict[int, float]:
    """Without a timeline: one speed, at the mean number of sequences of a busy replica."""
    replicas = int(run.setting("generators", "replicas") or 1)
    slots = int(run.setting("generators", "slots") or 1)
    busy_s = replicas * _total(steps, "perf/generator_busy")
    held_s = replicas * slots * _total(steps, "generator/occupancy")
    tokens = _total(steps, "generator/tokens_per_s")
    if not busy_s or not tokens:
        raise UsageError(
            f"found neither slots in {run.trace} nor generator/tokens_per_s in metrics.jsonl; expected one "
            "of them: take a run with log.trace_mb above 0"
        )
    return {max(1, round(held_s / busy_s)): held_s / tokens}


def _total(steps: Sequence[Record], rate: str) -> float:
    """What a rate comes to over all steps."""
    return float(sum(line.get(rate, 0.0) * line["timing_s/step"] for line in steps))


def _delay(events: Sequence[TraceEvent]) -> float:
    """Of batches that the learner waited for: from the end of what they waited for to the update."""
    ends = sorted(e.end for e in events if e.track.startswith(("slot", "reward worker")))
    waits = [e.end for e in events if e.name == "wait_for_batch" and e.end - e.start > 1e-3]
    if not ends or not waits:
        return 0.0
    places = np.searchsorted(ends, waits, side="right") - 1
    delays = [wait - ends[place] for wait, place in zip(waits, places, strict=True) if place >= 0]
    return statistics.median(delays) if delays else 0.0


def _lengths(run: RecordedRun, events: Sequence[TraceEvent]) -> tuple[int, ...]:
    """Of every answer to a prompt of the ledger: the timeline has those of evaluations too."""
    prompts = {retired.get("uid") for retired in run.retired}
    found: dict[tuple[int, int], int] = {}
    for event in events:
        facts = event.facts
        if {"ordinal", "sample", "tokens"} <= facts.keys() and facts.get("uid") in prompts:
            found[int(facts["ordinal"]), int(facts["sample"])] = max(1, int(facts["tokens"]))
    by_group: dict[int, list[int]] = defaultdict(list)
    for (ordinal, _), tokens in sorted(found.items()):
        by_group[ordinal].append(tokens)
    size = max(map(len, by_group.values()), default=0)
    whole = [lengths for lengths in by_group.values() if len(lengths) == size]
    groups: Sequence[Sequence[int]] = whole or recorded_groups(run.folder)
    return tuple(length for lengths in groups for length in lengths)
