"""The modes that a config is compared in, each a few settings on top of it.

Invariant: modes differ in the schedule, and colocated in the placement too; seed, data, batch and model stay
those of the config, and so do the devices that both sides have together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config import Config
from asyncrl.config_load import parse_config
from asyncrl.errors import ConfigError, UsageError

_SYNCHRONOUS = (
    "schedule.pipeline_depth=0",
    "schedule.max_staleness=0",
    "schedule.publish_every=1",
    "schedule.at_bound=wait",
    "weight_sync.overlap=false",
)
MODES: dict[str, tuple[str, ...]] = {"sync": _SYNCHRONOUS, "async": ()}
"""By name, the overrides: ``sync`` is split and one after the other, ``async`` the config as it stands."""
NAMES = ("sync", "async", "colocated")
"""All modes, in the order in which they are shown."""


def overrides_of(mode: str, config: Config) -> tuple[str, ...]:
    """What ``mode`` changes in ``config``."""
    if mode != "colocated":
        return MODES[mode]
    return (*_SYNCHRONOUS, *as_overrides(shared_devices(config)))


def of_steps(steps: int, config: Config) -> dict[str, Any]:
    """Settings under which ``config`` is ``steps`` (1 or more) long: warm-ups that do not fit end with it."""
    settings: dict[str, Any] = {"run.steps": steps}
    if config.learner.warmup_steps > steps:
        settings["learner.warmup_steps"] = steps
    if config.critic.warmup_steps >= steps:
        settings["critic.warmup_steps"] = steps - 1
    return settings


def as_overrides(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """``{"run.steps": 3}`` as ``("run.steps=3",)``."""
    return tuple(f"{key}={json.dumps(value)}" for key, value in settings.items())


def shared_devices(config: Config) -> dict[str, Any]:
    """What puts a generator and a learner rank onto each device that either side of ``config`` has.

    As many processes as replicas and ranks together, with the cores of both dealt out to them, and what one
    process has once as the side with more of it has it. Empty where the config is colocated already.
    """
    if config.placement.mode == "colocated":
        return {}
    generators, learner = config.generators, config.learner
    processes = generators.replicas + learner.ranks
    threads = max(generators.threads, learner.threads)
    cores = None
    if generators.cpu_cores and learner.cpu_cores:
        cores = sorted({*generators.cpu_cores, *learner.cpu_cores})
    settings: dict[str, Any] = {
        "placement.mode": "colocated",
        "generators.replicas": processes,
        "generators.threads": threads,
        "generators.cpu_cores": cores,
        "learner.ranks": processes,
        "learner.threads": threads,
        "learner.cpu_cores": cores,
    }
    if learner.device == "auto":
        settings["generators.device"] = "auto"
    if learner.zero_stage < 2 and config.model.dtype == "bfloat16":
        settings["learner.zero_stage"] = 2
    return settings


def parse_modes(text: str) -> tuple[str, ...]:
    """``sync,async`` as names, in the order given. UsageError for an unknown one, or one given twice."""
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise UsageError(f"--modes: found {', '.join(unknown)}; expected names out of {', '.join(NAMES)}")
    if len(set(names)) < len(names):
        raise UsageError(f"--modes: found {text!r}; expected each mode once")
    return names


def require_modes(config: Config, modes: Sequence[str]) -> None:
    """ConfigError where the config cannot be run in one of the modes, or two of them would be the same."""
    require_overlap(config, modes)
    if config.placement.mode == "colocated" and {"sync", "async"} & set(modes):
        raise ConfigError(
            "placement.mode: found colocated, of which only the mode colocated can be run; expected split, "
            "for devices of their own, to compare sync and async (bench makes the colocated one of it)"
        )
    values = config.model_dump(mode="json")
    for mode in modes:
        try:
            parse_config(values, overrides_of(mode, config), name=f"the config in mode {mode}")
        except ConfigError as error:
            rest = ",".join(name for name in modes if name != mode)
            remedy = f"\nwithout it: --modes {rest}" if rest else ""
            raise ConfigError(f"the config cannot be run in mode {mode}: {error}{remedy}") from error


def require_overlap(config: Config, modes: Sequence[str]) -> None:
    """ConfigError where ``async`` would be the same as ``sync``."""
    if "async" in modes and config.schedule.pipeline_depth == 0:
        raise ConfigError(
            "schedule.pipeline_depth: found 0, which is the mode sync; expected at least 1 to compare async "
            "with it (schedule.pipeline_depth=1 schedule.max_staleness=1), or --modes without async"
        )
