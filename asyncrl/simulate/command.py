"""``asyncrl simulate``: a workload in several modes, in virtual time, reported as ``bench`` does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from asyncrl.bench.comparison import Comparison
from asyncrl.bench.figures import Window, measure
from asyncrl.bench.modes import overrides_of, require_overlap
from asyncrl.bench.output import write_json
from asyncrl.bench.table import print_comparison
from asyncrl.bench.verdict import judge
from asyncrl.simulate.run import SimulatedRun, simulate
from asyncrl.simulate.workload import SimulationConfig, load_simulation, with_settings

log = logging.getLogger(__name__)


def simulate_modes(
    file: Path, overrides: Sequence[str], modes: Sequence[str], *, warm_up: int, out: Path | None = None
) -> tuple[SimulationConfig, dict[str, SimulatedRun], Comparison]:
    """Run the workload in each mode; ``run.steps`` steps are measured, after ``warm_up`` of them.

    With ``out``, each mode's files go into a folder of its name there.

    Raises ConfigError for what is wrong with the file or cannot be run in a mode, and what ends a run.
    """
    config = load_simulation(file, overrides)
    require_overlap(config, modes)
    window = Window(warm_up, config.run.steps, config.schedule.pipeline_depth + 1)
    runs = {}
    for mode in modes:
        settings = (*overrides_of(mode, config), f"run.steps={window.total}")
        in_mode = with_settings(config, settings, name=f"{file} in mode {mode}")
        runs[mode] = simulate(in_mode, out=None if out is None else out / mode)
    figures = {mode: [measure(run.lines, window)] for mode, run in runs.items()}
    return config, runs, Comparison.of(figures)


def run_simulation(
    file: Path,
    overrides: Sequence[str],
    modes: Sequence[str],
    *,
    warm_up: int,
    json_file: Path | None,
    out: Path | None,
    console: Console,
) -> None:
    """The command: simulate, print the table, and write the object of ``--json``."""
    config, runs, comparison = simulate_modes(file, overrides, modes, warm_up=warm_up, out=out)
    verdict = judge(comparison, config)
    title = f"{config.run.name}: {config.run.steps} simulated steps"
    print_comparison(console, comparison, verdict, title, learns=False)
    for mode, run in runs.items():
        log.info(
            "%s: %d steps and %s answers in %.0f s of virtual time, at %.0f us of processor time an answer",
            mode,
            run.summary.steps,
            f"{run.trajectories:,}",
            run.summary.wall_s,
            1e6 * run.cpu_s / max(1, run.trajectories),
        )
    if json_file is not None:
        write_json(json_file, comparison.as_json(config.model_dump(mode="json"), {"simulated": True}))
