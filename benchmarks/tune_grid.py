"""Does ``asyncrl tune`` find the best schedule? Its advice against a grid of 12, all run for real.

    python benchmarks/tune_grid.py [--steps 30] [--repeats 4] [--json docs/tune-grid.json]

A finished run of configs/quickstart.yaml (made first, or ``--from-run``) is what the advice comes from. The
grid is D in 0, 1, 2 with S = D and D + 2, each with 32 and 64 slots. All 12 run once. The fastest three of
them then run against the advice, in turn, ``--repeats`` times: the best of 12 noisy figures is flattered by
the noise, and these figures are new ones. All of it takes about 20 minutes on 2 quiet CPU cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.bench.figures import Figures, Window
from asyncrl.bench.machine import describe_machine
from asyncrl.bench.modes import as_overrides, of_steps
from asyncrl.bench.runs import QUIET, claim_folder, measure_variants, train_once
from asyncrl.config_load import load_config
from asyncrl.tune.search import Candidate

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
CALIBRATION_STEPS = 30
WARM_UP = 5
FINALISTS = 3
GRID = tuple(
    Candidate(depth, depth + more, 1, slots) for depth in (0, 1, 2) for more in (0, 2) for slots in (32, 64)
)


def advice(run: Path, folder: Path) -> dict[str, Any]:
    """What ``asyncrl tune --from-run`` says."""
    file = folder / "advice.json"
    command = [sys.executable, "-m", "asyncrl.cli", "tune", "--config", str(CONFIG), "--from-run", str(run)]
    subprocess.run([*command, "--json", str(file)], check=True)
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def name_of(candidate: Candidate) -> str:
    return f"d{candidate.depth}-s{candidate.staleness}-slots{candidate.slots}"


def rate(runs: list[Figures]) -> float:
    return statistics.median(run.tokens_per_s for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30, help="steps in the window (default 30)")
    parser.add_argument("--repeats", type=int, default=4, help="runs of the fastest and of the advice")
    parser.add_argument("--from-run", type=Path, help="a finished run of the quickstart (default: make one)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    config = load_config(CONFIG)
    folder = claim_folder(config, "advice")
    run = args.from_run
    if run is None:
        short = as_overrides(of_steps(CALIBRATION_STEPS, config))
        train_once(CONFIG, folder, "calibration", [*QUIET, *short])
        run = folder / "calibration"
    advised = advice(run, folder)
    settings = {name_of(candidate): candidate.settings(config) for candidate in GRID}
    settings["advice"] = advised["recommended"]["settings"]
    deepest = max(found["schedule.pipeline_depth"] for found in settings.values())

    def measured(names: Sequence[str], repeats: int, stage: str) -> dict[str, list[Figures]]:
        return measure_variants(
            config,
            {name: as_overrides(settings[name]) for name in names},
            Window(WARM_UP, args.steps, deepest + 1),
            repeats=repeats,
            folder=claim_folder(config, stage),
            config_name=stage,
        )

    first = measured([name_of(candidate) for candidate in GRID], 1, "grid")
    fastest = sorted(first, key=lambda name: -rate(first[name]))[:FINALISTS]
    last = measured([*fastest, "advice"], args.repeats, "final")
    best = max(fastest, key=lambda name: rate(last[name]))
    report = {
        "machine": describe_machine(),
        "steps": args.steps,
        "repeats": args.repeats,
        "advice": advised["recommended"],
        "grid": {name: rate(runs) for name, runs in first.items()},
        "final": {name: [run.tokens_per_s for run in runs] for name, runs in last.items()},
        "best": best,
        "advice_over_best": rate(last["advice"]) / rate(last[best]),
    }
    for name in sorted(first, key=lambda name: -rate(first[name])):
        again = f", in turn with the advice {rate(last[name]):,.0f}" if name in last else ""
        sys.stdout.write(f"{rate(first[name]):10,.0f} tokens/s  {name}{again}\n")
    sys.stdout.write(
        f"advice ({json.dumps(settings['advice'])}): {rate(last['advice']):,.0f}, over the best of the grid: "
        f"{report['advice_over_best']:.3f}\n"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
