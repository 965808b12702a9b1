"""How long simulated answers are: drawn, taken from a run, or listed.

Invariants:
- A length is a pure function of the workload, the seed and (ordinal, sample): it is the same in every mode,
  and whatever replica samples the answer, however often.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.simulate.draws import standard_normal, uniform
from asyncrl.simulate.workload import LengthsSection, LogNormalSection
from asyncrl.types import DrawKey

LengthOf = Callable[[DrawKey], int]
"""Tokens of the answer that a key names, at least 1."""

_FROM_PROMPT, _FROM_SAMPLE = 1, 2


def make_lengths(lengths: LengthsSection, group_size: int) -> LengthOf:
    """The lengths that the workload asks for. ConfigError for a run without recorded rollouts."""
    if lengths.log_normal is not None:
        return _log_normal(lengths.log_normal)
    if lengths.run is not None:
        return _recorded(recorded_groups(Path(lengths.run)))
    values = lengths.values
    assert values is not None  # the section has one of the three
    return lambda key: values[(key.ordinal * group_size + key.sample) % len(values)]


def _log_normal(shape: LogNormalSection) -> LengthOf:
    of_prompt = shape.sigma * math.sqrt(shape.prompt_share)
    of_sample = shape.sigma * math.sqrt(1 - shape.prompt_share)

    def length(key: DrawKey) -> int:
        deviation = of_sample * standard_normal(key.seed, key.ordinal, key.sample, _FROM_SAMPLE)
        if of_prompt:
            deviation += of_prompt * standard_normal(key.seed, key.ordinal, _FROM_PROMPT)
        return max(1, round(shape.median * math.exp(deviation)))

    return length


def _recorded(groups: list[tuple[int, ...]]) -> LengthOf:
    def length(key: DrawKey) -> int:
        group = groups[int(uniform(key.seed, key.ordinal, _FROM_PROMPT) * len(groups))]
        return max(1, group[key.sample % len(group)])

    return length


def recorded_groups(run: Path) -> list[tuple[int, ...]]:
    """Response lengths of each group in a run's ``rollouts/``. ConfigError where there is none."""
    from asyncrl.queues.codec import decode_group, read_records

    files = sorted((run / "rollouts").glob("step_*.msgpack"))
    groups: list[tuple[int, ...]] = []
    for path in files:
        with path.open("rb") as file:
            groups += [decode_group(record).response_lengths for record in read_records(file)]
    groups = [lengths for lengths in groups if lengths]
    if not groups:
        raise ConfigError(
            f"workload.lengths.run: found {len(files)} files with 0 groups in {run / 'rollouts'}; expected a "
            "run's folder with at least one: run it with log.rollouts_every of 1 or more"
        )
    return groups
