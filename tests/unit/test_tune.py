"""Calibration and search: runs that the simulator made stand in for real ones, so that the truth is known."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from asyncrl.bench.figures import Figures, Window, measure
from asyncrl.bench.modes import MODES
from asyncrl.cli import app
from asyncrl.config import Config
from asyncrl.config_load import parse_config
from asyncrl.errors import UsageError
from asyncrl.queues.codec import append_record, encode_group
from asyncrl.recorded import read_run
from asyncrl.simulate.run import simulate
from asyncrl.simulate.workload import parse_simulation
from asyncrl.timeline import TraceEvent
from asyncrl.trace_file import TraceFile
from asyncrl.tune.command import advise, as_json, print_advice
from asyncrl.tune.costs import Costs, measure_costs, with_contention
from asyncrl.tune.prediction import predict_itself
from asyncrl.tune.rates import Stay, fit_token_seconds
from asyncrl.tune.search import (
    Candidate,
    Laboratory,
    Outcome,
    as_yaml_block,
    current,
    explore,
    pareto,
    recommended,
)
from asyncrl.types import Group

from .test_simulate import trajectory

WORKLOAD: dict[str, Any] = {
    "workload": {
        "lengths": {"log_normal": {"median": 60, "sigma": 0.8, "prompt_share": 0.5}},
        "generation": {"token_s": {1: 0.004, 8: 0.005, 16: 0.008}},
        "learner": {"step_s": 0.3, "token_s": 2.0e-4},
        "push": {"send_s": 0.1, "pause_s": 0.03},
        "reward": {"mean": 0.4, "score_s": 0.02},
    },
    "run": {"steps": 16},
    "rollout": {"group_size": 4, "groups_per_step": 4, "max_new_tokens": 400},
    "schedule": {"pipeline_depth": 1, "max_staleness": 2},
    "generators": {"slots": 16},
}


def record(folder: Path, *overrides: str) -> Path:
    """A run of the workload with its files, as ``asyncrl train`` leaves them."""
    config = parse_simulation(WORKLOAD, overrides)
    simulate(config, out=folder)
    values = config.model_dump(mode="json")
    del values["workload"]
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder


def settings(*overrides: str) -> Config:
    values = parse_simulation(WORKLOAD).model_dump(mode="json")
    del values["workload"]
    return parse_config(values, overrides)


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs") / "sync", *MODES["sync"])


@pytest.fixture(scope="module")
def costs(synchronous: Path) -> Costs:
    return measure_costs(read_run(synchronous))


def test_costs_are_those_that_the_run_was_made_with(costs: Costs) -> None:
    truth = WORKLOAD["workload"]
    for running in (2, 4, 8, 12, 16):
        expected = np.interp(running, [1, 8, 16], [0.004, 0.005, 0.008])
        points = sorted(costs.token_s.items())
        found = np.interp(running, [n for n, _ in points], [s for _, s in points])
        assert found == pytest.approx(expected, rel=0.1), running
    assert costs.update_token_s == pytest.approx(2.0e-4, rel=0.02)
    # The prompts' 16 x 64 tokens count as part of what every update takes.
    assert costs.update_s == pytest.approx(0.3 + 16 * 64 * 2.0e-4, rel=0.02)
    assert (costs.send_s, costs.pause_s) == pytest.approx((0.1, 0.03), rel=0.01)
    assert costs.score_s == pytest.approx(truth["reward"]["score_s"], rel=0.05)
    assert costs.overhead_s == pytest.approx(0.0, abs=1e-6)
    assert len(costs.lengths) == 16 * 16


def test_an_update_is_told_by_what_it_computes_where_the_run_says_so(tmp_path: Path) -> None:
    """Another batch, with less padding to a token: a calibration by answers would miss it by far."""
    padded = ("workload.learner.padded=true", "workload.learner.token_s=1e-4", "data.max_prompt_tokens=64")
    padded += ("learner.micro_batch_tokens=1200",)
    costs = measure_costs(read_run(record(tmp_path / "padded", *MODES["sync"], *padded)))
    assert costs.padded
    assert costs.prompt_tokens == 64
    assert costs.update_token_s == pytest.approx(1.0e-4, rel=0.02)
    assert costs.update_s == pytest.approx(0.3, rel=0.02)
    packed = (*padded, "learner.packing=true", "rollout.group_size=8")
    run = read_run(record(tmp_path / "packed", *MODES["sync"], *packed))
    other = measure_costs(run)
    assert other.update_token_s == pytest.approx(1.0e-4, rel=0.02)
    prediction = predict_itself(run, replace(costs, lengths=other.lengths))
    assert prediction.error == pytest.approx(0.0, abs=0.03)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_calibration_predicts_the_run_that_it_came_from(mode: str, tmp_path: Path) -> None:
    run = read_run(record(tmp_path / mode, *MODES[mode]))
    # As another version of asyncrl would have written it.
    run = replace(
        run, config={**run.config, "schedule": {**run.config["schedule"], "new_knob": 1}, "new": {}}
    )
    prediction = predict_itself(run, measure_costs(run))
    assert abs(prediction.error) < 0.1
    assert prediction.simulated_lag_mean == pytest.approx(prediction.lag_mean, abs=0.1)


def test_a_synchronous_calibration_predicts_an_asynchronous_run(tmp_path: Path, costs: Costs) -> None:
    run = read_run(record(tmp_path / "deep", "schedule.pipeline_depth=2", "schedule.max_staleness=3"))
    prediction = predict_itself(run, costs)
    assert abs(prediction.error) < 0.1
    assert prediction.simulated_lag_mean == pytest.approx(prediction.lag_mean, rel=0.1)


OVERLAPPED = ("schedule.pipeline_depth=2", "schedule.max_staleness=4")


def test_what_the_sides_cost_each_other_is_found_by_an_overlapped_run(tmp_path: Path) -> None:
    shared = "workload.contention={update: 1.2, token: 1.3}"
    alone = measure_costs(read_run(record(tmp_path / "sync", *MODES["sync"], shared)))
    overlapped = read_run(record(tmp_path / "async", *OVERLAPPED, shared))
    assert predict_itself(overlapped, alone).error > 0.1
    found = with_contention(alone, overlapped)
    assert found.update_beside == pytest.approx(1.2, rel=0.03)
    assert found.token_beside == pytest.approx(1.3, rel=0.1)
    assert abs(predict_itself(overlapped, found).error) < 0.05


def test_sides_that_cost_each_other_nothing_are_told_so(tmp_path: Path, costs: Costs) -> None:
    found = with_contention(costs, read_run(record(tmp_path / "async", *OVERLAPPED)))
    assert found.update_beside == pytest.approx(1.0, abs=0.02)
    assert found.token_beside == pytest.approx(1.0, abs=0.1)


def test_answers_of_evaluations_are_not_taken_for_those_of_training(
    synchronous: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(synchronous, run)
    file = TraceFile(run / "trace.json", offset=0.0, limit_bytes=1 << 24)
    facts = {"uid": "eval-0", "ordinal": 0, "sample": 0, "tokens": 9999}
    file.write([TraceEvent("generator 0", "slot 0", "version 16", 1e4, 1e4 + 1, facts)])
    file.close()
    assert measure_costs(read_run(run)).lengths == measure_costs(read_run(synchronous)).lengths


def test_rates_leave_standstills_out() -> None:
    # Two answers of 10 tokens at 0.1 s side by side, and 3 s in the middle in which nothing moves.
    stays = [Stay(0.0, 4.0, 10), Stay(0.0, 4.0, 10)]
    assert fit_token_seconds([stays], [(1.0, 4.0)]) == pytest.approx({2: 0.1})
    assert fit_token_seconds([stays, stays], [(1.0, 4.0)]) == pytest.approx({2: 0.1})
    with pytest.raises(UsageError, match="found 0 answers"):
        fit_token_seconds([], [])


def test_a_machine_that_is_slow_at_times_does_not_bias_the_rates() -> None:
    draws, clock, stays = random.Random(0), 0.0, []
    for turn in range(600):
        slowness = (0.5, 1.5)[turn % 2]  # 1 on the mean
        moment, sampled = clock, 0
        for i, length in enumerate(sorted(draws.randint(10, 200) for _ in range(8))):
            moment += (length - sampled) * (0.01 + 0.002 * (8 - i)) * slowness
            sampled = length
            stays.append(Stay(clock, moment, length))
        clock = moment + 1.0
    points = sorted(fit_token_seconds([stays], []).items())
    for running in (2, 4, 8):
        found = np.interp(running, [n for n, _ in points], [seconds for _, seconds in points])
        assert found == pytest.approx(0.01 + 0.002 * running, rel=0.15), running


def test_a_run_that_tells_no_costs_is_refused(tmp_path: Path) -> None:
    short = record(tmp_path / "short", "run.steps=3")
    with pytest.raises(UsageError, match=r"found 3 steps in .*; expected at least 6"):
        measure_costs(read_run(short))
    run = record(tmp_path / "colocated", "placement.mode=colocated", *MODES["sync"])
    with pytest.raises(UsageError, match=r"placement\.mode: found colocated"):
        measure_costs(read_run(run))


def test_without_a_timeline_one_speed_is_measured(tmp_path: Path) -> None:
    run = record(tmp_path / "plain", *MODES["sync"], "log.trace_mb=0")
    (run / "trace.json").unlink(missing_ok=True)
    with pytest.raises(UsageError, match="found 0 files with 0 groups"):
        measure_costs(read_run(run))
    (run / "rollouts").mkdir()
    with (run / "rollouts" / "step_000010.msgpack").open("wb") as file:
        samples = tuple(trajectory(sample, tokens) for sample, tokens in enumerate((30, 40, 50, 60)))
        append_record(file, encode_group(Group(0, "t-0", 0, samples)))
    costs = measure_costs(read_run(run))
    ((running, seconds),) = costs.token_s.items()
    assert 1 < running < 16
    assert 0.004 < seconds < 0.008
    assert costs.lengths == (30, 40, 50, 60)


def figures(tokens_per_s: float, lag_mean: float, lag_max: float) -> Figures:
    zero = dict.fromkeys(Figures.__dataclass_fields__, 0.0)
    chosen = {"steps": 1, "wall_s": 1.0, "tokens": tokens_per_s, "lag_mean": lag_mean, "lag_max": lag_max}
    return Figures(**{**zero, **chosen, "length_bias": None, "rewards": ()})  # type: ignore[arg-type]


def outcome(depth: int, tokens_per_s: float, lag_mean: float, lag_max: float) -> Outcome:
    return Outcome(Candidate(depth, depth, 1, 8), (figures(tokens_per_s, lag_mean, lag_max),))


def test_the_front_is_what_no_other_beats_and_the_choice_the_least_lag_near_the_best() -> None:
    slow, middle, fast = outcome(0, 50, 0.0, 0), outcome(1, 99, 1.0, 1), outcome(3, 100, 2.0, 3)
    beaten, equal = outcome(2, 98, 1.5, 2), outcome(4, 100, 2.0, 3)
    everything = [slow, beaten, middle, fast, equal]
    assert pareto(everything) == [fast, middle, slow]
    assert recommended(everything) is middle, "1 % slower, and half the lag"
    assert recommended([slow, outcome(1, 90, 1.0, 1), fast]) is fast, "10 % slower is too much"


def test_a_fifth_of_what_colocated_is_predicted_to_do_is_not_counted_on() -> None:
    def colocated(tokens_per_s: float) -> Outcome:
        return Outcome(Candidate(0, 0, 1, 8, colocated=True), (figures(tokens_per_s, 0.0, 0),))

    split, hopeful, sure = outcome(1, 100, 1.0, 1), colocated(110), colocated(126)
    assert pareto([split, hopeful]) == [split, hopeful]
    assert recommended([split, hopeful]) is split
    assert pareto([split, sure]) == [sure]
    assert recommended([split, sure]) is sure


def test_advice_beats_the_config_as_it_stands(synchronous: Path, costs: Costs) -> None:
    config = settings("schedule.pipeline_depth=0", "schedule.max_staleness=0")
    advice = advise(config, read_run(synchronous), costs, depths=(0, 1, 2))
    assert advice.gain > 1.3
    choice = advice.choice.candidate
    assert choice.depth >= 1
    assert advice.present.lag_max == 0
    # What is recommended is a config that can be run, and gains what was said in the full simulation.
    parsed = settings(*(f"{key}={json.dumps(value)}" for key, value in choice.settings(config).items()))
    assert parsed.schedule.pipeline_depth == choice.depth
    overrides = [
        f"schedule.pipeline_depth={choice.depth}",
        f"schedule.max_staleness={choice.staleness}",
        f"schedule.publish_every={choice.publish_every}",
        f"generators.slots={choice.slots}",
    ]
    window = Window(6, 24, choice.depth + 1)
    if not choice.colocated:
        truth = measure(
            simulate(parse_simulation(WORKLOAD, [*overrides, f"run.steps={window.total}"])).lines, window
        )
        assert advice.choice.tokens_per_s == pytest.approx(truth.tokens_per_s, rel=0.1)
    screen = StringIO()
    print_advice(Console(file=screen, width=140), advice, config)
    assert as_yaml_block(choice.settings(config)) in screen.getvalue()
    assert "The calibration misses the run that it came from by" in " ".join(screen.getvalue().split())
    assert json.loads(json.dumps(as_json(advice, config)))["recommended"]["tokens_per_s"] > 0


def test_a_block_is_yaml_that_sets_the_settings() -> None:
    candidate = Candidate(1, 2, 1, 32, colocated=False)
    assert yaml.safe_load(as_yaml_block(candidate.settings(settings()))) == {
        "schedule": {"pipeline_depth": 1, "max_staleness": 2, "publish_every": 1},
        "generators": {"slots": 32},
    }


def test_what_the_placement_refuses_is_no_candidate(costs: Costs) -> None:
    colocated = Candidate(0, 0, 1, 16, colocated=True)
    assert Laboratory(settings(), costs).allows(colocated) is None
    why_not = Laboratory(settings("learner.zero_stage=3"), costs).allows(colocated)
    assert why_not is not None
    assert "learner.zero_stage: found 3" in why_not


def test_a_warm_up_longer_than_what_is_simulated_leaves_no_candidate_out(
    costs: Costs, synchronous: Path
) -> None:
    long = settings("learner.warmup_steps=16")
    assert Laboratory(long, costs).allows(current(long)) is None
    assert explore(Laboratory(long, costs), lambda line: None, (0, 1))
    run = read_run(synchronous)
    longer = {"run": {"steps": 1000}, "learner": {"warmup_steps": 500}}
    stopped = {**run.config, **{name: {**run.config[name], **block} for name, block in longer.items()}}
    assert predict_itself(replace(run, config=stopped), costs).tokens_per_s > 0


def test_the_command_refuses_what_it_cannot_tune(tmp_path: Path, synchronous: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text((synchronous / "config.yaml").read_text())
    nowhere = ["tune", "--config", str(file), "--from-run", str(tmp_path)]
    for arguments in (nowhere, [*nowhere, "placement.mode=colocated"]):
        assert CliRunner().invoke(app, arguments).exit_code == 2
