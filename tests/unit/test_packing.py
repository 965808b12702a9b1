from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError, InvariantError
from asyncrl.learners.packing import plan_step
from asyncrl.types import Batch, BatchItem, GroupMeta, TrajectoryMeta

LONGEST = 60


def trajectory(sample: int, prompt: int, response: int, trained: int) -> TrajectoryMeta:
    return TrajectoryMeta(sample, prompt, response, 0.0, "stop", ((0, trained),) if trained else ())


@st.composite
def trajectories(draw: st.DrawFn) -> TrajectoryMeta:
    response = draw(st.integers(1, LONGEST // 2))
    return trajectory(0, draw(st.integers(1, LONGEST // 2)), response, draw(st.integers(0, response)))


groups = st.lists(st.lists(trajectories(), min_size=1, max_size=6), min_size=1, max_size=12)


def batch_of(groups: list[list[TrajectoryMeta]]) -> Batch:
    metas = [GroupMeta(i, f"u{i}", 0, tuple(ts), checksum=1000 + i, nbytes=1) for i, ts in enumerate(groups)]
    return Batch(0, tuple(BatchItem(m, b"", (0.0,) * len(m.trajectories)) for m in metas))


def tokens(t: TrajectoryMeta) -> int:
    return t.prompt_tokens + t.response_tokens


@given(groups, st.integers(1, 5), st.integers(LONGEST, 4 * LONGEST))
def test_a_plan_holds_its_promises(
    groups: list[list[TrajectoryMeta]], ranks: int, micro_batch_tokens: int
) -> None:
    plans = plan_step(batch_of(groups), ranks, micro_batch_tokens)

    assert len(plans) == ranks
    # Every group on exactly one rank, and asked for by its own checksum.
    assert sorted(i for plan in plans for i in plan.items) == list(range(len(groups)))
    assert all(plan.checksums == tuple(1000 + i for i in plan.items) for plan in plans)
    # The same number of micro-batches everywhere, and never a round in which all are dummies.
    assert len({len(plan.micro_batches) for plan in plans}) == 1
    assert all(any(row) for row in zip(*(plan.micro_batches for plan in plans), strict=True))

    loads = []
    for plan in plans:
        own = [t for i in plan.items for t in groups[i]]
        loads.append(sum(map(tokens, own)))
        # Every trajectory of the rank in exactly one micro-batch, within the budget.
        assert sorted(i for rows in plan.micro_batches for i in rows) == list(range(len(own)))
        for rows in plan.micro_batches:
            assert len(rows) * max((tokens(own[i]) for i in rows), default=0) <= micro_batch_tokens
        assert plan.loss_tokens == sum(t.loss_tokens for ts in groups for t in ts)
        assert plan.sequences == sum(t.loss_tokens > 0 for ts in groups for t in ts)
    largest = max(sum(map(tokens, ts)) for ts in groups)
    assert max(loads) <= sum(loads) / ranks + largest


@given(groups, st.integers(1, 3))
def test_equal_batches_have_equal_plans(groups: list[list[TrajectoryMeta]], ranks: int) -> None:
    assert plan_step(batch_of(groups), ranks, LONGEST) == plan_step(batch_of(groups), ranks, LONGEST)


def test_rows_of_like_length_share_a_micro_batch() -> None:
    lengths = [10, 50, 10, 50, 10]
    (plan,) = plan_step(batch_of([[trajectory(0, 5, n - 5, 1) for n in lengths]]), 1, 100)
    assert plan.micro_batches == ((1, 3), (0, 2, 4))


def test_a_rank_without_groups_runs_dummies() -> None:
    plans = plan_step(batch_of([[trajectory(0, 10, 40, 40)] * 3]), 2, 50)
    assert [plan.micro_batches for plan in plans] == [((0,), (1,), (2,)), ((), (), ())]
    assert plans[1].loss_tokens == 120


def test_a_sequence_over_the_budget_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"101 tokens, learner\.micro_batch_tokens is 100"):
        plan_step(batch_of([[trajectory(0, 1, 100, 100)]]), 1, 100)


def test_an_empty_batch_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="0 groups"):
        plan_step(Batch(3, ()), 1, 100)


@given(groups, st.integers(1, 3), st.integers(1, 5))
def test_mini_batches_split_a_step_by_groups(
    groups: list[list[TrajectoryMeta]], ranks: int, mini_batches: int
) -> None:
    plans = plan_step(batch_of(groups), ranks, 2 * LONGEST, mini_batches)
    updates = min(mini_batches, len(groups))
    if updates == 1:
        assert plans == plan_step(batch_of(groups), ranks, 2 * LONGEST)
        return
    assert [len(plan.mini_batches) for plan in plans] == [updates] * ranks
    seen: list[set[int]] = [set() for _ in range(updates)]
    for plan in plans:
        group_of = [i for i in plan.items for _ in groups[i]]
        assert sorted(i for rows in plan.micro_batches for i in rows) == list(range(len(group_of)))
        assert plan.micro_batches == tuple(rows for u in plan.mini_batches for rows in u.micro_batches)
        for update, of_update in zip(plan.mini_batches, seen, strict=True):
            of_update.update(group_of[i] for rows in update.micro_batches for i in rows)
    # Every group in one update, in order, and each update normalised by what is in it on all ranks.
    assert [i for of_update in seen for i in sorted(of_update)] == list(range(len(groups)))
    assert max(map(len, seen)) - min(map(len, seen)) <= 1
    for number, of_update in enumerate(seen):
        members = [t for i in of_update for t in groups[i]]
        for plan in plans:
            update = plan.mini_batches[number]
            assert len(update.micro_batches) == len(plans[0].mini_batches[number].micro_batches)
            assert update.loss_tokens == sum(t.loss_tokens for t in members)
            assert update.sequences == sum(t.loss_tokens > 0 for t in members)
