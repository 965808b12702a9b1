"""Real runs of one config with different settings, interleaved, and the figures of each.

Invariants:
- Each run is ``asyncrl train`` in a process of its own, as a user would start it; runs of a measurement
  differ in nothing but the settings that they are named for.
- Runs are interleaved (A B A B), so that whatever the machine does in the long run meets every one.
- A signal goes on to the run that is under way, which ends in good order, and with it the measurement.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from asyncrl.bench.figures import Figures, Line, Window, measure
from asyncrl.bench.modes import as_overrides, of_steps
from asyncrl.bench.output import write_json
from asyncrl.config import Config
from asyncrl.config_load import dump_config
from asyncrl.errors import BenchRunError, ConfigError, UsageError

log = logging.getLogger(__name__)

QUIET = (
    "eval.every=0",
    "eval.max_prompts=1",
    "checkpoint.every=0",
    "checkpoint.at_end=false",
    "checkpoint.keep_best=false",
    "checkpoint.resume=never",
    "log.rollouts_every=0",
    "log.trackers=[]",
    "log.display=lines",
)
"""Switches off what costs time beside the steps, and is no part of them."""
_SHOWN_LINES = 20


class Interrupted(Exception):
    """A signal ended a run, and with it the measurement."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"ended by a signal, with exit code {exit_code}")
        self.exit_code = exit_code


def claim_folder(config: Config, kind: str) -> Path:
    """A folder of a measurement's own, ``<run.dir>/<run.name>-<kind>-<time>/``. ConfigError without one.

    Its runs find the models that were made in ``run.dir`` before, and leave theirs there.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    models = Path(config.run.dir) / ".models"
    folder = Path(config.run.dir) / f"{config.run.name}-{kind}-{stamp}"
    try:
        folder.mkdir(parents=True)
        models.mkdir(exist_ok=True)
        (folder / ".models").symlink_to(models.resolve())
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be made: {error.strerror}; set run.dir") from error
    return folder


def measure_variants(
    config: Config,
    variants: Mapping[str, Sequence[str]],
    window: Window,
    *,
    repeats: int,
    folder: Path,
    config_name: str,
) -> dict[str, list[Figures]]:
    """Run each variant ``repeats`` times, in turn, in ``folder``; by name, the figures of its runs.

    ``variants``: by name, the overrides. Raises UsageError or BenchRunError where a run fails, Interrupted.
    """
    config_file = folder / f"{config_name}.yaml"
    config_file.write_text(dump_config(config), encoding="utf-8")
    figures: dict[str, list[Figures]] = {name: [] for name in variants}
    count = repeats * len(variants)
    for repeat in range(repeats):
        for variant, overrides in variants.items():
            name = f"{variant}-{repeat}"
            done = sum(map(len, figures.values()))
            log.info("run %d of %d: %s, %d steps", done + 1, count, name, window.total)
            settings = [*QUIET, *overrides, *as_overrides(of_steps(window.total, config))]
            train_once(config_file, folder, name, settings)
            found = measure(read_lines(folder / name), window)
            figures[variant].append(found)
            log.info("%s: %.0f trained tokens/s, %.3g s a step", name, found.tokens_per_s, found.step_s)
            write_json(folder / "runs.json", {v: [asdict(f) for f in fs] for v, fs in figures.items()})
    return figures


def train_once(config_file: Path, folder: Path, name: str, overrides: Sequence[str]) -> None:
    """``asyncrl train`` into ``folder/name``, whose own deadlines bound it; what it says, beside that.

    Raises as ``run_command`` does.
    """
    command = [sys.executable, "-m", "asyncrl.cli", "train", "--config", str(config_file)]
    command += [*overrides, f"run.dir={folder}", f"run.name={name}"]
    run_command(command, folder / f"{name}.log", name)


def run_command(
    command: Sequence[str], log_file: Path, name: str, environment: Mapping[str, str] | None = None
) -> None:
    """Run ``command`` to its end; what it says goes into ``log_file``. Null ``environment``: this process's.

    Raises UsageError (exit code 2) or BenchRunError, with the end of what was said and ``name`` in front;
    Interrupted where a signal was passed on.
    """
    process: subprocess.Popen[bytes] | None = None
    received: list[int] = []
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with log_file.open("w", encoding="utf-8") as out:
            # In a session of its own: it hears of Ctrl-C from here, once.
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        for number in early:
            process.send_signal(number)
        code = process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        raise Interrupted(128 + received[0])
    if code != 0:
        said = log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
        kind = UsageError if code == 2 else BenchRunError
        raise kind("\n".join([f"the run of {name} ended with exit code {code}, after:", *said]))


def read_lines(folder: Path) -> list[Line]:
    """The lines of metrics.jsonl of a run that ended well."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
