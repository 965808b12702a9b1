"""A reward model beside the real controller, on a virtual clock: weights, failures, batches, deaths, time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from asyncrl.credit import CreditAssignment
from asyncrl.environments.base import RolloutResult
from asyncrl.errors import RoleError
from asyncrl.generators.scripted import ScriptedGenerator, constant_length
from asyncrl.learners.scripted import ScriptedLearner
from asyncrl.queues.codec import decode_group, encode_group, group_meta
from asyncrl.roles.group import MemberGroup
from asyncrl.roles.reward_group import RewardModelGroup
from asyncrl.roles.scoring import with_scores
from asyncrl.roles.scripted_reward import ScriptedScoringMember
from asyncrl.rollout import Score
from asyncrl.simulate.clock import run_virtual
from asyncrl.types import Group, Task, Trajectory

from .controller_harness import ScriptedScorer, Stream, config, run

FAST = {"length": constant_length(10), "token_s": 0.1}  # a group takes 1 s
MODEL = "reward_model={path: none, weight: 0.5}"


class NamedScorer(ScriptedScorer):
    """As a pool of one function ``right`` would score."""

    async def score(self, task: Task, completion: str, result: RolloutResult) -> Score:
        reward = self.reward(task, result)
        return Score(reward, {"right": reward})


def model(
    *members: ScriptedScoringMember,
    spares: list[ScriptedScoringMember] | None = None,
    weight: float = 0.5,
    call_tokens: int = 1000,
    timeout_s: float = 100.0,
) -> RewardModelGroup:
    group = MemberGroup(
        "reward_model",
        members,
        restart=None if spares is None else lambda name: spares.pop(0),
        timeout_s=timeout_s,
        setting="reward_model.timeout_s",
    )
    return RewardModelGroup(group, weight=weight, call_tokens=call_tokens)


def outcome_of(
    *members: ScriptedScoringMember,
    overrides: Sequence[str] = (),
    scorer: ScriptedScorer | None = None,
    **options: Any,
) -> Any:
    settings = config("run.steps=6", MODEL, *overrides)
    learner = ScriptedLearner(
        max_staleness=settings.schedule.max_staleness, step_s=options.pop("step_s", 1.0)
    )
    eval_tasks = options.pop("eval_tasks", ())
    return run(
        settings,
        [ScriptedGenerator(**FAST)],
        learner,
        scorer=scorer or NamedScorer(),
        eval_tasks=eval_tasks,
        reward_model=model(*members, **options),
    )


# ---------------------------------------------------------------- what becomes of a score


def test_a_score_is_one_more_part_of_the_reward_by_its_weight() -> None:
    outcome = outcome_of(ScriptedScoringMember())
    seen = 0
    for batch in outcome.learner.batches:
        for item in batch.items:
            group = decode_group(item.payload)
            assert tuple(t.meta() for t in group.trajectories) == item.meta.trajectories
            for t in group.trajectories:
                assert t.rewards == {"right": t.rewards["right"], "reward_model": float(t.sample)}
                assert t.reward == t.rewards["right"] + 0.5 * t.sample
                seen += 1
    assert seen == 6 * 4
    line = outcome.log.lines[-1]
    assert line["reward/reward_model_mean"] == 0.5  # of the samples 0 and 1
    assert line["reward/mean"] == pytest.approx(line["reward/right_mean"] + 0.25)


def test_it_is_clipped_and_normalised_as_a_function_is() -> None:
    group, _ = with_scores(a_group([1.0, 0.0]), [10.0, -10.0], 0.5)
    meta = group_meta(group, encode_group(group))
    assert CreditAssignment(config(MODEL)).rewards(meta) == (6.0, -5.0)
    assert CreditAssignment(config(MODEL, "algorithm.reward_clip=[-1.0,2.0]")).rewards(meta) == (2.0, -1.0)

    # One within a group of two, each reward is +1 or -1 once normalised: the weights alone are left.
    opposed, _ = with_scores(a_group([0.0, 1.0]), [10.0, -10.0], 0.5)
    metas = [meta, group_meta(opposed, encode_group(opposed))]
    overrides = (MODEL, "algorithm.objectives=normalised", "reward.functions=[{path: a.py:f, weight: 2}]")
    agreeing, against = CreditAssignment(config(*overrides)).advantages(metas)
    assert agreeing[0] / against[1] == pytest.approx((2.0 + 0.5) / (2.0 - 0.5), rel=1e-4)
    assert agreeing == pytest.approx([agreeing[0], -agreeing[0]])


def nan_for(ordinal: int, sample: int, value: float = math.nan) -> Callable[[Group], list[float]]:
    def scores(group: Group) -> list[float]:
        return [
            value if (group.ordinal, t.sample) == (ordinal, sample) else 1.0 * t.sample for t in group.answers
        ]

    return scores


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_not_finite_fails_its_group(value: float) -> None:
    outcome = outcome_of(ScriptedScoringMember(scores=nan_for(3, 1, value)))
    (failed,) = [r for r in outcome.log.retired_ if r.state == "failed"]
    assert failed.ordinal == 3
    assert failed.reason == (
        f"RewardValueError: train-3: the reward model: found {value}; expected a finite number"
    )
    assert outcome.summary.counts["trained"] == 12


def test_or_its_sample_alone() -> None:
    overrides = ("reward.on_error=drop", "rollout.group_size=3")
    outcome = outcome_of(ScriptedScoringMember(scores=nan_for(3, 1)), overrides=overrides)
    assert outcome.summary.counts["failed"] == 0
    (group,) = [
        item.meta for batch in outcome.learner.batches for item in batch.items if item.meta.ordinal == 3
    ]
    assert [t.sample for t in group.trajectories] == [0, 2]
    assert [(f.sample, f.kind) for f in group.failures] == [(1, "RewardValueError")]


def a_group(rewards: Sequence[float], baseline: float | None = None) -> Group:
    def answer(sample: int, reward: float) -> Trajectory:
        ids, mask = np.asarray([5, 6], np.int32), np.ones(2, np.bool_)
        return Trajectory(
            sample,
            0,
            ids,
            ids,
            mask,
            np.full(2, -1.0, np.float32),
            np.zeros(2, np.int32),
            reward,
            "stop",
            {"f": reward},
        )

    answers = [answer(i, r) for i, r in enumerate(rewards)]
    greedy = None if baseline is None else answer(len(rewards), baseline)
    return Group(0, "train-0", 0, tuple(answers), greedy)


def test_a_sum_that_overflows_is_a_failure_and_zero_is_a_score() -> None:
    group, failures = with_scores(a_group([1e308, 0.0]), [1e308, 0.0], 1.0)
    assert [t.reward for t in group.trajectories] == [0.0]
    assert group.trajectories[0].rewards == {"f": 0.0, "reward_model": 0.0}
    assert "a weighted sum of 1e+308 + 1 * 1e+308" in failures[0].message


def test_a_greedy_baseline_is_scored_and_can_fail() -> None:
    group, failures = with_scores(a_group([1.0, 2.0], baseline=3.0), [1.0, 1.0, 1.0], 2.0)
    assert ([t.reward for t in group.trajectories], group.baseline.reward, failures) == ([3.0, 4.0], 5.0, ())
    group, failures = with_scores(a_group([1.0], baseline=3.0), [1.0, math.nan], 2.0)
    assert (len(group.trajectories), group.baseline, [f.sample for f in failures]) == (1, None, [1])


def test_equal_rewards_of_functions_are_told_apart_before_groups_are_filtered() -> None:
    flat = NamedScorer(lambda task, result: 1.0)
    outcome = outcome_of(
        ScriptedScoringMember(), overrides=["algorithm.filter_zero_variance=refill"], scorer=flat
    )
    assert (outcome.summary.counts["trained"], outcome.summary.counts["filtered"]) == (12, 0)


def test_evaluations_are_scored_too() -> None:
    tasks = [Stream().task(i) for i in range(5)]
    outcome = outcome_of(
        ScriptedScoringMember(scores=lambda group: [4.0] * len(group.answers)), eval_tasks=tasks
    )
    first = outcome.log.lines[0]
    assert first["eval/reward_model_mean"] == 4.0
    assert first["eval/reward_mean"] == pytest.approx(first["eval/right_mean"] + 2.0)


# ---------------------------------------------------------------- time


def test_its_work_is_hidden_behind_the_learner_and_shown() -> None:
    overrides = ["schedule.max_staleness=1"]
    alone = run(
        config("run.steps=6", *overrides),
        [ScriptedGenerator(**FAST)],
        ScriptedLearner(max_staleness=1, step_s=3.0),
    )
    outcome = outcome_of(ScriptedScoringMember(score_s=0.5), overrides=overrides, step_s=3.0)
    lines = outcome.log.lines
    assert sum(line.get("timing_s/reward_model", 0.0) for line in lines) > 0
    assert [line["timing_s/annotate_wait"] for line in lines[2:]] == pytest.approx([0.0] * 5)
    # What it costs is the first batch, which nothing hides.
    assert 0 < lines[1]["timing_s/annotate_wait"] <= 1.0
    assert outcome.summary.wall_s == pytest.approx(alone.summary.wall_s + lines[1]["timing_s/annotate_wait"])


# ---------------------------------------------------------------- batches of what waits


def landed(count: int, call_tokens: int, members: int = 1) -> list[list[str]]:
    """The calls that ``count`` groups of two answers of four tokens come to, all landing at once."""
    parts = [ScriptedScoringMember(f"m{i}", score_s=1.0) for i in range(members)]
    group = model(*parts, call_tokens=call_tokens)

    async def one(ordinal: int) -> tuple[Any, Any]:
        whole = a_group([0.0, 1.0])
        payload = encode_group(whole)
        return await group.score(
            Task(ordinal, f"t{ordinal}", "", (5, 6)), group_meta(whole, payload), payload
        )

    async def main() -> list[Any]:
        await group.start()
        return await asyncio.gather(*(one(i) for i in range(count)))

    found = run_virtual(main())
    assert [meta.rewards for meta, _ in found] == [(0.0, 1.5)] * count
    return [call for part in parts for call in part.calls]


def test_what_waits_is_scored_together_as_far_as_a_forward_pass_holds_it() -> None:
    # Two calls are made at a time; the other six wait, and 24 tokens are six answers of three groups.
    assert [len(call) for call in landed(8, call_tokens=24)] == [1, 1, 3, 3]
    assert [len(call) for call in landed(8, call_tokens=23)] == [1, 1, 2, 2, 2]
    assert [len(call) for call in landed(8, call_tokens=10_000)] == [1, 1, 6]


def test_in_a_run_that_promises_bits_each_group_is_a_call_of_its_own() -> None:
    assert [len(call) for call in landed(5, call_tokens=0)] == [1] * 5


# ---------------------------------------------------------------- deaths


def test_a_dead_member_is_replaced_and_nothing_is_lost() -> None:
    dying, spare = ScriptedScoringMember(score_s=0.1, dies_at=[3]), ScriptedScoringMember(start_s=2.0)
    outcome = outcome_of(dying, spares=[spare])
    assert (outcome.summary.counts["trained"], outcome.summary.counts["failed"]) == (12, 0)
    assert dying.ended
    assert outcome.log.lines[-1]["reward_model/restarts"] == 1
    # What it died of was scored by the other.
    assert dying.calls[3] in spare.calls
    for batch in outcome.learner.batches:
        assert all("reward_model" in t.rewards for item in batch.items for t in item.meta.trajectories)


def test_one_that_hangs_is_killed_at_its_deadline() -> None:
    hung = ScriptedScoringMember(hangs_at=[2])
    outcome = outcome_of(hung, spares=[ScriptedScoringMember()], timeout_s=7.0)
    assert outcome.summary.counts["trained"] == 12
    assert hung.ended
    assert 7.0 < outcome.summary.wall_s < 25.0


def test_a_second_failure_ends_the_run_by_its_name() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        outcome_of(ScriptedScoringMember(dies_at=[1]), spares=[ScriptedScoringMember(dies_at=[0])] * 2)
    assert caught.group_contains(RoleError, match="reward_model 0 is not up")


def test_a_group_that_is_dropped_while_it_is_scored_leaves_the_others_alone() -> None:
    slow = ScriptedScoringMember("m0", hangs_at=[3])
    overrides = ["schedule.max_staleness=1", "schedule.at_bound=drop", "run.steps=8"]
    outcome = outcome_of(slow, ScriptedScoringMember("m1"), overrides=overrides, timeout_s=1e4)
    dropped = [f"train-{r.ordinal}" for r in outcome.log.retired_ if r.state == "dropped"]
    assert dropped == slow.calls[3]
    assert outcome.summary.wall_s < 30
