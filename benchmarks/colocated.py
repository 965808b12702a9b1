"""What taking turns on the same parameters costs and buys, with the torch engine on CPU.

    python benchmarks/colocated.py                       all of it, then docs/colocated-table.md
    python benchmarks/colocated.py --pairs 1 --steps 8   less of the runs
    python benchmarks/colocated.py --report              the page, of what there is

- Runs: ``asyncrl train`` colocated at pipeline_depth 1 against 0, in turn, on answers with long-tailed
  lengths (counting to n, n log-normal). A learning rate of next to nothing leaves the policy as it is, so
  that both have the same lengths to sample.
- Pushes: seconds and bytes of one, colocated and split, for two sizes of a model.
- Bytes: who holds how much in each phase of a turn.

What is in the JSON file already, with the same settings, is not measured again: one that was stopped goes on
where it was. All of it takes about 8 minutes on 2 quiet CPU cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colocated_parts import SLOTS, make_job, measure
from lag import COUNTING, STATES

from asyncrl.bench.machine import describe_machine
from asyncrl.inherited import set_inherited
from asyncrl.queues.codec import decode_group, read_records
from asyncrl.types import Trajectory

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "colocated.yaml"
SCHEDULES = {0: 0, 1: 2}
"""max_staleness by pipeline_depth."""
SETTINGS = (
    "learner.lr=1.0e-8",
    "learner.warmup_steps=0",
    "log.rollouts_every=1",
    "eval.every=0",
    "checkpoint.every=0",
    # A prompt of these is 10 tokens long; a wrong limit would make the slots longer than they need to be.
    "data.max_prompt_tokens=16",
)
MODELS = ((128, 4), (512, 8))
"""(hidden size, layers)."""
PHASES = ("start", "rollout", "before update", "in update", "after update", "push")
OWNERS = ("parameters", "gradients", "optimizer", "kv", "staging")
log = logging.getLogger("colocated")


# ---------------------------------------------------------------- runs


def run(
    depth: int, pair: int, steps: int, warm_up: int, folder: Path, overrides: list[str]
) -> dict[str, Any]:
    """One ``asyncrl train``, and its figures over the steps after the warm-up."""
    name = f"d{depth}-pair{pair}"
    shutil.rmtree(folder / name, ignore_errors=True)  # of a measurement that was stopped
    command = [sys.executable, "-m", "asyncrl.cli", "train", "--config", str(CONFIG), *COUNTING, *SETTINGS]
    command += [f"run.dir={folder}", f"run.name={name}", f"run.steps={steps + warm_up}", f"run.seed={pair}"]
    command += [f"schedule.pipeline_depth={depth}", f"schedule.max_staleness={SCHEDULES[depth]}", *overrides]
    subprocess.run(command, check=True)
    lines = read_lines(folder / name / "metrics.jsonl")
    require_nothing_lost(lines, read_lines(folder / name / "ledger.jsonl"), SCHEDULES[depth])
    window = [line for line in lines if line["step"] > warm_up]
    seconds = sum(line["timing_s/step"] for line in window)
    tokens = sum(line["perf/tokens_per_s"] * line["timing_s/step"] for line in window)
    answers = list(trained_answers(folder / name / "rollouts"))
    spans = [1 + int(answer.versions[-1]) - int(answer.versions[0]) for answer in answers]
    return {
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / len(window),
        "train_s": statistics.fmean(line["timing_s/train"] for line in window),
        "turns_s": statistics.fmean(line["timing_s/turns"] for line in window),
        "occupancy": statistics.fmean(line["generator/occupancy"] for line in window),
        "lag_mean": statistics.fmean(line["staleness/mean"] for line in window),
        "lag_max": max(line["staleness/max"] for line in window),
        "carried_groups": statistics.fmean(line["turns/carried_groups"] for line in window),
        "carried_samples": statistics.fmean(line["turns/carried_samples"] for line in window),
        "answers": len(answers),
        "spans": {str(versions): spans.count(versions) for versions in sorted(set(spans))},
        "length_mean": statistics.fmean(len(answer.token_ids) for answer in answers),
        "length_max": max(len(answer.token_ids) for answer in answers),
        "submitted": lines[-1]["ledger/submitted"],
        "trained": lines[-1]["ledger/trained"],
    }


def require_nothing_lost(
    lines: list[dict[str, Any]], ledger: list[dict[str, Any]], max_staleness: int
) -> None:
    """Raise AssertionError unless the bound held and every prompt was trained on, once."""
    for line in lines:
        assert line.get("staleness/max", 0) <= max_staleness, line
        assert line["ledger/submitted"] == sum(line[f"ledger/{state}"] for state in STATES), line
    assert sorted(end["ordinal"] for end in ledger) == list(range(len(ledger)))
    assert lines[-1]["ledger/submitted"] == lines[-1]["ledger/trained"] == len(ledger)


def trained_answers(folder: Path) -> Iterator[Trajectory]:
    for path in sorted(folder.glob("step_*.msgpack")):
        with path.open("rb") as file:
            for record in read_records(file):
                yield from decode_group(record).trajectories


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------- the page


def page(report: dict[str, Any]) -> str:
    """Markdown: docs/colocated-table.md."""
    machine = report["machine"]
    lines = [
        "# Colocated, as measured",
        "",
        f"{machine['processor']}, {machine['cores']} cores. `python benchmarks/colocated.py` makes this page",
        "and `docs/colocated.json`, with all figures.",
        *runs_table(report["runs"]),
        *pushes_table(report["models"]),
        *bytes_table(report["models"]),
    ]
    return "\n".join(lines) + "\n"


def runs_table(runs: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Depth 1 against 0, by pairs."""
    yield from (
        "",
        "## Carrying unfinished answers over",
        "",
        "| run | trained tokens/s | step s | slots busy | mean lag | largest | groups carried a step "
        "| answers carried a step | answers of 2 versions or more | lost |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    )
    for name, r in runs.items():
        several = sum(count for versions, count in r["spans"].items() if int(versions) > 1)
        most = max(map(int, r["spans"]))
        yield (
            f"| {name} | {r['tokens_per_s']:,.0f} | {r['step_s']:.2f} | {r['occupancy']:.0%} "
            f"| {r['lag_mean']:.2f} | {r['lag_max']:.0f} | {r['carried_groups']:.1f} "
            f"| {r['carried_samples']:.1f} | {several} of {r['answers']}, at most {most} "
            f"| {r['submitted'] - r['trained']:.0f} of {r['submitted']:.0f} groups |"
        )
    speedups = [
        runs[f"d1-pair{pair}"]["tokens_per_s"] / runs[f"d0-pair{pair}"]["tokens_per_s"]
        for pair in range(len(runs) // 2)
    ]
    if speedups:
        lengths = [r["length_mean"] for r in runs.values()]
        longest = max(r["length_max"] for r in runs.values())
        pairs = ", ".join(f"{speedup:.2f}" for speedup in speedups)
        yield from (
            "",
            f"Depth 1 over depth 0, trained tokens/s: {statistics.median(speedups):.2f} (pairs: {pairs}).",
            f"Answers had {statistics.fmean(lengths):.0f} tokens on average, the longest {longest}.",
        )


def pushes_table(models: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield from (
        "",
        "## A push",
        "",
        "Medians, after an update each. Waking takes memory for keys and values, and computes anew those of",
        f"{SLOTS} unfinished answers, which a split push with `kv_after_swap: keep` does not.",
        "",
        "| model | parameters | split: MiB | ms | colocated: MiB | ms to name it | ms to wake at it |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    )
    for name, m in models.items():
        yield (
            f"| {name} | {m['parameters'] / 1e6:.1f} M | {m['split_bytes'] / 2**20:.1f} "
            f"| {1e3 * m['split_s']:.1f} | 0 | {1e3 * m['naming_s']:.2f} | {1e3 * m['waking_s']:.1f} |"
        )


def bytes_table(models: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, m in models.items():
        yield from (
            "",
            f"## Who holds what, MiB: {name}, float32, ZeRO 2, one rank",
            "",
            "| phase | " + " | ".join(OWNERS) + " | total |",
            "| --- |" + " --- |" * (len(OWNERS) + 1),
        )
        for phase in PHASES:
            sizes = [m["phases"][phase][owner] / 2**20 for owner in OWNERS]
            yield f"| {phase} | " + " | ".join(f"{size:.1f}" for size in (*sizes, sum(sizes))) + " |"


# ---------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=2, help="runs of each depth (default 2)")
    parser.add_argument("--steps", type=int, default=20, help="steps in a run's window (default 20)")
    parser.add_argument("--warm-up", type=int, default=3, help="steps left out before it (default 3)")
    parser.add_argument("--pushes", type=int, default=5, help="pushes of each model and way (default 5)")
    parser.add_argument("--folder", type=Path, default=Path("runs/colocated"), help="where the runs go")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "colocated.json")
    parser.add_argument("--markdown", type=Path, default=ROOT / "docs" / "colocated-table.md")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the page")
    parser.add_argument("overrides", nargs="*", help="settings for all runs")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    set_inherited()
    settings = {key: getattr(args, key) for key in ("pairs", "steps", "warm_up", "pushes", "overrides")}
    report: dict[str, Any] = {"machine": describe_machine(), "settings": settings, "runs": {}, "models": {}}
    if args.json.exists():
        found = json.loads(args.json.read_text())
        if args.report or (found["settings"], found["machine"]) == (settings, report["machine"]):
            report = found
        else:
            log.info("%s is of other settings or of another machine: measuring anew", args.json)
    if not args.report:
        measure_missing(report, args)
    write(args.markdown, page(report))


def measure_missing(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Everything that ``report`` has not yet, kept after each part."""
    for hidden, layers in MODELS:
        name = f"{hidden} wide, {layers} layers"
        if name in report["models"]:
            log.info("%s: measured already", name)
            continue
        with tempfile.TemporaryDirectory() as folder:
            report["models"][name] = measure(make_job(folder, hidden, layers, args.pushes))
        keep(report, args)
    for pair in range(args.pairs):
        for depth in SCHEDULES:
            name = f"d{depth}-pair{pair}"
            if name in report["runs"]:
                log.info("%s: measured already", name)
                continue
            figures = run(depth, pair, args.steps, args.warm_up, args.folder, args.overrides)
            report["runs"][name] = figures
            keep(report, args)


def keep(report: dict[str, Any], args: argparse.Namespace) -> None:
    write(args.json, json.dumps(report, indent=2) + "\n")


def write(path: Path, text: str) -> None:
    """All or nothing: a measurement may be stopped at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    main()
