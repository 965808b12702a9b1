"""Figures of a run, speed-up and ideal: small cases that were computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.bench.comparison import Comparison, ideal_speedup
from asyncrl.bench.figures import Figures, Window, measure
from asyncrl.bench.modes import (
    of_steps,
    overrides_of,
    parse_modes,
    require_modes,
    require_overlap,
    shared_devices,
)
from asyncrl.bench.table import conclusions
from asyncrl.bench.verdict import judge
from asyncrl.config import Config
from asyncrl.config_load import parse_config
from asyncrl.errors import ConfigError, UsageError

from .controller_harness import config

ALL = Window(warm_up=0, steps=4, cool_down=0)


def line(step: int, *, version: int | None = None, **figures: float) -> dict[str, Any]:
    """A step of 10 s: 6 s of rollouts, 3 s of update, 1 s of push; 100 tokens trained and sampled."""
    timings = {"step": 10.0, "wait_for_batch": 6.0, "wait_for_policy": 4.0, "train": 3.0, "weight_sync": 1.0}
    timings |= {"weight_sync_stall": 1.0, "wait_for_push": 0.0}
    record: dict[str, Any] = {
        "step": step,
        "policy_version": step if version is None else version,
        **{f"timing_s/{name}": seconds for name, seconds in timings.items()},
        "perf/tokens_per_s": 10.0,
        "perf/samples_per_s": 0.8,
        "perf/learner_busy": 0.3,
        "perf/generator_busy": 0.5,
        "generator/occupancy": 0.25,
        "generator/tokens_per_s": 10.0,
        "generator/full": 0.2,
        "generator/full_tokens_per_s": 40.0,
        "staleness/mean": 0.5,
        "staleness/max": 1.0,
        "reward/mean": step / 10,
        "bias/length_trained_over_dispatched": 0.9,
    }
    return record | {name.replace("__", "/"): value for name, value in figures.items()}


def run(*lines: dict[str, Any], window: Window = ALL) -> Figures:
    return measure([{"step": 0, "policy_version": 0}, *lines], window)


def test_a_window_leaves_out_the_start_and_the_end() -> None:
    window = Window(warm_up=2, steps=3, cool_down=2)
    assert window.total == 7
    lines = [line(step, timing_s__step=1000.0 if step < 3 or step > 5 else 10.0) for step in range(1, 8)]
    figures = run(*lines, window=window)
    assert (figures.steps, figures.wall_s) == (3, 30.0)
    assert figures.rewards == ((10.0, 0.3), (20.0, 0.4), (30.0, 0.5))
    with pytest.raises(UsageError, match="found 2 steps with a time between steps 3 and 5; expected 3"):
        run(*lines[:4], window=window)


def test_rates_are_sums_over_time_and_not_means_of_rates() -> None:
    # 100 tokens in 10 s, then 100 in 2 s: 200 in 12 s.
    fast = line(2, timing_s__step=2.0, perf__tokens_per_s=50.0, timing_s__wait_for_policy=0.0)
    figures = run(line(1), fast, window=Window(0, 2, 0))
    assert figures.tokens_per_s == pytest.approx(200 / 12)
    assert figures.generate_s == pytest.approx((6 + 2) / 2)
    assert figures.generator_busy == pytest.approx(0.5)


def test_a_skipped_update_trains_nothing_and_takes_its_time() -> None:
    figures = run(line(1), line(2, version=1), line(3, version=2), line(4, version=3))
    assert figures.tokens == 300.0
    assert figures.wall_s == 40.0


def test_phases_of_a_synchronous_step_add_up() -> None:
    figures = run(*(line(step) for step in range(1, 5)))
    assert (figures.generate_s, figures.train_s, figures.weight_sync_s) == (6.0, 3.0, 1.0)
    assert figures.other_s == pytest.approx(0.0)
    slower = run(*(line(step, timing_s__step=12.0, timing_s__wait_for_policy=5.0) for step in range(1, 5)))
    assert slower.other_s == pytest.approx(12 - 7 - 3 - 1)


@pytest.mark.parametrize(
    ("generate", "train", "push", "saturated", "expected"),
    [
        (6.0, 3.0, 1.0, 2.5, 10 / 4),  # the learner's 4 s bound it: generation fits beside them
        (6.0, 3.0, 1.0, 5.0, 10 / 5),  # full slots still take longer than the learner
        (6.0, 6.0, 0.0, 6.0, 2.0),  # both sides alike: the most there is without a tail
        (9.0, 1.0, 0.0, 9.0, 10 / 9),  # hardly any update: next to nothing to win
        (0.0, 0.0, 0.0, 0.0, 1.0),
    ],
)
def test_the_ideal_is_the_longer_side_alone(
    generate: float, train: float, push: float, saturated: float, expected: float
) -> None:
    assert ideal_speedup(generate, train, push, saturated) == pytest.approx(expected)


def comparison(**async_figures: float) -> Comparison:
    sync = [run(*(line(step) for step in range(1, 5)))]
    fast = {"timing_s__step": 5.0, "perf__tokens_per_s": 20.0, "perf__samples_per_s": 1.6, **async_figures}
    return Comparison.of({"sync": sync, "async": [run(*(line(step, **fast) for step in range(1, 5)))]})


def test_speedup_ideal_and_efficiency() -> None:
    found = comparison()
    # 40 tokens/s with all slots full: 100 tokens a step take 2.5 s, so the learner's 4 s bound it.
    assert found.saturated_rate == 40.0
    assert found.speedup == pytest.approx(2.0)
    assert found.ideal_speedup == pytest.approx(10 / 4)
    assert found.overlap_efficiency == pytest.approx(0.8)
    assert found.paired_speedups == pytest.approx([2.0])
    assert found.speedup_vs_colocated is None


def test_without_full_slots_the_best_rate_that_was_seen_stands_in() -> None:
    lines = [
        {k: v for k, v in line(step).items() if not k.startswith("generator/full")} for step in range(1, 5)
    ]
    found = Comparison.of({"sync": [run(*lines)]})
    assert not found.rate_is_saturated
    assert found.saturated_rate == 10.0 / 0.5  # 10 tokens/s over all time, sampled in half of it
    assert "No run had all slots taken" in conclusions(found, None)[0]


def test_an_efficiency_above_one_is_reported_as_a_measurement_error() -> None:
    found = comparison(timing_s__step=2.0, perf__tokens_per_s=50.0)
    assert found.overlap_efficiency is not None
    assert found.overlap_efficiency > 1
    assert "measurement error" in conclusions(found, None)[1]
    assert len(conclusions(comparison(), None)) == 1


def test_the_object_has_the_promised_keys_and_agrees_with_itself() -> None:
    document = comparison().as_json({"run": {}}, {"cores": 2})
    assert list(document) == [
        "config",
        "machine",
        "modes",
        "speedup",
        "speedup_vs_colocated",
        "ideal_speedup",
        "overlap_efficiency",
    ]
    assert list(document["modes"]) == ["sync", "async", "colocated"]
    assert document["modes"]["colocated"] is None
    sync = document["modes"]["sync"]
    assert list(sync) == [
        "steps",
        "wall_s",
        "tokens_per_s",
        "samples_per_s",
        "phase_s",
        "generator_busy",
        "learner_busy",
        "staleness",
        "reward_last",
    ]
    assert list(sync["phase_s"]) == ["generate", "generate_saturated", "train", "weight_sync", "other"]
    assert sync["staleness"] == {"mean": 0.5, "max": 1.0}
    assert sync["reward_last"] == pytest.approx((0.1 + 0.2 + 0.3 + 0.4) / 4)
    assert document["speedup"] == document["modes"]["async"]["tokens_per_s"] / sync["tokens_per_s"]


@pytest.mark.parametrize(
    ("figures", "limit"),
    [
        ({"timing_s__train": 4.6, "timing_s__weight_sync_stall": 0.1}, "contention"),  # 3 s alone
        ({"timing_s__train": 3.0, "timing_s__weight_sync_stall": 1.8}, "push"),
        (
            {
                "timing_s__train": 3.1,
                "timing_s__step": 3.4,
                "timing_s__weight_sync_stall": 0.1,
                "perf__tokens_per_s": 100 / 3.4,
            },
            "update",
        ),
        ({"generator__occupancy": 0.97}, "generation"),
        ({"generator__occupancy": 0.4}, "tail"),
        (  # Updates are slowed down too, but the learner has time to spare.
            {
                "timing_s__train": 4.6,
                "timing_s__step": 20.0,
                "perf__tokens_per_s": 100 / 20,
                "generator__occupancy": 0.1,
            },
            "tail",
        ),
    ],
)
def test_the_verdict_names_what_limits(figures: dict[str, float], limit: str) -> None:
    verdict = judge(comparison(**figures), config())
    assert verdict is not None
    assert verdict.limit == limit


def test_the_verdict_admits_that_nothing_was_won() -> None:
    verdict = judge(comparison(timing_s__step=10.0, perf__tokens_per_s=10.0), config())
    assert verdict is not None
    assert "async wins nothing here (1.00x)" in verdict.sentence
    assert judge(Comparison.of({"sync": [run(*(line(step) for step in range(1, 5)))]}), config()) is None


def test_modes_are_names_each_once() -> None:
    assert parse_modes("async, sync") == ("async", "sync")
    with pytest.raises(UsageError, match="found warp; expected names out of sync, async, colocated"):
        parse_modes("sync,warp")
    with pytest.raises(UsageError, match="each mode once"):
        parse_modes("sync,sync")


def test_a_shortened_config_ends_its_warm_ups_with_it() -> None:
    found = of_steps(5, config("learner.warmup_steps=10", "critic.warmup_steps=5", "run.steps=100"))
    assert found == {"run.steps": 5, "learner.warmup_steps": 5, "critic.warmup_steps": 4}
    assert of_steps(5, config("learner.warmup_steps=5", "run.steps=100")) == {"run.steps": 5}


def test_async_has_to_differ_from_sync() -> None:
    synchronous: Config = config("schedule.pipeline_depth=0", "schedule.max_staleness=0")
    with pytest.raises(ConfigError, match="pipeline_depth: found 0"):
        require_overlap(synchronous, ("sync", "async"))
    require_overlap(synchronous, ("sync",))
    require_overlap(config(), ("sync", "async"))


def test_colocated_has_the_devices_of_both_sides() -> None:
    split: Config = config(
        "rollout.groups_per_step=4",
        "generators.replicas=2",
        "generators.cpu_cores=[0,1]",
        "learner.ranks=1",
        "learner.cpu_cores=[4]",
        "learner.threads=3",
        "weight_sync.overlap=true",
        "schedule.publish_every=2",
        "schedule.max_staleness=4",
    )
    parsed = parse_config(split.model_dump(mode="json"), overrides_of("colocated", split))
    assert parsed.placement.mode == "colocated"
    assert parsed.generators.replicas == parsed.learner.ranks == 3
    assert parsed.generators.cpu_cores == parsed.learner.cpu_cores == (0, 1, 4)
    assert parsed.generators.threads == parsed.learner.threads == 3
    assert parsed.schedule.pipeline_depth == parsed.schedule.max_staleness == 0
    require_modes(split, ("sync", "async", "colocated"))
    half_pinned = shared_devices(config("learner.cpu_cores=[4]"))
    assert half_pinned["generators.cpu_cores"] is None
    low: Config = config("model.dtype=bfloat16", "learner.zero_stage=1")
    assert parse_config(low.model_dump(mode="json"), overrides_of("colocated", low)).learner.zero_stage == 2


def test_a_config_that_cannot_be_colocated_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError) as caught:
        require_modes(config("learner.zero_stage=3"), ("sync", "colocated"))
    assert "the config cannot be run in mode colocated" in str(caught.value)
    assert "learner.zero_stage: found 3 with placement.mode colocated" in str(caught.value)
    assert "without it: --modes sync" in str(caught.value)
    colocated: Config = config(
        "placement.mode=colocated", "schedule.pipeline_depth=0", "schedule.max_staleness=0"
    )
    require_modes(colocated, ("colocated",))
    assert shared_devices(colocated) == {}
    with pytest.raises(ConfigError, match=r"placement\.mode: found colocated, of which only"):
        require_modes(colocated, ("sync", "colocated"))
