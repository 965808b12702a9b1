"""Colocated runs on a virtual clock: the real controller, and generators and learner that take turns."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest

from asyncrl.config import Config
from asyncrl.errors import (
    CanaryError,
    GeneratorError,
    NoGeneratorError,
    PushTimeoutError,
    RewardRaisedError,
)
from asyncrl.generators.scripted import ScriptedGenerator, constant_length, log_normal_length
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.queues.codec import decode_group
from asyncrl.simulate.clock import run_virtual
from asyncrl.types import Batch, Float32Array, Task
from asyncrl.waiting import Deadlines, now

from .controller_harness import Outcome, ScriptedScorer, Stream, config, run

COLOCATED = ("placement.mode=colocated", "schedule.kv_after_swap=recompute")
FAST: dict[str, Any] = {"length": constant_length(10), "token_s": 0.1}  # a group takes 1 s


def colocated(*overrides: str, depth: int = 0, bound: int | None = None) -> Config:
    bound = depth if bound is None else bound
    schedule = (f"schedule.pipeline_depth={depth}", f"schedule.max_staleness={bound}")
    return config(*COLOCATED, *schedule, *overrides)


class WatchedLearner(ScriptedLearner):
    """Looks, before and after an update, at whether the generators sleep, and at what they have sampled."""

    def __init__(self, generators: Sequence[ScriptedGenerator], **script: Any) -> None:
        super().__init__(**script)
        self._watched = generators
        self.updates = 0

    async def step(self, batch: Batch) -> Any:
        before = self._look()
        result = await super().step(batch)
        assert self._look() == before, "sampled during an update"
        self.updates += 1
        return result

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        self._look()
        return await super().score(token_ids)

    def _look(self) -> list[int]:
        assert all(generator.asleep for generator in self._watched), "a generator is awake"
        return [generator.statistics().tokens for generator in self._watched]


def take_turns(
    settings: Config,
    *generators: ScriptedGenerator,
    step_s: float = 1.0,
    bad_steps: Collection[int] = (),
    **options: Any,
) -> Outcome:
    bound = settings.schedule.max_staleness
    learner = WatchedLearner(generators, max_staleness=bound, step_s=step_s, bad_steps=bad_steps)
    outcome = run(settings, list(generators), learner, **options)
    assert learner.updates == len(learner.batches)
    return outcome


def spans(outcome: Outcome) -> list[tuple[int, int]]:
    """Oldest and newest version of each trained answer."""
    groups = [decode_group(item.payload) for batch in outcome.learner.batches for item in batch.items]
    return [(int(t.versions[0]), int(t.versions[-1])) for group in groups for t in group.trajectories]


def test_synchronous_turns_take_the_sum_of_both_sides_and_carry_nothing_over() -> None:
    settings = colocated("run.steps=10")
    outcome = take_turns(settings, ScriptedGenerator(shared=True, sleep_s=0.25, wake_s=0.5, **FAST))
    # Each step: 1 s of rollouts, 0.25 s to sleep, 1 s of update, 0.5 s to wake; and asleep at the end.
    assert outcome.summary.wall_s == pytest.approx(10 * 2.75 + 0.25)
    assert all(line["turns/carried_groups"] == 0 for line in outcome.log.steps)
    assert [line["timing_s/turns"] for line in outcome.log.steps] == pytest.approx([1.25] + [0.75] * 9)
    assert all(first == last for first, last in spans(outcome))


def test_unfinished_answers_go_on_under_the_next_version_within_the_bound() -> None:
    two = ("generators.replicas=2", "learner.ranks=2")
    settings = colocated("run.steps=60", "rollout.groups_per_step=4", *two, depth=1, bound=2)
    generators = [
        ScriptedGenerator(shared=True, length=log_normal_length(12, 1.0), token_s=0.01, recompute_s=0.02)
        for _ in range(2)
    ]
    outcome = take_turns(settings, *generators)
    assert max(lag for step in outcome.learner.lags for lag in step) <= 2
    lines = outcome.log.steps
    assert sum(line["turns/carried_groups"] for line in lines) > 0
    assert sum(line["turns/carried_samples"] for line in lines) > 0
    assert any(first < last for first, last in spans(outcome)), "no answer spans two versions"
    assert outcome.summary.counts["trained"] == 60 * 4, "nothing was lost on the way"
    assert all(generator.live_version == 60 for generator in generators)


def test_carrying_over_beats_waiting_for_the_tail() -> None:
    tailed = {"length": log_normal_length(12, 1.0), "token_s": 0.01, "shared": True}
    walls = [
        take_turns(
            colocated("run.steps=40", "rollout.groups_per_step=4", depth=depth, bound=2 * depth),
            ScriptedGenerator(**tailed),
        ).summary.wall_s
        for depth in (0, 1)
    ]
    assert walls[1] < 0.9 * walls[0]


def random_turns(seed: int) -> Outcome:
    rng = random.Random(seed)
    depth, replicas = rng.randint(0, 3), rng.randint(1, 2)
    settings = colocated(
        f"generators.replicas={replicas}",
        f"learner.ranks={replicas}",
        f"run.steps={rng.randint(3, 8)}",
        f"rollout.groups_per_step={rng.randint(2, 4)}",
        f"schedule.at_bound={rng.choice(['wait', 'drop', 'mask'])}",
        f"algorithm.filter_zero_variance={rng.choice(['none', 'drop', 'refill'])}",
        f"eval.every={rng.choice([0, 2])}",
        "run.max_unusable_groups=100000",
        "learner.max_bad_steps=100",
        "reward.on_error=drop",
        depth=depth,
        bound=depth + rng.randint(0, 2),
    )
    failing = rng.choice([0.0, 0.1, 0.5])

    def reward(task: Task, result: object) -> float:
        if task.uid.startswith("train") and rng.random() < failing:
            raise RewardRaisedError("scripted")
        return float(rng.random() < 0.5)

    generators = [
        ScriptedGenerator(
            shared=True,
            slots=rng.choice([2, 8, 64]),
            length=log_normal_length(rng.choice([4, 16]), rng.choice([0.0, 0.6, 1.2])),
            token_s=rng.choice([0.01, 0.1]),
            sleep_s=rng.choice([0.0, 0.2]),
            wake_s=rng.choice([0.0, 0.2]),
            recompute_s=rng.choice([0.0, 0.3]),
        )
        for _ in range(replicas)
    ]
    return take_turns(
        settings,
        *generators,
        step_s=rng.choice([0.1, 1.0, 3.0]),
        bad_steps={rng.randint(0, 6)} if rng.random() < 0.2 else (),
        scorer=ScriptedScorer(reward),
        eval_tasks=[Task(i, f"eval-{i}", "", (1, 2)) for i in range(rng.choice([0, 3]))],
    )


def test_random_turns_break_no_bound_and_lose_nothing() -> None:
    """``controller_harness.check`` and ``WatchedLearner`` look at each of them."""
    seen = {"dropped": 0, "failed": 0, "filtered": 0, "lag": 0, "carried": 0, "evaluations": 0}
    for seed in range(60):
        try:
            outcome = random_turns(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        for state in ("dropped", "failed", "filtered"):
            seen[state] += outcome.summary.counts[state]
        seen["lag"] += sum(lag or 0 for lags in outcome.learner.lags for lag in lags)
        seen["carried"] += sum(int(line["turns/carried_samples"]) for line in outcome.log.steps)
        seen["evaluations"] += len(outcome.log.evaluations)
    assert all(seen.values()), f"these turns did not try everything: {seen}"


def test_an_update_waits_for_the_evaluation_of_the_version_that_it_changes() -> None:
    settings = colocated("run.steps=4", "eval.every=2", "eval.max_new_tokens=40")
    tasks = [Stream().task(10_000)]
    # An evaluation takes 4 s, rollouts beside it 1 s.
    long = ScriptedGenerator(
        shared=True,
        length=lambda request: request.sampling.max_new_tokens if request.key.seed else 10,
        token_s=0.1,
    )
    outcome = take_turns(settings, long, eval_tasks=tasks)
    assert [e["eval/policy_version"] for e in outcome.log.evaluations] == [0, 2, 4]
    assert [line["timing_s/eval"] for line in outcome.log.steps] == pytest.approx([0, 0, 3, 0])


def test_a_skipped_update_changes_no_version_and_gives_the_turn_back() -> None:
    settings = colocated("run.steps=3")
    generator = ScriptedGenerator(shared=True, **FAST)
    outcome = take_turns(settings, generator, bad_steps={1})
    assert [line["policy_version"] for line in outcome.log.steps] == [1, 1, 2, 3]
    assert generator.live_version == 3
    # The canary is looked at after the wake that it led to as well.
    assert generator.scored == outcome.learner.scored == [0, 1, 1, 2, 3]


def test_the_canary_is_looked_at_after_each_wake() -> None:
    generator = ScriptedGenerator(shared=True, **FAST)
    outcome = take_turns(colocated("run.steps=3", "weight_sync.canary_every=10"), generator)
    assert generator.scored == outcome.learner.scored == [0, 1, 2, 3]
    wrong = ScriptedGenerator(
        shared=True,
        logprobs=lambda version, ids: np.full(len(ids) - 1, -9.0 - version, dtype=np.float32),
        **FAST,
    )
    with pytest.raises(ExceptionGroup) as raised:
        run(colocated("run.steps=3"), [wrong])
    assert raised.group_contains(CanaryError)


def test_time_asleep_does_not_count_against_a_group() -> None:
    # Answers take 1 s, of which the deadline allows 2; updates of 50 s lie in between.
    settings = colocated("run.steps=6", "rollout.deadline_s=2.0", "reward.timeout_s=1", depth=1)
    slow = ScriptedGenerator(
        shared=True, length=lambda request: 6 if request.key.ordinal % 2 else 15, token_s=0.1, slots=6
    )
    outcome = take_turns(settings, slow, step_s=50.0)
    assert outcome.summary.counts["trained"] == 12
    assert outcome.summary.counts["failed"] == 0
    assert sum(line["turns/carried_groups"] for line in outcome.log.steps) > 0


def test_a_generator_that_will_not_sleep_or_dies_of_it_ends_the_run() -> None:
    settings = colocated("run.steps=3", "weight_sync.timeout_s=5", "generators.health_every_s=1000")
    with pytest.raises(ExceptionGroup) as raised:
        run(settings, [ScriptedGenerator(shared=True, sleep_s=100.0, **FAST)])
    assert raised.group_contains(PushTimeoutError, match="putting the generators to sleep")

    class Dying(ScriptedGenerator):
        async def sleep(self) -> Any:
            self.die("lost its device")
            raise GeneratorError("lost its device")

    with pytest.raises(ExceptionGroup) as raised:
        run(settings, [Dying(shared=True, **FAST)])
    assert raised.group_contains(NoGeneratorError, match="lost its device")


def test_shared_weights_are_renamed_asleep_or_not_at_all() -> None:
    async def main() -> None:
        generator = ScriptedGenerator(shared=True)
        await generator.start()
        await generator.swap(1, in_flight=True, kv="recompute")
        await generator.wake()
        with pytest.raises(GeneratorError, match="while awake"):
            await generator.swap(2, in_flight=True, kv="recompute")

    run_virtual(main())


def test_deadlines_stand_still_while_paused() -> None:
    async def main() -> None:
        deadlines = Deadlines()

        async def work(seconds: float) -> float:
            with pytest.raises(TimeoutError):
                async with deadlines.timeout(seconds):
                    await asyncio.sleep(1000)
            return now()

        early, never = asyncio.create_task(work(3.0)), deadlines.timeout(None)
        await asyncio.sleep(1)
        deadlines.pause()
        deadlines.pause()
        late = asyncio.create_task(work(1.5))  # begins, and does not run, while paused
        await asyncio.sleep(10)
        deadlines.resume()
        deadlines.resume()
        async with never:
            pass
        assert await late == pytest.approx(12.5)
        assert await early == pytest.approx(13.0)
        async with deadlines.timeout(1.0):
            await asyncio.sleep(0.5)

    run_virtual(main())
