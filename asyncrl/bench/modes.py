"""The modes that a config is compared in, each a few settings on top of it.

Invariant: modes differ in the schedule, and colocated in the placement too; seed, data, batch and model stay
those of the config.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config import Config
from asyncrl.errors import ConfigError, UsageError

_SYNCHRONOUS = (
    "schedule.pipeline_depth=0",
    "schedule.max_staleness=0",
    "schedule.publish_every=1",
    "schedule.at_bound=wait",
    "weight_sync.overlap=false",
)
MODES: dict[str, tuple[str, ...]] = {
    "sync": _SYNCHRONOUS,
    "async": (),
    "colocated": (*_SYNCHRONOUS, "placement.mode=colocated"),
}
"""By name, the overrides: ``sync`` is split and one after the other, ``async`` the config as it stands."""


def parse_modes(text: str) -> tuple[str, ...]:
    """``sync,async`` as names, in the order given. UsageError for an unknown one, or one given twice."""
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise UsageError(f"--modes: found {', '.join(unknown)}; expected names out of {', '.join(MODES)}")
    if len(set(names)) < len(names):
        raise UsageError(f"--modes: found {text!r}; expected each mode once")
    return names


def require_overlap(config: Config, modes: Sequence[str]) -> None:
    """ConfigError where ``async`` would be the same as ``sync``."""
    if "async" in modes and config.schedule.pipeline_depth == 0:
        raise ConfigError(
            "schedule.pipeline_depth: found 0, which is the mode sync; expected at least 1 to compare async "
            "with it (schedule.pipeline_depth=1 schedule.max_staleness=1), or --modes without async"
        )
