"""Each way of getting the schedule slightly wrong is caught: the checks of the harness have teeth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from asyncrl import types
from asyncrl.errors import AsyncRLError, BudgetError, DeadlockError, StalenessError
from asyncrl.queues import experience
from asyncrl.queues.budget import Admission, StalenessBudget
from asyncrl.queues.experience import ExperienceQueue, Shortfall
from asyncrl.types import GroupMeta, ReadyGroup, Trajectory, TrajectoryMeta

from . import schedule_harness
from .schedule_harness import Params, run_schedule

SCHEDULES = 400
"""A mutant has to be caught within so many random schedules; most need fewer than ten."""


def caught(
    budget_cls: type[StalenessBudget] = StalenessBudget,
    queue_cls: type[ExperienceQueue] = ExperienceQueue,
    draw: Callable[[int], Params] = Params.random,
) -> Exception:
    """The first error over the seeds of the property test."""
    for seed in range(SCHEDULES):
        try:
            run_schedule(draw(seed), budget_cls, queue_cls)
        except (AssertionError, AsyncRLError) as error:
            return error
    pytest.fail(f"the mutant passed {SCHEDULES} schedules")


def shifted(term: int, groups: int) -> type[StalenessBudget]:
    """Admission with one of its three terms off by some groups."""

    class Shifted(StalenessBudget):
        def _limits(self) -> tuple[int, int, int]:
            limits = list(super()._limits())
            limits[term] += groups
            return limits[0], limits[1], limits[2]

    return Shifted


class IgnoresUnpublished(StalenessBudget):
    @property
    def unpublished(self) -> int:
        return 0


class AdmitsOneBeyond(StalenessBudget):
    """``N <=`` in place of ``N <``."""

    def _limits(self) -> tuple[int, int, int]:
        a, b, c = super()._limits()
        return a + 1, b + 1, c + 1


class LosesTheSlotOfAFailure(StalenessBudget):
    def retire(self, ordinal: int) -> None:
        if not self.is_running(ordinal):
            super().retire(ordinal)


class LosesTheSlotQuietly(StalenessBudget):
    """Like the one above, and its own count looks right: only the hang tells."""

    lost = 0

    def retire(self, ordinal: int) -> None:
        self.lost += self.is_running(ordinal)
        super().retire(ordinal)

    def admissible(self) -> int:
        return max(0, super().admissible() - self.lost)


class ExpiryFromCompletion(StalenessBudget):
    def mark_ready(self, ordinal: int) -> None:
        self._forget(ordinal)
        self._issue(ordinal)
        super().mark_ready(ordinal)


class StartsAtTheTrainedVersion(StalenessBudget):
    """The start version is taken to be v, though generators still sample with g."""

    def _issue(self, ordinal: int, not_before: int = 0) -> Admission:
        live, self._live_version = self._live_version, self.version
        admission = super()._issue(ordinal, not_before)
        self._live_version = live
        return admission


class ExpiresALittleLate(StalenessBudget):
    def _issue(self, ordinal: int, not_before: int = 0) -> Admission:
        self.max_staleness += 1
        admission = super()._issue(ordinal, not_before)
        self.max_staleness -= 1
        return admission


class ReissueTakesASecondSlot(StalenessBudget):
    def reissue(self, ordinal: int) -> Admission:
        admission = super().reissue(ordinal)
        self._expiry[-ordinal - 1] = admission.expiry
        return admission


class NeverLive(StalenessBudget):
    def set_live(self, version: int) -> None:
        pass


BUDGETS = {
    "depth term one batch too many": (shifted(0, 4), AssertionError),
    "depth term one group too many": (shifted(0, 1), AssertionError),
    "depth term one group too few": (shifted(0, -1), DeadlockError),
    "staleness term one group too many": (shifted(1, 1), (AssertionError, StalenessError)),
    "staleness term one group too few": (shifted(1, -1), DeadlockError),
    "steps term one group too many": (shifted(2, 1), AssertionError),
    "steps term one group too few": (shifted(2, -1), DeadlockError),
    "admits at the limit": (AdmitsOneBeyond, AssertionError),
    "p ignored": (IgnoresUnpublished, AssertionError),
    "slot of a failed group not given back": (LosesTheSlotOfAFailure, AssertionError),
    "slot of a failed group not given back, unseen": (LosesTheSlotQuietly, DeadlockError),
    "expiry from the completion version": (ExpiryFromCompletion, (AssertionError, StalenessError)),
    "start version v instead of g": (StartsAtTheTrainedVersion, StalenessError),
    "expiry one step late": (ExpiresALittleLate, (AssertionError, StalenessError)),
    "a second slot at reissue": (ReissueTakesASecondSlot, AssertionError),
    "live version never raised": (NeverLive, DeadlockError),
}


@pytest.mark.parametrize(("mutant", "error"), BUDGETS.values(), ids=BUDGETS)
def test_a_wrong_budget_is_caught(mutant, error):
    assert isinstance(caught(budget_cls=mutant), error)


class TakesInArrivalOrder(ExperienceQueue):
    """Ignores the bound: the oldest arrivals make the batch."""

    def take(self) -> list[ReadyGroup] | Shortfall:
        batch = self._budget.groups_per_step
        if len(self) < batch:
            return Shortfall(len(self), batch, 0, self._budget)
        return [self._discard(ordinal) for ordinal in list(self._ready)[:batch]]


class FullBelowOneBatch(ExperienceQueue):
    @property
    def full(self) -> bool:
        return self.bytes >= self.max_bytes


class LosesTheOldest(ExperienceQueue):
    """A bounded buffer that pushes its oldest group out."""

    def put(self, group: ReadyGroup) -> None:
        super().put(group)
        if len(self) > self._budget.groups_per_step:
            self.remove(next(iter(self._ready)))


class BlocksBelowOneBatch(ExperienceQueue):
    """Has groups dropped while no batch is ready: at once, and for ever."""

    def take(self) -> list[ReadyGroup] | Shortfall:
        found = super().take()
        return (
            dataclasses.replace(found, missing=self._budget.running)
            if isinstance(found, Shortfall)
            else found
        )


QUEUES = {
    "S ignored in take": (TakesInArrivalOrder, (AssertionError, StalenessError)),
    "full below one batch": (FullBelowOneBatch, DeadlockError),
    "oldest group pushed out": (LosesTheOldest, AssertionError),
    "drops below one batch": (BlocksBelowOneBatch, AssertionError),
}


@pytest.mark.parametrize(("mutant", "error"), QUEUES.values(), ids=QUEUES)
def test_a_wrong_queue_is_caught(mutant, error):
    assert isinstance(caught(queue_cls=mutant), error)


class PostponesWhatIsBlockingByOneStep(StalenessBudget):
    """Takes no account of what the next step can train beside it."""

    def overdue(self) -> tuple[tuple[int, int], ...]:
        found = tuple(o for o in self.expiries() if self.is_running(o) and self.expiries()[o] <= self.version)
        return tuple((ordinal, self.version + 1) for ordinal in found)


class FreesTheSlotOfWhatItPostpones(StalenessBudget):
    def admissible(self) -> int:
        return super().admissible() + sum(self.is_running(ordinal) for ordinal in self.postponed())

    def admit(self, ordinal: int) -> Admission:
        return self._issue(ordinal)


class NothingIsAllMasked(ExperienceQueue):
    def all_masked(self) -> tuple[int, ...]:
        return ()


class MaskedWhereTheOldestIs(ExperienceQueue):
    """Drops a postponed group as soon as any token of it is too old."""

    def all_masked(self) -> tuple[int, ...]:
        oldest = self._budget.version - self._budget.max_staleness
        metas = [self._ready[o].meta for o in self._budget.postponed() if o in self._ready]
        return tuple(m.ordinal for m in metas if m.oldest_version is None or m.oldest_version < oldest)


MASKING = {
    "postponed by one step whatever that step holds": {"budget_cls": PostponesWhatIsBlockingByOneStep},
    "slot of a postponed group given back": {"budget_cls": FreesTheSlotOfWhatItPostpones},
    "groups with no token left kept": {"queue_cls": NothingIsAllMasked},
    "groups with an old token dropped": {"queue_cls": MaskedWhereTheOldestIs},
}


@pytest.mark.parametrize("mutant", MASKING.values(), ids=MASKING)
def test_wrong_masking_is_caught(mutant):
    assert isinstance(caught(**mutant, draw=Params.masking), AssertionError)


@pytest.mark.parametrize("off", [-1, 1])
def test_masking_a_version_too_many_or_too_few_is_caught(monkeypatch, off):
    monkeypatch.setattr(
        schedule_harness, "unmasked", lambda version, bound, meta: types.unmasked(version, bound + off, meta)
    )
    assert isinstance(caught(draw=Params.masking), AssertionError)


needs = experience.batch_needs

NEEDS: dict[str, Callable[..., list[tuple[int, int]]]] = {
    "only what expires now": lambda o, step, batch: [n for n in needs(o, step, batch) if n[0] == step],
    "all but what expires now": lambda o, step, batch: [n for n in needs(o, step, batch) if n[0] != step],
    "one step too lax": lambda o, step, batch: needs({d + 1: n for d, n in o.items()}, step, batch),
    "one group too lax": lambda o, step, batch: [(d, n - 1) for d, n in needs(o, step, batch) if n > 1],
}


@pytest.mark.parametrize("mutant", NEEDS.values(), ids=NEEDS)
def test_wrong_needs_are_caught(monkeypatch, mutant):
    monkeypatch.setattr(experience, "batch_needs", mutant)
    assert isinstance(caught(), AssertionError | StalenessError)


def test_a_selection_that_ignores_nesting_is_caught(monkeypatch):
    """Fills the needs one by one from the front, and the rest in arrival order."""

    def last_arrivals(expiries, needs, batch):
        return list(range(len(list(expiries))))[-batch:]

    monkeypatch.setattr(experience, "select", last_arrivals)
    assert isinstance(caught(), AssertionError | StalenessError)


def stamp_newest(self: Trajectory) -> TrajectoryMeta:
    found = original_meta(self)
    return dataclasses.replace(found, trained=((found.newest_version, found.loss_tokens),))


original_meta = Trajectory.meta


def test_the_newest_version_stamped_is_caught(monkeypatch):
    monkeypatch.setattr(Trajectory, "meta", stamp_newest)
    error = caught()
    assert isinstance(error, AssertionError)
    assert "was reported as" in str(error)


def test_a_group_as_old_as_its_newest_token_is_caught(monkeypatch):
    newest = property(lambda self: max(t.newest_version for t in self.trajectories))
    monkeypatch.setattr(GroupMeta, "oldest_version", newest)
    assert "was reported as" in str(caught())


def test_a_lag_that_is_one_short_is_caught(monkeypatch):
    monkeypatch.setattr(types, "token_lag", lambda version, token_version: version - token_version - 1)
    assert "was reported as" in str(caught())


def test_a_reissue_that_keeps_the_old_expiry_is_safe():
    """Not a fault: the group only has to be trained sooner than it would need to be.

    With ``at_bound: mask`` the harness also holds the budget to the expiry that it announced, so that
    mode is left out here.
    """

    class KeepsExpiry(StalenessBudget):
        def reissue(self, ordinal: int) -> Admission:
            if not self.is_running(ordinal):
                raise BudgetError(f"ordinal {ordinal} is not running")
            expiry = self.expiries()[ordinal]
            return Admission(expiry - self.max_staleness, expiry)

    reissued = 0
    for params in map(Params.random, range(SCHEDULES)):
        if params.at_bound != "mask":
            reissued += run_schedule(params, KeepsExpiry).happened["reissued"]
    assert reissued > SCHEDULES


def test_retiring_before_the_update_counts_is_what_the_order_is_for():
    """The unsafe order admits a batch on the weights of the step before: see ``complete_update``."""
    budget = StalenessBudget(1, 0, 1, 1, 9)
    budget.admit(0)
    budget.retire(0)
    stale = budget.admit(1)
    budget.complete_update()
    assert budget.version - stale.start_version == 1  # a lag of 1 at pipeline_depth 0
