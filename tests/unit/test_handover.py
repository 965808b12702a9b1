"""Colocated runs whose sides have weights of their own: the order of each change of turn, on a virtual clock.

Engine and learner record what they are asked for. ``assert_turns`` holds the record of a whole run against
the only order that is allowed; the two look at each other themselves whenever they work.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest

from asyncrl.config import Config
from asyncrl.errors import (
    CanaryError,
    GeneratorError,
    InvariantError,
    NoGeneratorError,
    PushTimeoutError,
    RewardRaisedError,
)
from asyncrl.generators.base import Asleep, KVAfterSwap
from asyncrl.generators.scripted import ScriptedGenerator, constant_length, log_normal_length
from asyncrl.learners.base import PushReport, StepResult
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.simulate.clock import run_virtual
from asyncrl.types import Batch, Float32Array, Task
from asyncrl.weight_sync.base import Channel, PushGroupSpec, WeightEcho

from .controller_harness import Outcome, ScriptedScorer, config, run

COLOCATED = ("placement.mode=colocated", "generators.backend=vllm", "schedule.kv_after_swap=recompute")
FAST: dict[str, Any] = {"length": constant_length(10), "token_s": 0.1}  # a group takes 1 s
HAND_OVER = ("room", "push", "swap", "score", "offload", "wake", "look")
"""What happens in turn, on all replicas at once, from the end of an update to the next token."""


class Record:
    """What both sides were asked for, in order. Each entry stands for the end of a call."""

    def __init__(self) -> None:
        self.calls: list[str] = []


class RecordedLearner(ScriptedLearner):
    def __init__(self, record: Record, generators: Sequence[RecordedGenerator], **script: Any) -> None:
        super().__init__(**script)
        self._record = record
        self._generators = generators

    def _look(self) -> list[int]:
        """All generators sleep without keys and values, and this is on its device."""
        assert not self.offloaded, "the learner works off its device"
        assert all(generator.asleep for generator in self._generators), "both sides are awake"
        return [generator.statistics().tokens for generator in self._generators]

    async def step(self, batch: Batch) -> StepResult:
        before = self._look()
        assert not any(generator.has_room for generator in self._generators), "two sets of weights"
        result = await super().step(batch)
        assert self._look() == before, "sampled during an update"
        self._record.calls.append("update")
        return result

    async def push(self, version: int, channel: Channel = "generators") -> PushReport:
        self._look()
        report = await super().push(version, channel)
        self._look()
        self._record.calls.append("push")
        return report

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        self._look()
        found = await super().score(token_ids)
        self._record.calls.append("score")
        return found

    async def offload(self) -> None:
        self._look()
        await super().offload()
        self._record.calls.append("offload")

    async def reload(self) -> None:
        assert all(generator.asleep and not generator.has_room for generator in self._generators)
        await super().reload()
        self._record.calls.append("reload")


class RecordedGenerator(ScriptedGenerator):
    record: Record
    learner: RecordedLearner

    @property
    def has_room(self) -> bool:
        return self._room

    def _rate(self) -> float:
        rate = super()._rate()
        assert not rate or self.learner.offloaded, "samples while the learner has the device"
        return rate

    async def sleep(self) -> Asleep:
        asleep = await super().sleep()
        self.record.calls.append("sleep")
        return asleep

    async def make_room(self) -> None:
        await super().make_room()
        self.record.calls.append("room")

    async def swap(self, version: int, *, in_flight: bool, kv: KVAfterSwap) -> WeightEcho:
        echo = await super().swap(version, in_flight=in_flight, kv=kv)
        self.record.calls.append("swap")
        return echo

    async def wake(self) -> None:
        assert self.learner.offloaded, "wakes while the learner has the device"
        await super().wake()
        self.record.calls.append("wake")

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        found = await super().score(token_ids)
        self.record.calls.append("look")
        return found


def colocated(*overrides: str, depth: int = 0, bound: int | None = None) -> Config:
    bound = depth if bound is None else bound
    schedule = (f"schedule.pipeline_depth={depth}", f"schedule.max_staleness={bound}")
    return config(*COLOCATED, *schedule, *overrides)


def take_turns(
    settings: Config,
    *scripts: dict[str, Any],
    step_s: float = 1.0,
    bad_steps: Collection[int] = (),
    learner: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Outcome, list[str]]:
    """A run with a generator for each of ``scripts``; its outcome, and the record of all calls."""
    record = Record()
    generators = [RecordedGenerator(beside=True, **script) for script in scripts]
    recorded = RecordedLearner(
        record,
        generators,
        max_staleness=settings.schedule.max_staleness,
        step_s=step_s,
        bad_steps=bad_steps,
        **(learner or {}),
    )
    for generator in generators:
        generator.record, generator.learner = record, recorded
    outcome = run(settings, list(generators), recorded, **options)
    assert_turns(record.calls, len(generators), scores=settings.weight_sync.canary_every > 0)
    return outcome, record.calls


def assert_turns(calls: Sequence[str], replicas: int, *, scores: bool) -> None:
    """The whole record is: hand over, then (sleep, reload, update, hand over) again and again; at the end the
    learner has the turn, to be summed up and exported."""
    of_learner = {"push", "score", "offload"}
    hand_over: list[str] = []
    for name in HAND_OVER:
        if scores or name not in ("score", "look"):
            hand_over += [name] * (1 if name in of_learner else replicas)
    back = ["sleep"] * replicas + ["reload"]
    updates = list(calls).count("update")
    expected = [*hand_over, *([*back, "update", *hand_over] * updates), *back]
    for i, (found, wanted) in enumerate(zip(calls, expected, strict=False)):
        assert found == wanted, f"call {i}: {list(calls)[max(0, i - 12) : i + 1]}, expected {wanted}"
    assert len(calls) == len(expected)


def test_each_turn_is_handed_over_in_the_order_that_holds_no_two_peaks() -> None:
    settings = colocated("run.steps=5")
    script = {"sleep_s": 0.25, "room_s": 0.5, "wake_s": 0.75, "swap_s": 0.1, **FAST}
    costs = {"offload_s": 0.3, "reload_s": 0.2, "push_s": 0.6}
    outcome, calls = take_turns(settings, script, learner=costs)
    assert calls.count("update") == 5
    # Each step: 1 s of rollouts, 0.25 to sleep, 0.2 to reload, 1 of update, and the hand-over of 2.25.
    hand_over = 0.5 + 0.6 + 0.1 + 0.3 + 0.75
    assert outcome.summary.wall_s == pytest.approx(5 * (1 + 0.25 + 0.2 + 1 + hand_over) + 0.25 + 0.2)
    lines = outcome.log.steps
    assert [line["timing_s/weight_sync"] for line in lines] == pytest.approx([hand_over] * 5)
    turn = 0.25 + 0.2 + 0.5 + 0.3 + 0.75  # all but the push and the swap
    assert [line["timing_s/turns"] for line in lines[1:]] == pytest.approx([turn] * 4)
    assert all(line["turns/carried_groups"] == 0 for line in lines)


def test_each_rank_hands_over_to_the_replica_of_its_number() -> None:
    settings = colocated("run.steps=2", "generators.replicas=2", "learner.ranks=2")

    class Joining(RecordedGenerator):
        async def join(self, spec: PushGroupSpec) -> None:
            joined.append(spec)
            await super().join(spec)

    joined: list[PushGroupSpec] = []
    record = Record()
    generators = [Joining(beside=True, **FAST) for _ in range(2)]
    learner = RecordedLearner(record, generators, max_staleness=0, step_s=1.0)
    for generator in generators:
        generator.record, generator.learner = record, learner
    run(settings, list(generators), learner)
    (opened,) = learner.push_groups
    assert (opened.slots, opened.backend) == ((0, 1), "shm")
    assert joined == [opened.of_slot(0, 1), opened.of_slot(1, 1)]
    assert [spec.prefix for spec in joined] == ["push1-0", "push1-1"]


def test_a_skipped_update_hands_the_version_before_over_again() -> None:
    settings = colocated("run.steps=3")
    outcome, calls = take_turns(settings, FAST, bad_steps={1})
    assert [line["policy_version"] for line in outcome.log.steps] == [1, 1, 2, 3]
    assert calls.count("push") == 5
    assert outcome.learner.pushed == [0, 1, 1, 2, 3]
    assert outcome.generators[0].live_version == 3


def random_turns(seed: int) -> tuple[Outcome, list[str]]:
    rng = random.Random(seed)
    depth, replicas = rng.randint(0, 3), rng.randint(1, 2)
    canary = rng.choice([0, 10])
    settings = colocated(
        f"generators.replicas={replicas}",
        f"learner.ranks={replicas}",
        f"run.steps={rng.randint(3, 8)}",
        f"rollout.groups_per_step={rng.randint(2, 4)}",
        f"schedule.at_bound={rng.choice(['wait', 'drop', 'mask'])}",
        f"algorithm.filter_zero_variance={rng.choice(['none', 'drop', 'refill'])}",
        f"eval.every={rng.choice([0, 2])}",
        f"weight_sync.canary_every={canary}",
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

    def seconds(*choices: float) -> float:
        return rng.choice([0.0, *choices])

    scripts = [
        {
            "slots": rng.choice([2, 8, 64]),
            "length": log_normal_length(rng.choice([4, 16]), rng.choice([0.0, 0.6, 1.2])),
            "token_s": rng.choice([0.01, 0.1]),
            "sleep_s": seconds(0.2),
            "room_s": seconds(0.1, 0.4),
            "wake_s": seconds(0.2),
            "recompute_s": seconds(0.3),
            "score_s": seconds(0.05),
        }
        for _ in range(replicas)
    ]
    return take_turns(
        settings,
        *scripts,
        step_s=rng.choice([0.1, 1.0, 3.0]),
        bad_steps={rng.randint(0, 6)} if rng.random() < 0.3 else (),
        learner={"push_s": seconds(0.5), "offload_s": seconds(0.4), "reload_s": seconds(0.4)},
        scorer=ScriptedScorer(reward),
        eval_tasks=[Task(i, f"eval-{i}", "", (1, 2)) for i in range(rng.choice([0, 3]))],
    )


def test_random_turns_break_neither_the_order_nor_a_bound_and_lose_nothing() -> None:
    seen = {"dropped": 0, "failed": 0, "filtered": 0, "lag": 0, "carried": 0, "evaluations": 0, "again": 0}
    for seed in range(60):
        try:
            outcome, _ = random_turns(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        for state in ("dropped", "failed", "filtered"):
            seen[state] += outcome.summary.counts[state]
        seen["lag"] += sum(lag or 0 for lags in outcome.learner.lags for lag in lags)
        seen["carried"] += sum(int(line["turns/carried_samples"]) for line in outcome.log.steps)
        seen["evaluations"] += len(outcome.log.evaluations)
        seen["again"] += len(outcome.learner.pushed) - len(set(outcome.learner.pushed))
    assert all(seen.values()), f"these turns did not try everything: {seen}"


def test_an_engine_that_computes_something_else_ends_the_run_at_the_first_turn() -> None:
    def wrong(version: int, ids: Sequence[int]) -> Float32Array:
        return np.full(len(ids) - 1, -9.0 - version, dtype=np.float32)

    with pytest.raises(ExceptionGroup) as raised:
        take_turns(colocated("run.steps=3"), {"logprobs": wrong, **FAST})
    assert raised.group_contains(CanaryError, match="generator 0 at version 0")


@pytest.mark.parametrize(
    ("script", "doing"),
    [
        ({"sleep_s": 100.0}, "putting the generators to sleep"),
        ({"room_s": 100.0}, "making room for weights on the generators"),
        ({"wake_s": 100.0}, "waking the generators"),
    ],
)
def test_a_generator_that_hangs_in_a_change_of_turn_is_named_with_the_step(
    script: dict[str, Any], doing: str
) -> None:
    settings = colocated("run.steps=3", "weight_sync.timeout_s=5", "generators.health_every_s=1000")
    with pytest.raises(ExceptionGroup) as raised:
        take_turns(settings, {**script, **FAST})
    assert raised.group_contains(PushTimeoutError, match=doing)


@pytest.mark.parametrize(
    ("costs", "doing"),
    [({"offload_s": 100.0}, "off the device"), ({"reload_s": 100.0}, "state to the device")],
)
def test_a_learner_that_hangs_in_a_change_of_turn_is_named_with_the_step(
    costs: dict[str, float], doing: str
) -> None:
    settings = colocated("run.steps=3", "weight_sync.timeout_s=5")
    with pytest.raises(ExceptionGroup) as raised:
        take_turns(settings, FAST, learner=costs)
    assert raised.group_contains(PushTimeoutError, match=doing)


def test_the_last_generator_that_dies_ends_the_run() -> None:
    settings = colocated("run.steps=30")

    async def strike(outcome: Outcome) -> None:
        import asyncio

        await asyncio.sleep(5)
        outcome.generators[0].die("lost its device")

    with pytest.raises(ExceptionGroup) as raised:
        take_turns(settings, FAST, during=strike)
    assert raised.group_contains(NoGeneratorError, match="lost its device")


def test_the_doubles_refuse_what_the_real_ones_would() -> None:
    async def main() -> None:
        generator = ScriptedGenerator(beside=True)
        await generator.start()
        with pytest.raises(GeneratorError, match="without weights"):
            await generator.wake()
        await generator.receive(1)
        with pytest.raises(GeneratorError, match="without room"):
            await generator.swap(1, in_flight=True, kv="recompute")
        await generator.make_room()
        with pytest.raises(GeneratorError, match="make room"):
            await generator.make_room()
        await generator.swap(1, in_flight=True, kv="recompute")
        await generator.wake()
        learner = ScriptedLearner(max_staleness=0)
        await learner.start()
        await learner.offload()
        with pytest.raises(InvariantError, match="push version 0 while off its device"):
            await learner.push(0)
        await learner.copy_state()
        await learner.reload()
        await learner.push(0)

    run_virtual(main())
