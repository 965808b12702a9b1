"""That a run went back to the checkpoint which ``checkpoint.resume`` names: ``<run>/resumed_from.json``.

A run that was killed is started by the same command again, with the same path in it. It has been there: it
goes on from the checkpoints that it made since.

Invariants:
- The note is made after the run's files were brought back there, and before anything is added to them: what
  was cut short in between is done again.
- A start with any other ``checkpoint.resume`` removes it.
"""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.checkpoint.files import replace_file
from asyncrl.config import Config

NOTE = "resumed_from.json"


def named_checkpoint(config: Config) -> Path | None:
    """The folder that ``checkpoint.resume`` names; None where it is ``auto`` or ``never``."""
    resume = config.checkpoint.resume
    return None if resume in ("auto", "never") else Path(resume)


def is_own(config: Config, checkpoint: Path) -> bool:
    """Whether ``checkpoint`` lies in the run's own folder."""
    # Its place, not what it may be a link to.
    return checkpoint.parent.resolve() == (config.run.folder / "checkpoints").resolve()


def went_back(config: Config, checkpoint: Path) -> bool:
    """Whether the run went back to ``checkpoint`` when it was last started."""
    try:
        return (config.run.folder / NOTE).read_bytes() == _note(config, checkpoint)
    except FileNotFoundError:
        return False


def forget_others(config: Config) -> None:
    """Remove the note of a start with any other ``checkpoint.resume``; before anything is rolled back."""
    checkpoint = named_checkpoint(config)
    if checkpoint is None or not went_back(config, checkpoint):
        (config.run.folder / NOTE).unlink(missing_ok=True)


def note_start(config: Config) -> None:
    """Note what ``checkpoint.resume`` names, if it names a checkpoint; once all is rolled back."""
    checkpoint = named_checkpoint(config)
    if checkpoint is not None and not went_back(config, checkpoint):
        replace_file(config.run.folder / NOTE, _note(config, checkpoint))


def _note(config: Config, checkpoint: Path) -> bytes:
    # Its own by their name: a run's folder may be moved.
    place = checkpoint.resolve().name if is_own(config, checkpoint) else str(checkpoint.resolve())
    return (json.dumps({"checkpoint": place}) + "\n").encode()
