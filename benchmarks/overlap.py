"""Trained tokens a second of configs/overlap.yaml against configs/sync.yaml, in one paired measurement.

    python benchmarks/overlap.py [--steps 40] [--repeats 2] [--json FILE] [key.sub=value ...]

Both configs run in turn (sync, overlap, sync, overlap, ...) as ``asyncrl train`` does, with the
generator on core 0 and the learner on core 1. The first steps and evaluations are left out of the
window. Tokens are response tokens with loss_mask 1 of groups trained in the window, over its time.
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

CONFIGS = Path(__file__).parent.parent / "configs"
MODES = ("sync", "overlap")
PHASES = ("train", "weight_sync", "wait_for_batch", "wait_for_policy")


def measure(
    mode: str, folder: Path, name: str, steps: int, warm_up: int, overrides: list[str]
) -> dict[str, Any]:
    """Run one config; its figures over the steps after the warm-up."""
    command = [sys.executable, "-m", "asyncrl.cli", "train", "--config", str(CONFIGS / f"{mode}.yaml")]
    command += [f"run.dir={folder}", f"run.name={name}", f"run.steps={steps + warm_up}"]
    command += ["eval.every=0", "eval.max_prompts=1", "log.rollouts_every=0", "log.trackers=[]", *overrides]
    subprocess.run(command, check=True)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    window = [line for line in lines if line["step"] > warm_up]
    seconds = sum(line["timing_s/step"] for line in window)
    tokens = sum(line["perf/tokens_per_s"] * line["timing_s/step"] for line in window)
    phases = {p: statistics.fmean(line[f"timing_s/{p}"] for line in window) for p in PHASES}
    return {
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / len(window),
        "tokens_per_step": tokens / len(window),
        "phase_s": phases,
        "generator_busy": statistics.fmean(line["perf/generator_busy"] for line in window),
        "learner_busy": statistics.fmean(line["perf/learner_busy"] for line in window),
        "occupancy": statistics.fmean(line["generator/occupancy"] for line in window),
        "staleness_mean": statistics.fmean(line["staleness/mean"] for line in window),
        "staleness_max": max(line["staleness/max"] for line in window),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="steps in the window (default 40)")
    parser.add_argument("--warm-up", type=int, default=5, help="steps left out before it (default 5)")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each config (default 2)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("overrides", nargs="*", help="settings for both configs, e.g. generators.slots=32")
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(args.repeats):
            for mode in MODES:
                name = f"{mode}-{repeat}"
                figures = measure(mode, Path(scratch), name, args.steps, args.warm_up, args.overrides)
                results[mode].append(figures)
    pairs = zip(results["sync"], results["overlap"], strict=True)
    speedups = [overlap["tokens_per_s"] / sync["tokens_per_s"] for sync, overlap in pairs]
    report = {"runs": results, "speedups": speedups, "speedup": statistics.median(speedups)}
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    columns = ("tokens_per_s", "step_s", "generator_busy", "occupancy", "learner_busy", "staleness_mean")
    sys.stdout.write("".join(f"{c:>16}" for c in ("mode", *columns, *PHASES)) + "\n")
    for mode in MODES:
        for run in results[mode]:
            values = [run[c] for c in columns] + [run["phase_s"][p] for p in PHASES]
            sys.stdout.write(f"{mode:>16}" + "".join(f"{value:16.3f}" for value in values) + "\n")
    paired = ", ".join(f"{s:.2f}" for s in speedups)
    sys.stdout.write(f"overlap / sync, trained tokens a second: {report['speedup']:.2f} (pairs: {paired})\n")


if __name__ == "__main__":
    main()
