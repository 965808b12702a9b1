"""What the simulator says of configs that it was not calibrated on, and what they come to for real.

    python benchmarks/predictions.py [--steps 30] [--rounds 3] [--out docs/predictions.json]
    python benchmarks/predictions.py --report            the page, of what there is

In each round, all costs come from synchronous and overlapped runs of configs/bench-cpu.yaml, measured as
``asyncrl tune`` does. Between two such calibrations a target runs for real, synchronous and as it stands, and
what is predicted of it is the mean of what follows from the one before and from the one after: how fast the
machine is changes within minutes, and meets both the prediction and what it is compared with.

Each target differs from the calibration in several of task, lengths, batch, slots and schedule. Of a target
the simulation gets its config and the lengths of its prompts and answers (those of its synchronous run): how
long they are is the workload, how long they take is predicted. Beside it stands what the simulation says with
the costs of the target's own two runs: what is off there is the simulation itself, the rest the costs.

Writes the figures and, beside them, a page. Started again, it makes the rounds that are missing. A round
takes about 12 minutes on 2 quiet CPU cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.bench.figures import Figures, Window, measure
from asyncrl.bench.machine import describe_machine
from asyncrl.bench.modes import MODES, as_overrides, of_steps, overrides_of
from asyncrl.bench.runs import QUIET, claim_folder, measure_variants, train_once
from asyncrl.config import Config
from asyncrl.config_load import load_config
from asyncrl.recorded import read_run
from asyncrl.simulate.run import simulate
from asyncrl.tune.costs import Costs, measure_costs, with_contention
from asyncrl.tune.search import Candidate, Laboratory, current, with_lengths

ROOT = Path(__file__).parent.parent
CALIBRATION = ROOT / "configs" / "bench-cpu.yaml"
CALIBRATION_STEPS = 18
WARM_UP = 5
COUNTING = "data.train={{python: 'asyncrl.examples.counting:rows', args: {{count: 4000, sigma: {sigma}}}}}"
CORES = ("generators.cpu_cores=[0]", "learner.cpu_cores=[1]")
TARGETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "addition: even lengths, D=1, S=2": ("quickstart", CORES),
    "counting: shorter tail, 24 groups of 4, 48 slots, D=1, S=1": (
        "bench-cpu",
        (
            COUNTING.format(sigma=0.5),
            "rollout.group_size=4",
            "rollout.groups_per_step=24",
            "generators.slots=48",
            "schedule.pipeline_depth=1",
            "schedule.max_staleness=1",
        ),
    ),
    "counting: 12 groups of 8, 32 slots, D=3, S=6, each 2nd version pushed": (
        "bench-cpu",
        (
            "rollout.groups_per_step=12",
            "generators.slots=32",
            "schedule.pipeline_depth=3",
            "schedule.max_staleness=6",
            "schedule.publish_every=2",
        ),
    ),
}
"""By name: the file in configs/, and the settings on top of it."""
SYNCHRONOUS = Candidate(0, 0, 1, 0)
log = logging.getLogger("predictions")


def calibrate() -> Costs:
    """The costs of the calibration's config: a synchronous run, and one that shows what overlap costs."""
    config = load_config(CALIBRATION)
    folder = claim_folder(config, "calibration")
    for mode in ("sync", "async"):
        short = as_overrides(of_steps(CALIBRATION_STEPS, config))
        train_once(CALIBRATION, folder, mode, [*QUIET, *MODES[mode], *short, "log.trace_mb=64"])
    costs = with_contention(measure_costs(read_run(folder / "sync")), read_run(folder / "async"))
    log.info("beside each other: update %.2f, token %.2f times", costs.update_beside, costs.token_beside)
    return costs


def run_for_real(config: Config, steps: int) -> dict[str, Any]:
    """The figures of a target by mode, and its own costs."""
    folder = claim_folder(config, "prediction")
    window = Window(WARM_UP, steps, config.schedule.pipeline_depth + 1)
    variants = {mode: (*overrides_of(mode, config), "log.trace_mb=64") for mode in MODES}
    real = measure_variants(config, variants, window, repeats=1, folder=folder, config_name="target")
    figures = {mode: shown(found) for mode, (found,) in real.items()}
    own = with_contention(measure_costs(read_run(folder / "sync-0")), read_run(folder / "async-0"))
    return {"figures": figures, "own": own}


def predict(config: Config, costs: Costs, own: Costs, steps: int) -> dict[str, Any]:
    """The figures of a target by mode, simulated with ``costs`` and the lengths of its ``own`` runs."""
    window = Window(WARM_UP, steps, config.schedule.pipeline_depth + 1)
    laboratory = Laboratory(config, replace(costs, lengths=own.lengths, prompt_tokens=own.prompt_tokens))
    slots = config.generators.slots
    candidates = {"sync": replace(SYNCHRONOUS, slots=slots), "async": current(config)}
    return {
        mode: shown(
            measure(
                simulate(with_lengths(laboratory.simulation(candidate, window.total), own.lengths)).lines,
                window,
            )
        )
        for mode, candidate in candidates.items()
    }


def shown(figures: Figures) -> dict[str, float]:
    return {
        "tokens_per_s": figures.tokens_per_s,
        "lag_mean": figures.lag_mean,
        "step_s": figures.step_s,
        "train_s": figures.train_s,
        "generate_s": figures.generate_s,
        "generator_busy": figures.generator_busy,
        "learner_busy": figures.learner_busy,
    }


# ---------------------------------------------------------------- page


def column(rounds: Sequence[dict[str, Any]], name: str, mode: str, kind: str, figure: str) -> list[float]:
    """One figure of each round."""
    return [float(found[name][mode][kind][figure]) for found in rounds]


def errors(rounds: Sequence[dict[str, Any]], name: str, mode: str, of: str = "simulated") -> list[float]:
    """Of the simulated speed in each round, as a share of the measured one."""
    simulated, real = (column(rounds, name, mode, kind, "tokens_per_s") for kind in (of, "real"))
    return [predicted / measured - 1 for predicted, measured in zip(simulated, real, strict=True)]


def page(document: dict[str, Any]) -> str:
    rounds, machine = document["rounds"], document["machine"]
    lines = [
        "# Simulated and measured",
        "",
        "What `asyncrl tune` and `asyncrl simulate` predict of configs that they were not calibrated on, by",
        "`benchmarks/predictions.py`. All costs are of synchronous and overlapped runs of",
        "`configs/bench-cpu.yaml`, one of each right before a target's real runs and one right after them:",
        "what is predicted is the mean of both. Of each target the simulation knows the config, and how long",
        "prompts and answers of its synchronous run are.",
        "",
        "The last two columns are simulated with the costs of the target's own two runs: what is off there",
        "is the simulation itself, all else the costs: those of another config, on a machine whose speed",
        "changes within minutes.",
        "",
        f"Machine: {machine['processor']}, {machine['cores']} cores. {document['steps']} steps, "
        f"{len(rounds)} rounds; medians, each round's own value behind them.",
        "",
        "| target | mode | tokens/s simulated | measured | error | mean lag simulated | measured "
        "| error with its own costs | mean lag |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in TARGETS:
        for mode in MODES:
            of_each = errors(rounds, name, mode)
            cells = [name, mode]
            for kind in ("simulated", "real"):
                rates = column(rounds, name, mode, kind, "tokens_per_s")
                each = ", ".join(f"{rate:,.0f}" for rate in rates)
                cells.append(f"{statistics.median(rates):,.0f} ({each})")
            each = ", ".join(f"{error:+.1%}" for error in of_each)
            cells.append(f"{statistics.median(of_each):+.1%} ({each})")
            lags = {
                kind: statistics.median(column(rounds, name, mode, kind, "lag_mean"))
                for kind in ("simulated", "real", "own")
            }
            with_own = errors(rounds, name, mode, of="own")
            each = ", ".join(f"{error:+.1%}" for error in with_own)
            cells += [f"{lags['simulated']:.2f}", f"{lags['real']:.2f}"]
            cells += [f"{statistics.median(with_own):+.1%} ({each})", f"{lags['own']:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- all of it


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30, help="steps in the window (default 30)")
    parser.add_argument("--rounds", type=int, default=3, help="how often all is measured (default 3)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "predictions.json")
    parser.add_argument("--report", action="store_true", help="only write the page again")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    document = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.report and "rounds" not in document:
        raise SystemExit(f"found no rounds in {args.out}: run without --report first")
    if not args.report:
        if document.get("steps") != args.steps:
            document = {"steps": args.steps, "machine": describe_machine(), "rounds": []}
        while len(document["rounds"]) < args.rounds:
            document["rounds"].append(measure_round(args.steps))
            args.out.write_text(json.dumps(document, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(page(document))


def measure_round(steps: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    before = calibrate()
    for name, (file, overrides) in TARGETS.items():
        config = load_config(ROOT / "configs" / f"{file}.yaml", overrides)
        real = run_for_real(config, steps)
        after = calibrate()
        simulated = [predict(config, costs, real["own"], steps) for costs in (before, after)]
        own = predict(config, real["own"], real["own"], steps)
        found[name] = {
            mode: {
                "real": real["figures"][mode],
                "simulated": mean([each[mode] for each in simulated]),
                "own": own[mode],
            }
            for mode in MODES
        }
        for mode in MODES:
            (error,) = errors([found], name, mode)
            log.info("%s, %s: simulated speed is off by %+.1f %%", name, mode, 100 * error)
        before = after
    return found


def mean(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each figure."""
    return {name: statistics.fmean(each[name] for each in figures) for name in figures[0]}


if __name__ == "__main__":
    main()
