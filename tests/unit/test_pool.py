"""Deaths, hangs, restarts and late joins of generator replicas, on a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random

import pytest

from asyncrl.config import Config
from asyncrl.errors import GeneratorError, LostGroupError, NoGeneratorError, VersionGoneError
from asyncrl.generators.local import LocalReplica
from asyncrl.generators.pool import GeneratorPool
from asyncrl.generators.scripted import (
    Failure,
    ScriptedGenerator,
    constant_length,
    log_normal_length,
    scripted_length,
)
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.rollout import GroupRequest, RolloutHost
from asyncrl.simulate.clock import run_virtual
from asyncrl.snapshot import Progress, Snapshot
from asyncrl.types import SamplingParams, Task

from .controller_harness import Outcome, ScriptedScorer, config, run

FAST = {"length": constant_length(10), "token_s": 0.1}  # a group takes 1 s
DEPTH_ONE = ("run.steps=30", "schedule.pipeline_depth=1", "schedule.max_staleness=2")


def fast(**script) -> ScriptedGenerator:
    return ScriptedGenerator(**{**FAST, **script})


def slow_start() -> ScriptedGenerator:
    return fast(start_s=7.0)


def learner(settings: Config, **script) -> ScriptedLearner:
    return ScriptedLearner(max_staleness=settings.schedule.max_staleness, **{"step_s": 1.0, **script})


def held_out(count: int) -> list[Task]:
    return [Task(i, f"eval-{i}", "", (1, 2)) for i in range(count)]


def assert_all_trained(outcome: Outcome) -> None:
    """Nothing lost, nothing failed, nothing dropped; nothing twice is the harness's own check."""
    counts = outcome.summary.counts
    batch, steps = outcome.controller.config.rollout.groups_per_step, outcome.controller.config.run.steps
    assert counts["trained"] == counts["submitted"] == batch * steps


# ------------------------------------------------------------------ the pool alone


def request(ordinal: int = 0, tokens: int = 10, samples: int = 2) -> GroupRequest:
    task = Task(ordinal, f"train-{ordinal}", "", (1, 2, 3))
    return GroupRequest(task, 0, samples, SamplingParams(tokens), seed=0, deadline_s=1000.0)


def replica(name: str, generator: ScriptedGenerator) -> LocalReplica:
    return LocalReplica(name, RolloutHost(generator, ScriptedScorer(), lambda ids: ""))


async def started(*generators: ScriptedGenerator, **settings) -> GeneratorPool:
    pool = GeneratorPool([replica(f"generator {i}", g) for i, g in enumerate(generators)], **settings)
    await pool.start()
    pool.let_in(pool.joining, 0)
    return pool


def test_work_goes_to_the_fewest_outstanding_tokens() -> None:
    async def main() -> list[int]:
        pool = await started(fast(), fast(), fast())
        sizes = [50, 10, 10, 10, 30, 10]
        groups = [asyncio.ensure_future(pool.run_group(request(i, n))) for i, n in enumerate(sizes)]
        await asyncio.sleep(0.01)
        holders = [pool.holder(f"train-{i}", i) for i in range(len(sizes))]
        assert [m.outstanding_tokens for m in pool.members] == [100, 60, 80]
        await asyncio.gather(*groups)
        assert [m.outstanding_tokens for m in pool.members] == [0, 0, 0]
        return [int(name.split()[1]) for name in holders]

    assert run_virtual(main()) == [0, 1, 2, 1, 2, 1]


def test_a_hung_replica_is_noticed_within_interval_and_deadline_and_fails_its_requests_then() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        hanging = fast()
        pool = await started(hanging, health_every_s=1.0, health_timeout_s=3.5)
        supervisor = asyncio.ensure_future(pool.supervise())
        await asyncio.sleep(0.25)
        group = asyncio.ensure_future(pool.run_group(request(tokens=10_000)))
        await asyncio.sleep(0.01)
        hanging.freeze()
        since = loop.time()
        with pytest.raises(GeneratorError, match=r"no answer to a ping in 3.5 s"):
            await group
        noticed = loop.time() - since
        assert "no answer to a ping" in str(await pool.shortage())
        await supervisor
        with pytest.raises(NoGeneratorError):
            await pool.run_group(request())
        return noticed

    assert 3.5 < run_virtual(main()) <= 4.5


def test_an_idle_replica_whose_engine_broke_is_noticed_by_its_ping() -> None:
    async def main() -> None:
        broken = fast()
        pool = await started(broken, fast())
        supervisor = asyncio.ensure_future(pool.supervise())
        broken.die("the decode thread failed")
        await asyncio.sleep(1.1)
        assert [m.state for m in pool.members] == ["dead", "live"]
        assert pool.members[0].why == "the decode thread failed"
        supervisor.cancel()

    run_virtual(main())


def test_a_replica_that_answers_pings_but_not_its_group_is_taken_for_hung() -> None:
    async def main() -> None:
        pool = await started(fast(failure=lambda request: Failure("hang")))
        with pytest.raises(GeneratorError, match=r"generator 0 did not answer for train-0 in 50 s"):
            await pool.run_group(request(), limit_s=50.0)
        assert not pool.live

    run_virtual(main())


def test_a_restarted_replica_takes_no_work_before_it_is_let_in() -> None:
    async def main() -> None:
        first = fast()
        pool = await started(first, restart=lambda name: replica(name, slow_start()))
        supervisor = asyncio.ensure_future(pool.supervise())
        first.die()
        await asyncio.sleep(1.5)
        group = asyncio.ensure_future(pool.run_group(request()))
        await asyncio.sleep(20.0)
        assert [m.state for m in pool.members] == ["joining"]
        assert not group.done()
        assert pool.restarts == 1
        pool.let_in(pool.joining, 4)
        await group
        assert pool.live_version == 4
        supervisor.cancel()

    run_virtual(main())


def test_work_that_is_to_run_alone_waits_for_an_empty_replica_and_keeps_others_off() -> None:
    async def main() -> None:
        pool = await started(fast())
        beside = asyncio.ensure_future(pool.run_group(request(0)))
        await asyncio.sleep(0.5)
        alone = asyncio.ensure_future(pool.run_group(request(1), alone=True))
        await asyncio.sleep(0.1)
        after = [asyncio.ensure_future(pool.run_group(request(i))) for i in (2, 3)]
        held = []
        while not all(task.done() for task in (beside, alone, *after)):
            await asyncio.sleep(0.25)
            held.append(sorted(ordinal for _, ordinal in pool.members[0].groups))
        assert [now for now, before in zip(held, [None, *held], strict=False) if now != before] == [
            [0], [1], [2, 3], []
        ]  # fmt: skip
        # One that gives up while it waits leaves nothing behind.
        beside = asyncio.ensure_future(pool.run_group(request(4)))
        await asyncio.sleep(0.1)
        alone = asyncio.ensure_future(pool.run_group(request(5), alone=True))
        await asyncio.sleep(0.1)
        alone.cancel()
        await asyncio.gather(beside, pool.run_group(request(6)))

    run_virtual(main())


def test_restarts_back_off_and_end_after_max_restarts_without_a_completed_group() -> None:
    deaths: list[float] = []

    def stillborn(name: str) -> LocalReplica:
        deaths.append(asyncio.get_running_loop().time())
        generator = fast()
        generator.die("no memory")
        generator.start = generator.check_health  # type: ignore[method-assign]
        return replica(name, generator)

    async def main() -> None:
        first = fast()
        pool = await started(first, restart=stillborn, max_restarts=4)
        first.die()
        await pool.supervise()
        why = str(await pool.shortage())
        assert "no generator is left, generators.min = 1 (generators.max_restarts = 4 in a row" in why
        assert "generator 0 after 4 restarts: no memory" in why

    run_virtual(main())
    waits = [after - before for before, after in itertools.pairwise(deaths)]
    assert waits == pytest.approx([2.0, 4.0, 8.0])


def test_a_completed_group_makes_up_for_earlier_restarts() -> None:
    async def main() -> None:
        made = [fast()]

        def restart(name: str) -> LocalReplica:
            made.append(fast())
            return replica(name, made[-1])

        pool = await started(made[0], restart=restart, max_restarts=1)
        supervisor = asyncio.ensure_future(pool.supervise())
        for life in range(5):
            await pool.run_group(request(life))
            made[-1].die()
            await pool.until(lambda pool: pool.joining)
            pool.let_in(pool.joining, 0)
        assert pool.restarts == 5
        supervisor.cancel()

    run_virtual(main())


def test_work_for_a_version_waits_for_it_or_hears_that_it_is_gone() -> None:
    async def main() -> None:
        first = fast()
        pool = await started(first, restart=lambda name: replica(name, fast()))
        supervisor = asyncio.ensure_future(pool.supervise())
        await pool.run_group(request(), version=0)
        first.die()
        await pool.until(lambda pool: not pool.live)
        same = asyncio.ensure_future(pool.run_group(request(1), version=0))
        await pool.until(lambda pool: pool.joining)
        assert not same.done()
        pool.let_in(pool.joining, 0)
        await same
        pool.let_in(pool.live, 1)
        with pytest.raises(
            VersionGoneError, match="no replica holds version 0 any more, and the newest is 1"
        ):
            await pool.run_group(request(2), version=0)
        supervisor.cancel()

    run_virtual(main())


def lost(group: asyncio.Future) -> LostGroupError:
    error = group.exception()
    assert isinstance(error, LostGroupError)
    return error


def test_a_group_of_a_dead_replica_goes_on_from_its_last_snapshot() -> None:
    lengths = scripted_length({(0, 0): 10}, default=40)

    async def main() -> None:
        first, second, third = (fast(length=lengths) for _ in range(3))
        pool = await started(first, second, third)
        supervisor = asyncio.ensure_future(pool.supervise())
        undisturbed = await pool.run_group(request(0, tokens=64))
        sampled = [g.statistics().tokens for g in (first, second, third)]
        group = asyncio.ensure_future(pool.run_group(request(0, tokens=64)))
        # Looked at each second: at 2 s one sample is done, and the other has 20 tokens.
        await asyncio.sleep(2.45)
        assert pool.holder("train-0", 0) == "generator 0"
        first.die()
        await asyncio.wait([group])
        salvage = lost(group).salvage
        assert salvage.progress == Progress(samples=2, tokens=10 + 20)

        # The second dies before it was looked at: what the first had is still there.
        again = asyncio.ensure_future(pool.run_group(request(0, tokens=64), salvage=salvage))
        await asyncio.sleep(0.5)
        assert pool.members[1].outstanding_tokens == 2 * 64 - 30
        second.die()
        await asyncio.wait([again])
        assert lost(again).salvage == salvage
        outcome = await pool.run_group(request(0, tokens=64), salvage=salvage)
        assert outcome == undisturbed
        assert third.statistics().tokens - sampled[2] == 20
        assert (pool.continued_samples, pool.continued_tokens) == (4, 60)
        supervisor.cancel()

    run_virtual(main())


def test_of_a_group_that_was_never_looked_at_nothing_is_left_and_an_idle_replica_holds_nothing() -> None:
    async def main() -> None:
        first, second = fast(), fast(length=constant_length(30))
        pool = await started(first, second)
        supervisor = asyncio.ensure_future(pool.supervise())
        group = asyncio.ensure_future(pool.run_group(request()))
        await asyncio.sleep(0.5)
        first.die()
        await asyncio.wait([group])
        assert lost(group).salvage is None
        group = asyncio.ensure_future(pool.run_group(request(1, tokens=64)))
        await asyncio.sleep(1.0)
        assert pool.members[1].snapshot.groups == {("train-1", 1): Progress(samples=2, tokens=2 * 5)}
        await group
        await asyncio.sleep(2.0)
        assert pool.members[1].snapshot == Snapshot()
        supervisor.cancel()

    run_virtual(main())


def test_a_snapshot_that_takes_long_neither_delays_the_checks_nor_counts_as_a_hang() -> None:
    async def main() -> None:
        slow = fast(length=constant_length(200))
        release = asyncio.Event()
        partials = slow.partials

        async def late() -> dict:
            await release.wait()
            return await partials()

        slow.partials = late  # type: ignore[method-assign]
        pool = await started(slow)
        supervisor = asyncio.ensure_future(pool.supervise())
        group = asyncio.ensure_future(pool.run_group(request(tokens=200)))
        await asyncio.sleep(10.0)
        assert pool.live, "it was taken for hung"
        release.set()
        await asyncio.sleep(0.1)
        assert pool.members[0].snapshot.groups == {("train-0", 0): Progress(samples=2, tokens=200)}
        await group
        supervisor.cancel()

    run_virtual(main())


# ------------------------------------------------------------------ whole runs


def kill(which: int, at: float):
    async def during(outcome: Outcome) -> None:
        await asyncio.sleep(at)
        outcome.generators[which].die()

    return during


def freeze(which: int, at: float):
    async def during(outcome: Outcome) -> None:
        await asyncio.sleep(at)
        outcome.generators[which].freeze()

    return during


@pytest.mark.parametrize("end", [kill, freeze])
@pytest.mark.parametrize("at", [3.05, 3.3, 4.0, 4.7])
def test_a_run_outlives_one_of_two_replicas_and_gets_it_back(end, at: float) -> None:
    settings = config(*DEPTH_ONE)
    pusher = learner(settings, push_s=0.2)
    outcome = run(settings, [fast(), fast()], pusher, during=end(0, at), spare=slow_start)
    assert_all_trained(outcome)
    assert len(outcome.generators) == 3
    live = [line["generator/replicas_live"] for line in outcome.log.lines[1:]]
    assert live[0] == live[-1] == 2
    assert min(live) == 1
    assert outcome.log.lines[-1]["generator/restarts"] == 1
    _, other, restarted = outcome.generators
    assert restarted.live_version == other.live_version == 30
    # It works again. Had it sampled before its first push, at version 0, the learner had refused that.
    assert restarted._tokens > 0


@pytest.mark.parametrize("end", [kill, freeze])
@pytest.mark.parametrize("overlap", ["false", "true"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("at", [0.05, 1.5, 3.05, 3.5, 4.1])
def test_a_run_outlives_its_only_replica(end, overlap: str, depth: int, at: float) -> None:
    settings = config(
        "run.steps=12",
        f"schedule.pipeline_depth={depth}",
        f"schedule.max_staleness={depth + 1}",
        f"weight_sync.overlap={overlap}",
    )
    outcome = run(settings, [fast()], learner(settings, push_s=0.2), during=end(0, at), spare=slow_start)
    assert_all_trained(outcome)
    assert outcome.generators[1].live_version == 12


def test_the_only_replica_may_die_again_and_again_whatever_the_loop_waits_for() -> None:
    settings = config(
        "run.steps=40", "schedule.pipeline_depth=2", "schedule.max_staleness=5", "schedule.publish_every=3"
    )

    async def kill_each(outcome: Outcome) -> None:
        for nap in (2.3, 9.1, 9.7, 10.3, 11.9, 8.2, 9.4):
            await asyncio.sleep(nap)
            outcome.generators[-1].die()

    outcome = run(
        settings, [fast()], learner(settings, push_s=0.4), during=kill_each, spare=lambda: fast(start_s=2)
    )
    assert_all_trained(outcome)
    assert outcome.log.lines[-1]["generator/restarts"] == 7


def test_synchronous_runs_train_on_the_same_samples_whoever_dies() -> None:
    settings = config("run.steps=10", "schedule.pipeline_depth=0", "schedule.max_staleness=0")
    calm = run(settings, [fast(), fast()])
    stormy = run(settings, [fast(), fast()], during=kill(0, 4.4), spare=slow_start)
    assert calm.learner.ordinals == stormy.learner.ordinals
    assert [b.items[0].payload for b in calm.learner.batches] == [
        b.items[0].payload for b in stormy.learner.batches
    ]


@pytest.mark.parametrize("end", ["die", "freeze"])
def test_a_group_that_goes_on_keeps_the_start_version_that_its_oldest_tokens_have(end: str) -> None:
    settings = config(
        "run.steps=12", "schedule.pipeline_depth=1", "schedule.max_staleness=4", "rollout.max_new_tokens=200"
    )
    starts: dict[int, int] = {}
    live_then = []

    def mixed() -> ScriptedGenerator:
        # One group in five is slow, so that versions pass while it runs.
        return fast(length=lambda request: 80 if request.key.ordinal % 5 == 1 else 10)

    async def strike(outcome: Outcome) -> None:
        await asyncio.sleep(8.1)
        budget, member = outcome.controller.budget, outcome.controller._pool.members[0]
        left = [key for key in member.groups if key in member.snapshot.groups]
        starts.update({ordinal: budget.start_version(ordinal) for _, ordinal in left})
        live_then.append(budget.live_version)
        getattr(outcome.generators[0], end)()

    outcome = run(settings, [mixed(), mixed()], learner(settings), during=strike, spare=slow_start)
    assert_all_trained(outcome)
    assert min(starts.values()) < live_then[0], "no version has passed since the start: it shows nothing"
    metas = {item.meta.ordinal: item.meta for batch in outcome.learner.batches for item in batch.items}
    for ordinal, start in starts.items():
        assert metas[ordinal].start_version == metas[ordinal].oldest_version == start
    last = outcome.log.lines[-1]
    assert last["generator/continued_samples"] == 2 * len(starts)
    assert last["generator/continued_tokens"] > 0


def test_replicas_that_stay_dead_end_the_run() -> None:
    settings = config("run.steps=30", "generators.max_restarts=2")

    def doomed() -> ScriptedGenerator:
        return fast(failure=lambda request: Failure("die", 3))

    outcome: list[ScriptedGenerator] = []

    def spare() -> ScriptedGenerator:
        outcome.append(doomed())
        return outcome[-1]

    with pytest.raises(ExceptionGroup) as caught:
        run(settings, [doomed(), doomed()], spare=spare)
    assert caught.group_contains(NoGeneratorError, match="generators.max_restarts = 2 in a row")
    assert len(outcome) == 4


def test_a_prompt_that_kills_its_replicas_fails_by_name_and_the_run_goes_on() -> None:
    settings = config(*DEPTH_ONE)

    def fragile() -> ScriptedGenerator:
        return fast(failure=lambda r: Failure("die", 5) if r.key.ordinal == 6 else None, slots=64)

    outcome = run(settings, [fragile(), fragile()], learner(settings), spare=fragile)
    failed = {r.ordinal: r.reason for r in outcome.log.retired_ if r.state == "failed"}
    assert list(failed) == [6], "others were beside it when the replicas died, and are not at fault"
    assert (
        "train-6 was on 3 replicas when they died (rollout.max_attempts = 3), the last time with" in failed[6]
    )
    assert outcome.summary.counts["trained"] == 60


@pytest.mark.parametrize("at", [0.3, 3.9, 4.4, 5.0, 9.0])
@pytest.mark.parametrize("replicas", [1, 2])
def test_evaluations_outlive_a_death_and_stay_of_one_version(
    at: float, replicas: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config("run.steps=9", "eval.every=3", "schedule.pipeline_depth=1", "schedule.max_staleness=2")
    generators = [fast(slots=4) for _ in range(replicas)]
    with caplog.at_level(logging.WARNING, logger="asyncrl"):
        outcome = run(
            settings,
            generators,
            learner(settings, step_s=0.5),
            eval_tasks=held_out(8),
            during=kill(0, at),
            spare=lambda: fast(slots=4, start_s=3.0),
        )
    assert_all_trained(outcome)
    evaluated = {line["policy_version"]: line for line in outcome.log.lines if "eval/reward_mean" in line}
    assert sorted(evaluated) == [0, 3, 6, 9]
    for version, line in evaluated.items():
        assert line["eval/prompts"] == 8
        moved = f"the evaluation of version {version} becomes one of {int(line['eval/policy_version'])}"
        assert line["eval/policy_version"] == version or moved in caplog.text


def test_an_evaluation_whose_version_died_out_is_made_of_the_next() -> None:
    settings = config("run.steps=9", "eval.every=3", "schedule.pipeline_depth=1", "schedule.max_staleness=2")

    async def kill_in_evaluation(outcome: Outcome) -> None:
        while outcome.controller._pushes.evaluation is None:  # noqa: ASYNC110  the loop has no event for it
            await asyncio.sleep(0.1)
        # The learner is in the update 3 -> 4 by now, so that the weights of version 3 are nowhere else.
        await asyncio.sleep(0.3)
        outcome.generators[0].die()

    outcome = run(
        settings,
        [ScriptedGenerator(length=constant_length(40), token_s=0.1)],
        learner(settings, step_s=2.0),
        eval_tasks=held_out(8),
        during=kill_in_evaluation,
        spare=slow_start,
    )
    assert_all_trained(outcome)
    lines = {line["policy_version"]: line for line in outcome.log.lines if "eval/reward_mean" in line}
    assert {version: line["eval/policy_version"] for version, line in lines.items()} == {
        0: 0,
        3: 4,
        6: 6,
        9: 9,
    }


def test_an_evaluation_prompt_that_kills_its_replicas_is_counted_as_failed() -> None:
    settings = config("run.steps=2", "eval.every=0", "eval.samples=1")

    def fragile() -> ScriptedGenerator:
        # Evaluations draw with seeds of their own.
        return fast(
            failure=lambda r: Failure("die", 5) if r.key.seed and r.uid.startswith("eval-3") else None
        )

    outcome = run(settings, [fragile()], eval_tasks=held_out(8), spare=fragile)
    for line in (outcome.log.lines[0], outcome.log.lines[-1]):
        assert (line["eval/prompts"], line["eval/failed"]) == (7, 1)
    assert_all_trained(outcome)


def test_a_receiver_that_hangs_in_a_push_holds_it_up_for_seconds_not_for_the_push_timeout() -> None:
    settings = config("run.steps=8", "schedule.pipeline_depth=1", "schedule.max_staleness=2")
    pusher = learner(settings, push_s=0.5)
    # Versions are pushed from 2 s on, each 1.5 s; 10,000 s are allowed for a push.
    outcome = run(settings, [fast(), fast()], pusher, during=freeze(0, 2.1), spare=slow_start)
    assert_all_trained(outcome)
    assert outcome.summary.wall_s < 30


@pytest.mark.parametrize("seed", range(60))
def test_random_storms_lose_nothing_break_no_bound_and_never_deadlock(seed: int) -> None:
    """Deaths and hangs at random moments of random schedules; the harness checks every retirement."""
    rng = random.Random(seed)
    depth, every = rng.randint(0, 3), rng.randint(1, 3)
    settings = config(
        f"run.steps={rng.randint(6, 20)}",
        f"rollout.groups_per_step={rng.randint(1, 3)}",
        "rollout.max_attempts=1000",
        f"schedule.pipeline_depth={depth}",
        f"schedule.publish_every={every}",
        f"schedule.max_staleness={depth + every - 1 + rng.randint(0, 2)}",
        f"schedule.at_bound={rng.choice(['wait', 'drop'])}",
        f"schedule.in_flight_updates={rng.choice(['true', 'false'])}",
        f"eval.every={rng.choice([0, 2, 3])}",
        f"weight_sync.overlap={rng.choice(['true', 'false'])}",
        "generators.max_restarts=1000",
    )

    def generator() -> ScriptedGenerator:
        return ScriptedGenerator(
            slots=rng.choice([2, 64]),
            length=log_normal_length(8, 0.8),
            token_s=0.1,
            start_s=rng.choice([0.0, 2.0, 10.0]),
            receive_s=rng.choice([0.0, 0.3]),
            swap_s=rng.choice([0.0, 0.1]),
        )

    async def storm(outcome: Outcome) -> None:
        for _ in range(rng.randint(1, 6)):
            await asyncio.sleep(rng.expovariate(1 / 6))
            victim = rng.choice(outcome.generators)
            if victim._broken is None and victim._clock is not None:
                rng.choice([victim.die, victim.freeze])()

    outcome = run(
        settings,
        [generator() for _ in range(rng.randint(1, 3))],
        learner(settings, step_s=rng.choice([0.1, 1.0, 5.0]), push_s=rng.choice([0.0, 0.5])),
        eval_tasks=held_out(rng.choice([0, 4])),
        during=storm,
        spare=generator,
    )
    counts = outcome.summary.counts
    assert counts["failed"] == 0
    assert counts["submitted"] == counts["trained"] + counts["dropped"]
