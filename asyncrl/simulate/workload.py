"""What a simulation is of: a run's own settings, and how long everything takes.

Invariants:
- Imports nothing heavy, so that a mistake in a file shows at once.
- A workload file is a run's config, with the same keys, and one block more: ``workload``. What a simulation
  has no use for (model, data, reward functions) may be left out.
- All times are seconds of virtual time, all lengths tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from asyncrl.config import Config, Section
from asyncrl.config_load import parse_as, read_values

Share = Annotated[float, Field(ge=0.0, le=1.0)]

NEVER_S = 1e9
"""Longer than any simulation: the deadlines of a workload file that sets none."""

_UNUSED: dict[str, Any] = {
    "model": {"path": "simulated"},
    "data": {"train": "simulated", "max_prompt_tokens": 1 << 20},
    "reward": {"functions": ["exact_match"]},
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "run": {"name": "simulation", "stall_after_s": NEVER_S},
    "rollout": {"deadline_s": NEVER_S, "max_new_tokens": 1 << 20},
    "eval": {"every": 0},
    "learner": {"step_timeout_s": NEVER_S, "micro_batch_tokens": 1 << 30},
    "weight_sync": {"timeout_s": NEVER_S, "canary_every": 0},
    # A death is noticed by whatever the dead was working on; pings would be most of what is simulated.
    "generators": {"health_every_s": NEVER_S, "health_timeout_s": NEVER_S},
}


class LogNormalSection(Section):
    median: PositiveFloat
    """Half of all answers are longer."""
    sigma: NonNegativeFloat
    """Standard deviation of the lengths' logarithm; 1.0 is a long tail."""
    prompt_share: Share = 0.0
    """Share of the logarithm's variance that comes from the prompt, and is the same in the whole group."""


class LengthsSection(Section):
    """How long answers are: exactly one of ``log_normal``, ``run`` and ``values``."""

    log_normal: LogNormalSection | None = None
    """Drawn from a log-normal distribution, cut off at ``rollout.max_new_tokens``."""
    run: str | None = None
    """Folder of a run: groups of its ``rollouts/``, drawn at random, each with all its lengths."""
    values: tuple[PositiveInt, ...] | None = None
    """These, one answer after the other in the order of prompts and samples, from the first again after
    the last."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("log_normal", "run", "values") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"found {found}; expected exactly one of log_normal, run, values")
        if self.values == ():
            raise ValueError("values: found no length; expected at least one")
        return self


class GenerationSection(Section):
    """How fast one engine samples."""

    token_s: Annotated[dict[PositiveInt, PositiveFloat], Field(min_length=1)] | PositiveFloat
    """Time of one more token of every running sequence, by the number of these; linear in between, and
    beyond the ends as at the ends. One number: the same however many run."""
    prompt_tokens: PositiveInt = 64
    """Length of every prompt."""
    prefill_token_s: NonNegativeFloat = 0.0
    """Time for which the whole engine stands still for each token of a prompt that it takes in."""
    prompt_once: bool = True
    """A prompt is taken in once for its group, as the torch engine does; false: for each answer."""


class LearningSection(Section):
    """How long an update takes."""

    step_s: NonNegativeFloat = 0.0
    """What every update takes."""
    token_s: NonNegativeFloat = 0.0
    """More for each token of its batch, prompts included, all ranks together."""
    padded: bool = False
    """Whether ``token_s`` is of every token that is computed, padding included, in the micro-batches that
    ``learner`` asks for; otherwise padding costs nothing."""
    ranks: PositiveInt | None = None
    """Ranks that ``token_s`` is of: with twice as many a token takes half of it. Null: it is of
    ``learner.ranks``, however many."""


class PushSection(Section):
    """How long a version takes to the generators."""

    send_s: NonNegativeFloat = 0.0
    """Until the weights are there, generation going on."""
    pause_s: NonNegativeFloat = 0.0
    """Standstill of generation for the swap."""
    recompute_s: NonNegativeFloat = 0.0
    """Longer standstill with ``schedule.kv_after_swap: recompute`` and sequences running."""
    copy_s: NonNegativeFloat = 0.0
    """Standstill of the learner with ``weight_sync.overlap``."""


class ContentionSection(Section):
    """What each side costs the other, where they share cores or memory bandwidth."""

    update: Annotated[float, Field(ge=1.0)] = 1.0
    """An update takes so many times as long where it begins beside generators that sample."""
    token: Annotated[float, Field(ge=1.0)] = 1.0
    """A token takes so many times as long while an update goes on."""


class TurnsSection(Section):
    """How long it takes until the other side has the devices, with ``placement.mode: colocated``."""

    sleep_s: NonNegativeFloat = 0.0
    """Generators fall asleep."""
    wake_s: NonNegativeFloat = 0.0
    """They wake at the next version; ``push.recompute_s`` more with unfinished answers."""


class RewardsSection(Section):
    """What answers are worth: 1 or 0."""

    mean: Share = 0.5
    """Probability of 1."""
    score_s: NonNegativeFloat = 0.0
    """Time until an answer is scored."""


class FailuresSection(Section):
    """What goes wrong."""

    mean_life_s: PositiveFloat | None = None
    """Mean time until a replica dies (exponential); null: never."""
    restart_s: NonNegativeFloat = 30.0
    """Time that a restarted replica takes until it can receive weights."""
    reward_errors: Share = 0.0
    """Share of answers whose scoring fails."""
    bad_steps: tuple[NonNegativeInt, ...] = ()
    """Updates, counted from 0, that are not finite and are skipped."""


class WorkloadSection(Section):
    lengths: LengthsSection
    """How long answers are."""
    generation: GenerationSection
    """How fast they are sampled."""
    learner: LearningSection
    """How long updates take."""
    push: PushSection = PushSection()
    """How long pushes take."""
    contention: ContentionSection = ContentionSection()
    """How much the sides slow each other down."""
    turns: TurnsSection = TurnsSection()
    """How long turns take to change hands."""
    reward: RewardsSection = RewardsSection()
    """What answers are worth."""
    failures: FailuresSection = FailuresSection()
    """What goes wrong."""


class SimulationConfig(Config):
    """A run's config, and what it is simulated with."""

    workload: WorkloadSection
    """How long everything takes."""


def load_simulation(file: Path, overrides: Sequence[str] = ()) -> SimulationConfig:
    """Read a workload file and apply ``key.sub=value`` overrides. Raises ConfigError."""
    return parse_simulation(read_values(file), overrides, name=str(file))


def parse_simulation(
    values: Mapping[str, Any], overrides: Sequence[str] = (), *, name: str = "workload"
) -> SimulationConfig:
    """As ``load_simulation``, of values that are at hand; ``name`` stands for the file in messages."""
    sections = _UNUSED | dict(values)
    for section, defaults in _DEFAULTS.items():
        given = sections.get(section, {})
        if isinstance(given, dict):  # else it is refused by name
            sections[section] = defaults | given
    return parse_as(SimulationConfig, sections, overrides, name=name)


def with_settings(
    config: SimulationConfig, overrides: Sequence[str], *, name: str = "workload"
) -> SimulationConfig:
    """``config`` with ``overrides``. Where these change the number of ranks, a token's time follows."""
    values = config.model_dump(mode="json")
    costs = values["workload"]["learner"]
    costs["ranks"] = costs["ranks"] or config.learner.ranks
    return parse_simulation(values, overrides, name=name)
