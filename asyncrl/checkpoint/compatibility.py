"""Whether a config can go on from a checkpoint, and what of it is another one than before.

Invariants:
- Everything is decided by the checkpoint's files, the config and the fingerprints of the models' files: no
  model is loaded.
- All that cannot work is said at once, each with what was found and what was expected.
- Whatever is not refused is meant to work: docs/checkpoints.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrl.checkpoint.state import CRITIC, LEARNER, REFERENCE, RunState
from asyncrl.config import Config
from asyncrl.errors import ConfigError

_FIXED: Final = ("run.seed", "model.create.", "learner.lora")
"""Keys that a run cannot change on its way."""
_HALVES: Final = ("run.rollout_only", "run.replay")
"""Keys that say which half of a run there is."""
_SAMPLED_BY: Final = (
    "model",
    "data",
    "rollout",
    "reward",
    "reward_model",
    "algorithm",
    "schedule",
    "reference",
    "critic",
)
"""Sections that ready groups depend on: where one changed, they are sampled anew."""
_WHEREABOUTS: Final = ("run.name", "run.dir", "checkpoint.", "log.")
"""Keys that say where and how things are kept, and nothing of what happens."""
_PATHS: Final = ("model.path", "critic.path", "reference.path")
"""Keys of models that may be found in another place, if they are the same ones."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a run is of, beside its config: fingerprints of what is read from files."""

    data: str
    """Of the training prompts and their order."""
    models: Mapping[str, str]
    """Of each model that a run starts from, by the config key that names it."""


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that is another one than in the checkpoint."""

    key: str
    before: Any
    after: Any


def changes(before: Mapping[str, Any], config: Config) -> list[Change]:
    """Every setting that differs, but for those that say where things are kept."""
    then, now = dict(_flat(before)), dict(_flat(config.model_dump(mode="json")))
    keys = [*now, *(key for key in then if key not in now)]
    return [
        Change(key, then.get(key), now.get(key))
        for key in keys
        if then.get(key) != now.get(key) and not key.startswith(_WHEREABOUTS)
    ]


def is_sampled_anew(changed: Sequence[Change]) -> bool:
    """Whether ready groups are no longer what this config would sample and score."""
    return any(change.key.split(".")[0] in _SAMPLED_BY for change in changed)


def require_compatible(
    folder: Path, state: RunState, changed: Sequence[Change], config: Config, origin: Origin
) -> None:
    """Raise ConfigError for what cannot work, all of it at once. ``folder`` is the checkpoint's."""
    problems = [
        *_fixed(changed),
        *_origin(folder, state, config, origin),
        *_length(state, config),
        *_critic(folder, state, config),
        *_reference(folder, config),
    ]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(
            f"the run cannot go on from {folder}:\n{lines}\nchange these back, or choose another run.name to "
            "start anew"
        )


def _fixed(changed: Sequence[Change]) -> Iterator[str]:
    for change in changed:
        other_half = change.key in _HALVES and bool(change.before) != bool(change.after)
        if change.key.startswith(_FIXED) or other_half:
            yield (
                f"{change.key}: found {change.after!r}, the checkpoint was made with {change.before!r}, "
                "which has to stay"
            )


def _origin(folder: Path, state: RunState, config: Config, origin: Origin) -> Iterator[str]:
    if origin.data != state.data:
        yield (
            "data.train: the prompts, or their order, are not those of the checkpoint: what was trained and "
            "what was not could not be told apart"
        )
    goes_on = {
        "model.path": True,
        "critic.path": config.has_critic and (folder / CRITIC).is_dir(),
        "reference.path": config.algorithm.needs_reference and _reference_holder(folder) is not None,
    }
    for key in _PATHS:
        then, now = state.models.get(key), origin.models.get(key)
        if goes_on[key] and then != now:
            yield (
                f"{key}: found {_path(config, key)!r}, which is not the model of the checkpoint: config.json "
                f"or the weights differ (fingerprint {now}, expected {then}); expected the same "
                "files, wherever they are"
            )


def _length(state: RunState, config: Config) -> Iterator[str]:
    done, what = state.version, "policy version"
    if config.run.rollout_only:
        done, what = state.step, "step"
    if config.run.steps < done:
        yield (
            f"run.steps: found {config.run.steps}, the checkpoint is at {what} {done}; expected at least that"
        )


def _critic(folder: Path, state: RunState, config: Config) -> Iterator[str]:
    if config.has_critic and state.learner and not (folder / CRITIC).is_dir():
        yield "algorithm.advantage: found gae, but the checkpoint holds no critic"


def _reference(folder: Path, config: Config) -> Iterator[str]:
    """A reference that has followed the policy is nowhere but in the checkpoint."""
    holder = _reference_holder(folder)
    if holder is None or not config.algorithm.needs_reference:
        return
    section = config.reference
    if section.place != holder:
        yield (
            f"reference.place: found {section.place!r}, but the checkpoint's reference has followed the "
            f"policy, and was kept by {holder!r} in a form of its own; expected place {holder}"
        )
    if section.refresh_every == 0:
        yield (
            "reference.refresh_every: found 0, but the checkpoint's reference has followed the policy and is "
            "not what it started from; expected at least 1 (one beyond run.steps keeps it where it is)"
        )


def _reference_holder(folder: Path) -> str | None:
    """The ``reference.place`` that a checkpoint's reference is of; None where it has not moved."""
    if (folder / REFERENCE).is_dir():
        return "actors"
    return "learner" if (folder / LEARNER / REFERENCE).is_dir() else None


def _path(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
