"""What a run left in its folder, read back: of a run that ended, broke off, or still goes on.

Invariants:
- Nothing here needs the run's own version of asyncrl: keys that are missing or unknown are no fault.
- A line that cannot be read, as the last of a killed run, is left out and counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from asyncrl.errors import UsageError

Record = Mapping[str, Any]
"""A line of a .jsonl file."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run's folder."""

    folder: Path
    config: Mapping[str, Any]
    """``config.yaml`` as it stands there, unchecked; empty where there is none."""
    lines: tuple[Record, ...]
    """``metrics.jsonl``: one before the first step, and one a step."""
    retired: tuple[Record, ...]
    """``ledger.jsonl``: one a group that was retired."""
    unreadable: int
    """Lines of both that are not whole."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def trace(self) -> Path:
        """The run's timeline; there may be none."""
        return self.folder / "trace.json"

    @property
    def steps(self) -> list[Record]:
        """The lines that a step was measured in."""
        return [line for line in self.lines if "timing_s/step" in line]

    def setting(self, section: str, key: str) -> Any:
        """One key of the config; None where it does not have it."""
        values = self.config.get(section)
        return values.get(key) if isinstance(values, Mapping) else None


def read_run(folder: Path) -> RecordedRun:
    """Read a run's folder. UsageError where it is none."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise UsageError(f"found no {metrics}; expected the folder of a run, <run.dir>/<run.name>")
    lines, torn_lines = _read_lines(metrics)
    retired, torn_retired = _read_lines(folder / "ledger.jsonl")
    return RecordedRun(
        folder=folder,
        config=_read_config(folder / "config.yaml"),
        lines=tuple(line for line in lines if isinstance(line.get("step"), int)),
        retired=tuple(retired),
        unreadable=torn_lines + torn_retired,
    )


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"run": {"seed": 0}}`` as ``{"run.seed": 0}``; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Keys that the configs do not agree on, with each one's value; None where a config lacks it."""
    flat = [flattened(config) for config in configs]
    keys = dict.fromkeys(key for config in flat for key in config)
    values = {key: tuple(config.get(key) for config in flat) for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Whole lines, and the number of others; nothing where there is no file."""
    if not path.is_file():
        return [], 0
    records, unreadable = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            unreadable += 1
    return records, unreadable


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return values if isinstance(values, Mapping) else {}
