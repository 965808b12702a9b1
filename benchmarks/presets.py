"""Every preset on the quickstart's task, synchronous and overlapped: eval reward before and after.

    python benchmarks/presets.py [--only grpo rloo ...] [--steps 60] [--folder FOLDER] [key.sub=value ...]

Writes benchmarks/presets.json and docs/presets.md after every run, and starts no run that is in the JSON
file with the same settings: a sweep that was stopped goes on where it was. A preset that this version
refuses is left out and named.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl.algorithms.names import PRESETS
from asyncrl.config_load import load_config
from asyncrl.errors import ConfigError

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "quickstart.yaml"
SCHEDULES = ((0, 0), (1, 2))
"""Pipeline depth and staleness bound."""
log = logging.getLogger("presets")


@dataclass(frozen=True)
class Row:
    """One run. ``settings`` are all that it differs in from the quickstart."""

    preset: str
    pipeline_depth: int
    max_staleness: int
    settings: list[str]
    steps: int
    before: float
    after: float
    seconds: float
    lag_mean: float

    @property
    def key(self) -> tuple[str, ...]:
        return self.preset, *self.settings


def settings_of(preset: str, depth: int, bound: int, steps: int, overrides: list[str]) -> list[str]:
    return [
        f"algorithm.preset={preset}",
        f"schedule.pipeline_depth={depth}",
        f"schedule.max_staleness={bound}",
        f"run.steps={steps}",
        *overrides,
    ]


def measure(preset: str, depth: int, bound: int, settings: list[str], folder: Path) -> Row:
    """Train, and read from metrics.jsonl what came of it."""
    # The time is in the name, so that what an interrupted run left behind is in nobody's way.
    name = f"{preset}-d{depth}-s{bound}-{time.time_ns() // 10**6}"
    command = [sys.executable, "-m", "asyncrl.cli", "train", "--config", str(CONFIG), *settings]
    command += [
        f"run.dir={folder}",
        f"run.name={name}",
        "log.rollouts_every=0",
        "log.trackers=[]",
        "eval.every=30",
    ]
    subprocess.run(command, check=True)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval/reward_mean" in line]
    trained = lines[1:]
    assert all(line["staleness/max"] <= bound for line in trained), f"{name}: a lag above {bound}"
    return Row(
        preset,
        depth,
        bound,
        settings,
        steps=int(lines[-1]["policy_version"]),
        before=evaluations[0]["eval/reward_mean"],
        after=evaluations[-1]["eval/reward_mean"],
        seconds=lines[-1]["time"] - lines[0]["time"],
        lag_mean=sum(line["staleness/mean"] for line in trained) / len(trained),
    )


def table(rows: list[Row], refused: dict[str, str]) -> str:
    """Markdown: what docs/presets.md says."""
    lines = [
        "# Presets on the quickstart's task",
        "",
        "Three-digit sums, a model of 1 million parameters, two CPU cores: greedy reward on 200 held-out "
        "prompts before",
        "and after training, and the seconds that training took, evaluations included. "
        "`python benchmarks/presets.py`",
        "makes this page.",
        "",
        "| preset | D | S | steps | mean lag | before | after | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{r.preset}` | {r.pipeline_depth} | {r.max_staleness} | {r.steps} | {r.lag_mean:.2f} "
        f"| {r.before:.3f} | {r.after:.3f} | {r.seconds:.0f} |"
        for r in sorted(rows, key=lambda r: (list(PRESETS).index(r.preset), r.pipeline_depth, r.settings))
    ]
    lines += [f"\n`{preset}` was refused: {why}" for preset, why in refused.items()]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """All or nothing: a sweep may be stopped at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(PRESETS), default=list(PRESETS), metavar="PRESET")
    parser.add_argument("--steps", type=int, default=60, help="updates of each run (default 60)")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where the runs go (default runs)")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "presets.json")
    parser.add_argument("--markdown", type=Path, default=ROOT / "docs" / "presets.md")
    parser.add_argument("overrides", nargs="*", help="settings for all runs")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows = [Row(**row) for row in json.loads(args.json.read_text())] if args.json.exists() else []
    done, refused = {row.key for row in rows}, {}
    for preset in args.only:
        for depth, bound in SCHEDULES:
            settings = settings_of(preset, depth, bound, args.steps, args.overrides)
            if (preset, *settings) in done:
                log.info("%s with D=%d, S=%d is done", preset, depth, bound)
                continue
            try:
                load_config(CONFIG, settings)
            except ConfigError as error:
                refused[preset] = str(error).strip().splitlines()[-1].strip()
                log.warning("%s is refused: %s", preset, error)
                continue
            rows.append(measure(preset, depth, bound, settings, args.folder))
            write(args.json, json.dumps([asdict(row) for row in rows], indent=2) + "\n")
            write(args.markdown, table(rows, refused))
            log.info("%s", rows[-1])


if __name__ == "__main__":
    main()
