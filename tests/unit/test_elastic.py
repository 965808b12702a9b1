"""Generators that join and leave under a real controller, on a virtual clock.

``controller_harness.run`` checks the bound, the books and the queue's size in each run.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from asyncrl.checkpoint.compatibility import Origin
from asyncrl.checkpoint.saver import Saver
from asyncrl.checkpoint.store import CheckpointStore
from asyncrl.config import Config
from asyncrl.errors import NoGeneratorError
from asyncrl.generators.scripted import ScriptedGenerator, constant_length, log_normal_length
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.types import Task

from .controller_harness import Outcome, ScriptedCluster, config, run

SCHEDULES = 80
ELASTIC = (
    "placement.address=cluster",
    "generators.max=4",
    "schedule.pipeline_depth=1",
    "schedule.max_staleness=2",
)


def fast(**script) -> ScriptedGenerator:
    return ScriptedGenerator(**{"length": constant_length(10), "token_s": 0.1, **script})


def learner(settings: Config, **script) -> ScriptedLearner:
    return ScriptedLearner(max_staleness=settings.schedule.max_staleness, **{"step_s": 1.0, **script})


def assert_all_trained(outcome: Outcome) -> None:
    counts = outcome.summary.counts
    steps, batch = outcome.controller.config.run.steps, outcome.controller.config.rollout.groups_per_step
    assert counts["trained"] == counts["submitted"] == batch * steps


def test_a_generator_that_joins_serves_at_the_live_version(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="asyncrl")
    settings = config("run.steps=30", *ELASTIC)
    cluster = ScriptedCluster(lambda: fast(start_s=3.0))
    joined: list[int] = []

    async def grow(outcome: Outcome) -> None:
        await asyncio.sleep(10.0)
        cluster.add()
        await outcome.controller._pool.until(lambda pool: len(pool.live) == 2)
        joined.append(outcome.controller._pool.members[1].version)
        assert joined == [outcome.controller.budget.live_version]

    outcome = run(settings, [fast()], learner(settings), cluster=cluster, during=grow)
    assert_all_trained(outcome)
    assert joined[0] > 3
    assert f"generator 1 has joined, at version {joined[0]}" in caplog.text
    assert outcome.controller._pool.members[1].completed > 0
    last = outcome.log.lines[-1]
    assert (last["generator/replicas_live"], last["generator/joined"], last["generator/left"]) == (2, 1, 0)


def test_no_more_join_than_may() -> None:
    settings = config("run.steps=40", *ELASTIC)
    cluster = ScriptedCluster(fast)
    for _ in range(9):
        cluster.add()
    outcome = run(settings, [fast(), fast()], learner(settings), cluster=cluster)
    assert outcome.log.lines[-1]["generator/replicas_live"] == 4
    assert cluster.rooms == 7


def test_a_generator_that_leaves_with_its_node_is_no_fault_and_loses_nothing() -> None:
    settings = config("run.steps=30", *ELASTIC, "rollout.max_attempts=1000")
    cluster = ScriptedCluster(fast)

    async def shrink(outcome: Outcome) -> None:
        await asyncio.sleep(10.25)
        assert outcome.controller._pool.members[0].groups, "it works on nothing: this shows nothing"
        cluster.remove("generator 0")

    long = constant_length(50)  # so that there is a snapshot of it
    generators = [fast(length=long), fast(length=long)]
    outcome = run(settings, generators, learner(settings), cluster=cluster, during=shrink)
    assert_all_trained(outcome)
    last = outcome.log.lines[-1]
    assert (last["generator/replicas_live"], last["generator/left"], last["generator/restarts"]) == (1, 1, 0)
    assert last["generator/continued_tokens"] > 0


def test_the_place_of_one_that_left_is_taken_by_another() -> None:
    settings = config("run.steps=60", "placement.address=cluster")
    cluster = ScriptedCluster(fast)

    async def move(outcome: Outcome) -> None:
        await asyncio.sleep(10.25)
        cluster.remove("generator 0")  # none is left then, but one may join
        await asyncio.sleep(20.0)
        cluster.add()

    outcome = run(settings, [fast()], learner(settings), cluster=cluster, during=move)
    assert_all_trained(outcome)
    assert outcome.log.lines[-1]["generator/joined"] == 1


@pytest.mark.parametrize("gone", [1, 2], ids=["one is left", "none is left"])
@pytest.mark.parametrize("overlap", [False, True])
def test_too_few_generators_stop_the_run_after_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gone: int, overlap: bool
) -> None:
    settings = config(
        "run.steps=1000",
        *ELASTIC,
        "generators={replicas: 2, min: 2, below_min_s: 50}",
        "checkpoint={every: 0, keep_best: false}",
        f"weight_sync={{overlap: {str(overlap).lower()}, timeout_s: 10000}}",
        "eval.every=3",
    )
    trains = learner(settings)
    store = CheckpointStore(tmp_path / "checkpoints")

    async def nothing() -> None: ...

    saver = Saver(
        settings.checkpoint,
        store,
        trains,
        resolve=list,
        lines_on_disk=nothing,
        config_text="",
        of=Origin("", {}),
    )
    cluster = ScriptedCluster(fast)
    seen: list[Outcome] = []

    async def shrink(outcome: Outcome) -> None:
        seen.append(outcome)
        await asyncio.sleep(10.25)
        for number in range(gone):
            cluster.remove(f"generator {number}")

    with pytest.raises(ExceptionGroup) as caught:
        run(
            settings,
            [fast(), fast()],
            trains,
            cluster=cluster,
            during=shrink,
            saver=saver,
            eval_tasks=[Task(0, "eval-0", "", (1, 2))],
        )
    assert caught.group_contains(
        NoGeneratorError, match=r"generators\.min = 2 .*generator 0 left with its node"
    )
    last = max(store.steps())
    assert last == seen[0].controller._groups.step > 0
    assert f"stopped after step {last}, with a checkpoint of it" in caplog.text
    # With one left it went on, as long as others might have joined.
    assert last > 20 if gone == 1 else last < 20


def test_fewer_than_the_minimum_are_borne_for_a_while() -> None:
    settings = config("run.steps=60", *ELASTIC, "generators={replicas: 2, min: 2, below_min_s: 30}")
    cluster = ScriptedCluster(fast)

    async def move(outcome: Outcome) -> None:
        for number in range(2):
            await asyncio.sleep(10.25)
            cluster.remove(f"generator {number}")
            await asyncio.sleep(20.0)
            cluster.add()

    assert_all_trained(run(settings, [fast(), fast()], learner(settings), cluster=cluster, during=move))


def test_a_generator_whose_node_goes_away_while_it_starts_is_not_waited_for() -> None:
    settings = config("run.steps=60", *ELASTIC)
    cluster = ScriptedCluster(lambda: fast(start_s=1e6))

    async def come_and_go(outcome: Outcome) -> None:
        await asyncio.sleep(5.0)
        cluster.add()
        await asyncio.sleep(5.0)
        assert len(outcome.controller._pool.members) == 2
        del cluster.engines["generator 1"]  # which says nothing of it
        await asyncio.sleep(6.0)
        assert len(outcome.controller._pool.members) == 1

    outcome = run(settings, [fast()], learner(settings), cluster=cluster, during=come_and_go)
    assert outcome.log.lines[-1]["generator/left"] == 1


def random_run(seed: int) -> Outcome:
    rng = random.Random(seed)
    depth, every = rng.randint(0, 3), rng.randint(1, 2)
    settings = config(
        f"run.steps={rng.randint(5, 15)}",
        "placement.address=cluster",
        "generators={replicas: 2, max: 4, below_min_s: 1000000}",
        f"rollout.groups_per_step={rng.randint(1, 4)}",
        "rollout.max_attempts=1000",
        f"schedule.pipeline_depth={depth}",
        f"schedule.publish_every={every}",
        f"schedule.max_staleness={depth + every - 1 + rng.randint(0, 2)}",
        f"schedule.at_bound={rng.choice(['wait', 'drop'])}",
        f"schedule.in_flight_updates={rng.choice(['true', 'false'])}",
        f"eval.every={rng.choice([0, 2])}",
    )

    def engine() -> ScriptedGenerator:
        return ScriptedGenerator(
            slots=rng.choice([2, 8]),
            length=log_normal_length(rng.choice([4, 16]), rng.choice([0.0, 1.2])),
            token_s=rng.choice([0.01, 0.1]),
            start_s=rng.choice([0.0, 2.0]),
            receive_s=rng.choice([0.0, 1.0]),
        )

    cluster = ScriptedCluster(engine)

    async def weather(outcome: Outcome) -> None:
        """Nodes come and go; in the end there is one to finish on."""
        for _ in range(rng.randint(1, 8)):
            await asyncio.sleep(rng.uniform(0.0, 6.0))
            if cluster.engines and rng.random() < 0.5:
                cluster.remove(rng.choice(sorted(cluster.engines)))
            else:
                cluster.add()
        cluster.add()

    trains = learner(settings, step_s=rng.choice([0.1, 1.0, 3.0]), push_s=rng.choice([0.0, 0.3, 2.5]))
    held_out = [Task(i, f"eval-{i}", "", (1, 2)) for i in range(rng.choice([0, 2]))]
    return run(settings, [engine(), engine()], trains, cluster=cluster, during=weather, eval_tasks=held_out)


def test_generators_that_come_and_go_at_random_break_no_bound_and_lose_nothing() -> None:
    seen = {"joined": 0, "left": 0, "continued": 0, "lag": 0}
    for seed in range(SCHEDULES):
        try:
            outcome = random_run(seed)
            assert outcome.summary.counts["failed"] == 0
        except BaseException as error:
            error.add_note(f"schedule seed {seed}")
            raise
        pool = outcome.controller._pool
        seen["joined"] += pool.joined
        seen["left"] += len(pool.left)
        seen["continued"] += pool.continued_tokens
        seen["lag"] += sum(lag or 0 for lags in outcome.learner.lags for lag in lags)
    assert all(seen.values()), f"these schedules did not try everything: {seen}"
