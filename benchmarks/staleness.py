"""What lag costs in learning: the same number of samples at D = S = 0 to 8, corrected and not.

    python benchmarks/staleness.py                          runs what is missing, then writes the report
    python benchmarks/staleness.py --report                 the report of what there is
    python benchmarks/staleness.py --depths 0 8 --seeds 0 --steps 30

Each run is the quickstart's task with 64 samples a step, another depth, correction and seed. A run that ended
is not run again, so that this can be stopped at any time and goes on where it was; one that was stopped
half-way starts anew. The report is a table (docs/staleness-table.md), all figures (docs/staleness.json) and a
picture (docs/images/staleness.png): reward on held-out questions after the last step, mean and standard
deviation over the seeds, beside the lag that the trained tokens really had.

All of it, 45 runs of 80 steps, one on each core, takes about 40 minutes on 2 quiet CPU cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "quickstart.yaml"
DEPTHS = (0, 1, 2, 4, 8)
SEEDS = (0, 1, 2)
CORES = tuple(sorted(os.sched_getaffinity(0)))
METHODS = {
    "decoupled_ppo": ("algorithm.correction=decoupled_ppo",),
    "tis": ("algorithm.correction=tis",),
    "uncorrected": ("algorithm.correction=none", "algorithm.allow_uncorrected=true"),
}
# Half the quickstart's samples a step: twice the updates, and twice the lag in them, for the same time.
COMMON = ("rollout.groups_per_step=8", "eval.every=40", "log.trackers=[]", "log.rollouts_every=0")
log = logging.getLogger("staleness")


@dataclass(frozen=True)
class Run:
    """One cell of the table and one of its seeds."""

    method: str
    depth: int
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.method}-d{self.depth}-seed{self.seed}-{self.steps}"

    def command(self, folder: Path, overrides: Sequence[str]) -> list[str]:
        settings = {
            "run.dir": folder,
            "run.name": self.name,
            "run.seed": self.seed,
            "run.steps": self.steps,
            "schedule.pipeline_depth": self.depth,
            "schedule.max_staleness": self.depth,
        }
        given = [f"{key}={value}" for key, value in settings.items()]
        command = [sys.executable, "-m", "asyncrl.cli", "train", "--config", str(CONFIG)]
        return [*command, *given, *COMMON, *METHODS[self.method], *overrides]


@dataclass(frozen=True)
class Figures:
    """What one run came to."""

    run: Run
    before: float
    after: float
    lag_mean: float
    """Of the trained tokens, once the pipeline was full."""
    lag_max: float
    grad_norm: float
    wall_s: float


def read(folder: Path, run: Run) -> Figures | None:
    """The figures of a run that ended, else None. Raises AssertionError where its bound was broken."""
    file = folder / run.name / "metrics.jsonl"
    if not file.exists():
        return None
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    if not lines or "model/checksum" not in lines[-1]:
        return None
    trained = [line for line in lines if line["step"] > run.depth + 1]
    largest = max(line["staleness/max"] for line in lines[1:])
    assert largest <= run.depth, f"{run.name}: lag {largest}, max_staleness {run.depth}"
    return Figures(
        run,
        before=lines[0]["eval/reward_mean"],
        after=lines[-1]["eval/reward_mean"],
        lag_mean=statistics.fmean(line["staleness/token_mean"] for line in trained),
        lag_max=largest,
        grad_norm=statistics.fmean(line["actor/grad_norm"] for line in trained),
        wall_s=lines[-1]["time"],
    )


def perform(folder: Path, runs: Sequence[Run], overrides: Sequence[str]) -> None:
    """Run those that have not ended, one on each core. Raises CalledProcessError for one that fails."""
    left = [run for run in runs if read(folder, run) is None]
    log.info("%d of %d runs are there already", len(runs) - len(left), len(runs))
    cores: SimpleQueue[int] = SimpleQueue()
    for core in CORES:
        cores.put(core)
    began = time.monotonic()
    with ThreadPoolExecutor(len(CORES)) as pool:
        running = {pool.submit(perform_one, folder, run, cores, overrides) for run in left}
        for done, future in enumerate(as_completed(running), 1):
            try:
                found = future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            log.info(
                "%s: %.3f -> %.3f, lag %.2f; %d runs left, about %.0f minutes",
                found.run.name,
                found.before,
                found.after,
                found.lag_mean,
                len(left) - done,
                (time.monotonic() - began) / done * (len(left) - done) / 60,
            )


def perform_one(folder: Path, run: Run, cores: SimpleQueue[int], overrides: Sequence[str]) -> Figures:
    """A whole run on one of ``cores``: learner and generator share it, the lag does not depend on that."""
    shutil.rmtree(folder / run.name, ignore_errors=True)
    core = cores.get()
    pinned = [f"generators.cpu_cores=[{core}]", f"learner.cpu_cores=[{core}]"]
    try:
        with (folder / f"{run.name}.log").open("w") as out:
            command = run.command(folder, [*pinned, *overrides])
            subprocess.run(command, check=True, stdout=out, stderr=subprocess.STDOUT)
    finally:
        cores.put(core)
    found = read(folder, run)
    assert found is not None, f"{run.name} ended without a last line"
    return found


def cells(figures: Sequence[Figures]) -> Iterator[tuple[str, int, list[Figures]]]:
    """Method, depth and the seeds' figures, for each cell that has any."""
    for method in METHODS:
        for depth in sorted({f.run.depth for f in figures}):
            found = [f for f in figures if (f.run.method, f.run.depth) == (method, depth)]
            if found:
                yield method, depth, found


def spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def markdown(figures: Sequence[Figures]) -> str:
    rows = [
        "| correction | D = S | lag mean | lag max | reward before | after | gain, each seed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for method, depth, found in cells(figures):
        after = [f.after for f in found]
        gains = ", ".join(f"{f.after - f.before:+.3f}" for f in found)
        rows.append(
            f"| {method} | {depth} | {statistics.fmean(f.lag_mean for f in found):.2f} "
            f"| {max(f.lag_max for f in found):.0f} | {statistics.fmean(f.before for f in found):.3f} "
            f"| {statistics.fmean(after):.3f} ± {spread(after):.3f} | {gains} |"
        )
    return "\n".join(rows) + "\n"


def draw(figures: Sequence[Figures], file: Path) -> None:
    """Reward after the last step over the depth: a line a correction, a bar for the seeds' deviation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    depths = sorted({f.run.depth for f in figures})
    for i, method in enumerate(METHODS):
        found = [(depth, [f.after for f in each]) for name, depth, each in cells(figures) if name == method]
        if not found:
            continue
        # Beside each other, or bars of equal height would hide one another.
        x = [depths.index(depth) + 0.06 * (i - 1) for depth, _ in found]
        mean = [statistics.fmean(after) for _, after in found]
        axes.errorbar(x, mean, [spread(after) for _, after in found], marker="o", capsize=3, label=method)
    before = statistics.fmean(f.before for f in figures)
    axes.axhline(before, color="grey", linewidth=1, linestyle=":", label="start model")
    axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set_xlabel("pipeline_depth = max_staleness")
    axes.set_ylabel("held-out reward after the last step")
    axes.set_title(f"{figures[0].run.steps} steps of 64 samples of the quickstart's task")
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def report(figures: Sequence[Figures], docs: Path) -> str:
    """Write the three files; returns the table."""
    table = markdown(figures)
    docs.mkdir(parents=True, exist_ok=True)
    plain: list[dict[str, Any]] = [asdict(f) for f in figures]
    (docs / "staleness.json").write_text(json.dumps(plain, indent=1) + "\n")
    (docs / "staleness-table.md").write_text(table)
    draw(figures, docs / "images" / "staleness.png")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/staleness"), help="where the runs are")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where the report goes")
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--methods", nargs="+", default=tuple(METHODS), choices=tuple(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, default=80, help="updates of each run (default 80)")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("overrides", nargs="*", help="settings for all runs, key.sub=value")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    given.folder.mkdir(parents=True, exist_ok=True)
    # Seeds outermost: stopped early, there is a whole table of the first ones.
    runs = [Run(m, d, seed, given.steps) for seed in given.seeds for d in given.depths for m in given.methods]
    if not given.report:
        perform(given.folder, runs, given.overrides)
    figures = [found for run in runs if (found := read(given.folder, run)) is not None]
    if not figures:
        raise SystemExit(f"no run of {len(runs)} has ended in {given.folder}: run without --report first")
    sys.stdout.write(report(figures, given.docs))


if __name__ == "__main__":
    main()
