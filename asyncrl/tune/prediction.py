"""What a calibration is worth: the run that it came from, simulated, against what that run measured.

Invariant: both are measured over the same steps. Time in which evaluations and checkpoints held the real run
up is no part of it: nothing simulates those.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.bench.figures import Window, measure
from asyncrl.bench.modes import as_overrides, of_steps
from asyncrl.config_load import known_values, parse_config
from asyncrl.errors import UsageError
from asyncrl.recorded import RecordedRun
from asyncrl.simulate.run import simulate
from asyncrl.tune.costs import Costs, warm_up_steps
from asyncrl.tune.search import Laboratory, current, with_lengths


@dataclass(frozen=True, slots=True)
class Prediction:
    """Measured and simulated figures of one run."""

    tokens_per_s: float
    simulated_tokens_per_s: float
    lag_mean: float
    simulated_lag_mean: float

    @property
    def error(self) -> float:
        """Of the speed, as a share of what was measured; positive: the simulation is too fast."""
        return self.simulated_tokens_per_s / self.tokens_per_s - 1


def predict_itself(run: RecordedRun, costs: Costs) -> Prediction:
    """Simulate the run that ``costs`` were measured in. UsageError where it is too short to compare."""
    if not run.config:
        raise UsageError(f"found no config.yaml in {run.folder}; expected the one that the run wrote")
    done = len(run.steps)
    values = known_values(run.config)
    name = f"{run.folder}/config.yaml"
    whole = parse_config(values, name=name)
    config = parse_config(values, as_overrides(of_steps(done, whole)), name=name)
    warm_up, cool_down = warm_up_steps(run.steps), config.schedule.pipeline_depth + 1
    if done - warm_up - cool_down < 1:
        raise UsageError(
            f"found {done} steps in {run.folder}; expected more than {warm_up + cool_down}, which a depth of "
            f"{config.schedule.pipeline_depth} needs: take a longer run"
        )
    window = Window(warm_up, done - warm_up - cool_down, cool_down)
    real = measure(run.lines, window)
    held_up = sum(
        line.get("timing_s/eval", 0.0) + line.get("timing_s/checkpoint", 0.0) for line in window.of(run.lines)
    )
    laboratory = Laboratory(config, costs)
    simulation = laboratory.simulation(current(config), window.total)
    simulated = measure(simulate(with_lengths(simulation, costs.lengths)).lines, window)
    return Prediction(
        tokens_per_s=real.tokens / (real.wall_s - held_up),
        simulated_tokens_per_s=simulated.tokens_per_s,
        lag_mean=real.lag_mean,
        simulated_lag_mean=simulated.lag_mean,
    )
