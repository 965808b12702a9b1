"""``asyncrl bench``: real runs of one config in several modes, and what came of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from asyncrl.bench.comparison import Comparison
from asyncrl.bench.figures import Window
from asyncrl.bench.machine import describe_machine
from asyncrl.bench.modes import overrides_of, require_modes
from asyncrl.bench.output import write_json
from asyncrl.bench.runs import Interrupted, claim_folder, measure_variants
from asyncrl.bench.table import print_comparison
from asyncrl.bench.verdict import judge
from asyncrl.config import Config

log = logging.getLogger(__name__)


def run_bench(
    config: Config,
    modes: Sequence[str],
    *,
    steps: int,
    repeats: int,
    warm_up: int,
    json_file: Path | None,
    console: Console,
    html_file: Path | None = None,
) -> int:
    """Measure ``steps`` steps of each mode, ``repeats`` times; returns the exit code.

    Everything stays in ``<run.dir>/<run.name>-bench-<time>/``; ``html_file`` gets the first run of each mode
    side by side. Raises UsageError for what the user can fix, BenchRunError where a run fails.
    """
    require_modes(config, modes)
    if html_file is not None:
        from asyncrl.report.command import require_plotly

        require_plotly()
    window = Window(warm_up, steps, config.schedule.pipeline_depth + 1)
    folder = claim_folder(config, "bench")
    variants = {mode: overrides_of(mode, config) for mode in modes}
    try:
        figures = measure_variants(
            config, variants, window, repeats=repeats, folder=folder, config_name="bench"
        )
    except Interrupted as end:
        return end.exit_code
    comparison = Comparison.of(figures)
    title = f"{config.run.name}: {steps} steps, {repeats} runs of each mode"
    print_comparison(console, comparison, judge(comparison, config), title)
    document = comparison.as_json(config.model_dump(mode="json"), describe_machine())
    for target in (folder / "bench.json", json_file):
        if target is not None:
            write_json(target, document)
    if html_file is not None:
        from asyncrl.report.command import write_report

        write_report([folder / f"{mode}-0" for mode in modes], html_file)
    log.info("everything is in %s", folder)
    return 0
