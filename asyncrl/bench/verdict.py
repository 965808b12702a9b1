"""What limits a comparison's asynchronous runs, and which knob to turn: one sentence.

The causes are looked at in this order, and the first that holds is named: cores that both sides want, a
learner that is never idle (or is, for a push), engines whose slots are always full, and else the tail: slots
that are empty because too little is admitted. Thresholds are shares of the time, and stand in the sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.bench.comparison import Comparison
from asyncrl.bench.figures import Figures
from asyncrl.config import Config

Limit = Literal["contention", "push", "update", "generation", "tail"]

_BUSY = 0.9
"""A side that works for this share of the time limits the run."""
_SLOWED = 1.15
"""Phases that take so many times as long beside each other as alone compete for something."""
_COUNTS = 0.5
"""A side that works for less of the time has time to spare: what slows it down limits nothing."""
_GAIN = 1.03
"""Less than this is within what two runs of one mode differ by."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``limit`` in one word, and ``sentence`` for a person."""

    limit: Limit
    sentence: str


def judge(comparison: Comparison, config: Config) -> Verdict | None:
    """What limits the asynchronous mode; None where it was not run."""
    mode = comparison.modes.get("async")
    if mode is None:
        return None
    step_s = mode.median(lambda run: run.step_s)
    train = mode.median(lambda run: run.train_s)
    stall = mode.median(lambda run: run.stall_s)
    waits = mode.median(lambda run: run.wait_for_batch_s) / step_s
    occupancy = mode.median(lambda run: run.occupancy)
    schedule = config.schedule
    learner = (train + stall) / step_s
    at_work = {"updates": learner, "generation": occupancy}
    slowed = {n: times for n, times in _slowdowns(comparison).items() if at_work[n] >= _COUNTS}
    if slowed and max(slowed.values()) >= _SLOWED and not _is_at_ideal(comparison):
        what = " and ".join(f"{name} {factor:.2f}" for name, factor in slowed.items())
        verdict = Verdict(
            "contention",
            f"contention: beside each other, the sides compete for cores or memory ({what} times as long as "
            "alone): give them cores of their own (generators.cpu_cores, learner.cpu_cores) or fewer threads",
        )
    elif learner >= _BUSY and stall > 0.25 * train:
        overlap = "weight_sync.overlap=true" if not config.weight_sync.overlap else "a larger publish_every"
        verdict = Verdict(
            "push",
            f"push-bound: the learner is never idle, but stands still for pushes {stall / step_s:.0%} of the "
            f"time: set {overlap}",
        )
    elif learner >= _BUSY:
        verdict = Verdict(
            "update",
            f"update-bound: the learner works {learner:.0%} of the time, more overlap cannot help: give it "
            "more ranks or a larger learner.micro_batch_tokens, or take generators away",
        )
    elif occupancy >= _BUSY:
        verdict = Verdict(
            "generation",
            f"generation-bound: {occupancy:.0%} of all slots are always taken while the learner waits "
            f"{waits:.0%} of the time: add generators.replicas (or generators.slots, where the engine gets "
            "faster with more)",
        )
    else:
        verdict = Verdict(
            "tail",
            f"tail-bound: the learner waits {waits:.0%} of the time for the longest answers while only "
            f"{occupancy:.0%} of all slots are taken: raise schedule.pipeline_depth (now "
            f"{schedule.pipeline_depth}) and with it schedule.max_staleness (now {schedule.max_staleness})",
        )
    speedup = comparison.speedup
    if speedup is not None and speedup < _GAIN:
        return Verdict(
            verdict.limit,
            f"async wins nothing here ({speedup:.2f}x). {_capitalised(verdict.sentence)}",
        )
    return Verdict(verdict.limit, _capitalised(verdict.sentence))


def _slowdowns(comparison: Comparison) -> dict[str, float]:
    """How many times as long each side takes beside the other as alone."""
    sync, overlapped = comparison.modes.get("sync"), comparison.modes["async"]
    if sync is None:
        return {}
    found = {}
    alone = sync.median(_seconds_a_token)
    if alone > 0:
        found["updates"] = overlapped.median(_seconds_a_token) / alone
    if sync.full_rate and overlapped.full_rate:
        found["generation"] = sync.full_rate / overlapped.full_rate
    return found


def _seconds_a_token(run: Figures) -> float:
    return run.train_s * run.steps / run.tokens if run.tokens else 0.0


def _is_at_ideal(comparison: Comparison) -> bool:
    efficiency = comparison.overlap_efficiency
    return efficiency is not None and efficiency >= _BUSY


def _capitalised(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:] + "."
