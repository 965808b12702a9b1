"""Schedules of a config, simulated on its costs: which are worth having, and which to take.

Invariants:
- Each is a config that ``asyncrl train`` would take: one that contradicts itself is never a candidate.
- Every candidate answers the same prompts at the same lengths, by the simulation's seed.
- A seed other than 0 brings the groups in another order; 0 in that of the run that was measured.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.bench.figures import Figures, Window, measure
from asyncrl.bench.modes import of_steps, shared_devices
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.simulate.run import simulate
from asyncrl.simulate.workload import NEVER_S, SimulationConfig, parse_simulation
from asyncrl.tune.costs import Costs

WARM_UP, STEPS = 6, 24
DEPTHS = (0, 1, 2, 3, 4)
SEEDS = (0, 1, 2)
WORTHWHILE = 0.02
"""Share of the best speed that is given up for less lag."""
COLOCATED_LOSS = 0.2
"""Share of a colocated schedule's predicted speed that is not counted on. It is predicted as if devices added
up; the one that was measured, a quickstart on two cores, came to 20 % less."""
_FEW_PUSHES = 0.02
"""Share of a step that pushes have to take before fewer of them are tried."""

# A run's own guards, which would only cost events: nothing hangs in a simulation.
_UNGUARDED = {
    "run.stall_after_s": NEVER_S,
    "run.deterministic": False,
    "eval.every": 0,
    "generators.health_every_s": NEVER_S,
    "generators.health_timeout_s": NEVER_S,
    "weight_sync.canary_every": 0,
    "rollout.deadline_s": NEVER_S,
    "learner.step_timeout_s": NEVER_S,
    "weight_sync.timeout_s": NEVER_S,
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings on top of the config, by their keys."""

    depth: int
    staleness: int
    publish_every: int
    slots: int
    colocated: bool = False

    @property
    def label(self) -> str:
        place = ", colocated" if self.colocated else ""
        return f"D={self.depth} S={self.staleness} k={self.publish_every}, {self.slots} slots{place}"

    def settings(self, config: Config) -> dict[str, Any]:
        """What is to be set in ``config``."""
        found: dict[str, Any] = {
            "schedule.pipeline_depth": self.depth,
            "schedule.max_staleness": self.staleness,
            "schedule.publish_every": self.publish_every,
            "generators.slots": self.slots,
        }
        if self.colocated:
            found |= {"weight_sync.overlap": False, **shared_devices(config)}
        return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """A candidate with the figures of each simulated seed."""

    candidate: Candidate
    runs: tuple[Figures, ...]

    def median(self, figure: Callable[[Figures], float]) -> float:
        return statistics.median(figure(run) for run in self.runs)

    @property
    def tokens_per_s(self) -> float:
        return self.median(lambda run: run.tokens_per_s)

    @property
    def certain_tokens_per_s(self) -> float:
        """What may be counted on: less than is predicted where that is an extrapolation."""
        return self.tokens_per_s * (1 - COLOCATED_LOSS if self.candidate.colocated else 1)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest speed over the seeds."""
        rates = [run.tokens_per_s for run in self.runs]
        return min(rates), max(rates)

    @property
    def lag_mean(self) -> float:
        return self.median(lambda run: run.lag_mean)

    @property
    def lag_max(self) -> float:
        return max(run.lag_max for run in self.runs)

    @property
    def rank(self) -> tuple[float, float, float]:
        """Smaller is better where speed does not decide."""
        return (round(self.lag_mean, 2), self.lag_max, -self.tokens_per_s)


class Laboratory:
    """Simulates candidates of one config on one set of costs; each candidate and seed once."""

    def __init__(self, config: Config, costs: Costs) -> None:
        self.config = config
        self.costs = costs
        self._values = config.model_dump(mode="json")
        self._size = config.rollout.group_size
        self._known: dict[tuple[Candidate, int], Figures] = {}

    def allows(self, candidate: Candidate) -> str | None:
        """Why the config cannot be run so; None where it can."""
        try:
            self.simulation(candidate, 1)
        except ConfigError as error:
            return str(error)
        return None

    def try_out(self, candidate: Candidate, seeds: Sequence[int] = SEEDS[:1]) -> Outcome:
        """The candidate's figures with each of ``seeds``."""
        return Outcome(candidate, tuple(self._figures(candidate, seed) for seed in seeds))

    def _figures(self, candidate: Candidate, seed: int) -> Figures:
        key = (candidate, seed)
        if key not in self._known:
            window = Window(WARM_UP, STEPS, candidate.depth + 1)
            config = with_lengths(self.simulation(candidate, window.total), self.shuffled(seed))
            self._known[key] = measure(simulate(config).lines, window)
        return self._known[key]

    def simulation(self, candidate: Candidate, steps: int) -> SimulationConfig:
        """A run of ``steps`` steps, but for the lengths. ConfigError where the config cannot be run so."""
        settings = {**candidate.settings(self.config), **_UNGUARDED, **of_steps(steps, self.config)}
        ranks = int(settings.get("learner.ranks", self.config.learner.ranks))
        values = {**merged(self._values, settings), "workload": self.costs.workload(ranks)}
        return parse_simulation(values, name=candidate.label)

    def shuffled(self, seed: int) -> tuple[int, ...]:
        """The recorded lengths, with the groups in an order of the seed's own."""
        lengths, size = self.costs.lengths, self._size
        groups = [lengths[i : i + size] for i in range(0, len(lengths), size)]
        if seed:
            random.Random(seed).shuffle(groups)
        return tuple(length for group in groups for length in group)


def merged(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a config with settings by dotted keys."""
    sections = {
        name: dict(section) if isinstance(section, dict) else section for name, section in values.items()
    }
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    return sections


def with_lengths(config: SimulationConfig, lengths: tuple[int, ...]) -> SimulationConfig:
    """``config`` with answers of these lengths, of which there may be too many for a config's parser."""
    section = config.workload.lengths.model_copy(update={"values": lengths})
    workload = config.workload.model_copy(update={"lengths": section})
    return config.model_copy(update={"workload": workload})


def current(config: Config) -> Candidate:
    """The config as it stands."""
    schedule = config.schedule
    return Candidate(
        schedule.pipeline_depth,
        schedule.max_staleness,
        schedule.publish_every,
        config.generators.slots,
        config.placement.mode == "colocated",
    )


def explore(
    laboratory: Laboratory, say: Callable[[str], None], depths: Sequence[int] = DEPTHS
) -> list[Outcome]:
    """Candidates with one seed each: depths and bounds, then slots, then fewer pushes and colocated."""
    slots = laboratory.config.generators.slots
    split = [Candidate(depth, bound, 1, slots) for depth in depths for bound in _bounds(depth, 1)]
    outcomes = list(_all(laboratory, [current(laboratory.config), *split], say))
    best = recommended(outcomes)
    more = [
        Candidate(best.candidate.depth, best.candidate.staleness, 1, count)
        for count in (slots // 2, slots * 2)
        if 0 < count <= 2 * laboratory.costs.most_running
    ]
    if best.median(lambda run: run.weight_sync_s / run.step_s) > _FEW_PUSHES:
        more += [
            Candidate(depth, bound, 2, slots) for depth in depths if depth for bound in _bounds(depth, 2)
        ]
    more.append(Candidate(0, 0, 1, slots, colocated=True))
    return outcomes + list(_all(laboratory, more, say, known=outcomes))


def _bounds(depth: int, publish_every: int) -> list[int]:
    """The tightest bound that the depth allows, one that leaves room for a straggler, and a loose one."""
    if depth == 0:
        return [0]
    least = depth + publish_every - 1
    return sorted({least, least + 1, least + depth})


def _all(
    laboratory: Laboratory,
    candidates: Sequence[Candidate],
    say: Callable[[str], None],
    known: Sequence[Outcome] = (),
) -> Iterator[Outcome]:
    """The outcomes of those that the config can be run with, each once."""
    done = {outcome.candidate for outcome in known}
    for candidate in dict.fromkeys(candidates):
        if candidate in done:
            continue
        why_not = laboratory.allows(candidate)
        if why_not is not None:
            say(f"{candidate.label}: left out: {why_not}")
            continue
        outcome = laboratory.try_out(candidate)
        say(f"{candidate.label}: {outcome.tokens_per_s:,.0f} tokens/s, lag {outcome.lag_mean:.2f}")
        yield outcome


def pareto(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that no other beats in speed, mean lag and largest lag at once, the fastest first."""

    def beats(a: Outcome, b: Outcome) -> bool:
        ours = (a.certain_tokens_per_s, -a.lag_mean, -a.lag_max)
        theirs = (b.certain_tokens_per_s, -b.lag_mean, -b.lag_max)
        if ours == theirs:  # of equals the first stays
            return outcomes.index(a) < outcomes.index(b)
        return all(mine >= its for mine, its in zip(ours, theirs, strict=True))

    front = [b for b in outcomes if not any(beats(a, b) for a in outcomes if a is not b)]
    return sorted(front, key=lambda outcome: -outcome.certain_tokens_per_s)


def recommended(outcomes: Sequence[Outcome]) -> Outcome:
    """The least lag among those within ``WORTHWHILE`` of the fastest."""
    fastest = max(outcome.certain_tokens_per_s for outcome in outcomes)
    near = [outcome for outcome in outcomes if outcome.certain_tokens_per_s >= (1 - WORTHWHILE) * fastest]
    return min(near, key=lambda outcome: outcome.rank)


def as_yaml_block(settings: dict[str, Any]) -> str:
    """Settings by dotted keys as a block for a config file."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return "\n".join(
        f"{section}: {{{', '.join(f'{name}: {json.dumps(value)}' for name, value in values.items())}}}"
        for section, values in sections.items()
    )
