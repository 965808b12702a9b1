"""The small model that a config asks for with ``model.create``, made on first use.

Invariants:
- A model folder that exists is whole: it is built beside its place and renamed into it.
- One process builds at a time; the others wait for it, and then find the model.
- The folder's name holds a hash of all that the weights depend on, so a changed ``create`` or
  ``data`` block (or data file) makes another model and never overwrites one.
- Imports no torch or transformers until a model has to be made.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.config import Config, CreateSection
from asyncrl.data.sources import parts
from asyncrl.errors import ConfigError, DeadlineError
from asyncrl.models.progress import ProgressCallback

logger = logging.getLogger(__name__)

RECIPE = 2
"""Part of the hash: raise it when the same config should give other weights."""
BUILD_TIMEOUT_S = 900.0


def model_folder(config: Config, folder: Path | None = None) -> Path:
    """Where the model of ``config`` is, or will be: ``<run.dir>/.models/llama-<hash>``.

    Relative paths of data files are taken from ``folder`` (default: the current one). Raises
    ConfigError if the config has no ``model.create``.
    """
    facts = {
        "recipe": RECIPE,
        "create": _create_section(config).model_dump(mode="json"),
        "data": config.data.model_dump(mode="json"),
        "files": _file_digests(config, folder or Path.cwd()),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    return Path(config.run.dir) / ".models" / f"llama-{digest}"


def ensure_model(
    config: Config,
    progress: ProgressCallback | None = None,
    *,
    folder: Path | None = None,
    timeout_s: float = BUILD_TIMEOUT_S,
) -> Path:
    """The Hugging Face folder of ``model.create``: found, or made now, with its warm start.

    ``progress`` hears of the warm start every few updates. Relative paths of data files are taken
    from ``folder`` (default: the current one). Raises ConfigError without ``model.create``, DataError
    for data that cannot be read or rows that have no answer to show, and DeadlineError if another
    process is still making the model after ``timeout_s``.
    """
    place = model_folder(config, folder)
    if place.exists():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{place.parent} cannot be made: {error.strerror}; set run.dir to a folder that can be written"
        ) from error
    with _only_builder(place.with_name(f"{place.name}.lock"), timeout_s):
        if place.exists():
            return place
        draft = place.with_name(f"{place.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)  # what a builder that was killed left behind
        from asyncrl.models.build import build_model

        build_model(config, _create_section(config), draft, folder, progress or (lambda _: None))
        draft.rename(place)
    return place


def _create_section(config: Config) -> CreateSection:
    if config.model.create is None:
        raise ConfigError("model.create is not set; expected it where a model is to be made")
    return config.model.create


def _file_digests(config: Config, folder: Path) -> dict[str, str]:
    """SHA-256 of the local files that the data block names."""
    digests = {}
    sections = (config.data.train, config.data.eval, *config.data.eval_sets.values())
    for source in (part for section in sections if section is not None for _, part in parts(section, "")):
        names = [source.path, source.python.rpartition(":")[0] if source.python else None]
        for name in filter(None, names):
            if (folder / name).is_file():
                with (folder / name).open("rb") as file:
                    digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


@contextmanager
def _only_builder(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock file ``path``. The kernel frees it when its holder ends, however that comes."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is making this model; waiting for it (%s)", path)
            _lock_within(path, file.fileno(), timeout_s)
        yield


def _lock_within(path: Path, descriptor: int, timeout_s: float) -> None:
    # flock knows no timeout, so it waits in a thread of its own. The duplicate shares the lock and
    # stays valid in that thread if this side gives up and closes its file.
    duplicate = os.dup(descriptor)

    def wait() -> None:
        fcntl.flock(duplicate, fcntl.LOCK_EX)
        os.close(duplicate)

    waiter = threading.Thread(target=wait, name="model-lock", daemon=True)
    waiter.start()
    waiter.join(timeout_s)
    if waiter.is_alive():
        raise DeadlineError(
            f"waited {timeout_s:.0f} s for another process to finish making the model; it holds {path}. "
            "End that process, or give this run another run.dir"
        )
