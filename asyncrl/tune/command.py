"""``asyncrl tune``: what a config costs, the schedules that this speaks for, and how sure that is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncrl.bench.comparison import Mode
from asyncrl.bench.figures import Window
from asyncrl.bench.modes import MODES, as_overrides, of_steps
from asyncrl.bench.output import write_json
from asyncrl.bench.runs import QUIET, Interrupted, claim_folder, measure_variants, train_once
from asyncrl.config import Config
from asyncrl.config_load import dump_config
from asyncrl.errors import ConfigError
from asyncrl.recorded import RecordedRun, read_run
from asyncrl.tune.costs import Costs, measure_costs, with_contention
from asyncrl.tune.prediction import Prediction, predict_itself
from asyncrl.tune.search import (
    COLOCATED_LOSS,
    DEPTHS,
    SEEDS,
    WORTHWHILE,
    Laboratory,
    Outcome,
    as_yaml_block,
    current,
    explore,
    pareto,
    recommended,
)

log = logging.getLogger(__name__)

_CALIBRATION_STEPS = 15
_PIPELINE = {
    "schedule.pipeline_depth": 2,
    "schedule.max_staleness": 4,
    "schedule.publish_every": 1,
    "schedule.at_bound": "wait",
}
"""Of the run that shows what the sides cost each other: both are busy nearly all the time."""
_FRONT = 8
"""Candidates of the Pareto front that are simulated with every seed."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What a search came to."""

    front: list[Outcome]
    """The Pareto front, the fastest first."""
    choice: Outcome
    present: Outcome
    """The config as it stands."""
    prediction: Prediction

    @property
    def gain(self) -> float:
        """The choice's speed over that of the config as it stands."""
        return self.choice.tokens_per_s / self.present.tokens_per_s

    @property
    def best_two(self) -> list[Outcome]:
        """The choice, and the fastest other of the front (the present config where there is none)."""
        others = [outcome for outcome in self.front if outcome.candidate != self.choice.candidate]
        return [self.choice, *(others[:1] or [self.present])]


def run_tune(
    config: Config,
    *,
    from_run: Path | None,
    verify: bool,
    repeats: int,
    steps: int,
    json_file: Path | None,
    console: Console,
) -> int:
    """Measure, search, advise, and with ``verify`` run the best two; returns the exit code.

    Raises UsageError for a run that tells no costs, BenchRunError where a run fails.
    """
    if config.placement.mode == "colocated":
        raise ConfigError(
            "placement.mode: found colocated; expected split: tune compares it with colocated by itself"
        )
    try:
        if from_run is not None:
            run = read_run(from_run)
            costs = measure_costs(run)
        else:
            run, overlapped = _calibrate(config)
            costs = with_contention(measure_costs(run), overlapped)
            log.info(
                "side by side an update takes %.2f times as long, and a token %.2f times",
                costs.update_beside,
                costs.token_beside,
            )
        advice = advise(config, run, costs)
        print_advice(console, advice, config)
        document = as_json(advice, config)
        if verify:
            document["verified"] = _verify(config, advice, steps=steps, repeats=repeats, console=console)
    except Interrupted as end:
        return end.exit_code
    if json_file is not None:
        write_json(json_file, document)
    return 0


def advise(config: Config, run: RecordedRun, costs: Costs, depths: Sequence[int] = DEPTHS) -> Advice:
    """Search the schedules of ``config`` of these depths, on costs that were measured in ``run``."""
    prediction = predict_itself(run, costs)
    log.info(
        "simulated, the run itself comes to %.0f tokens/s, measured were %.0f (%+.1f %%)",
        prediction.simulated_tokens_per_s,
        prediction.tokens_per_s,
        100 * prediction.error,
    )
    laboratory = Laboratory(config, costs)
    outcomes = explore(laboratory, log.info, depths)
    front = [laboratory.try_out(o.candidate, SEEDS) for o in pareto(outcomes)[:_FRONT]]
    present = laboratory.try_out(current(config), SEEDS)
    return Advice(pareto(front), recommended([*front, present]), present, prediction)


def _calibrate(config: Config) -> tuple[RecordedRun, RecordedRun]:
    """Two short runs: a synchronous one, in which every number of sequences occurs and nothing runs beside
    anything, and one with a pipeline, which shows what the sides then cost each other."""
    folder = claim_folder(config, "tune")
    file = folder / "tune.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    settings = {
        **of_steps(_CALIBRATION_STEPS, config),
        "log.trace_mb": max(64, config.log.trace_mb),
        "weight_sync.overlap": config.weight_sync.overlap,  # what copying out costs is to be seen
    }
    runs = {"calibration": MODES["sync"], "overlapped": as_overrides(_PIPELINE)}
    for name, schedule in runs.items():
        log.info("calibrating, %s: %d steps", name, _CALIBRATION_STEPS)
        train_once(file, folder, name, [*QUIET, *schedule, *as_overrides(settings)])
    return read_run(folder / "calibration"), read_run(folder / "overlapped")


def _verify(
    config: Config, advice: Advice, *, steps: int, repeats: int, console: Console
) -> dict[str, dict[str, float]]:
    """Run the best two for real; by name, what was predicted and what was measured."""
    found: dict[str, dict[str, float]] = {}
    names = {("recommended", "second")[i]: outcome for i, outcome in enumerate(advice.best_two)}
    variants = {name: as_overrides(o.candidate.settings(config)) for name, o in names.items()}
    depth = max(outcome.candidate.depth for outcome in names.values())
    figures = measure_variants(
        config,
        variants,
        Window(5, steps, depth + 1),
        repeats=repeats,
        folder=claim_folder(config, "verify"),
        config_name="verify",
    )
    table = Table(title=f"for real: {steps} steps, {repeats} runs of each")
    for column in ("", "settings", "tokens/s predicted", "measured", "lag predicted", "measured"):
        table.add_column(column, justify="left" if column in ("", "settings") else "right")
    for name, outcome in names.items():
        mode = Mode(name, tuple(figures[name]))
        rate, lag = mode.median(lambda run: run.tokens_per_s), mode.median(lambda run: run.lag_mean)
        found[name] = {"predicted_tokens_per_s": outcome.tokens_per_s, "tokens_per_s": rate, "lag_mean": lag}
        table.add_row(
            name,
            outcome.candidate.label,
            f"{outcome.tokens_per_s:,.0f}",
            f"{rate:,.0f} ({rate / outcome.tokens_per_s - 1:+.0%})",
            f"{outcome.lag_mean:.2f}",
            f"{lag:.2f}",
        )
    console.print(table)
    if found["second"]["tokens_per_s"] > found["recommended"]["tokens_per_s"] * (1 + WORTHWHILE):
        console.print("The second was faster than the recommended one: take it, if its lag is no objection.")
    return found


def print_advice(console: Console, advice: Advice, config: Config) -> None:
    """The table, the block for the config, and how sure it is."""
    table = Table(title=f"{config.run.name}: what no other schedule beats in speed and in lag")
    for column in (
        "D",
        "S",
        "push each",
        "slots",
        "placement",
        "tokens/s",
        "over seeds",
        "lag mean",
        "largest",
    ):
        table.add_column(column, justify="left" if column == "placement" else "right")
    rows = list(advice.front)
    if all(outcome.candidate != advice.present.candidate for outcome in rows):
        rows.append(advice.present)
    for outcome in rows:
        candidate, (low, high) = outcome.candidate, outcome.spread
        is_choice = candidate == advice.choice.candidate
        is_present = candidate == advice.present.candidate
        place = "colocated, at most" if candidate.colocated else "split"
        table.add_row(
            str(candidate.depth),
            str(candidate.staleness),
            str(candidate.publish_every),
            str(candidate.slots),
            f"{place}{' (as it stands)' if is_present else ''}",
            f"{outcome.tokens_per_s:,.0f}",
            f"{low:,.0f} to {high:,.0f}",
            f"{outcome.lag_mean:.2f}",
            f"{outcome.lag_max:.0f}",
            style="bold green" if is_choice else None,
        )
    console.print(table)
    console.print("Recommended:\n")
    console.print(as_yaml_block(advice.choice.candidate.settings(config)), highlight=False, markup=False)
    console.print()
    console.print(confidence(advice), highlight=False)


def confidence(advice: Advice) -> str:
    """How much the advice is worth, in a few sentences."""
    choice, prediction = advice.choice, advice.prediction
    low, high = choice.spread
    spread = (high - low) / choice.tokens_per_s
    text = (
        f"{choice.tokens_per_s:,.0f} tokens/s are predicted, {advice.gain:.2f} times those of the config as "
        f"it stands; over {len(SEEDS)} orders of the prompts they differ by {spread:.0%}. The calibration "
        f"misses the run that it came from by {prediction.error:+.1%} in tokens/s (lag "
        f"{prediction.simulated_lag_mean:.2f} for {prediction.lag_mean:.2f})."
    )
    doubt = max(abs(prediction.error), spread)
    if choice.candidate == advice.present.candidate:
        return text + " The config is the recommended one already."
    if advice.gain - 1 <= doubt:
        text += f" The gain is within what it may be wrong by ({doubt:.0%}): measure it with --verify."
    if choice.candidate.colocated:
        text += (
            " Colocated, both sides are taken to be faster in proportion to their devices, of which "
            f"{COLOCATED_LOSS:.0%} are not counted on: use --verify."
        )
    return text


def as_json(advice: Advice, config: Config) -> dict[str, Any]:
    """The object of ``--json``."""

    def shown(outcome: Outcome) -> dict[str, Any]:
        low, high = outcome.spread
        return {
            "settings": outcome.candidate.settings(config),
            "tokens_per_s": outcome.tokens_per_s,
            "spread": [low, high],
            "staleness": {"mean": outcome.lag_mean, "max": outcome.lag_max},
        }

    return {
        "config": config.model_dump(mode="json"),
        "front": [shown(outcome) for outcome in advice.front],
        "recommended": shown(advice.choice),
        "as_it_stands": shown(advice.present),
        "calibration": {**asdict(advice.prediction), "error": advice.prediction.error},
    }
