"""Published step times, predicted: the simulator, calibrated on a vendor's synchronous rows alone.

    python benchmarks/published.py                  all of it, about four minutes on two cores
    python benchmarks/published.py --report         the page of docs/published.json as it is

Writes docs/published.json and docs/published.md. Every cost comes from the colocated rows, by least squares,
or is an assumption that the page states; asynchronous rows are looked at for the errors alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from published_page import page

from asyncrl.simulate.lengths import make_lengths
from asyncrl.simulate.run import simulate
from asyncrl.simulate.workload import LengthsSection, SimulationConfig, parse_simulation
from asyncrl.types import DrawKey

DOCS = Path(__file__).parent.parent / "docs"
log = logging.getLogger("published")

PROMPTS, SAMPLES, LONGEST = 512, 16, 28 * 1024
"""A step of the published runs, and the longest answer in tokens."""
UPDATES = 4
"""Batches that an asynchronous step is trained in; weights are sent after the last."""
UNIT = 4
"""Devices of one engine: a unit."""
RUNNING = 16 * SAMPLES
"""Answers that an engine of the asynchronous runs works at: those of 16 prompts."""
PUSH_S = 7.6e9 * 2 / 8.25e9
"""Bytes of the weights, over the rate that the same vendor gives for a push over NCCL."""
UNBOUND = 100
"""A max_staleness that is never reached: the published runs have no bound on the age of one answer."""
WARM_UP, STEPS = 2, 4
"""Published steps that are simulated: first those that do not count."""


@dataclass(frozen=True)
class Lengths:
    """Log-normal, cut at LONGEST."""

    mean: float = 1000.0
    """Before the cut."""
    sigma: float = 1.2
    prompt_share: float = 0.5

    @property
    def section(self) -> dict[str, Any]:
        median = self.mean * math.exp(-(self.sigma**2) / 2)
        return {"log_normal": {"median": median, "sigma": self.sigma, "prompt_share": self.prompt_share}}


ASSUMED = Lengths()
OTHERS = (
    *(Lengths(sigma=sigma) for sigma in (0.8, 1.6)),
    *(Lengths(mean=mean) for mean in (700.0, 1400.0)),
)


@dataclass(frozen=True)
class Row:
    """Seconds a step, as published."""

    devices: int
    step: float
    generate: float
    """Asynchronous: what the learner waits for it."""
    update: float
    hours: tuple[float, float]
    """Of the first 200 steps and of all 400, evaluations included."""
    old_logprobs: float = 0.0
    staleness: float = 0.0

    @property
    def first_half(self) -> Row:
        """Of the first 200 steps: all phases in proportion to the time that these took."""
        share = 2 * self.hours[0] / self.hours[1]
        names = ("step", "generate", "update", "old_logprobs")
        return replace(self, **{name: getattr(self, name) * share for name in names})


def hours(days: int, hours: int, minutes: int) -> float:
    return 24 * days + hours + minutes / 60


COLOCATED = (
    Row(32, 790.10, 357.41, 313.81, (hours(1, 3, 43), hours(3, 17, 5)), 107.71),
    Row(64, 365.28, 150.72, 133.41, (hours(0, 20, 45), hours(1, 17, 32)), 70.26),
    Row(128, 356.30, 177.85, 113.81, (hours(0, 17, 56), hours(1, 16, 48)), 53.92),
)
ASYNCHRONOUS = (
    Row(32, 294.77, 21.26, 269.80, (hours(0, 16, 21), hours(1, 9, 26)), staleness=0.5),
    Row(64, 189.26, 28.46, 156.98, (hours(0, 10, 14), hours(0, 21, 40)), staleness=0.5),
    Row(128, 231.34, 128.47, 98.77, (hours(0, 9, 41), hours(1, 1, 53)), staleness=0.0),
    Row(128, 171.30, 58.17, 109.12, (hours(0, 8, 37), hours(0, 19, 59)), staleness=0.1),
    Row(128, 146.11, 38.88, 103.22, (hours(0, 6, 49), hours(0, 17, 20)), staleness=0.3),
    Row(128, 150.63, 33.14, 113.16, (hours(0, 6, 46), hours(0, 17, 22)), staleness=0.5),
)


@dataclass(frozen=True)
class Costs:
    """What a calibration gives; all times in seconds."""

    token_s: float
    """One more token of every running answer of an engine, however many run ..."""
    sequence_s: float
    """... and more for each of them."""
    update_s: float
    """Update of a whole step, however many units ..."""
    update_token_s: float
    """... and more for each token, of one unit."""
    old_s: float
    old_token_s: float
    """The pass for old log-probs, likewise."""
    turn_s: float
    """What is left of a colocated step."""
    recompute_s: float
    """Reading all begun answers of a full engine anew: each token at ``sequence_s``."""


@dataclass(frozen=True)
class Schedule:
    """asyncrl's knobs for a published row."""

    groups: int
    depth: int
    bound: int
    every: int
    in_flight: bool


WHOLE = Schedule(PROMPTS, 0, 0, 1, in_flight=False)
"""Every answer is of the weights that it is trained on, and nothing overlaps."""


def in_parts(staleness: float) -> Schedule:
    """Batches of a quarter step, with as many groups outstanding as the published rule allows on average.

    That is (1 + staleness) * PROMPTS after a push, and a batch less after each update until the next.
    """
    depth = round((1 + staleness) * UPDATES - (UPDATES - 1) / 2) - 1
    return Schedule(PROMPTS // UPDATES, depth, UNBOUND, UPDATES, in_flight=staleness > 0)


def schedules(row: Row) -> tuple[Schedule, ...]:
    """What stands for a row. Staleness 0 streams and never overlaps pushes: there it is one of each."""
    return (WHOLE, in_parts(0.0)) if row.staleness == 0 else (in_parts(row.staleness),)


@cache
def draw(lengths: Lengths) -> npt.NDArray[np.int64]:
    """The lengths that the simulation will see, (published steps, answers of one)."""
    length_of = make_lengths(LengthsSection.model_validate(lengths.section), SAMPLES)
    keys = (
        DrawKey(0, ordinal, sample)
        for ordinal in range((WARM_UP + STEPS) * PROMPTS)
        for sample in range(SAMPLES)
    )
    drawn = np.fromiter((length_of(key) for key in keys), np.int64)
    return np.minimum(drawn, LONGEST).reshape(WARM_UP + STEPS, -1)


def calibrate(rows: Sequence[Row], drawn: npt.NDArray[np.int64]) -> Costs:
    """Least squares of relative errors over the colocated ``rows``; each phase has two unknowns.

    A phase takes what it takes on any number of units, and more for the tokens that each of them has. When
    all answers are begun at once, an engine takes ``token_s`` for each token of its longest answer, and
    ``sequence_s`` for each of all tokens.
    """
    tokens, longest = float(drawn.sum(1).mean()), float(drawn.max(1).mean())

    def fit(fixed: float, seconds: Sequence[float]) -> tuple[float, float]:
        terms = np.array([[fixed, tokens * UNIT / row.devices] for row in rows]) / np.array(seconds)[:, None]
        (first, second), *_ = np.linalg.lstsq(terms, np.ones(len(rows)), rcond=None)
        return float(first), float(second)

    token_s, sequence_s = fit(longest, [row.generate for row in rows])
    # Half of an answer is begun, and long ones are met more often.
    begun = RUNNING * float((drawn**2.0).mean() / (2 * drawn.mean()))
    return Costs(
        token_s,
        sequence_s,
        *fit(1.0, [row.update for row in rows]),
        *fit(1.0, [row.old_logprobs for row in rows]),
        turn_s=statistics.fmean(row.step - row.generate - row.update - row.old_logprobs for row in rows),
        recompute_s=begun * sequence_s,
    )


def colocated(devices: int, costs: Costs, lengths: Lengths, updates: int) -> SimulationConfig:
    """A synchronous run, old log-probs counted as part of the update."""
    units = devices // UNIT
    learner = {
        "step_s": costs.update_s + costs.old_s,
        "token_s": costs.update_token_s + costs.old_token_s,
        "ranks": 1,
    }
    slots = PROMPTS * SAMPLES // units
    extra = {"learner": learner, "turns": {"wake_s": costs.turn_s}}
    return _run("colocated", units, slots, WHOLE, costs, lengths, updates, extra)


def split(devices: int, schedule: Schedule, costs: Costs, lengths: Lengths, updates: int) -> SimulationConfig:
    """A run with half the devices on each side, and without old log-probs."""
    learner = {
        "step_s": costs.update_s * schedule.groups / PROMPTS,
        "token_s": costs.update_token_s,
        "ranks": 1,
    }
    # Both sides stand still for a push; begun answers are read anew while the learner goes on.
    push = {"copy_s": PUSH_S, "pause_s": PUSH_S, "recompute_s": costs.recompute_s}
    if not schedule.in_flight:
        push = {"send_s": PUSH_S}
    extra = {"learner": learner, "push": push}
    return _run("split", devices // UNIT // 2, RUNNING, schedule, costs, lengths, updates, extra)


def _run(
    mode: str,
    units: int,
    slots: int,
    schedule: Schedule,
    costs: Costs,
    lengths: Lengths,
    updates: int,
    extra: dict[str, Any],
) -> SimulationConfig:
    """``units`` for each side, or for both."""
    pace = {n: costs.token_s + n * costs.sequence_s for n in (1, slots)}
    generation = {"token_s": pace, "prompt_tokens": 1}
    values = {
        "workload": {"lengths": lengths.section, "generation": generation, **extra},
        "run": {"steps": updates},
        "rollout": {"group_size": SAMPLES, "groups_per_step": schedule.groups, "max_new_tokens": LONGEST},
        "schedule": {
            "pipeline_depth": schedule.depth,
            "max_staleness": schedule.bound,
            "publish_every": schedule.every,
            "in_flight_updates": schedule.in_flight,
            "kv_after_swap": "recompute",
        },
        "generators": {"replicas": units, "slots": slots},
        "learner": {"ranks": units},
        "weight_sync": {"overlap": schedule.in_flight},
        "placement": {"mode": mode},
    }
    return parse_simulation(values, name=f"the published run with {units} units")


def seconds_of(config: SimulationConfig, first: int, steps: int, every: int) -> dict[str, float]:
    """Of a published step (``every`` updates) and its phases: the mean of ``steps`` after ``first``."""
    lines = [line for line in simulate(config).lines if "timing_s/step" in line]
    window = lines[first * every : (first + steps) * every]
    names = {"step": "step", "generate": "wait_for_batch", "update": "train"}
    return {
        name: sum(line[f"timing_s/{metric}"] for line in window) / steps for name, metric in names.items()
    }


def single_update(devices: int, schedule: Schedule, costs: Costs, lengths: Lengths) -> dict[str, float]:
    """A run of nothing but one update: a figure that is quickly had again."""
    return seconds_of(split(devices, schedule, costs, lengths, 1), 0, 1, 1)


@cache
def predict(devices: int, schedule: Schedule | None, costs: Costs, lengths: Lengths) -> dict[str, float]:
    """Seconds a published step, and of its phases; without a schedule of a colocated run."""
    if schedule is None:
        config, every = colocated(devices, costs, lengths, WARM_UP + STEPS), 1
    else:
        # The last depth + 1 updates begin nothing new.
        every, updates = schedule.every, (WARM_UP + STEPS) * schedule.every + schedule.depth + 1
        config = split(devices, schedule, costs, lengths, updates)
    return seconds_of(config, WARM_UP, STEPS, every)


def overlap(sync: Sequence[Row], rows: Sequence[Row], lengths: Lengths) -> dict[str, Any]:
    """Calibrate on ``sync``, and simulate the asynchronous ``rows``."""
    costs = calibrate(sync, draw(lengths))
    found = []
    for row in rows:
        for schedule in schedules(row):
            predicted = predict(row.devices, schedule, costs, lengths)
            log.info("%s, %s: %.1f s, published %.1f s", lengths, schedule, predicted["step"], row.step)
            found.append(
                {
                    "published": asdict(row),
                    "schedule": asdict(schedule),
                    "predicted": predicted,
                    "single_update": single_update(row.devices, schedule, costs, lengths),
                }
            )
    return {"lengths": asdict(lengths), "costs": asdict(costs), "asynchronous": found}


def compare(sync: Sequence[Row], rows: Sequence[Row], lengths: Lengths) -> dict[str, Any]:
    """As ``overlap``, and simulate the rows of the calibration too."""
    costs = calibrate(sync, draw(lengths))
    found = [
        {"published": asdict(row), "predicted": predict(row.devices, None, costs, lengths)} for row in sync
    ]
    return {**overlap(sync, rows, lengths), "colocated": found}


def report() -> dict[str, Any]:
    """All figures of the page."""
    half = [row.first_half for row in COLOCATED], [row.first_half for row in ASYNCHRONOUS]
    some = [row for row in half[1] if row.staleness in (0.1, 0.5)]
    with ProcessPoolExecutor() as pool:
        first_half = pool.submit(compare, *half, ASSUMED)
        whole = pool.submit(compare, COLOCATED, ASYNCHRONOUS, ASSUMED)
        others = [pool.submit(overlap, half[0], some, lengths) for lengths in OTHERS]
        return {
            "assumed": {"push_s": PUSH_S, "running": RUNNING, "longest": LONGEST},
            "first_half": first_half.result(),
            "whole": whole.result(),
            "sensitivity": [other.result() for other in others],
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", action="store_true", help="simulate nothing")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of both files (default docs)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    figures = args.docs / "published.json"
    if not args.report:
        figures.write_text(json.dumps(report(), indent=1) + "\n")
    (args.docs / "published.md").write_text(page(json.loads(figures.read_text())))


if __name__ == "__main__":
    main()
