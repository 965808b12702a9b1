"""Consumption by expiry: by hand, and against a search of all batches."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import BudgetError, ConfigError, QueueOverflowError, StalenessError
from asyncrl.queues.budget import StalenessBudget
from asyncrl.queues.experience import ExperienceQueue, Shortfall, batch_needs, select
from asyncrl.types import GroupMeta, ReadyGroup, TrajectoryMeta


def ready(
    ordinal: int, expiry: int, *, versions: tuple[int, int] | None = None, nbytes: int = 10
) -> ReadyGroup:
    trained = tuple((version, 1) for version in sorted(set(versions or ())))
    trajectory = TrajectoryMeta(0, 1, 2, 1.0, "stop", trained)
    meta = GroupMeta(ordinal, f"task-{ordinal}", 0, (trajectory,), checksum=0, nbytes=nbytes)
    return ReadyGroup(meta, b"", expiry)


class Side:
    """Budget and queue together, with the controller's few lines."""

    def __init__(self, *settings: int, max_bytes: int = 1_000_000) -> None:
        self.budget = StalenessBudget(*settings)
        self.queue = ExperienceQueue(self.budget, self.budget.capacity, max_bytes)
        self.next = 0

    def admit_all(self) -> None:
        while self.budget.admissible():
            self.budget.admit(self.next)
            self.next += 1

    def land(self, *ordinals: int) -> None:
        for ordinal in ordinals:
            self.queue.put(ready(ordinal, self.budget.expiries()[ordinal]))

    def take(self) -> list[int]:
        batch = self.queue.take()
        assert isinstance(batch, list), batch
        return [group.meta.ordinal for group in batch]

    def shortfall(self) -> tuple[int, int, tuple[int, ...]]:
        """Ready, wanted and blocking of a take that falls short."""
        found = self.queue.take()
        assert isinstance(found, Shortfall), found
        assert found.missing == len(found.blocking)
        return found.ready, found.wanted, found.blocking

    def finish_step(self, ordinals: list[int], *, live: bool = True) -> None:
        self.budget.complete_update()
        for ordinal in ordinals:
            self.budget.retire(ordinal)
        if live:
            self.budget.set_live(self.budget.version)
        self.admit_all()


def test_synchronous_takes_all_of_the_batch():
    side = Side(2, 0, 0, 1, 9)
    side.admit_all()
    assert side.shortfall() == (0, 2, ())
    side.land(1)
    assert side.shortfall() == (1, 2, ())
    side.land(0)
    assert side.take() == [1, 0]
    side.finish_step([1, 0])
    assert list(side.budget.expiries()) == [2, 3]


def test_depth_one_waits_for_exactly_the_groups_that_expire_now():
    side = Side(2, 1, 1, 1, 9)
    side.admit_all()  # 0..3, all with expiry 1: the steps 0 and 1 take them in any order
    side.land(3, 1)
    assert side.take() == [3, 1]
    side.finish_step([3, 1])  # 4, 5 with expiry 2
    side.land(5, 4)
    # Step 1: 0 and 2 expire now. Two groups are ready, but the bound wants these.
    assert side.shortfall() == (2, 2, (0, 2))
    side.land(2)
    assert side.shortfall() == (3, 2, (0,))
    side.land(0)
    assert side.take() == [2, 0]
    side.finish_step([2, 0])
    assert side.take() == [5, 4]


def test_a_postponed_group_may_hold_older_tokens_but_none_older_than_its_start():
    side = Side(2, 1, 1, 1, 9)
    side.admit_all()  # 0..3, expiry 1
    side.land(3, 1)
    side.finish_step(side.take())  # 4, 5 with expiry 2
    side.land(5, 4)
    found = side.queue.take()
    assert isinstance(found, Shortfall)
    assert found.overdue == ((0, 2), (2, 2))
    for ordinal, expiry in found.overdue:
        side.budget.postpone(ordinal, expiry)
    assert side.take() == [5, 4]
    side.finish_step([5, 4])  # version 2: a lag of 1 at most means version 1 at least
    side.queue.put(ready(0, 2, versions=(0, 1)))
    side.queue.put(ready(2, 2, versions=(0, 0)))
    assert side.queue.all_masked() == (2,)
    side.queue.remove(2)
    side.budget.retire(2)
    side.admit_all()
    side.land(6)
    assert side.take() == [0, 6]
    assert side.queue.all_masked() == ()
    # Issued again at version 2, a group has no token of version 1.
    side.budget.postpone(7, 9)
    side.budget.reissue(7)
    with pytest.raises(StalenessError, match="tokens of versions 1 to 2, but it started at 2"):
        side.queue.put(ready(7, 9, versions=(1, 2)))


def test_slack_in_the_bound_lets_stragglers_be_overtaken_once():
    side = Side(2, 1, 2, 1, 9)
    side.admit_all()  # 0..3, expiry 2
    side.land(2, 3)
    assert side.take() == [2, 3]
    side.finish_step([2, 3])  # 4, 5 with expiry 3
    side.land(4, 5)
    # Step 1 may leave (2 - 1) * 2 groups with expiry <= 2 to step 2: both of 0 and 1.
    assert side.take() == [4, 5]
    side.finish_step([4, 5])
    side.land(6, 7)
    assert side.shortfall() == (2, 2, (0, 1))
    side.land(0, 1)
    assert side.take() == [0, 1]


def test_a_batch_mixes_what_must_go_with_what_came_first():
    side = Side(2, 1, 2, 1, 9)
    side.admit_all()  # 0..3, expiry 2
    side.land(1, 2)
    assert side.take() == [1, 2]
    side.finish_step([1, 2])  # 4, 5 with expiry 3
    side.land(4, 5)
    side.budget.retire(3)  # failed: one less has to be trained by step 2
    side.admit_all()  # 6, expiry 3
    assert side.take() == [4, 5]
    side.finish_step([4, 5])  # 7, 8 with expiry 4
    side.land(6, 7, 0)
    assert side.take() == [6, 0]  # 0 expires now and came last; of the rest the first


def test_with_every_second_version_pushed_two_steps_share_their_start():
    side = Side(2, 0, 1, 2, 9)
    side.admit_all()
    side.land(1, 0)
    assert side.take() == [1, 0]
    side.finish_step([1, 0], live=False)  # version 1 is not due: 2 and 3 start from version 0 as well
    assert dict(side.budget.expiries()) == {2: 1, 3: 1}
    side.land(3, 2)
    assert side.take() == [3, 2]
    side.finish_step([3, 2])
    assert dict(side.budget.expiries()) == {4: 3, 5: 3}


def test_dropping_what_blocks_makes_the_next_take_succeed():
    side = Side(2, 1, 1, 1, 9)
    side.admit_all()
    side.land(1, 3)
    side.finish_step(side.take())
    side.land(4, 5)
    _, _, blocking = side.shortfall()
    assert blocking == (0, 2)
    for ordinal in blocking:
        side.budget.retire(ordinal)
    assert side.take() == [4, 5]


def test_blocking_is_empty_while_no_batch_is_ready():
    """Otherwise ``at_bound: drop`` would cancel groups of step 0 before the first of them lands."""
    side = Side(3, 0, 0, 1, 9)
    side.admit_all()
    side.land(0, 1)
    assert side.shortfall() == (2, 3, ())


def test_a_batch_is_taken_only_after_the_one_before_has_retired():
    side = Side(1, 1, 1, 1, 9)
    side.admit_all()
    side.land(0, 1)
    assert side.take() == [0]
    with pytest.raises(BudgetError, match=r"ordinals \[0\] of the one before are outstanding"):
        side.queue.take()
    side.budget.complete_update()
    with pytest.raises(BudgetError, match="retire them first"):
        side.queue.take()
    side.budget.retire(0)
    assert side.take() == [1]


def test_a_skipped_update_leaves_the_step_to_the_next_batch():
    side = Side(1, 1, 1, 1, 9)
    side.admit_all()
    side.land(0, 1)
    assert side.take() == [0]
    side.budget.retire(0)
    assert side.take() == [1]


def test_put_refuses_what_the_budget_does_not_know_so():
    side = Side(1, 1, 2, 1, 9)
    side.admit_all()
    with pytest.raises(BudgetError, match="ordinal 9 became ready, but is not outstanding"):
        side.queue.put(ready(9, 2))
    with pytest.raises(BudgetError, match="landed with expiry 3, but was issued with 2"):
        side.queue.put(ready(0, 3))
    side.land(0)
    with pytest.raises(BudgetError, match="ordinal 0 became ready, but is ready"):
        side.queue.put(ready(0, 2))
    assert len(side.queue) == 1


def test_put_refuses_tokens_older_than_the_start_or_newer_than_the_policy():
    side = Side(1, 0, 1, 1, 9)
    side.admit_all()
    side.land(0)
    side.finish_step(side.take())  # ordinal 1 starts at version 1
    with pytest.raises(StalenessError, match="versions 0 to 1, but it started at 1 and the policy is at 1"):
        side.queue.put(ready(1, 2, versions=(0, 1)))
    with pytest.raises(StalenessError, match="versions 1 to 2"):
        side.queue.put(ready(1, 2, versions=(1, 2)))
    side.queue.put(ready(1, 2, versions=(1, 1)))


def test_a_put_beyond_the_capacity_raises_and_changes_nothing():
    budget = StalenessBudget(1, 1, 1, 1, 9)
    queue = ExperienceQueue(budget, 1, 100)
    budget.admit(0)
    budget.admit(1)
    queue.put(ready(0, 1))
    with pytest.raises(QueueOverflowError, match="ordinal 1 was put into a queue that holds 1 of 1"):
        queue.put(ready(1, 1))
    assert (len(queue), queue.bytes, budget.running) == (1, 10, 1)


def test_full_in_bytes_but_never_below_one_batch():
    side = Side(2, 1, 1, 1, 9, max_bytes=15)
    side.admit_all()
    side.queue.put(ready(0, 1, nbytes=15))
    assert not side.queue.full  # stopping admission here could leave the step without its second group
    side.queue.put(ready(1, 1, nbytes=1))
    assert side.queue.full
    side.take()
    assert (side.queue.full, side.queue.bytes) == (False, 0)


def test_removed_groups_leave_no_trace():
    side = Side(2, 0, 0, 1, 9)
    side.admit_all()
    side.land(0, 1)
    assert side.queue.remove(0).meta.ordinal == 0
    side.budget.retire(0)
    assert (len(side.queue), side.queue.bytes, 0 in side.queue, 1 in side.queue) == (1, 10, False, True)
    with pytest.raises(BudgetError, match="ordinal 0 was removed from the queue, but is not among its 1"):
        side.queue.remove(0)
    side.admit_all()
    side.land(2)
    assert side.take() == [1, 2]
    found = side.queue.statistics()
    assert (found.ready, found.bytes, found.put, found.taken, found.removed) == (0, 0, 3, 2, 1)


def test_settings_that_cannot_work_are_refused():
    budget = StalenessBudget(4, 0, 0, 1, 9)
    with pytest.raises(ConfigError, match="holds 3 groups, but a step takes 4"):
        ExperienceQueue(budget, 3, 100)
    with pytest.raises(ConfigError, match="max_bytes is 0"):
        ExperienceQueue(budget, 4, 0)


def test_needs_by_hand():
    assert batch_needs({5: 2, 6: 3, 8: 1}, step=5, batch=3) == [(5, 2), (6, 2)]
    assert batch_needs({7: 6}, step=5, batch=3) == []
    assert batch_needs({7: 7}, step=5, batch=3) == [(7, 1)]
    with pytest.raises(StalenessError, match=r"10 outstanding groups expire at step 7 or before.* only 9"):
        batch_needs({7: 10}, step=5, batch=3)
    with pytest.raises(StalenessError, match=r"at step 5, 1 outstanding groups expire at step 4.* only 0"):
        batch_needs({4: 1}, step=5, batch=3)


def test_select_by_hand():
    assert select([9, 9, 5, 9, 6], [], 2) == [0, 1]
    assert select([9, 9, 5, 9, 6], [(5, 1)], 2) == [0, 2]
    assert select([9, 9, 5, 9, 6], [(5, 1), (6, 2)], 2) == [2, 4]
    assert select([9, 9, 5, 9, 6], [(5, 1), (6, 2)], 3) == [0, 2, 4]
    assert select([6, 6, 5], [(5, 1), (6, 2)], 2) == [0, 2]


def feasible(taken: list[int], outstanding: list[int], step: int, batch: int) -> bool:
    """The rule as the design words it, for groups given by expiry; ``taken`` are indices."""
    left = [expiry for index, expiry in enumerate(outstanding) if index not in taken]
    return not any(expiry <= step for expiry in left) and all(
        sum(expiry <= d for expiry in left) <= (d - step) * batch for d in range(step + 1, step + 8)
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, list[int], list[bool]]:
    """Batch size, expiries of the outstanding groups (steps from now) within the bound, and who is ready."""
    batch = draw(st.integers(1, 3))
    kept: list[int] = []
    for expiry in draw(st.lists(st.integers(0, 4), max_size=9)):
        if all(sum(e <= d for e in [*kept, expiry]) <= (d + 1) * batch for d in range(5)):
            kept.append(expiry)
    return batch, kept, draw(st.lists(st.booleans(), min_size=len(kept), max_size=len(kept)))


@settings(max_examples=600, deadline=None)
@given(situations(), st.integers(0, 3))
def test_take_is_the_first_feasible_batch_of_all(situation, step):
    """Against every combination: the same batch, or a shortfall where there is none."""
    batch, offsets, landed = situation
    outstanding = [step + offset for offset in offsets]
    counts = {expiry: outstanding.count(expiry) for expiry in outstanding}
    arrived = [index for index, is_ready in enumerate(landed) if is_ready]
    expected = next(
        (list(c) for c in combinations(arrived, batch) if feasible(list(c), outstanding, step, batch)), None
    )
    needs = batch_needs(counts, step, batch)
    can_be_met = len(arrived) >= batch and all(
        sum(outstanding[i] <= d for i in arrived) >= need for d, need in needs
    )
    assert can_be_met == (expected is not None)
    if expected is not None:
        chosen = select([outstanding[index] for index in arrived], needs, batch)
        assert [arrived[index] for index in chosen] == expected


def build_situation(batch, offsets, landed) -> tuple[StalenessBudget, ExperienceQueue]:
    """A situation as it stands at step 4: start versions 0..4, under a bound with room for all of them."""
    budget = StalenessBudget(batch, 4, 4, 1, 100)
    queue = ExperienceQueue(budget, budget.capacity, 10**6)
    for version in range(5):
        for ordinal in [i for i, offset in enumerate(offsets) if offset == version]:
            budget.admit(ordinal)
        if version < 4:
            budget.complete_update()
            budget.set_live(version + 1)
    for ordinal, is_ready in enumerate(landed):
        if is_ready:
            queue.put(ready(ordinal, budget.expiries()[ordinal]))
    return budget, queue


@settings(max_examples=300, deadline=None)
@given(situations(), st.randoms(use_true_random=False))
def test_blocking_groups_suffice_and_none_of_them_is_idle(situation, random):
    """Landing or dropping all of ``blocking`` makes the take succeed; leaving one of them out does not."""
    batch = situation[0]
    _, queue = build_situation(*situation)
    shortfall = queue.take()
    if not isinstance(shortfall, Shortfall):
        return
    blocking = shortfall.blocking
    assert bool(blocking) == (shortfall.ready >= batch)
    for omitted in (None, *blocking):
        budget, queue = build_situation(*situation)
        for ordinal in blocking:
            if ordinal == omitted:
                continue
            if random.random() < 0.5:
                queue.put(ready(ordinal, budget.expiries()[ordinal]))
            else:
                budget.retire(ordinal)
        if blocking:
            assert isinstance(queue.take(), Shortfall) == (omitted is not None)


@settings(max_examples=300, deadline=None)
@given(situations(), st.integers(0, 20))
def test_postponing_what_is_overdue_suffices_and_none_of_it_is_idle(situation, omitted):
    """After all of ``overdue`` is postponed a take succeeds; one group or one step less, and it fails."""
    batch = situation[0]
    budget, queue = build_situation(*situation)
    shortfall = queue.take()
    if not isinstance(shortfall, Shortfall) or not shortfall.missing:
        return
    overdue = shortfall.overdue
    for ordinal, expiry in overdue:
        budget.postpone(ordinal, expiry)
    taken = queue.take()
    assert isinstance(taken, list)
    # What is left can be trained in time by the steps after this one.
    gone = [group.meta.ordinal for group in taken]
    left = [expiry for ordinal, expiry in budget.expiries().items() if ordinal not in gone]
    assert all(sum(e <= d for e in left) <= (d - 4) * batch for d in range(4, 16))

    budget, queue = build_situation(*situation)
    short = omitted % len(overdue)
    for i, (ordinal, expiry) in enumerate(overdue):
        less = expiry - (i == short)
        if less > budget.expiries()[ordinal]:
            budget.postpone(ordinal, less)
    assert isinstance(queue.take(), Shortfall)
