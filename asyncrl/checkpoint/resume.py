"""Going on from a checkpoint: which one, whether this config can, and the run's folder brought back to it.

Invariants:
- Only a checkpoint whose every byte is as it was written is used; ``auto`` takes the newest of those, and
  says of each newer one which file is damaged and how.
- A path is gone back to once: started by the same command again, the run goes on from what it made since.
- A config that cannot go on from it is refused before anything is changed or started. What else changed is
  said, line by line.
- Afterwards the run's files tell one history: lines after the checkpoint are in ``*.rolled_back.jsonl``,
  batches in ``rollouts/*.rolled_back``, and ``ledger.jsonl`` has one line of each ordinal that the checkpoint
  counts as retired. The best evaluation is the best one in that history of which there are weights.
- Whatever goes wrong here is a UsageError: the user decides which history counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from asyncrl.checkpoint.compatibility import Change, Origin, changes, is_sampled_anew, require_compatible
from asyncrl.checkpoint.going_back import NOTE, forget_others, is_own, named_checkpoint, note_start, went_back
from asyncrl.checkpoint.groups import READY, read_ready
from asyncrl.checkpoint.manifest import MANIFEST, verify
from asyncrl.checkpoint.rollback import Line, roll_back, roll_back_rollouts
from asyncrl.checkpoint.saver import Issued
from asyncrl.checkpoint.state import CONFIG, STATE, RunState
from asyncrl.checkpoint.store import Best, CheckpointStore
from asyncrl.config import Config
from asyncrl.errors import CheckpointError, CodecError, ConfigError
from asyncrl.types import Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint, read."""

    folder: Path
    state: RunState
    ready: tuple[Issued, ...]
    """Their payloads are bytes."""
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run goes on from."""

    folder: Path
    """The checkpoint's."""
    state: RunState
    ready: tuple[Issued, ...] = ()
    lines: tuple[Metrics, ...] = ()
    """Lines of metrics.jsonl up to the checkpoint that have to be written again."""
    lacks_line: bool = False
    """Whether the checkpoint's step has no line at all, not even among ``lines``."""
    first_evaluation: Metrics | None = None
    """What the start model was found to be worth."""
    elsewhere: bool = False
    """Whether the checkpoint is another run's, so that this one has none of its own yet."""
    finished: bool = False
    """Whether nothing is left to do."""


def require_usable(config: Config) -> None:
    """Raise ConfigError where ``checkpoint.resume`` and the run's folder contradict; a quick look only."""
    folder, resume = config.run.folder, config.checkpoint.resume
    store = CheckpointStore(folder / "checkpoints")
    metrics = folder / "metrics.jsonl"
    used, steps = metrics.exists() and metrics.stat().st_size > 0, store.steps()
    another = f"choose another run.name, or delete the folder {folder}"
    if resume == "never" and (used or steps):
        kept = f"checkpoints of {len(steps)} steps" if steps else "no checkpoint"
        raise ConfigError(
            f"checkpoint.resume: found never, but {folder} holds metrics.jsonl of another run and {kept}; "
            f"{another if not steps else another + ', or set checkpoint.resume to auto to go on from them'}"
        )
    if resume == "auto" and used and not steps:
        raise ConfigError(
            f"run.name: found {folder}, which holds metrics.jsonl of another run and no checkpoint to go on "
            f"from; {another}"
        )
    checkpoint = named_checkpoint(config)
    if checkpoint is None:
        return
    returned = went_back(config, checkpoint)
    if returned and steps:
        return
    if not (checkpoint / MANIFEST).is_file():
        raise ConfigError(
            f"checkpoint.resume: found {resume!r}, where there is no {MANIFEST}; expected auto, never, or "
            "the folder of a whole checkpoint, as in runs/NAME/checkpoints/step_50"
        )
    if (used or steps) and not (returned or is_own(config, checkpoint)):
        raise ConfigError(
            f"checkpoint.resume: found {resume}, of another run, but {folder} was used already; {another}"
            + (", or set checkpoint.resume to auto to go on from where it ended" if steps else "")
        )


def prepare(config: Config, origin: Origin) -> Resumed | None:
    """Choose the checkpoint, check ``config`` against it, and roll the run's files back to it.

    None: the run starts from its beginning. Raises ConfigError or CheckpointError.
    """
    require_usable(config)
    store = CheckpointStore(config.run.folder / "checkpoints")
    store.clear_parts()
    found = _chosen(config, store)
    if found is None:
        forget_others(config)
        return None
    changed = changes(found.config, config)
    require_compatible(found.folder, found.state, changed, config, origin)
    for change in changed:
        log.info("%s was %s and is %s from here on", change.key, change.before, change.after)
    forget_others(config)
    resumed = _rolled_back(found, config, store, changed, elsewhere=not is_own(config, found.folder))
    note_start(config)
    return resumed


def _chosen(config: Config, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint to go on from; None for a run that begins."""
    named = named_checkpoint(config)
    if named is None:
        return newest_checkpoint(store) if config.checkpoint.resume == "auto" else None
    if went_back(config, named):
        newest = newest_checkpoint(store)
        if newest is not None:
            again = f"; to go back there again, delete {config.run.folder / NOTE}"
            log.info(
                "this run went on from %s before: it goes on from step %d%s",
                named,
                newest.state.step,
                again if is_own(config, named) else "",
            )
            return newest
    return read_checkpoint(named)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify a checkpoint and read the controller's part of it. Raises CheckpointError."""
    manifest = verify(folder)
    if all(entry.path != STATE for entry in manifest.files):
        raise CheckpointError(
            f"{folder} holds weights alone, without {STATE}: no run can go on from it; expected a folder as "
            "runs/NAME/checkpoints/step_50, or asyncrl export, and the model that it makes as model.path"
        )
    state = RunState.decode((folder / STATE).read_bytes(), str(folder / STATE))
    try:
        with (folder / READY).open("rb") as file:
            ready = tuple(read_ready(file))
    except (OSError, CodecError) as error:
        raise CheckpointError(f"{folder / READY} is damaged: {error}") from error
    return Checkpoint(folder, state, ready, _config(folder / CONFIG))


def _config(path: Path) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: found {type(config).__name__}; expected the sections of a config")
    return config


def newest_checkpoint(store: CheckpointStore) -> Checkpoint | None:
    """The newest whole one; None where there is none at all. CheckpointError if all are damaged."""
    problems = []
    for step in store.without_manifest():
        log.warning("%s is no whole checkpoint: it has no %s", store.path(step), MANIFEST)
    for step in reversed(store.steps()):
        try:
            return read_checkpoint(store.path(step))
        except CheckpointError as error:
            problems.append(str(error))
            log.warning("cannot go on from step %d, trying the checkpoint before: %s", step, error)
    if problems:
        raise CheckpointError(
            f"none of the {len(problems)} checkpoints in {store.folder} is whole: {'; '.join(problems)}; "
            "choose another run.name, or delete the run's folder"
        )
    return None


def _rolled_back(
    found: Checkpoint, config: Config, store: CheckpointStore, changed: Sequence[Change], elsewhere: bool
) -> Resumed:
    state, folder = found.state, config.run.folder
    records = config.run.rollout_only
    left = config.run.steps - (state.step if records else state.version)
    last = left <= 0
    # First: where this is cut short, no later checkpoint is left whose lines are gone.
    store.set_aside(after=state.step)
    # Where no learner is, the last line waits for nothing.
    kept = roll_back(
        folder / "metrics.jsonl", lambda line: _is_through(state, line, last=last and not records)
    )
    has_line = {line["step"] for line in kept}
    lines = tuple(line for line in state.lines if line["step"] not in has_line)
    ends = roll_back(folder / "ledger.jsonl", lambda line: _is_retired(state, line.get("ordinal", -1)))
    if elsewhere:
        state = replace(state, inherited=sum(state.frontier.final_counts.values()))
    _require_whole_ledger(state, ends, folder / "ledger.jsonl")
    roll_back_rollouts(folder / "rollouts", after=state.step)
    if config.checkpoint.keep_best:
        _find_best(store, kept)
    ready = found.ready
    if ready and is_sampled_anew(changed):
        log.info("%d ready groups were sampled under another config: they are issued again", len(ready))
        ready = ()
    if state.poisoned and (
        is_sampled_anew(changed) or any(c.key.startswith(("generators.", "placement.")) for c in changed)
    ):
        log.info("%d prompts that killed generators are tried again: the config changed", len(state.poisoned))
        state = replace(state, poisoned={})
    if any(change.key.startswith("algorithm.kl") for change in changed):
        state = replace(state, kl_coefficient=None)
    log.info(
        "going on from %s: step %d, policy version %d, %d ready groups, %d retired ones",
        found.folder,
        state.step,
        state.version,
        len(ready),
        sum(state.frontier.final_counts.values()),
    )
    return Resumed(
        folder=found.folder.resolve(),
        state=state,
        ready=ready[: left * config.rollout.groups_per_step],
        lines=lines,
        lacks_line=state.step not in has_line | {line["step"] for line in lines},
        first_evaluation=_evaluation(kept),
        elsewhere=elsewhere,
        finished=last and state.step in has_line,
    )


def _is_through(state: RunState, line: Line, *, last: bool) -> bool:
    """Whether a line of metrics.jsonl stays: it is of the checkpoint's history, and lacks nothing."""
    step = line.get("step")
    if not isinstance(step, int):
        return False
    if step != state.step:
        return 0 <= step < state.step
    if last:
        return "model/checksum" in line
    waited = any(other["step"] == step for other in state.lines)
    return "eval/reward_mean" in line or not waited


def _is_retired(state: RunState, ordinal: Any) -> bool:
    return isinstance(ordinal, int) and (
        0 <= ordinal < state.frontier.lowest or ordinal in state.frontier.retired_above
    )


def _require_whole_ledger(state: RunState, ends: list[Line], path: Path) -> None:
    retired = sum(state.frontier.final_counts.values()) - state.inherited
    ordinals = {line["ordinal"] for line in ends}
    if not len(ends) == len(ordinals) == retired:
        raise CheckpointError(
            f"{path} has {len(ends)} lines of {len(ordinals)} ordinals, the checkpoint counts {retired} "
            "retired ones in it: lines were lost or repeated; restore the file, or choose another run.name"
        )


def _find_best(store: CheckpointStore, lines: Sequence[Line]) -> None:
    """Have the best evaluation again: the best one so far was rolled back, or not noted before a crash."""
    evaluated = [
        Best(line["step"], line["eval/reward_mean"])
        for line in lines
        if line["step"] and isinstance(line.get("eval/reward_mean"), float)
        # Else the evaluation had to turn to another version, whose weights are not this step's.
        if line.get("eval/policy_version") == line.get("policy_version")
    ]
    held = [best for best in evaluated if store.holding(best.step) is not None]
    found, before = max(held, key=lambda best: best.reward_mean, default=None), store.best()
    if found is not None and (before is None or found.reward_mean > before.reward_mean):
        store.set_best(found)


def _evaluation(lines: list[Line]) -> Metrics | None:
    first = lines[0] if lines and lines[0]["step"] == 0 else {}
    found = {key: value for key, value in first.items() if key.startswith("eval/")}
    return found or None
