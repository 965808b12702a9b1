"""The staleness budget: the one throttle of the system, and the only place that knows the admission rule.

With v the completed updates, g the live version, N the outstanding groups, p the due versions
(multiples of k) in (g, v], and L = steps - v, groups are admitted while ::

    N < min((D + 1 - p) * B, (g + S - v + 1) * B, L * B)

The first term keeps the mean lag at D: a finished step gives its B slots back when its weights are
live, not before. The second starts nothing that could not be trained in time: a group that starts at
g expires at g + S, and only the steps v .. g + S, of B groups each, may still train it. The third
starts nothing that the run could not train.

Invariants, between two completed steps (see ``complete_update`` for the moment inside one):
- N <= min(...) above, so N <= (D + 1) * B.
- For every d >= v, at most (d - v + 1) * B outstanding groups have expiry <= d: all of them can be
  trained in time, whichever finish first. Postponing keeps that, because it only ever takes a group
  away from the left side, and so does admitting beside postponed groups, because the second term
  bounds all N groups, whatever their expiry.
- An expiry is start version + S or, once postponed, later; it never moves back. Only running groups
  are postponed. What a postponed group's step then finds too old is masked out of the loss.
- g <= v, and neither ever goes back.

A plain synchronous object without locks or I/O, for one event loop. Every operation is O(1), but for
``earliest_running``, which is O(S log S + answer), and ``overdue``, which is O(S + running).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from asyncrl.errors import BudgetError, ConfigError


@dataclass(frozen=True, slots=True)
class Admission:
    """What a group is bound by: no token of it is older than ``start_version``."""

    start_version: int
    """The live version when the group was admitted or issued again."""
    expiry: int
    """The last step (policy version before it) that the group may be left to: start_version +
    max_staleness, or later once it was postponed."""


@dataclass(frozen=True, slots=True)
class BudgetStatistics:
    """A snapshot; counters are since the start of the budget."""

    version: int
    live_version: int
    outstanding: int
    running: int
    """Outstanding groups that are still being generated."""
    unpublished: int
    """p: due versions that are not yet live."""
    admissible: int
    binding: str
    admitted: int
    reissued: int
    retired: int
    postponed: int
    """Times that a group was postponed."""


class StalenessBudget:
    """Admits groups, and knows of every outstanding one when it expires.

    ``groups_per_step`` is B, ``pipeline_depth`` D, ``max_staleness`` S and ``publish_every`` k (both in
    policy versions), ``steps`` the policy updates of the run. ConfigError if S < D + k - 1, below which
    steps would wait for weights that are not due.
    """

    def __init__(
        self,
        groups_per_step: int,
        pipeline_depth: int,
        max_staleness: int,
        publish_every: int,
        steps: int,
    ) -> None:
        for name, value, least in (
            ("rollout.groups_per_step", groups_per_step, 1),
            ("schedule.pipeline_depth", pipeline_depth, 0),
            ("schedule.publish_every", publish_every, 1),
            ("run.steps", steps, 1),
            ("schedule.max_staleness", max_staleness, pipeline_depth + publish_every - 1),
        ):
            if value < least:
                raise ConfigError(
                    f"{name} is {value}, but has to be at least {least}"
                    + (
                        f" (pipeline_depth {pipeline_depth} + publish_every {publish_every} - 1):"
                        " raise it, or lower one of these"
                        if name == "schedule.max_staleness"
                        else ""
                    )
                )
        self.groups_per_step = groups_per_step
        self.pipeline_depth = pipeline_depth
        self.max_staleness = max_staleness
        self.publish_every = publish_every
        self.steps = steps
        self._version = 0
        self._live_version = 0
        self._expiry: dict[int, int] = {}  # ordinal -> expiry, all outstanding groups
        self._count: dict[int, int] = {}  # expiry -> number of outstanding groups
        self._running: dict[int, dict[int, None]] = {}  # expiry -> ordinals not ready, oldest issue first
        self._n_running = 0
        self._start: dict[int, int] = {}  # ordinal -> start version, where it is not expiry - S
        self._admitted = 0
        self._reissued = 0
        self._retired = 0
        self._postponed = 0

    # What holds now.

    @property
    def version(self) -> int:
        """v: completed policy updates, and so the step that is next to be trained."""
        return self._version

    @property
    def live_version(self) -> int:
        """g: the oldest version that new work is sampled with."""
        return self._live_version

    @property
    def outstanding(self) -> int:
        """N: groups admitted and not retired, those in a running update included."""
        return len(self._expiry)

    @property
    def capacity(self) -> int:
        """(D + 1) * B: the most groups that are ever outstanding."""
        return (self.pipeline_depth + 1) * self.groups_per_step

    @property
    def unpublished(self) -> int:
        """p: due versions in (g, v]. A version made live early, due or not, settles all below it."""
        return self._version // self.publish_every - self._live_version // self.publish_every

    def is_due(self, version: int) -> bool:
        """Whether ``version`` is one that has to be pushed: a multiple of k above 0."""
        return version > 0 and version % self.publish_every == 0

    def expiries(self) -> Mapping[int, int]:
        """Expiry of every outstanding group by ordinal; a read-only live view, in order of admission."""
        return MappingProxyType(self._expiry)

    def outstanding_by_expiry(self) -> Mapping[int, int]:
        """Number of outstanding groups by expiry; a read-only live view with at most S + 1 entries."""
        return MappingProxyType(self._count)

    def start_version(self, ordinal: int) -> int:
        """The live version when the group was issued last. KeyError if it is not outstanding."""
        return self._start.get(ordinal, self._expiry[ordinal] - self.max_staleness)

    def postponed(self) -> Iterable[int]:
        """Ordinals of the outstanding groups that expire later than start version + max_staleness."""
        return self._start.keys()

    @property
    def running(self) -> int:
        """Outstanding groups that are still being generated."""
        return self._n_running

    def is_running(self, ordinal: int) -> bool:
        """Whether the group is outstanding and not yet ready."""
        expiry = self._expiry.get(ordinal)
        return expiry is not None and ordinal in self._running.get(expiry, ())

    def earliest_running(self, count: int) -> tuple[int, ...]:
        """Up to ``count`` outstanding groups that are not ready, earliest expiry first."""
        found: list[int] = []
        for expiry in sorted(self._running):
            found.extend(islice(self._running[expiry], count - len(found)))
            if len(found) >= count:
                break
        return tuple(found)

    def overdue(self) -> tuple[tuple[int, int], ...]:
        """Running groups that would hold up the next step, each with the expiry that frees the step.

        The step v can do without its running groups iff for every d >= v at most (d - v) * B groups
        with expiry <= d are still running: the later steps can train so many, and what is ready takes
        as much from a batch as it needs. So, d ascending, the excess is moved to d + 1. It always has
        expiry d, since (d - 1 - v) * B at most had an earlier one; those that were moved there before
        stay, so that no group loses more of its tokens than another.
        """
        moved: dict[int, int] = {}
        carried: list[int] = []  # moved to this expiry from the one before
        fixed, expiry = 0, self._version  # fixed: running groups with an earlier expiry that stay
        while carried or expiry <= max(self._running, default=-1):
            here = [*self._running.get(expiry, ()), *carried]
            room = (expiry - self._version) * self.groups_per_step - fixed
            carried = here[: max(0, len(here) - room)]
            moved.update(dict.fromkeys(carried, expiry + 1))
            fixed += len(here) - len(carried)
            expiry += 1
        return tuple(moved.items())

    def limits(self) -> dict[str, int]:
        """The three terms of the rule, in groups, by the setting that each comes from."""
        return dict(zip(("pipeline_depth", "max_staleness", "steps"), self._limits(), strict=True))

    def binding(self) -> str:
        """Which setting admits the fewest groups now: pipeline_depth, max_staleness or steps."""
        limits = self.limits()
        return min(limits, key=limits.__getitem__)

    def admissible(self) -> int:
        """How many more groups may be admitted now."""
        return max(0, min(self._limits()) - len(self._expiry))

    # After a resume, before anything else.

    def resume(self, version: int) -> None:
        """Go on at ``version``, live everywhere. BudgetError once anything has happened."""
        if self._version or self._admitted or not 0 <= version <= self.steps:
            raise BudgetError(
                f"a budget at version {self._version} that admitted {self._admitted} groups was told to go "
                f"on at {version} of {self.steps} steps; expected a new one, and a step of the run"
            )
        self._version = self._live_version = version

    def readmit(self, ordinal: int, start_version: int, expiry: int) -> None:
        """Count a group in that was issued at ``start_version`` before the resume, and is running to this.

        BudgetError if it is outstanding, or expires before the next step, or the rule has no room for it.
        """
        if ordinal in self._expiry or self.admissible() < 1 or expiry < self._version:
            raise BudgetError(
                f"ordinal {ordinal} of version {start_version} was readmitted with expiry {expiry} at "
                f"version {self._version} with {self.outstanding} groups outstanding; the limits "
                f"are {self.limits()}"
            )
        self._admitted += 1
        self._enter(ordinal, start_version, expiry)

    # What happens to a group.

    def admit(self, ordinal: int) -> Admission:
        """Count a new group in, at the live version.

        BudgetError if the rule does not admit it or the ordinal is outstanding already.
        """
        if ordinal in self._expiry:
            raise BudgetError(
                f"ordinal {ordinal} was admitted, but is outstanding already with expiry"
                f" {self._expiry[ordinal]}: an ordinal is admitted once, and issued again by reissue()"
            )
        if self.admissible() < 1:
            raise BudgetError(
                f"ordinal {ordinal} was admitted with {self.outstanding} groups outstanding, but at version"
                f" {self._version} with {self._live_version} live the limits are {self.limits()}:"
                " ask admissible() first"
            )
        self._admitted += 1
        return self._issue(ordinal)

    def reissue(self, ordinal: int) -> Admission:
        """Start an outstanding group afresh, e.g. after its replica died: it gets a new start version.

        Its expiry never moves back, so that one which was postponed keeps the later one.
        Only for a group that is generated again as a whole. One that keeps some of its trajectories
        keeps its admission too, because those hold tokens as old as its first start.
        BudgetError if the group is not running.
        """
        if not self.is_running(ordinal):
            found = "ready or in training" if ordinal in self._expiry else "not outstanding"
            raise BudgetError(f"ordinal {ordinal} was issued again, but is {found}: it has to be running")
        expiry = self._expiry[ordinal]
        self._forget(ordinal)
        self._reissued += 1
        return self._issue(ordinal, expiry)

    def postpone(self, ordinal: int, expiry: int) -> None:
        """Let a running group be trained as late as at step ``expiry`` (``at_bound: mask``).

        The caller masks its tokens with a lag above max_staleness then. BudgetError if the group is
        not running, or ``expiry`` is not later than its own.
        """
        if not self.is_running(ordinal):
            found = "ready or in training" if ordinal in self._expiry else "not outstanding"
            raise BudgetError(f"ordinal {ordinal} was postponed, but is {found}: it has to be running")
        before = self._expiry[ordinal]
        if expiry <= before:
            raise BudgetError(
                f"ordinal {ordinal} was postponed to step {expiry}, but expires at {before}: an expiry"
                " moves forward only"
            )
        start = self.start_version(ordinal)
        self._forget(ordinal)
        self._enter(ordinal, start, expiry)
        self._postponed += 1

    def mark_ready(self, ordinal: int) -> None:
        """The group is generated and waits to be trained; ``ExperienceQueue.put`` calls this."""
        if not self.is_running(ordinal):
            found = "ready or in training" if ordinal in self._expiry else "not outstanding"
            raise BudgetError(f"ordinal {ordinal} became ready, but is {found}: it has to be running")
        self._stop_running(ordinal, self._expiry[ordinal])

    def retire(self, ordinal: int) -> None:
        """Give the slot of a group back: trained, filtered, dropped or failed.

        BudgetError if the group is not outstanding.
        """
        if ordinal not in self._expiry:
            raise BudgetError(
                f"ordinal {ordinal} was retired, but is not among the {self.outstanding} outstanding groups:"
                " it was never admitted, or retired before"
            )
        self._forget(ordinal)
        self._retired += 1

    # What happens to the policy.

    def complete_update(self) -> None:
        """An update moved the policy: v += 1. Not called for a skipped update.

        Order: ``complete_update()`` first, then ``retire()`` of each group of the batch, with no await
        in between. Both orders end in the same counts, but in this one the moment in between admits
        too little; in the other, the batch's slots would be free before its unpublished version counts.
        BudgetError beyond the run's last step.
        """
        if self._version >= self.steps:
            raise BudgetError(
                f"an update was completed at version {self._version}, but the run has {self.steps} steps"
            )
        self._version += 1

    def forgo_updates(self, count: int = 1) -> None:
        """So many of the run's updates will not be made, nor tried again: ``steps`` comes down by as many.

        BudgetError where fewer are left.
        """
        if self.steps - count < self._version:
            raise BudgetError(
                f"{count} updates were forgone, but the run has {self.steps - self._version} left"
            )
        self.steps -= count

    def set_live(self, version: int) -> None:
        """Every replica that takes new work samples with ``version`` or a later one: g = version.

        Any completed version, due or not. BudgetError if it lies below g or above v.
        """
        if not self._live_version <= version <= self._version:
            raise BudgetError(
                f"version {version} was made live, but it has to lie between the live version"
                f" {self._live_version} and the {self._version} completed updates"
            )
        self._live_version = version

    def statistics(self) -> BudgetStatistics:
        """A snapshot of the budget."""
        return BudgetStatistics(
            version=self._version,
            live_version=self._live_version,
            outstanding=self.outstanding,
            running=self.running,
            unpublished=self.unpublished,
            admissible=self.admissible(),
            binding=self.binding(),
            admitted=self._admitted,
            reissued=self._reissued,
            retired=self._retired,
            postponed=self._postponed,
        )

    def _limits(self) -> tuple[int, int, int]:
        batch = self.groups_per_step
        return (
            (self.pipeline_depth + 1 - self.unpublished) * batch,
            (self._live_version + self.max_staleness - self._version + 1) * batch,
            (self.steps - self._version) * batch,
        )

    def _issue(self, ordinal: int, not_before: int = 0) -> Admission:
        start = self._live_version
        admission = Admission(start, max(start + self.max_staleness, not_before))
        self._enter(ordinal, start, admission.expiry)
        return admission

    def _enter(self, ordinal: int, start: int, expiry: int) -> None:
        if expiry != start + self.max_staleness:
            self._start[ordinal] = start
        self._expiry[ordinal] = expiry
        self._count[expiry] = self._count.get(expiry, 0) + 1
        self._running.setdefault(expiry, {})[ordinal] = None
        self._n_running += 1

    def _forget(self, ordinal: int) -> None:
        if self.is_running(ordinal):
            self._stop_running(ordinal, self._expiry[ordinal])
        self._start.pop(ordinal, None)
        expiry = self._expiry.pop(ordinal)
        self._count[expiry] -= 1
        if not self._count[expiry]:
            del self._count[expiry]

    def _stop_running(self, ordinal: int, expiry: int) -> None:
        bucket = self._running[expiry]
        del bucket[ordinal]
        if not bucket:
            del self._running[expiry]
        self._n_running -= 1
