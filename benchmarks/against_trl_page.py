"""One run of against_trl.py, what it comes to, and the page of all of them.

Invariants:
- A figure has one definition, which knows nothing of the side that it is of.
- A ratio is of a pair: the same workload and seed, one run after the other.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

SIDES = ("trl", "asyncrl")
WARM_UP = 5
"""Steps left out at a run's start."""
SETTLE = 3
"""Steps left out after an evaluation and at a run's end: what an evaluation holds up passes through an
overlapped run in pipeline_depth + 1 steps, and in the last so many nothing new is sampled."""
TARGETS = {"smollm2": 0.6}
"""Held-out reward whose time is taken."""


def evaluated_versions(steps: int, every: int) -> list[int]:
    """Updates after which there is an evaluation: none, each ``every`` of them, and all."""
    return sorted({0, steps, *(range(every, steps, every) if every else ())})


@dataclass(frozen=True)
class Run:
    """What was asked for and, after ``with_figures``, what was measured. Plain JSON."""

    workload: str
    side: str
    seed: int
    config: str
    settings: list[str]
    """Overrides of the config, as asyncrl takes them, and TRL's own (``trl.``)."""
    samples_a_step: int = 0
    step_s: list[float] = field(default_factory=list)
    """Between the ends of two steps, less the time that stood still for an evaluation."""
    rewards: list[float] = field(default_factory=list)
    """Mean of each step's samples."""
    lengths: list[float] = field(default_factory=list)
    """Mean tokens of each step's answers."""
    evals: list[Sequence[float]] = field(default_factory=list)
    """(updates, held-out reward of greedy answers)."""
    packages: dict[str, str] = field(default_factory=dict)
    lag_max: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.workload}-{self.side}-{self.seed}"

    def is_same_as(self, other: Run) -> bool:
        """Whether the two ask for the same."""
        return (self.name, self.config, self.settings) == (other.name, other.config, other.settings)

    def with_figures(self, **figures: Any) -> Run:
        return replace(self, **figures)

    @property
    def timed(self) -> list[int]:
        """The steps, from 1, whose time counts: neither warm-up, nor touched by an evaluation or the end."""
        steps = len(self.step_s)
        touched = {int(at) + after for at, _ in self.evals for after in range(1, SETTLE + 1)}
        return [s for s in range(WARM_UP + 1, steps - SETTLE + 1) if s not in touched]

    @property
    def step_mean_s(self) -> float | None:
        """Seconds a step; None where too few steps were made."""
        return statistics.fmean(self.step_s[s - 1] for s in self.timed) if self.timed else None

    @property
    def samples_per_s(self) -> float | None:
        """Trained samples over wall time."""
        return self.samples_a_step / self.step_mean_s if self.step_mean_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """Sampled tokens of trained answers over wall time."""
        if not self.step_mean_s:
            return None
        mean_tokens = statistics.fmean(self.lengths[s - 1] for s in self.timed)
        return self.samples_a_step * mean_tokens / self.step_mean_s

    @property
    def target_s(self) -> float | None:
        """Seconds of training up to the first evaluation that reached the target; None: none did."""
        target = TARGETS.get(self.workload)
        reached = [int(at) for at, reward in self.evals if target is not None and reward >= target]
        return sum(self.step_s[: min(reached)]) if reached else None

    @property
    def setting(self) -> str:
        """Its settings without what differs between the runs of a workload and side."""
        return " ".join(s for s in self.settings if not s.startswith(("run.seed=", "checkpoint.", "log.")))


Pair = tuple[Run, Run]
"""TRL's run and asyncrl's, of one workload and seed."""
FIGURES: dict[str, Callable[[Run], float | None]] = {
    "samples/s": lambda run: run.samples_per_s,
    "tokens/s": lambda run: run.tokens_per_s,
    "seconds a step": lambda run: run.step_mean_s,
    "held-out reward before": lambda run: run.evals[0][1],
    "held-out reward after": lambda run: run.evals[-1][1],
    "mean reward of all samples": lambda run: statistics.fmean(run.rewards),
}


def pairs_of(runs: Sequence[Run], workload: str) -> list[Pair]:
    """Those of ``workload`` whose both halves are there, by seed."""
    by_key = {(run.side, run.seed): run for run in runs if run.workload == workload}
    seeds = sorted({seed for _, seed in by_key})
    return [
        (by_key["trl", seed], by_key["asyncrl", seed])
        for seed in seeds
        if ("trl", seed) in by_key and ("asyncrl", seed) in by_key
    ]


def ratios(pairs: Sequence[Pair], figure: Callable[[Run], float | None]) -> list[float]:
    """asyncrl's over TRL's, of the pairs in which both have the figure."""
    found = [(figure(trl), figure(ours)) for trl, ours in pairs]
    return [ours / trl for trl, ours in found if trl and ours is not None]


def markdown(runs: Sequence[Run], machine: dict[str, Any] | None) -> str:
    """The page."""
    names = list(dict.fromkeys(run.workload for run in runs))
    return "\n".join(
        [
            "# TRL's GRPOTrainer and asyncrl on the same two cores",
            "",
            "`python benchmarks/against_trl.py --trl-venv FOLDER` makes this page and `against-trl.json`.",
            "",
            *_machine(runs, machine),
            "",
            "Every figure is a mean over seeds, each seed's own value behind it. A ratio is the median over",
            "pairs (both sides with one seed, one after the other), smallest and largest behind it.",
            "",
            "| workload | figure | TRL | asyncrl | asyncrl / TRL |",
            "| --- | --- | ---: | ---: | ---: |",
            *(row for name in names for row in _rows(name, pairs_of(runs, name))),
            "",
            "Held-out reward at equal samples, mean over seeds:",
            "",
            "| workload | samples | TRL | asyncrl |",
            "| --- | ---: | ---: | ---: |",
            *(row for name in names for row in _curve(name, pairs_of(runs, name))),
            "",
            *HOW,
            "",
            "Settings, over those of the config:",
            "",
            *(
                f"- {name}, {side}: `{first.config}`, {len(first.step_s)} steps, `{first.setting}`"
                for name in names
                for side in SIDES
                for first in [run for run in runs if (run.workload, run.side) == (name, side)][:1]
            ),
            "",
        ]
    )


HOW = """\
The same on both sides: start model and tokenizer, prompts of each step and their order, reward function,
group size, lengths, temperature, optimizer (AdamW, learning rate of every update, betas, epsilon, decay,
clipping of the gradient), loss (clipped ratio, mean over the step's tokens, advantages over the group's
deviation, no KL), cores, held-out questions, answered greedily.

Measured: seconds are wall time between the ends of two steps, without the first 5 steps, the 3 after an
evaluation and the last 3. Evaluations stand outside the clock; asyncrl's go on beside training, and what they
slow down there counts in the time to a reward.

Different by necessity: TRL samples and trains in turn, on both cores, and each answer is of the newest
weights. asyncrl does both at once: its samples are up to `schedule.max_staleness` updates old, which
truncated importance sampling corrects for. TRL divides advantages by the deviation
+ 1e-4, asyncrl by it + 1e-6. In bfloat16 TRL autocasts float32 weights, and asyncrl computes with
bfloat16 weights and updates float32 masters. Random draws differ.""".splitlines()


def _machine(runs: Sequence[Run], machine: dict[str, Any] | None) -> Iterator[str]:
    if machine is not None:
        yield (
            f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB; "
            f"Python {machine['python']}. "
        )
    for side in SIDES:
        packages = next((run.packages for run in runs if run.side == side), {})
        yield f"{side}: {', '.join(f'{name} {number}' for name, number in packages.items())}. "


def _rows(name: str, pairs: Sequence[Pair]) -> Iterator[str]:
    figures = dict(FIGURES)
    if name in TARGETS:
        figures[f"seconds to a held-out reward of {TARGETS[name]:g}"] = lambda run: run.target_s
    for title, figure in figures.items():
        sides = [_spread([figure(pair[i]) for pair in pairs]) for i in range(2)]
        found = ratios(pairs, figure)
        ratio = f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else "–"
        yield f"| {name} | {title} | {sides[0]} | {sides[1]} | {ratio} |"


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    each = ", ".join("never" if value is None else f"{value:.3g}" for value in values)
    return f"{statistics.fmean(known):.3g} ({each})"


def _curve(name: str, pairs: Sequence[Pair]) -> Iterator[str]:
    for i, (at, _) in enumerate(pairs[0][0].evals if pairs else ()):
        means = [statistics.fmean(pair[side].evals[i][1] for pair in pairs) for side in range(2)]
        samples = int(at) * pairs[0][0].samples_a_step
        yield f"| {name} | {samples} | {means[0]:.3f} | {means[1]:.3f} |"


def as_json(machine: dict[str, Any] | None, runs: Sequence[Run]) -> str:
    """What ``of_json`` reads."""
    return json.dumps({"machine": machine, "runs": [vars(run) for run in runs]}, indent=1) + "\n"


def of_json(text: str) -> tuple[dict[str, Any] | None, list[Run]]:
    """Machine and runs."""
    stored = json.loads(text)
    return stored["machine"], [Run(**run) for run in stored["runs"]]
