"""Lag of the trained groups for five settings of the two knobs, on long-tailed answer lengths.

    python benchmarks/lag.py [--steps 25] [--json FILE] [key.sub=value ...]

The quickstart's model counts to n, with n log-normal (asyncrl/examples/counting.py). For each (D, S) this
checks on every line of metrics.jsonl that no lag exceeds S and that the ledger balances, and prints the
mean and the largest lag. The mean is near D where generation is the faster side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
SETTINGS = ((0, 0), (1, 1), (1, 2), (2, 4), (4, 8))
STATES = ("running", "ready", "training", "trained", "filtered", "dropped", "failed")
COUNTING = (
    "data.train={python: 'asyncrl.examples.counting:rows', args: {count: 4000, sigma: 1.0}}",
    "reward.functions=['asyncrl.examples.counting:reward']",
    "data.eval=null",
    "rollout.max_new_tokens=200",
    "model.create.warm_start.steps=150",
    "log.trackers=[]",
    "log.rollouts_every=0",
)


def run(folder: Path, depth: int, bound: int, steps: int, overrides: list[str]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of one run."""
    name = f"d{depth}-s{bound}"
    command = [sys.executable, "-m", "asyncrl.cli", "train", "--config", str(CONFIG), *COUNTING]
    command += [f"run.dir={folder}", f"run.name={name}", f"run.steps={steps}"]
    command += [f"schedule.pipeline_depth={depth}", f"schedule.max_staleness={bound}", *overrides]
    subprocess.run(command, check=True)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def check(lines: list[dict[str, Any]], depth: int, bound: int) -> dict[str, float]:
    """The run's figures. Raises AssertionError on a line that breaks the bound or does not balance."""
    for line in lines:
        assert line.get("staleness/max", 0) <= bound, line
        assert line["ledger/submitted"] == sum(line[f"ledger/{state}"] for state in STATES), line
    trained = [line for line in lines if line["step"] > 2 * depth + 1]
    return {
        "pipeline_depth": depth,
        "max_staleness": bound,
        "lag_mean": statistics.fmean(line["staleness/mean"] for line in trained),
        "lag_max": max(line["staleness/max"] for line in trained),
        "learner_waited": statistics.fmean(
            line["timing_s/wait_for_batch"] / line["timing_s/step"] for line in trained
        ),
        "tokens_per_s": statistics.fmean(line["perf/tokens_per_s"] for line in trained),
        "length_mean": statistics.fmean(line["response_length/mean"] for line in trained),
        "length_max": max(line["response_length/max"] for line in trained),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=25, help="updates of each run (default 25)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("overrides", nargs="*", help="settings for all runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = [
            check(run(Path(scratch), depth, bound, args.steps, args.overrides), depth, bound)
            for depth, bound in SETTINGS
        ]
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    sys.stdout.write("".join(f"{name:>16}" for name in rows[0]) + "\n")
    for row in rows:
        sys.stdout.write("".join(f"{value:16.2f}" for value in row.values()) + "\n")


if __name__ == "__main__":
    main()
