"""``asyncrl bench``: real runs of one config in several modes, interleaved, and what came of it.

Invariants:
- Each run is ``asyncrl train`` in a process of its own, as a user would start it; modes differ in nothing
  but the overrides of ``modes.py``.
- Runs are interleaved (A B A B), so that whatever the machine does in the long run meets every mode.
- A signal goes on to the run that is under way, which ends in good order, and with it the command.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from asyncrl.bench.comparison import Comparison
from asyncrl.bench.figures import Figures, Line, Window, measure
from asyncrl.bench.machine import describe_machine
from asyncrl.bench.modes import MODES, require_overlap
from asyncrl.bench.output import write_json
from asyncrl.bench.table import print_comparison
from asyncrl.bench.verdict import judge
from asyncrl.config import Config
from asyncrl.config_load import dump_config, parse_config
from asyncrl.errors import BenchRunError, ConfigError, UsageError

log = logging.getLogger(__name__)

# What costs time beside the steps, and is no part of them.
_QUIET = (
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
_SHOWN_LINES = 20


def run_bench(
    config: Config,
    modes: Sequence[str],
    *,
    steps: int,
    repeats: int,
    warm_up: int,
    json_file: Path | None,
    console: Console,
) -> int:
    """Measure ``steps`` steps of each mode, ``repeats`` times; returns the exit code.

    Everything stays in ``<run.dir>/<run.name>-bench-<time>/``. Raises UsageError for what the user can fix,
    BenchRunError where a run fails.
    """
    require_overlap(config, modes)
    window = Window(warm_up, steps, config.schedule.pipeline_depth + 1)
    for mode in modes:
        parse_config(config.model_dump(mode="json"), MODES[mode], name=f"the config in mode {mode}")
    folder = _claim(config)
    config_file = folder / "bench.yaml"
    config_file.write_text(dump_config(config), encoding="utf-8")
    figures: dict[str, list[Figures]] = {mode: [] for mode in modes}
    count = repeats * len(modes)
    for repeat in range(repeats):
        for mode in modes:
            name = f"{mode}-{repeat}"
            log.info(
                "run %d of %d: %s, %d steps", sum(map(len, figures.values())) + 1, count, name, window.total
            )
            overrides = [
                *_QUIET,
                *MODES[mode],
                f"run.dir={folder}",
                f"run.name={name}",
                f"run.steps={window.total}",
            ]
            stopped = _train(config_file, overrides, folder / f"{name}.log")
            if stopped:
                return stopped
            found = measure(_lines(folder / name / "metrics.jsonl"), window)
            figures[mode].append(found)
            log.info("%s: %.0f trained tokens/s, %.3g s a step", name, found.tokens_per_s, found.step_s)
            write_json(folder / "runs.json", {m: [asdict(f) for f in fs] for m, fs in figures.items()})
    comparison = Comparison.of(figures)
    title = f"{config.run.name}: {steps} steps, {repeats} runs of each mode"
    print_comparison(console, comparison, judge(comparison, config), title)
    document = comparison.as_json(config.model_dump(mode="json"), describe_machine())
    for target in (folder / "bench.json", json_file):
        if target is not None:
            write_json(target, document)
    log.info("everything is in %s", folder)
    return 0


def _claim(config: Config) -> Path:
    """A folder of this measurement's own, beside the run's."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(config.run.dir) / f"{config.run.name}-bench-{stamp}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be made: {error.strerror}; set run.dir") from error
    return folder


def _train(config_file: Path, overrides: Sequence[str], log_file: Path) -> int:
    """One run, whose own deadlines bound it; 0, or where a signal was passed on, the exit code for that.

    Raises UsageError or BenchRunError, with the end of what the run said.
    """
    command = [sys.executable, "-m", "asyncrl.cli", "train", "--config", str(config_file), *overrides]
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
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        for number in early:
            process.send_signal(number)
        code = process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        return 128 + received[0]
    if code != 0:
        said = log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
        kind = UsageError if code == 2 else BenchRunError
        raise kind("\n".join([f"the run of {log_file.stem} ended with exit code {code}, after:", *said]))
    return 0


def _lines(path: Path) -> list[Line]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return list(lines)
