"""Workloads through the real controller in virtual time: times that were computed by hand."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from asyncrl.bench.comparison import Comparison
from asyncrl.bench.figures import Window, measure
from asyncrl.bench.modes import MODES
from asyncrl.cli import app
from asyncrl.config_load import dump_config
from asyncrl.errors import ConfigError
from asyncrl.queues.codec import append_record, encode_group
from asyncrl.simulate.command import simulate_modes
from asyncrl.simulate.draws import standard_normal, uniform
from asyncrl.simulate.lengths import make_lengths
from asyncrl.simulate.parts import token_seconds
from asyncrl.simulate.run import SimulatedRun, simulate
from asyncrl.simulate.workload import SimulationConfig, parse_simulation
from asyncrl.types import DrawKey, Group, Trajectory

# Ten tokens of 0.1 s: a rollout takes 1 s, however many there are at a time.
WORKLOAD: dict[str, Any] = {
    "workload": {
        "lengths": {"values": [10]},
        "generation": {"token_s": 0.1, "prompt_tokens": 5},
        "learner": {"step_s": 1.0},
    },
    "run": {"steps": 8},
    "rollout": {"group_size": 2, "groups_per_step": 2},
    "schedule": {"pipeline_depth": 1, "max_staleness": 2},
    "generators": {"slots": 8},
}


def workload(*overrides: str) -> SimulationConfig:
    return parse_simulation(WORKLOAD, overrides)


def compare(*overrides: str, window: Window = Window(2, 4, 2)) -> Comparison:  # noqa: B008  frozen
    def lines(mode: str) -> list[dict[str, float]]:
        settings = [*overrides, *MODES[mode], f"run.steps={window.total}"]
        return simulate(workload(*settings)).lines

    return Comparison.of({mode: [measure(lines(mode), window)] for mode in ("sync", "async")})


def test_one_after_the_other_and_at_the_same_time() -> None:
    found = compare("workload.push.send_s=0.5")
    sync, overlapped = found.modes["sync"].runs[0], found.modes["async"].runs[0]
    assert (sync.generate_s, sync.train_s, sync.weight_sync_s) == pytest.approx((1.0, 1.0, 0.5))
    assert sync.step_s == pytest.approx(2.5)
    assert (sync.lag_mean, sync.lag_max) == (0.0, 0.0)
    # The learner's 1.5 s are the longer side, and a rollout of 1 s fits beside them.
    assert overlapped.step_s == pytest.approx(1.5)
    assert overlapped.lag_max == 1.0
    assert found.speedup == pytest.approx(2.5 / 1.5)


def test_the_ideal_takes_all_slots_as_full() -> None:
    # 4 answers a step in 4 slots: all are full all of the second that rollouts take.
    found = compare("generators.slots=4")
    assert found.saturated_rate == pytest.approx(40.0)
    assert found.saturated_s(found.modes["sync"]) == pytest.approx(1.0)
    assert found.ideal_speedup == pytest.approx(2.0)
    assert found.speedup == pytest.approx(2.0)
    assert found.overlap_efficiency == pytest.approx(1.0)


def test_a_straggler_holds_up_the_synchronous_run_alone() -> None:
    # Of each four answers one takes 40 tokens, and its slot is one of sixteen.
    lengths = "workload.lengths.values=[10,10,10,40]"
    found = compare(lengths, "schedule.pipeline_depth=3", "schedule.max_staleness=6", window=Window(6, 12, 4))
    assert found.modes["sync"].runs[0].step_s == pytest.approx(5.0)
    assert found.modes["async"].runs[0].step_s < 2.0


def test_prompts_stop_the_whole_engine() -> None:
    # Two prompts of 5 tokens at 0.01 s: 0.1 s in which nobody samples; twice that if none is shared.
    prefill = "workload.generation.prefill_token_s=0.01"
    found = compare(prefill)
    assert found.modes["sync"].runs[0].generate_s == pytest.approx(1.1)
    found = compare(prefill, "workload.generation.prompt_once=false")
    assert found.modes["sync"].runs[0].generate_s == pytest.approx(1.2)


def test_updates_take_as_long_as_their_tokens() -> None:
    # 4 answers of 10 tokens and prompts of 5.
    found = compare("workload.learner={step_s: 0.4, token_s: 0.01}")
    assert found.modes["sync"].runs[0].train_s == pytest.approx(0.4 + 60 * 0.01)


def test_colocated_sides_take_turns_on_all_devices(tmp_path: Path) -> None:
    # 4 answers of 15 tokens with their prompts in an update: 0.6 s on one rank, 0.3 s on two.
    file = tmp_path / "w.yaml"
    file.write_text(json.dumps(WORKLOAD))
    overrides = (
        "workload.learner={step_s: 0.4, token_s: 0.01}",
        "workload.turns={sleep_s: 0.1, wake_s: 0.2}",
    )
    overrides += ("workload.push.send_s=5", "run.steps=4")
    config, runs, comparison = simulate_modes(file, overrides, ("sync", "colocated"), warm_up=2)
    assert (config.generators.replicas, config.learner.ranks) == (1, 1)
    colocated = comparison.modes["colocated"].runs[0]
    assert colocated.train_s == pytest.approx(0.4 + 60 * 0.01 / 2)
    assert colocated.weight_sync_s == pytest.approx(0.2), "no bytes are sent, but the generators wake"
    assert colocated.step_s == pytest.approx(1.0 + 0.1 + 0.7 + 0.2)
    assert runs["colocated"].lines[-1]["generator/replicas_live"] == 2
    assert comparison.modes["sync"].runs[0].step_s == pytest.approx(1.0 + 1.0 + 5.0)


def test_equal_configs_give_equal_lines() -> None:
    settings = (
        "workload.lengths={log_normal: {median: 20, sigma: 1.0, prompt_share: 0.5}}",
        "workload.reward={mean: 0.3, score_s: 0.2}",
        "rollout.max_new_tokens=200",
        "generators={replicas: 2, slots: 3}",
    )
    first, second = simulate(workload(*settings)), simulate(workload(*settings))
    assert first.lines == second.lines
    assert first.trajectories == second.trajectories == 8 * 4
    assert 0.0 < statistics.fmean(line["reward/mean"] for line in first.lines[1:]) < 0.7


def assert_sound(run: SimulatedRun, config: SimulationConfig) -> None:
    states = ("running", "ready", "training", "trained", "filtered", "dropped", "failed")
    assert run.summary.policy_version == config.run.steps
    for line in run.lines:
        assert line.get("staleness/max", 0) <= config.schedule.max_staleness
        assert line["ledger/submitted"] == sum(line[f"ledger/{state}"] for state in states)


def test_what_goes_wrong_breaks_no_bound_and_loses_nothing() -> None:
    config = workload(
        "run.steps=20",
        "run.max_unusable_groups=1000",
        "workload.lengths={log_normal: {median: 20, sigma: 1.0}}",
        "workload.failures={mean_life_s: 15, restart_s: 2, reward_errors: 0.05, bad_steps: [3]}",
        "generators={replicas: 3, slots: 4, max_restarts: 50}",
        "rollout.max_attempts=50",
    )
    run = simulate(config)
    assert_sound(run, config)
    assert run.lines[-1]["generator/restarts"] >= 1
    assert run.summary.counts["failed"] >= 1
    assert run.summary.counts["dropped"] == 2, "the groups of the skipped update"


def test_lengths_are_those_of_a_distribution() -> None:
    lengths = parse_simulation(
        WORKLOAD, ["workload.lengths={log_normal: {median: 100, sigma: 1.0, prompt_share: 0.7}}"]
    ).workload.lengths
    length_of = make_lengths(lengths, group_size=4)
    table = np.array([[length_of(DrawKey(0, o, s)) for s in range(4)] for o in range(4000)])
    assert np.median(table) == pytest.approx(100, rel=0.05)
    logs = np.log(table)
    assert logs.std() == pytest.approx(1.0, rel=0.05)
    # The prompt's share of the variance is what a group's samples have in common.
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(0.7, abs=0.05)
    assert length_of(DrawKey(0, 7, 1)) == table[7, 1]


def test_listed_lengths_go_round() -> None:
    lengths = parse_simulation(WORKLOAD, ["workload.lengths.values=[3,5,8]"]).workload.lengths
    length_of = make_lengths(lengths, group_size=2)
    assert [length_of(DrawKey(0, o, s)) for o in range(3) for s in range(2)] == [3, 5, 8, 3, 5, 8]


def trajectory(sample: int, tokens: int) -> Trajectory:
    ids = np.zeros(tokens, np.int32)
    return Trajectory(
        sample=sample,
        attempt=0,
        prompt_ids=np.zeros(2, np.int32),
        token_ids=ids,
        loss_mask=np.ones(tokens, np.bool_),
        logprobs=np.zeros(tokens, np.float32),
        versions=ids,
        reward=0.0,
        finish_reason="stop",
    )


def test_recorded_lengths_come_by_groups(tmp_path: Path) -> None:
    recorded = {(3, 4), (50, 60), (7, 7)}
    (tmp_path / "rollouts").mkdir()
    with (tmp_path / "rollouts" / "step_000010.msgpack").open("wb") as file:
        for ordinal, pair in enumerate(sorted(recorded)):
            samples = tuple(trajectory(sample, tokens) for sample, tokens in enumerate(pair))
            append_record(file, encode_group(Group(ordinal, f"t-{ordinal}", 0, samples)))
    lengths = parse_simulation(WORKLOAD, [f"workload.lengths={{run: '{tmp_path}'}}"]).workload.lengths
    length_of = make_lengths(lengths, group_size=2)
    drawn = {tuple(length_of(DrawKey(0, o, s)) for s in range(2)) for o in range(50)}
    assert drawn == recorded
    with pytest.raises(ConfigError, match="found 0 files with 0 groups"):
        make_lengths(lengths.model_copy(update={"run": str(tmp_path / "none")}), 2)


@pytest.mark.parametrize(
    ("running", "seconds"), [(1, 0.01), (4, 0.01), (8, 0.02), (12, 0.03), (16, 0.04), (99, 0.04)]
)
def test_token_times_lie_on_straight_lines_between_the_points(running: int, seconds: float) -> None:
    assert token_seconds({4: 0.01, 8: 0.02, 16: 0.04}, running) == pytest.approx(seconds)
    assert token_seconds(0.5, running) == 0.5


def test_draws_are_even_and_named_by_their_key() -> None:
    draws = [uniform(1, n) for n in range(4000)]
    assert statistics.fmean(draws) == pytest.approx(0.5, abs=0.02)
    assert statistics.pstdev(draws) == pytest.approx(12**-0.5, abs=0.01)
    assert uniform(1, 7) == draws[7]
    assert len({uniform(1, 2), uniform(2, 1), uniform(1, 2, 0), uniform(0, 1, 2)}) == 4
    normal = [standard_normal(2, n) for n in range(4000)]
    assert statistics.fmean(normal) == pytest.approx(0.0, abs=0.05)
    assert statistics.pstdev(normal) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.generation.tokens_s=1", "did you mean workload.generation.token_s?"),
        ("workload.lengths.run=x", "found run and values; expected exactly one of"),
        ("workload.learner=3", "workload.learner: found 3; expected a block of keys"),
        ("workload.reward.mean=1.5", "workload.reward.mean: found 1.5; expected at most 1"),
        ("schedule.max_staleness=0", "schedule.max_staleness"),
        ("rollout=3", "rollout: found 3; expected a block of keys"),
    ],
)
def test_a_mistake_in_a_workload_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        workload(override)
    assert message in str(caught.value)


def test_a_workload_is_written_and_read_back() -> None:
    config = workload("workload.generation.token_s={1: 0.1, 8: 0.2}")
    import yaml

    assert parse_simulation(yaml.safe_load(dump_config(config))) == config


def test_the_command_prints_a_table_and_the_object(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(json.dumps(WORKLOAD))
    arguments = ["simulate", "--workload", str(file), "--json", str(tmp_path / "o.json"), "--warm-up", "2"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out"), "run.steps=4"])
    assert result.exit_code == 0, result.output
    assert "2.00 times as fast" in " ".join(result.output.split())
    document = json.loads((tmp_path / "o.json").read_text())
    assert document["speedup"] == pytest.approx(2.0)
    assert document["modes"]["sync"]["steps"] == 4
    for mode in ("sync", "async"):
        lines = (tmp_path / "out" / mode / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["policy_version"] == 2 + 4 + 2
        assert (tmp_path / "out" / mode / "trace.json").stat().st_size > 0


def test_the_command_refuses_what_cannot_be_compared(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(json.dumps(WORKLOAD))
    for arguments in (
        ["schedule.pipeline_depth=0"],
        ["--modes", "warp"],
        ["--modes", "colocated", "learner.zero_stage=3"],
        ["workload.nonsense=1"],
    ):
        result = CliRunner().invoke(app, ["simulate", "--workload", str(file), *arguments])
        assert result.exit_code == 2, result.output
