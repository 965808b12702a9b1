"""The loop, event by event, on a virtual clock: overlap, bounds, failures, stops and stalls."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.environments.base import RolloutResult
from asyncrl.errors import (
    BadStepsError,
    DeadlineError,
    LearnerError,
    NoGeneratorError,
    NothingTrainableError,
    RewardRaisedError,
)
from asyncrl.generators.scripted import Failure, ScriptedGenerator, constant_length, log_normal_length
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.queues.codec import decode_group
from asyncrl.rollout import Score
from asyncrl.types import Task

from .controller_harness import Outcome, ScriptedScorer, config, run

FAST = {"length": constant_length(10), "token_s": 0.1}  # a group takes 1 s


def learner(settings, **script) -> ScriptedLearner:
    return ScriptedLearner(max_staleness=settings.schedule.max_staleness, **script)


def test_synchronous_steps_take_the_sum_of_both_sides() -> None:
    settings = config("run.steps=10", "schedule.pipeline_depth=0", "schedule.max_staleness=0")
    outcome = run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=1.0))
    assert outcome.summary.wall_s == pytest.approx(20.0)
    assert all(lag == 0 for lags in outcome.learner.lags for lag in lags)


def test_overlapped_steps_take_the_longer_of_both_sides() -> None:
    settings = config("run.steps=10", "schedule.pipeline_depth=1", "schedule.max_staleness=1")
    outcome = run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=1.0))
    assert outcome.summary.wall_s == pytest.approx(11.0)
    assert outcome.log.lines[-1]["staleness/max"] == 1


def test_batches_come_in_the_order_of_the_stream_when_synchronous() -> None:
    settings = config("run.steps=3", "schedule.pipeline_depth=0", "schedule.max_staleness=3")
    long_first = ScriptedGenerator(length=lambda request: 60 - request.key.ordinal, token_s=0.1)
    outcome = run(settings, [long_first])
    assert outcome.learner.ordinals == [(0, 1), (2, 3), (4, 5)]


@pytest.mark.parametrize(("depth", "bound"), [(1, 1), (1, 2), (2, 4), (4, 8)])
def test_long_tails_never_break_the_bound_and_mean_lag_is_near_depth(depth: int, bound: int) -> None:
    settings = config(
        "run.steps=60",
        "rollout.groups_per_step=4",
        f"schedule.pipeline_depth={depth}",
        f"schedule.max_staleness={bound}",
    )
    generator = ScriptedGenerator(length=log_normal_length(12, 1.0), token_s=0.01)
    outcome = run(settings, [generator], learner(settings, step_s=1.0, push_s=0.05))
    lags = [lag for step in outcome.learner.lags[10:] for lag in step]
    assert max(lags) <= bound
    assert sum(lags) / len(lags) == pytest.approx(depth, abs=0.35)


def test_drop_at_the_bound_cancels_the_straggler_and_replaces_it() -> None:
    settings = config(
        "run.steps=8", "schedule.pipeline_depth=1", "schedule.max_staleness=1", "schedule.at_bound=drop"
    )
    # Ordinal 3 would take 600 s.
    straggler = ScriptedGenerator(
        length=lambda request: 6000 if request.key.ordinal == 3 else 10, token_s=0.1, slots=8
    )
    outcome = run(config_with_long_answers(settings), [straggler], learner(settings, step_s=1.0))
    dropped = [r for r in outcome.log.retired_ if r.state == "dropped"]
    assert [(r.ordinal, r.reason) for r in dropped] == [(3, "at_bound")]
    assert outcome.summary.wall_s < 30


def config_with_long_answers(settings):
    return settings.model_copy(
        update={"rollout": settings.rollout.model_copy(update={"max_new_tokens": 10_000})}
    )


MASK = ("schedule.pipeline_depth=1", "schedule.max_staleness=1", "schedule.at_bound=mask")


def test_a_straggler_of_many_steps_is_postponed_and_trains_its_young_tokens_only() -> None:
    settings = config("run.steps=12", *MASK)
    # Ordinal 3 takes 7.5 s, in which the others are trained, a step a second.
    straggler = ScriptedGenerator(
        length=lambda request: 75 if request.key.ordinal == 3 else 10, token_s=0.1, slots=8
    )
    settings = config_with_long_answers(settings)
    outcome = run(settings, [straggler], learner(settings, step_s=1.0))
    assert outcome.summary.counts["trained"] == outcome.summary.counts["submitted"] == 24
    batch = next(b for b in outcome.learner.batches if any(i.meta.ordinal == 3 for i in b.items))
    item = next(i for i in batch.items if i.meta.ordinal == 3)
    whole = decode_group(item.payload)
    for trajectory, meta in zip(whole.trajectories, item.meta.trajectories, strict=True):
        versions = trajectory.versions.tolist()
        assert len(versions) == meta.response_tokens == 75
        assert versions[0] == 0
        assert batch.version == 4  # the others had 3 of 4 places: a step took 2 s
        assert meta.trained == tuple(
            (v, versions.count(v)) for v in sorted(set(versions)) if v >= batch.version - 1
        )
        assert 0 < meta.loss_tokens < 40
    assert item.advantages == group_advantages("grpo", [t.reward for t in whole.trajectories])
    line = outcome.log.lines[batch.version + 1]
    assert line["staleness/masked_tokens"] == 150 - item.meta.loss_tokens
    assert line["staleness/max"] <= 1
    assert 0 < line["staleness/token_mean"] <= 1
    assert outcome.controller.budget.statistics().postponed == 3


def test_a_group_with_no_token_left_is_dropped_and_replaced() -> None:
    settings = config("run.steps=8", *MASK)

    class SlowScorer(ScriptedScorer):
        """All tokens of ordinal 3 are of version 0, and its reward is known at version 2 or 3."""

        async def score(self, task: Task, completion: str, result: RolloutResult) -> Score:
            await asyncio.sleep(5.0 if task.ordinal == 3 else 0.0)
            return await super().score(task, completion, result)

    outcome = run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=1.0), scorer=SlowScorer())
    dropped = [r for r in outcome.log.retired_ if r.state == "dropped"]
    assert [(r.ordinal, r.reason, r.lag) for r in dropped] == [(3, "all_masked", None)]
    assert outcome.summary.counts["trained"] == 16


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("depth", "bound", "every"), [(1, 1, 1), (2, 2, 1), (2, 3, 2)])
def test_masking_keeps_the_bound_for_every_trained_token(
    seed: int, depth: int, bound: int, every: int
) -> None:
    settings = config(
        "run.steps=40",
        f"run.seed={seed}",
        f"schedule.pipeline_depth={depth}",
        f"schedule.max_staleness={bound}",
        f"schedule.publish_every={every}",
        "schedule.at_bound=mask",
        "rollout.max_new_tokens=4000",
    )
    generator = ScriptedGenerator(length=log_normal_length(60, 1.5), token_s=0.01, slots=64)
    outcome = run(settings, [generator], learner(settings, step_s=1.0, push_s=0.3))
    assert max(lag for step in outcome.learner.lags for lag in step) == bound
    assert sum(line.get("staleness/masked_tokens", 0) for line in outcome.log.lines) > 0
    trained = [item.meta for batch in outcome.learner.batches for item in batch.items]
    assert all(meta.loss_tokens > 0 for meta in trained)


def test_a_push_that_overlaps_costs_the_learner_its_copy_alone() -> None:
    overlap = ("run.steps=10", "schedule.pipeline_depth=2", "schedule.max_staleness=3")
    settings = config(*overlap, "weight_sync.overlap=true")
    times = {"step_s": 1.0, "push_s": 0.8}
    apart = run(config(*overlap), [ScriptedGenerator(**FAST)], learner(settings, **times))
    beside = run(settings, [ScriptedGenerator(**FAST)], learner(settings, copy_s=0.05, **times))
    assert apart.summary.wall_s == pytest.approx(1.0 + 10 * 1.8)
    # The first batch, ten updates, ten copies, and the last push, which nothing runs beside.
    assert beside.summary.wall_s == pytest.approx(1.0 + 10 * 1.05 + 0.8)
    for line in beside.log.lines[1:]:
        assert line["timing_s/weight_sync_stall"] == pytest.approx(0.05)
        assert line["timing_s/wait_for_push"] == 0
    assert apart.log.lines[3]["timing_s/weight_sync_stall"] == pytest.approx(0.8)
    assert beside.log.lines[3]["timing_s/weight_sync"] == pytest.approx(0.8)
    assert beside.learner.pushed == list(range(11))
    assert beside.generators[0].live_version == 10


def test_a_push_longer_than_a_step_is_waited_for_by_the_next() -> None:
    settings = config(
        "run.steps=6", "schedule.pipeline_depth=2", "schedule.max_staleness=4", "weight_sync.overlap=true"
    )
    outcome = run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=1.0, push_s=3.0))
    assert outcome.learner.pushed == list(range(7))
    assert sum(line.get("timing_s/wait_for_push", 0) for line in outcome.log.lines) > 3


@pytest.mark.parametrize("every", [1, 2])
def test_overlap_at_depth_zero_is_synchronous_all_the_same(every: int) -> None:
    settings = config(
        "run.steps=6",
        "schedule.pipeline_depth=0",
        f"schedule.max_staleness={every - 1}",
        f"schedule.publish_every={every}",
        "weight_sync.overlap=true",
    )
    outcome = run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=1.0, push_s=0.7))
    lags = [lag for step in outcome.learner.lags for lag in step]
    assert lags == [step % every for step in range(6) for _ in range(2)]


def test_an_evaluation_beside_overlapping_pushes_is_of_one_version() -> None:
    settings = config(
        "run.steps=7",
        "eval.every=3",
        "schedule.pipeline_depth=1",
        "schedule.max_staleness=2",
        "weight_sync.overlap=true",
    )
    generator = ScriptedGenerator(length=constant_length(60), token_s=0.1, slots=4)
    outcome = run(settings, [generator], learner(settings, step_s=0.1, push_s=0.4), eval_tasks=held_out(8))
    evaluated = {line["policy_version"]: line for line in outcome.log.lines if "eval/reward_mean" in line}
    assert sorted(evaluated) == [0, 3, 6, 7]
    assert all(line["eval/policy_version"] == version for version, line in evaluated.items())
    assert [line["step"] for line in outcome.log.lines] == list(range(8))


def test_an_overlapping_push_that_fails_ends_the_run_and_one_with_a_dead_receiver_is_sent_again() -> None:
    settings = config(
        "run.steps=8", "schedule.pipeline_depth=1", "schedule.max_staleness=2", "weight_sync.overlap=true"
    )
    with pytest.raises(ExceptionGroup) as caught:
        run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=1.0, failed_pushes={3}))
    assert "push call 3 of version 3 failed" in str(caught.value.exceptions[0])

    async def kill_one(outcome: Outcome) -> None:
        await asyncio.sleep(4.5)
        outcome.generators[0].die()

    outcome = run(
        settings,
        [ScriptedGenerator(**FAST), ScriptedGenerator(**FAST)],
        learner(settings, step_s=1.0, push_s=0.6),
        during=kill_one,
    )
    assert outcome.generators[1].live_version == 8
    assert outcome.summary.counts["trained"] == 16


def test_a_stop_waits_for_the_running_push_and_for_no_evaluation() -> None:
    settings = config(
        "run.steps=1000",
        "eval.every=3",
        "schedule.pipeline_depth=1",
        "schedule.max_staleness=2",
        "weight_sync.overlap=true",
    )

    async def stop(outcome: Outcome) -> None:
        await asyncio.sleep(12.5)
        outcome.controller.request_stop("SIGINT")

    outcome = run(
        settings,
        [ScriptedGenerator(**FAST)],
        learner(settings, step_s=1.0, push_s=0.5),
        eval_tasks=held_out(400),
        during=stop,
    )
    assert outcome.summary.stopped_by == "SIGINT"


def test_wait_at_the_bound_loses_nothing() -> None:
    settings = config("run.steps=8", "schedule.pipeline_depth=1", "schedule.max_staleness=1")
    straggler = ScriptedGenerator(length=lambda request: 60 if request.key.ordinal == 3 else 10, token_s=0.1)
    outcome = run(settings, [straggler], learner(settings, step_s=1.0))
    assert outcome.summary.counts["trained"] == outcome.summary.counts["submitted"] == 16


def test_a_replica_that_dies_loses_no_prompt() -> None:
    settings = config("run.steps=10", "schedule.pipeline_depth=1", "schedule.max_staleness=2")
    dying = ScriptedGenerator(
        **FAST, failure=lambda request: Failure("die", 5) if request.key.ordinal == 6 else None
    )
    outcome = run(settings, [dying, ScriptedGenerator(**FAST)], learner(settings, step_s=1.0))
    assert outcome.summary.counts["trained"] == outcome.summary.counts["submitted"] == 20
    assert [m.alive for m in outcome.controller._pool.members].count(False) == 1


def test_the_last_replica_that_dies_ends_the_run() -> None:
    settings = config("run.steps=10")
    dying = ScriptedGenerator(**FAST, failure=lambda r: Failure("die", 5) if r.key.ordinal == 6 else None)
    with pytest.raises(ExceptionGroup) as caught:
        run(settings, [dying])
    assert caught.group_contains(NoGeneratorError)


def test_a_learner_that_dies_ends_the_run() -> None:
    settings = config("run.steps=10")
    with pytest.raises(ExceptionGroup) as caught:
        run(settings, None, learner(settings, step_s=1.0, dies_at=4))
    assert caught.group_contains(LearnerError, match="died in step call 4")


def raising(task: Task, result) -> float:
    if task.ordinal % 3 == 1:
        raise RewardRaisedError(f"no reward for {task.uid}")
    return float(int(result.token_ids.sum()) % 2)


def test_failed_rewards_are_counted_and_never_zero() -> None:
    settings = config("run.steps=10", "schedule.pipeline_depth=1", "schedule.max_staleness=2")
    outcome = run(settings, [ScriptedGenerator(**FAST)], scorer=ScriptedScorer(raising))
    failed = [r for r in outcome.log.retired_ if r.state == "failed"]
    assert failed
    assert all(r.ordinal % 3 == 1 and "RewardRaisedError" in r.reason for r in failed)
    assert not any(o % 3 == 1 for ordinals in outcome.learner.ordinals for o in ordinals)


def test_groups_that_all_fail_end_in_a_clear_error() -> None:
    settings = config("run.steps=10", "run.max_unusable_groups=20")

    def always(task: Task, result) -> float:
        raise RewardRaisedError("the reward is broken")

    with pytest.raises(ExceptionGroup) as caught:
        run(settings, [ScriptedGenerator(**FAST)], scorer=ScriptedScorer(always))
    assert caught.group_contains(NothingTrainableError, match="20 groups in a row .* the reward is broken")


def test_groups_that_are_all_filtered_end_in_a_clear_error() -> None:
    settings = config("run.steps=10", "run.max_unusable_groups=20", "algorithm.filter_zero_variance=refill")
    with pytest.raises(ExceptionGroup) as caught:
        run(settings, [ScriptedGenerator(**FAST)], scorer=ScriptedScorer(lambda task, result: 1.0))
    assert caught.group_contains(NothingTrainableError, match="filtered: zero_variance")


def test_filtered_groups_give_their_slots_back() -> None:
    settings = config("run.steps=10", "algorithm.filter_zero_variance=refill")
    coin = itertools.cycle([0.0, 1.0])
    scorer = ScriptedScorer(lambda task, result: next(coin) if task.ordinal % 2 else 0.0)
    outcome = run(settings, [ScriptedGenerator(**FAST)], scorer=scorer)
    assert outcome.summary.counts["filtered"] >= 10


def test_a_hung_rollout_passes_its_deadline_and_its_survivors_train() -> None:
    settings = config("run.steps=6", "rollout.group_size=4", "rollout.deadline_s=20")
    hanging = ScriptedGenerator(
        **FAST,
        slots=64,
        failure=lambda r: Failure("hang", 3) if (r.key.ordinal, r.key.sample) == (5, 1) else None,
    )
    outcome = run(settings, [hanging], learner(settings, step_s=1.0))
    assert outcome.summary.counts["trained"] == outcome.summary.counts["submitted"]
    batch = next(b for b in outcome.learner.batches if any(i.meta.ordinal == 5 for i in b.items))
    meta = next(i.meta for i in batch.items if i.meta.ordinal == 5)
    assert [t.sample for t in meta.trajectories] == [0, 2, 3]
    assert [(f.sample, f.kind) for f in meta.failures] == [(1, "DeadlineError")]


def test_bad_steps_move_no_version_and_too_many_end_the_run() -> None:
    settings = config("run.steps=10", "learner.max_bad_steps=2")
    outcome = run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=1.0, bad_steps={2, 5, 6}))
    assert outcome.summary.steps == 13
    assert outcome.summary.policy_version == 10
    assert [r.reason for r in outcome.log.retired_ if r.state == "dropped"] == ["bad_step"] * 6
    with pytest.raises(ExceptionGroup) as caught:
        run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=1.0, bad_steps={2, 3, 4}))
    assert caught.group_contains(BadStepsError, match="3 updates in a row")


def test_a_push_that_fails_with_a_dead_receiver_is_sent_to_the_survivors() -> None:
    settings = config("run.steps=8", "schedule.pipeline_depth=1", "schedule.max_staleness=2")

    async def kill_one(outcome: Outcome) -> None:
        await asyncio.sleep(4.5)
        outcome.generators[0].die()

    outcome = run(
        settings,
        [ScriptedGenerator(**FAST), ScriptedGenerator(**FAST)],
        learner(settings, step_s=1.0),
        during=kill_one,
    )
    assert outcome.generators[1].live_version == 8
    assert outcome.summary.counts["trained"] == 16


def test_a_version_whose_push_failed_is_not_live() -> None:
    settings = config("run.steps=8")
    with pytest.raises(ExceptionGroup) as caught:
        run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=1.0, failed_pushes={3}))
    assert "push call 3 of version 3 failed" in str(caught.value.exceptions[0])


def test_a_receiver_with_other_weights_ends_the_run() -> None:
    settings = config("run.steps=8")
    damaged = ScriptedGenerator(**FAST, checksum=lambda v: "damaged" if v == 2 else f"scripted-{v}")
    with pytest.raises(ExceptionGroup, match="unhandled") as caught:
        run(settings, [damaged])
    assert "holds 2:damaged" in str(caught.value.exceptions[0])


@pytest.mark.parametrize("every", [1, 2, 3])
def test_each_kth_version_is_pushed_and_the_last(every: int) -> None:
    settings = config(
        "run.steps=10",
        "schedule.pipeline_depth=1",
        f"schedule.max_staleness={every + 1}",
        f"schedule.publish_every={every}",
    )
    outcome = run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=1.0))
    assert outcome.learner.pushed == sorted({0, 10, *range(every, 11, every)})


def held_out(count: int) -> list[Task]:
    return [Task(i, f"eval-{i}", "", (1, 2)) for i in range(count)]


def test_an_evaluation_is_of_one_version_and_lands_on_its_line() -> None:
    settings = config("run.steps=7", "eval.every=3", "schedule.pipeline_depth=1", "schedule.max_staleness=2")
    generator = ScriptedGenerator(length=constant_length(60), token_s=0.1, slots=4)
    outcome = run(settings, [generator], learner(settings, step_s=0.1), eval_tasks=held_out(8))
    evaluated = {line["policy_version"]: line for line in outcome.log.lines if "eval/reward_mean" in line}
    assert sorted(evaluated) == [0, 3, 6, 7]
    assert all(line["eval/policy_version"] == version for version, line in evaluated.items())
    assert [line["step"] for line in outcome.log.lines] == list(range(8))
    assert sum(line.get("timing_s/eval", 0) for line in outcome.log.lines) > 0
    assert outcome.summary.eval_after is not None
    assert outcome.log.lines[-1]["model/checksum"] == "scripted-7"


def test_a_stop_ends_after_the_running_update_and_keeps_the_books() -> None:
    settings = config("run.steps=1000", "schedule.pipeline_depth=1", "schedule.max_staleness=2")

    async def stop(outcome: Outcome) -> None:
        await asyncio.sleep(7.5)
        outcome.controller.request_stop("SIGINT")

    outcome = run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=1.0), during=stop)
    assert outcome.summary.stopped_by == "SIGINT"
    assert outcome.summary.steps == 7
    assert all(not generator._running for generator in outcome.generators)


def test_a_stall_is_reported_with_who_holds_what(caplog: pytest.LogCaptureFixture) -> None:
    settings = config("run.steps=3", "rollout.deadline_s=2000", "run.stall_after_s=100")
    hanging = ScriptedGenerator(**FAST, failure=lambda r: Failure("hang") if r.key.ordinal == 2 else None)
    with caplog.at_level(logging.WARNING, logger="asyncrl"):
        run(settings, [hanging])
    report = next(r.message for r in caplog.records if "no progress for" in r.message)
    assert "train-2 (ordinal 2) runs for" in report
    assert "on generator 0" in report
    assert "policy version 2, live version 2" in report


def test_a_learner_step_that_hangs_passes_a_deadline_that_names_it() -> None:
    settings = config("run.steps=3", "learner.step_timeout_s=50")
    with pytest.raises(ExceptionGroup) as caught:
        run(settings, None, learner(settings, step_s=100.0))
    assert caught.group_contains(DeadlineError, match=r"update 0 -> 1 .* learner.step_timeout_s = 50 s")


def test_waiting_times_say_which_side_is_short() -> None:
    settings = config("run.steps=20", "schedule.pipeline_depth=1", "schedule.max_staleness=1")
    slow_generation = run(settings, [ScriptedGenerator(length=constant_length(40), token_s=0.1)])
    slow_updates = run(settings, [ScriptedGenerator(**FAST)], learner(settings, step_s=4.0))
    short = slow_generation.log.lines[-2]
    assert short["timing_s/wait_for_batch"] > 0.7 * short["timing_s/step"]
    short = slow_updates.log.lines[-3]
    assert short["timing_s/wait_for_policy"] > 0.7 * short["timing_s/step"]
    assert short["perf/learner_busy"] == pytest.approx(1.0)
