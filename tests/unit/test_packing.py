from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError, InvariantError
from asyncrl.learners.layout import Layout, lay_out
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


layouts = st.sampled_from(["padded", "packed", "one_row"])


def area(lengths: list[int], layout: Layout) -> int:
    """Of the rows that ``collate`` makes, padding included."""
    places = lay_out(lengths, layout)
    return places.rows * places.width


@given(groups, st.integers(1, 8), st.integers(LONGEST, 4 * LONGEST), layouts)
def test_a_plan_holds_its_promises(
    groups: list[list[TrajectoryMeta]], ranks: int, micro_batch_tokens: int, layout: Layout
) -> None:
    plans = plan_step(batch_of(groups), ranks, micro_batch_tokens, layout=layout)

    assert len(plans) == ranks
    # Every group on exactly one rank, and asked for by its own checksum.
    assert sorted(i for plan in plans for i in plan.items) == list(range(len(groups)))
    assert all(plan.checksums == tuple(1000 + i for i in plan.items) for plan in plans)
    # The same number of micro-batches everywhere, and never a round in which all are dummies.
    assert len({len(plan.micro_batches) for plan in plans}) == 1
    if any(t.loss_tokens for ts in groups for t in ts):
        assert all(any(row) for row in zip(*(plan.micro_batches for plan in plans), strict=True))
    else:
        assert all(plan.micro_batches == ((),) for plan in plans)

    loads = []
    for plan in plans:
        own = [t for i in plan.items for t in groups[i]]
        loads.append(sum(tokens(t) for t in own if t.loss_tokens))
        # Every trajectory of the rank with a trained token in exactly one micro-batch, within the budget.
        trained = [i for i, t in enumerate(own) if t.loss_tokens]
        assert sorted(i for rows in plan.micro_batches for i in rows) == trained
        for rows in plan.micro_batches:
            assert area([tokens(own[i]) for i in rows], layout) <= micro_batch_tokens
        areas = [area([tokens(own[i]) for i in rows], layout) for rows in plan.micro_batches if rows]
        assert plan.computed_tokens == sum(areas)
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


def test_packed_rows_are_as_long_as_the_longest_answer_and_filled_up() -> None:
    lengths = [10, 50, 10, 40, 15, 25]
    batch = batch_of([[trajectory(0, 5, n - 5, 1) for n in lengths]])
    padded = plan_step(batch, 1, 100)[0].micro_batches
    assert padded == ((1, 3), (5, 4, 0, 2))
    # 50, 40 + 10, 25 + 15 + 10: three rows of 50, of which two fit into one micro-batch.
    assert plan_step(batch, 1, 100, layout="packed")[0].micro_batches == ((1, 3, 0), (5, 4, 2))
    assert plan_step(batch, 1, 150, layout="packed")[0].micro_batches == ((1, 3, 5, 4, 0, 2),)
    assert plan_step(batch, 1, 100, layout="one_row")[0].micro_batches == ((1, 3, 0), (5, 4, 2))
    assert lay_out([50, 40, 25, 15, 10], "packed").places == ((0, 0), (1, 0), (2, 0), (2, 25), (1, 40))


def test_packing_fills_micro_batches_that_padding_leaves_half_empty() -> None:
    """Long tails: what a row of the longest answer's length holds of the others."""
    lengths = [100, *[20] * 45]
    batch = batch_of([[trajectory(0, 5, n - 5, 1) for n in lengths]])
    padded, packed = (
        plan_step(batch, 1, 200, layout=layout)[0].micro_batches for layout in ("padded", "packed")
    )
    assert (len(padded), len(packed)) == (6, 5)


def test_an_answer_without_a_trained_token_costs_no_forward_pass() -> None:
    (plan,) = plan_step(batch_of([[trajectory(0, 5, 40, 0), trajectory(1, 5, 10, 10)]]), 1, 100)
    assert plan.micro_batches == ((1,),)


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


@given(groups, st.integers(1, 8), st.integers(1, 5))
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
        trained = [i for i, t in enumerate(t for i in plan.items for t in groups[i]) if t.loss_tokens]
        assert sorted(i for rows in plan.micro_batches for i in rows) == trained
        assert plan.micro_batches == tuple(rows for u in plan.mini_batches for rows in u.micro_batches)
        for update, of_update in zip(plan.mini_batches, seen, strict=True):
            of_update.update(group_of[i] for rows in update.micro_batches for i in rows)
    # Every group in one update, in order, and each update normalised by what is in it on all ranks.
    cuts = [len(groups) * i // updates for i in range(updates + 1)]
    for number, of_update in enumerate(seen):
        due = range(cuts[number], cuts[number + 1])
        assert of_update == {i for i in due if any(t.loss_tokens for t in groups[i])}
        members = [t for i in due for t in groups[i]]
        for plan in plans:
            update = plan.mini_batches[number]
            assert len(update.micro_batches) == len(plans[0].mini_batches[number].micro_batches)
            assert update.loss_tokens == sum(t.loss_tokens for t in members)
            assert update.sequences == sum(t.loss_tokens > 0 for t in members)
