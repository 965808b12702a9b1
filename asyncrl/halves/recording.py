"""Recorded rollouts, as a run trains on them again: which groups, in which order, and whether it may.

The files of ``rollouts/`` are batches, in the order of their steps; the groups of one are sorted by ordinal.
The n-th file, counted from 0, is the batch of the update from version n.

A replayed token's lag is what a lag always is: v - version(token), in the step v to v + 1. Its version is
the recording's, the updates behind the weights that sampled the token. v counts the updates of the run that
trains now. Where that repeats the recorded run, version n is one policy in both. Where it does not (another
learning rate, say), the lag still counts updates, and ``generator/logprob_diff_*`` says how far the two
histories are apart.

Invariants:
- Everything is checked before any model is loaded: each batch is whole, each of its groups can be trained on
  by this config, no token is younger than the step that trains it, and none has a lag above the bound.
- No group is in two batches.
- ``task(n)`` and ``group(n)`` are pure functions of the files and of n: a resumed replay needs no cursor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from asyncrl.config import Config
from asyncrl.credit import CreditAssignment
from asyncrl.errors import CodecError, ConfigError, DataError, ReplayError, UsageError
from asyncrl.queues.codec import decode_group, encode_group, group_meta, read_records
from asyncrl.recorded import RecordedRun, read_run
from asyncrl.screening import Screening
from asyncrl.types import GroupMeta, Task, group_lag, unmasked

_SAME = ("rollout.temperature", "model.path", "model.create")
"""Settings without which the log-probs and versions of a recording mean something else."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a group lies, and what has to be known of it before it is read again."""

    file: Path
    offset: int
    nbytes: int
    uid: str
    start_version: int
    newest_version: int


class Recording:
    """The groups of a run's ``rollouts/``, 0, 1, 2, ... A ``TaskSource``: its ordinals are these numbers."""

    def __init__(self, places: list[_Place], fingerprint: str) -> None:
        self._places = places
        self.fingerprint = fingerprint
        """Equal for equal groups in equal order."""

    def __len__(self) -> int:
        return len(self._places)

    def task(self, ordinal: int) -> Task:
        """The task of a group: its name alone. Raises ReplayError beyond the last."""
        if ordinal >= len(self._places):
            raise ReplayError(
                f"the recording has {len(self)} groups, and all were used: updates were skipped, and their "
                "groups do not come again; lower run.steps, or look at why they were not finite"
            )
        place = self._places[ordinal]
        return Task(ordinal, place.uid, "", (), issued_at=place.start_version)

    def newest_version(self, ordinal: int) -> int:
        """Version of the newest trained token of a group."""
        return self._places[ordinal].newest_version

    def group(self, ordinal: int) -> tuple[GroupMeta, bytes]:
        """A group under its number here; reads the disk. Raises CodecError where the file has changed."""
        place = self._places[ordinal]
        with place.file.open("rb") as file:
            file.seek(place.offset)
            group = replace(decode_group(file.read(place.nbytes)), ordinal=ordinal)
        payload = encode_group(group)
        return group_meta(group, payload), payload


def open_recording(config: Config, folder: Path) -> Recording:
    """Read and check what ``run.replay`` names, as seen from ``folder``. Raises ConfigError or DataError."""
    assert config.run.replay is not None
    run = folder / config.run.replay
    if run.resolve() == (folder / config.run.folder).resolve():
        raise ConfigError(f"run.replay: found {run}, the run's own folder; choose another run.name")
    try:
        recorded = read_run(run)
    except UsageError as error:
        raise ConfigError(f"run.replay: {error}") from None
    _require_same(config, recorded, run)
    files = sorted((run / "rollouts").glob("step_*.msgpack"))
    if len(files) < config.run.steps:
        raise ConfigError(
            f"run.steps: found {config.run.steps}, but {run / 'rollouts'} holds {len(files)} batches; lower "
            "run.steps, or record every step: --rollout-only, or log.rollouts_every of 1"
        )
    checks = _Checks(config)
    places: list[_Place] = []
    digest = blake2b(digest_size=16)
    seen: dict[int, Path] = {}
    for step, file in enumerate(files[: config.run.steps]):
        batch = list(_read(file))
        checks.require_whole(file, len(batch))
        for offset, meta in batch:
            if meta.ordinal in seen:
                raise DataError(
                    f"{file}: group {meta.ordinal} is in {seen[meta.ordinal].name} too: one of them is of a "
                    "history that was rolled back; remove the file that is not in metrics.jsonl's order"
                )
            seen[meta.ordinal] = file
            places.append(checks.require_trainable(file, offset, step, meta))
            digest.update(meta.checksum.to_bytes(4, "little"))
    return Recording(places, digest.hexdigest())


def _read(file: Path) -> Iterator[tuple[int, GroupMeta]]:
    """Each group of a file, with the byte that it starts at, by ordinal."""
    offset, found = 0, []
    try:
        with file.open("rb") as opened:
            for record in read_records(opened):
                found.append((offset, group_meta(decode_group(record), record)))
                offset += len(record)
    except (OSError, CodecError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    return iter(sorted(found, key=lambda pair: pair[1].ordinal))


class _Checks:
    """What ``config`` asks of each recorded group."""

    def __init__(self, config: Config) -> None:
        self._screening = Screening(config, CreditAssignment(config))
        self._batch = config.rollout.groups_per_step
        self._longest = config.max_sequence_tokens
        self._bound = config.schedule.max_staleness
        self._masks = config.schedule.at_bound == "mask"

    def require_whole(self, file: Path, groups: int) -> None:
        if groups != self._batch:
            raise DataError(
                f"{file} holds {groups} groups, rollout.groups_per_step = {self._batch}: a replay trains the "
                f"batches that were recorded; set rollout.groups_per_step to {groups}"
            )

    def require_trainable(self, file: Path, offset: int, step: int, meta: GroupMeta) -> _Place:
        """Where the group lies, if the update from version ``step`` may train it."""
        where = f"{file}: group {meta.ordinal} ({meta.uid})"
        verdict = self._screening.unusable_because(meta)
        if verdict is not None:
            raise DataError(
                f"{where} would be {verdict[0]} by this config ({verdict[1]}), and the batch not be whole; "
                "replay it with the rollout and algorithm settings that it was recorded with"
            )
        longest = max(t.prompt_tokens + t.response_tokens for t in meta.trajectories)
        if longest > self._longest:
            raise DataError(
                f"{where} has a sequence of {longest} tokens; expected at most data.max_prompt_tokens + "
                f"rollout.max_new_tokens = {self._longest}: raise these"
            )
        newest = meta.newest_version
        assert newest is not None, "what has no trained token was screened out"
        if newest > step:
            raise DataError(
                f"{where} holds tokens of version {newest}, but its batch is number {step} of the "
                f"recording, trained at version {step}: steps are missing before it; record every "
                "step (log.rollouts_every: 1), from the start model on"
            )
        trained = unmasked(step, self._bound, meta) if self._masks else meta
        lag = group_lag(step, trained)
        if lag is None or lag > self._bound:
            oldest = group_lag(step, meta)
            raise DataError(
                f"{where} holds tokens that lag {oldest} versions behind the update that would train it, "
                f"from version {step}; schedule.max_staleness = {self._bound}: raise it to {oldest}, "
                f"or lower run.steps to {step}"
            )
        return _Place(file, offset, meta.nbytes, meta.uid, meta.start_version, newest)


def _require_same(config: Config, recorded: RecordedRun, run: Path) -> None:
    values = config.model_dump(mode="json")
    for key in _SAME:
        section, name = key.split(".")
        found = values[section][name]
        was = recorded.setting(section, name)
        if found != was:
            raise ConfigError(
                f"{key}: found {found!r}, but {run} was recorded with {was!r}; expected the same, because "
                "the recorded log-probs and versions are of that policy"
            )
