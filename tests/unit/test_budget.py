"""The admission rule, with the arithmetic done by hand on small cases."""

import pytest

from asyncrl.errors import BudgetError, ConfigError
from asyncrl.queues.budget import Admission, StalenessBudget


def admit_all(budget: StalenessBudget, first: int) -> list[int]:
    """Admit as much as the rule allows, from ordinal ``first`` on."""
    ordinals = list(range(first, first + budget.admissible()))
    for ordinal in ordinals:
        budget.admit(ordinal)
    assert budget.admissible() == 0
    return ordinals


def finish_step(budget: StalenessBudget, ordinals: list[int]) -> None:
    budget.complete_update()
    for ordinal in ordinals:
        budget.retire(ordinal)


def test_depth_zero_is_synchronous_even_with_staleness_to_spare():
    budget = StalenessBudget(2, 0, 1, 1, 3)
    assert budget.limits() == {"pipeline_depth": 2, "max_staleness": 4, "steps": 6}
    assert admit_all(budget, 0) == [0, 1]
    finish_step(budget, [0, 1])
    # v = 1, g = 0, p = 1: the slots come back when version 1 is live, though S would allow a lag of 1.
    assert budget.limits() == {"pipeline_depth": 0, "max_staleness": 2, "steps": 4}
    assert budget.admissible() == 0
    budget.set_live(1)
    assert admit_all(budget, 2) == [2, 3]
    assert budget.expiries() == {2: 2, 3: 2}


def test_depth_one_staleness_one_keeps_one_batch_ahead():
    budget = StalenessBudget(2, 1, 1, 1, 4)
    assert admit_all(budget, 0) == [0, 1, 2, 3]  # batches of steps 0 and 1, both from version 0
    assert set(budget.expiries().values()) == {1}
    finish_step(budget, [0, 1])
    # v = 1, g = 0, N = 2: both the depth term (2 - 1) * 2 and the staleness term (0 + 1 - 1 + 1) * 2 are 2.
    assert budget.limits() == {"pipeline_depth": 2, "max_staleness": 2, "steps": 6}
    assert budget.admissible() == 0
    budget.set_live(1)
    assert admit_all(budget, 4) == [4, 5]
    assert budget.expiries() == {2: 1, 3: 1, 4: 2, 5: 2}


def test_depth_one_with_every_second_version_pushed():
    budget = StalenessBudget(1, 1, 2, 2, 9)  # S = D + k - 1
    admit_all(budget, 0)
    finish_step(budget, [0])
    assert admit_all(budget, 2) == [2]  # v = 1 is not due: p = 0, and (0 + 2 - 1 + 1) * 1 = 2
    finish_step(budget, [1])
    # v = 2 is due and not live: (2 - 1) * 1 = 1, and (0 + 2 - 2 + 1) * 1 = 1.
    assert budget.limits() == {"pipeline_depth": 1, "max_staleness": 1, "steps": 7}
    assert (budget.outstanding, budget.admissible(), budget.unpublished) == (1, 0, 1)
    budget.set_live(2)
    assert admit_all(budget, 3) == [3]
    assert budget.expiries() == {2: 2, 3: 4}


def test_publishing_every_second_version_at_depth_zero():
    budget = StalenessBudget(2, 0, 1, 2, 6)
    admit_all(budget, 0)
    finish_step(budget, [0, 1])
    assert not budget.is_due(1)
    assert admit_all(budget, 2) == [2, 3]  # from version 0 once more: lag 1, within S
    finish_step(budget, [2, 3])
    assert budget.is_due(2)
    assert budget.admissible() == 0
    budget.set_live(2)
    assert admit_all(budget, 4) == [4, 5]


@pytest.mark.parametrize(
    ("every", "live", "version", "unpublished"),
    [(1, 0, 3, 3), (2, 0, 3, 1), (2, 1, 3, 1), (2, 2, 3, 0), (2, 3, 4, 1), (3, 2, 8, 2), (3, 7, 8, 0)],
)
def test_unpublished_counts_due_versions_above_the_live_one(every, live, version, unpublished):
    budget = StalenessBudget(1, 0, every - 1, every, 9)
    for _ in range(live):
        budget.complete_update()
    budget.set_live(live)
    for _ in range(version - live):
        budget.complete_update()
    due = [v for v in range(live + 1, version + 1) if budget.is_due(v)]
    assert budget.unpublished == unpublished == len(due)


def test_nothing_is_started_that_the_run_could_not_train():
    budget = StalenessBudget(2, 3, 5, 1, 2)
    assert budget.binding() == "steps"
    assert admit_all(budget, 0) == [0, 1, 2, 3]
    finish_step(budget, [0, 1])
    budget.set_live(1)
    assert budget.admissible() == 0
    finish_step(budget, [2, 3])
    assert (budget.outstanding, budget.admissible()) == (0, 0)
    with pytest.raises(BudgetError, match="at version 2, but the run has 2 steps"):
        budget.complete_update()


def test_binding_names_the_setting_that_admits_least():
    budget = StalenessBudget(4, 2, 3, 2, 4)  # S = D + k - 1
    assert budget.limits() == {"pipeline_depth": 12, "max_staleness": 16, "steps": 16}
    assert budget.binding() == "pipeline_depth"
    for _ in range(3):
        budget.complete_update()
    # v = 3 with 0 live: one due version (2) is missing, but the weights are three versions old.
    assert budget.limits() == {"pipeline_depth": 8, "max_staleness": 4, "steps": 4}
    assert budget.binding() == "max_staleness"  # the first of a tie
    budget.set_live(2)
    assert budget.limits() == {"pipeline_depth": 12, "max_staleness": 12, "steps": 4}
    assert budget.binding() == "steps"
    assert budget.statistics().binding == "steps"


def test_every_unpublished_version_takes_a_batch_off_both_terms():
    budget = StalenessBudget(2, 2, 2, 1, 9)
    for version in range(1, 4):
        budget.complete_update()
        assert budget.limits()["pipeline_depth"] == (3 - version) * 2
        assert budget.limits()["max_staleness"] == (3 - version) * 2
    budget.complete_update()
    assert budget.limits()["pipeline_depth"] == -2  # further behind than the depth: still only "none"
    assert budget.admissible() == 0


def test_a_version_made_live_early_settles_the_due_ones_below_it():
    budget = StalenessBudget(1, 0, 3, 2, 9)
    for _ in range(3):
        budget.complete_update()
    assert (budget.unpublished, budget.admissible()) == (1, 0)
    budget.set_live(3)  # 3 is not due, but newer than 2, which is
    assert (budget.unpublished, budget.admissible()) == (0, 1)
    assert budget.admit(0) == Admission(start_version=3, expiry=6)


def test_live_version_never_goes_back_nor_beyond_the_updates():
    budget = StalenessBudget(1, 0, 0, 1, 9)
    budget.complete_update()
    budget.complete_update()
    budget.set_live(1)
    budget.set_live(1)  # a push sent again
    with pytest.raises(BudgetError, match=r"version 0 was made live.* 1 and the 2 completed"):
        budget.set_live(0)
    with pytest.raises(BudgetError, match="version 3 was made live"):
        budget.set_live(3)
    assert (budget.live_version, budget.version) == (1, 2)


def test_a_failed_group_gives_its_slot_back_at_once():
    budget = StalenessBudget(2, 0, 0, 1, 9)
    admit_all(budget, 0)
    budget.retire(1)
    assert admit_all(budget, 2) == [2]
    assert list(budget.expiries()) == [0, 2]


def test_a_skipped_update_gives_its_slots_back_and_moves_nothing():
    budget = StalenessBudget(2, 0, 0, 1, 9)
    admit_all(budget, 0)
    for ordinal in (0, 1):
        budget.retire(ordinal)
    assert (budget.version, budget.admissible()) == (0, 2)


def test_both_orders_of_retiring_end_alike_but_only_one_is_safe_in_between():
    def after_one_batch() -> StalenessBudget:
        budget = StalenessBudget(2, 0, 1, 1, 9)
        admit_all(budget, 0)
        return budget

    documented, other = after_one_batch(), after_one_batch()
    documented.complete_update()
    assert documented.admissible() == 0
    documented.retire(0)
    assert documented.admissible() == 0
    documented.retire(1)

    other.retire(0)
    other.retire(1)
    assert other.admissible() == 2  # what would be admitted here starts on the weights of the step before
    other.complete_update()
    assert documented.limits() == other.limits()
    assert documented.statistics() == other.statistics()


def test_a_group_issued_again_starts_at_the_live_version():
    budget = StalenessBudget(1, 1, 2, 1, 9)
    admit_all(budget, 0)
    finish_step(budget, [0])
    budget.set_live(1)
    assert budget.reissue(1) == Admission(start_version=1, expiry=3)
    assert budget.outstanding == 1
    assert budget.outstanding_by_expiry() == {3: 1}


def test_what_the_rule_forbids_raises():
    budget = StalenessBudget(2, 0, 0, 1, 9)
    budget.admit(7)
    with pytest.raises(BudgetError, match="ordinal 7 was admitted, but is outstanding already"):
        budget.admit(7)
    budget.admit(8)
    with pytest.raises(BudgetError, match="ordinal 9 was admitted with 2 groups outstanding"):
        budget.admit(9)
    with pytest.raises(BudgetError, match="ordinal 9 was retired, but is not among the 2"):
        budget.retire(9)
    with pytest.raises(BudgetError, match="ordinal 9 was issued again, but is not outstanding"):
        budget.reissue(9)
    budget.mark_ready(7)
    with pytest.raises(BudgetError, match="ordinal 7 was issued again, but is ready"):
        budget.reissue(7)
    with pytest.raises(BudgetError, match="ordinal 7 became ready, but is ready"):
        budget.mark_ready(7)
    budget.retire(7)
    with pytest.raises(BudgetError, match="ordinal 7 was retired"):
        budget.retire(7)
    assert (budget.outstanding, budget.running) == (1, 1)


def test_a_postponed_group_expires_later_and_keeps_its_start():
    budget = StalenessBudget(2, 1, 1, 1, 9)
    admit_all(budget, 0)
    finish_step(budget, [0, 1])
    budget.set_live(1)
    admit_all(budget, 4)  # 2 and 3 expire at 1, 4 and 5 at 2
    budget.mark_ready(4)
    budget.mark_ready(5)
    assert budget.overdue() == ((2, 2), (3, 2))
    budget.postpone(2, 2)
    budget.postpone(3, 2)
    assert budget.overdue() == ()
    assert budget.expiries() == {4: 2, 5: 2, 2: 2, 3: 2}
    assert [budget.start_version(ordinal) for ordinal in (2, 3, 4)] == [0, 0, 1]
    assert set(budget.postponed()) == {2, 3}
    assert budget.admissible() == 0, "a postponed group keeps its slot"
    finish_step(budget, [4, 5])
    budget.set_live(2)
    # Issued again, it starts afresh, but nothing that was promised to step 2 has to move up.
    assert budget.reissue(3) == Admission(start_version=2, expiry=3)
    assert budget.start_version(3) == 2
    assert set(budget.postponed()) == {2}
    budget.postpone(2, 5)
    assert budget.reissue(2) == Admission(start_version=2, expiry=5)
    budget.retire(2)
    assert not list(budget.postponed())
    assert budget.statistics().postponed == 3


def test_one_postponed_group_can_push_the_next_one_on():
    """One group a step: 1 expires now and 3 a step later, where only one of them can be trained."""
    budget = StalenessBudget(1, 2, 2, 1, 9)
    admit_all(budget, 0)  # 0, 1 and 2 expire at 2
    for trained, admitted in ((0, 3), (2, 4)):
        finish_step(budget, [trained])
        budget.set_live(budget.version)
        assert admit_all(budget, admitted) == [admitted]
    assert (budget.version, dict(budget.expiries())) == (2, {1: 2, 3: 3, 4: 4})
    budget.mark_ready(4)
    assert budget.overdue() == ((1, 3), (3, 4))


def test_what_the_rule_of_postponing_forbids_raises():
    budget = StalenessBudget(2, 0, 0, 1, 9)
    admit_all(budget, 0)
    with pytest.raises(BudgetError, match="ordinal 0 was postponed to step 0, but expires at 0"):
        budget.postpone(0, 0)
    budget.mark_ready(0)
    with pytest.raises(BudgetError, match="ordinal 0 was postponed, but is ready"):
        budget.postpone(0, 1)
    with pytest.raises(BudgetError, match="ordinal 7 was postponed, but is not outstanding"):
        budget.postpone(7, 1)


def test_running_groups_come_earliest_expiry_first():
    budget = StalenessBudget(2, 2, 2, 1, 9)
    admit_all(budget, 0)
    finish_step(budget, [0, 1])
    budget.set_live(1)
    admit_all(budget, 6)  # 2..5 expire at 2, 6 and 7 at 3
    budget.reissue(2)
    budget.mark_ready(4)
    assert budget.earliest_running(0) == ()
    assert budget.earliest_running(3) == (3, 5, 6)
    assert budget.earliest_running(99) == (3, 5, 6, 7, 2)
    assert not budget.is_running(4)
    assert not budget.is_running(99)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (1, 1, 1, 2, 9),
            r"max_staleness is 1, but has to be at least 2 \(pipeline_depth 1 \+ publish_every 2",
        ),
        ((0, 0, 0, 1, 9), "groups_per_step is 0, but has to be at least 1"),
        ((1, -1, 0, 1, 9), "pipeline_depth is -1"),
        ((1, 0, 0, 0, 9), "publish_every is 0"),
        ((1, 0, 0, 1, 0), "run.steps is 0"),
    ],
)
def test_settings_that_contradict_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        StalenessBudget(*arguments)


def test_views_are_live_and_read_only():
    budget = StalenessBudget(2, 0, 0, 1, 9)
    expiries, counts = budget.expiries(), budget.outstanding_by_expiry()
    budget.admit(3)
    assert (dict(expiries), dict(counts)) == ({3: 0}, {0: 1})
    with pytest.raises(TypeError):
        expiries[3] = 9  # type: ignore[index]


def test_statistics_tell_all_counts():
    budget = StalenessBudget(2, 1, 1, 1, 9)
    admit_all(budget, 0)
    budget.mark_ready(0)
    budget.mark_ready(1)
    budget.reissue(3)
    finish_step(budget, [0, 1])
    found = budget.statistics()
    assert (found.version, found.live_version, found.unpublished) == (1, 0, 1)
    assert (found.admitted, found.reissued, found.retired) == (4, 1, 2)
    assert (found.outstanding, found.running, found.admissible) == (2, 2, 0)


def test_a_resumed_budget_is_live_everywhere_and_takes_back_what_was_ready():
    budget = StalenessBudget(2, 1, 2, 1, 9)
    budget.resume(4)
    assert (budget.version, budget.live_version, budget.unpublished) == (4, 4, 0)
    budget.readmit(9, start_version=3, expiry=5)
    budget.readmit(11, start_version=2, expiry=6)  # postponed before
    assert (budget.start_version(9), budget.start_version(11)) == (3, 2)
    assert budget.expiries() == {9: 5, 11: 6}
    assert budget.is_running(9)
    assert admit_all(budget, 12) == [12, 13]
    assert budget.expiries()[12] == 6


def test_what_no_resume_could_have_left_is_refused():
    used = StalenessBudget(2, 1, 1, 1, 9)
    used.admit(0)
    with pytest.raises(BudgetError, match="expected a new one"):
        used.resume(3)
    with pytest.raises(BudgetError, match="at 10 of 9 steps"):
        StalenessBudget(2, 1, 1, 1, 9).resume(10)
    budget = StalenessBudget(1, 0, 0, 1, 9)
    budget.resume(4)
    with pytest.raises(BudgetError, match="readmitted with expiry 3 at version 4"):
        budget.readmit(7, start_version=3, expiry=3)
    budget.readmit(8, start_version=4, expiry=4)
    with pytest.raises(BudgetError, match="with 1 groups outstanding"):
        budget.readmit(9, start_version=4, expiry=4)
