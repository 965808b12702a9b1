"""The experience queue: ready groups, bounded in groups and in bytes, consumed by expiry.

Consumption for step t, B groups at a time: in arrival order, except that afterwards, for every d > t,
the outstanding groups outside the batch with expiry <= d number at most (d - t) * B, and none with
expiry <= t is left. So the groups that expire first are trained in time even if they land last, and
nothing waits for a straggler sooner than the bound makes it.

Invariants:
- At most ``capacity_groups`` groups are ready; the bound follows from the budget, so a put beyond it is
  a bug and raises. Nothing is ever discarded here.
- Every ready group is outstanding in the budget, with the same expiry.
- A batch holds exactly B groups, each with expiry >= t. So no token of it has a lag above S, but for
  postponed groups (``at_bound: mask``), whose older tokens the caller masks; ``all_masked`` names
  those that have none left.

A plain synchronous object without locks or I/O. ``put`` and ``remove`` are O(1); ``take`` is O(S) when
it falls short, and O(ready * S) once a step when it succeeds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.errors import BudgetError, ConfigError, QueueOverflowError, StalenessError
from asyncrl.queues.budget import StalenessBudget
from asyncrl.types import ReadyGroup


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why no batch could be taken.

    ``missing`` is 0 while fewer than ``wanted`` groups are ready: then any group that lands brings the
    step nearer, and cancelling one would only delay it. Otherwise a whole batch is ready and the
    staleness bound alone stands in the way: each group in ``blocking`` has to land (``at_bound: wait``)
    or be cancelled and retired (``at_bound: drop``), or each in ``overdue`` be postponed to the expiry
    beside it (``at_bound: mask``), after which a take succeeds.
    """

    ready: int
    wanted: int
    missing: int
    """How many running groups have to land or go."""
    _budget: StalenessBudget = field(repr=False, compare=False)

    @property
    def blocking(self) -> tuple[int, ...]:
        """Ordinals of the missing groups, earliest expiry first. As of now: read it before any change."""
        return self._budget.earliest_running(self.missing)

    @property
    def overdue(self) -> tuple[tuple[int, int], ...]:
        """(ordinal, expiry to postpone it to), as few and as little as will do; () if none is missing."""
        return self._budget.overdue() if self.missing else ()


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """A snapshot; counters are since the start of the queue."""

    ready: int
    bytes: int
    capacity_groups: int
    max_bytes: int
    put: int
    taken: int
    removed: int


def batch_needs(outstanding: Mapping[int, int], step: int, batch: int) -> list[tuple[int, int]]:
    """How many groups with expiry <= d the batch of ``step`` has to hold, as (d, need), d ascending.

    ``outstanding`` counts all outstanding groups by expiry, ready or not. A batch of ``batch`` groups may
    leave (d - step) * batch of those with expiry <= d to the steps before d + 1, and needs the rest. Only
    an expiry that occurs can set the largest need, so only those are listed, and only positive needs.
    Raises StalenessError if the bound cannot be kept any more, which the budget rules out.
    """
    needs = []
    total = 0
    for expiry in sorted(outstanding):
        total += outstanding[expiry]
        need = total - (expiry - step) * batch
        if expiry < step or need > batch:
            raise StalenessError(
                f"at step {step}, {total} outstanding groups expire at step {expiry} or before, but the steps"
                f" until then can train only {max(0, expiry - step + 1) * batch} in time"
            )
        if need > 0:
            needs.append((expiry, need))
    return needs


def select(expiries: Iterable[int], needs: Sequence[tuple[int, int]], batch: int) -> list[int]:
    """Indices of the first ``batch`` groups, in the order given, that meet every need.

    Expects at least ``batch`` groups, each need <= ``batch``, and for each (d, need) at least ``need``
    groups with expiry <= d; then exactly ``batch`` indices are returned.

    The sets that the needs speak of, {expiry <= d}, are nested. So a choice can be completed iff no
    need that is left exceeds the slots that are left. Greedy: accept a group with expiry e iff that
    still holds afterwards. Accepting takes 1 from the slots and from every need with d >= e, so it
    can fail only at some d < e with need_d = slots. *A skip loses nothing:* in that case all slots belong
    to groups with expiry <= d < e. *The rest can always be completed:* those groups are still to come
    (their supply shrinks only with need_d), and filling all slots with them meets every larger d as
    well, since no need exceeds the slots. *First in order:* by exchange, a batch that leaves
    out an accepted group can swap it in for its last one and stays complete.
    """
    bounds = [d for d, _ in needs]
    left = [need for _, need in needs]
    chosen: list[int] = []
    slots = batch
    for index, expiry in enumerate(expiries):
        if not slots:
            break
        first = bisect_left(bounds, expiry)  # needs[first:] are those that this group helps to meet
        if first and max(left[:first]) >= slots:
            continue
        chosen.append(index)
        slots -= 1
        for i in range(first, len(left)):
            left[i] -= 1
    return chosen


class ExperienceQueue:
    """Holds ready groups until a step takes them.

    ``capacity_groups`` is (D + 1) * B, ``max_bytes`` the payload bytes at which admission has to stop.
    A taken group leaves the queue but stays outstanding in the budget until it is retired, after
    ``budget.complete_update()``. Not a channel: it never waits; the controller awaits its own event.
    """

    def __init__(self, budget: StalenessBudget, capacity_groups: int, max_bytes: int) -> None:
        if capacity_groups < budget.groups_per_step:
            raise ConfigError(
                f"the queue holds {capacity_groups} groups, but a step takes {budget.groups_per_step}:"
                " give it (pipeline_depth + 1) * groups_per_step"
            )
        if max_bytes < 1:
            raise ConfigError(f"max_bytes is {max_bytes}, but has to be at least 1")
        self._budget = budget
        self.capacity_groups = capacity_groups
        self.max_bytes = max_bytes
        self._ready: dict[int, ReadyGroup] = {}  # by ordinal, in order of arrival
        self._count: dict[int, int] = {}  # expiry -> number of ready groups
        self._bytes = 0
        self._last_batch: tuple[int, ...] = ()
        self._put = 0
        self._taken = 0
        self._removed = 0

    def __len__(self) -> int:
        return len(self._ready)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._ready

    @property
    def bytes(self) -> int:
        """Payload bytes of all ready groups, annotations included."""
        return self._bytes

    @property
    def full(self) -> bool:
        """Whether admission has to stop for want of memory.

        Never with less than one batch ready, whatever its size: the step that would empty the queue
        could then not be completed.
        """
        return self._bytes >= self.max_bytes and len(self._ready) >= self._budget.groups_per_step

    def put(self, group: ReadyGroup) -> None:
        """Add a group that has landed, whole and scored.

        Raises QueueOverflowError beyond ``capacity_groups``, BudgetError if the group is not running in
        the budget or has another expiry there, and StalenessError if a trained token of it is older
        than its start version or newer than the policy.
        """
        meta = group.meta
        if len(self._ready) >= self.capacity_groups:
            raise QueueOverflowError(
                f"ordinal {meta.ordinal} was put into a queue that holds {len(self._ready)} of"
                f" {self.capacity_groups} groups: the budget admitted too many, or a group landed twice"
            )
        expected = self._budget.expiries().get(meta.ordinal)
        if expected is not None and expected != group.expiry:
            raise BudgetError(
                f"ordinal {meta.ordinal} landed with expiry {group.expiry}, but was issued with {expected}:"
                " a group that was issued again takes its new admission's"
            )
        start = 0 if expected is None else self._budget.start_version(meta.ordinal)
        for trajectory in meta.trajectories:
            oldest, newest = trajectory.oldest_version, trajectory.newest_version
            if oldest is None or newest is None:  # no trained token
                continue
            if oldest < start or newest > self._budget.version:
                raise StalenessError(
                    f"sample {trajectory.sample} of ordinal {meta.ordinal} has tokens of versions {oldest} to"
                    f" {newest}, but it started at {start} and the policy is at {self._budget.version}"
                )
        self._budget.mark_ready(meta.ordinal)
        self._ready[meta.ordinal] = group
        self._count[group.expiry] = self._count.get(group.expiry, 0) + 1
        self._bytes += group.nbytes
        self._put += 1

    @property
    def groups(self) -> list[ReadyGroup]:
        """All of them, in order of arrival."""
        return list(self._ready.values())

    def take(self) -> list[ReadyGroup] | Shortfall:
        """The batch for step ``budget.version``, in order of arrival, or why there is none yet.

        BudgetError if groups of the batch before have not been retired.
        """
        budget = self._budget
        unretired = [ordinal for ordinal in self._last_batch if ordinal in budget.expiries()]
        if unretired:
            raise BudgetError(
                f"a batch was taken at version {budget.version} while ordinals {unretired} of the one before"
                " are outstanding: retire them first"
            )
        batch = budget.groups_per_step
        self._last_batch = ()
        if len(self._ready) < batch:
            return Shortfall(len(self._ready), batch, 0, budget)
        needs = batch_needs(budget.outstanding_by_expiry(), budget.version, batch)
        missing = self._missing(needs)
        if missing > 0:
            return Shortfall(len(self._ready), batch, missing, budget)
        groups = list(self._ready.values())
        chosen = [groups[index] for index in select((g.expiry for g in groups), needs, batch)]
        for group in chosen:
            self._discard(group.meta.ordinal)
        self._last_batch = tuple(group.meta.ordinal for group in chosen)
        self._taken += len(chosen)
        return chosen

    def all_masked(self) -> tuple[int, ...]:
        """Ready groups that step ``budget.version`` could train no token of: all have a lag above S.

        Only postponed groups can be among them, and of these only ones that sampled their last token long
        before they landed, as with a slow reward: a group is postponed in favour of one that started at
        a later version, which is live by then, so whatever it samples afterwards can be trained.
        """
        oldest = self._budget.version - self._budget.max_staleness
        postponed = (self._ready[o].meta for o in self._budget.postponed() if o in self._ready)
        return tuple(m.ordinal for m in postponed if m.newest_version is None or m.newest_version < oldest)

    def remove(self, ordinal: int) -> ReadyGroup:
        """Take one group out, to drop it. The caller retires it. BudgetError if it is not ready."""
        if ordinal not in self._ready:
            raise BudgetError(
                f"ordinal {ordinal} was removed from the queue, but is not among its {len(self)} groups"
            )
        self._removed += 1
        return self._discard(ordinal)

    def statistics(self) -> QueueStatistics:
        """A snapshot of the queue."""
        return QueueStatistics(
            ready=len(self._ready),
            bytes=self._bytes,
            capacity_groups=self.capacity_groups,
            max_bytes=self.max_bytes,
            put=self._put,
            taken=self._taken,
            removed=self._removed,
        )

    def _missing(self, needs: Sequence[tuple[int, int]]) -> int:
        """How many running groups, earliest expiry first, have to land or go before the needs can be met.

        Whether a group lands (one more is ready) or goes (one less is needed), each need with d >= its
        expiry comes one nearer. The earliest expiries help most needs, so the largest gap is enough.
        """
        missing = 0
        ready = 0
        counts = sorted(self._count.items())
        position = 0
        for bound, need in needs:
            while position < len(counts) and counts[position][0] <= bound:
                ready += counts[position][1]
                position += 1
            missing = max(missing, need - ready)
        return missing

    def _discard(self, ordinal: int) -> ReadyGroup:
        group = self._ready.pop(ordinal)
        self._count[group.expiry] -= 1
        if not self._count[group.expiry]:
            del self._count[group.expiry]
        self._bytes -= group.nbytes
        return group
