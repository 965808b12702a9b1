"""The outstanding groups: admitted, and not yet trained, filtered, dropped or failed.

Budget, ledger and queue each keep one account of them; here are the moves that change all three.

Invariants:
- No await lies inside a move, so whoever runs next finds the three in agreement. The ledger's
  conservation law is asserted after each batch.
- A group is in exactly one place: running, ready in the queue, or in the batch that is being trained.
- Every group that is retired gives its slot back, and has its line in the ledger with the reason.
- Whatever could let someone go on notifies ``changed``.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.checkpoint.state import RunState
from asyncrl.config import Config
from asyncrl.errors import NothingTrainableError
from asyncrl.ledger import FinalState, Ledger, Retired
from asyncrl.metrics import PhaseTimes
from asyncrl.queues.budget import StalenessBudget
from asyncrl.queues.experience import ExperienceQueue, Shortfall
from asyncrl.types import Annotation, GroupMeta, Metrics, ReadyGroup, Task, group_lag, sort_key
from asyncrl.waiting import Signal, now
from asyncrl.watchdog import Watchdog

log = logging.getLogger(__name__)

_DESCRIBED = 5
"""Running groups that a stall report names, the oldest first."""


@dataclass(slots=True)
class Running:
    """A group that is out for rollout."""

    task: Task
    since: float
    attempt: int = 1
    handle: asyncio.Task[None] | None = None
    """What rolls it out, to be cancelled when the group is dropped."""


@dataclass(slots=True)
class _Unusable:
    """Groups in a row that nothing could be trained on, and why."""

    in_a_row: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class OutstandingGroups:
    """Every group from its admission to its retirement.

    Accounts the time in which none runs because none is admitted as ``times.wait_for_policy``.
    """

    def __init__(
        self,
        config: Config,
        *,
        retired: Callable[[Retired], None],
        changed: Signal,
        watchdog: Watchdog,
        times: PhaseTimes,
        max_queue_bytes: int,
    ) -> None:
        schedule, batch = config.schedule, config.rollout.groups_per_step
        self.budget = StalenessBudget(
            groups_per_step=batch,
            pipeline_depth=schedule.pipeline_depth,
            max_staleness=schedule.max_staleness,
            publish_every=schedule.publish_every,
            steps=config.run.steps,
        )
        self.queue = ExperienceQueue(
            self.budget, capacity_groups=self.budget.capacity, max_bytes=max_queue_bytes
        )
        self._retired = retired
        self.ledger = Ledger(retired)
        self.step = 0
        """Updates tried so far, the skipped ones included: the step that the ledger's lines name."""
        self._at_bound = schedule.at_bound
        self._max_unusable = config.run.max_unusable_groups
        self._changed = changed
        self._watchdog = watchdog
        self._times = times
        self._running: dict[int, Running] = {}
        self._unusable = _Unusable()
        self._closed = False
        self._only_records = config.run.rollout_only
        self._starved_since: float | None = None

    # Checkpoints.

    def restore(self, state: RunState, ready: Iterable[tuple[ReadyGroup, int]]) -> None:
        """Go on from a checkpoint, before anything was admitted: ``ready`` is in the queue again, each with
        the version that it was issued at, and every other ordinal that was not retired is issued anew."""
        groups = list(ready)
        self.budget.resume(state.version)
        if self._only_records:
            self.budget.forgo_updates(state.step)
        self.ledger = Ledger.restore(
            state.frontier, self._retired, {group.meta.ordinal: group.meta.uid for group, _ in groups}
        )
        for group, start_version in groups:
            self.budget.readmit(group.meta.ordinal, start_version, group.expiry)
            self.queue.put(group)
        self.step = state.step
        self._unusable = _Unusable(sum(state.unusable.values()), Counter(state.unusable))

    def ready(self) -> list[tuple[ReadyGroup, int]]:
        """What is in the queue, as ``restore`` takes it."""
        return [(group, self.budget.start_version(group.meta.ordinal)) for group in self.queue.groups]

    @property
    def unusable(self) -> dict[str, int]:
        """Groups in a row, up to now, that could not be trained on, by reason."""
        return dict(self._unusable.reasons)

    # Admission.

    def room(self) -> int:
        """Groups that may be admitted now."""
        return 0 if self._closed or self.queue.full else self.budget.admissible()

    def admit(self, task: Task) -> Running:
        """Count in the next group of the stream. BudgetError without room, LedgerError out of turn."""
        if task.issued_at is None:
            self.budget.admit(task.ordinal)
        else:  # its answers are no younger for being admitted again
            expiry = max(task.issued_at + self.budget.max_staleness, self.budget.version)
            self.budget.readmit(task.ordinal, task.issued_at, expiry)
        self.ledger.submit(task.ordinal, task.uid)
        running = self._running[task.ordinal] = Running(task, now())
        self.note_starvation()
        return running

    def close(self) -> None:
        """Admit nothing from now on."""
        self._closed = True
        self._changed.notify()

    # The end of a rollout.

    def land(
        self, meta: GroupMeta, payload: Any, annotations: tuple[Annotation, ...], landed_at: float
    ) -> None:
        """A rollout gave a group that can be trained on: running -> ready."""
        del self._running[meta.ordinal]
        self.ledger.mark_ready(meta.ordinal)
        expiry = self.budget.expiries()[meta.ordinal]
        self.queue.put(ReadyGroup(meta, payload, expiry, annotations, landed_at))
        self._watchdog.made_progress(f"group {meta.uid} landed")
        if self.queue.full:
            log.warning(
                "the queue holds %d bytes: no rollout is admitted until a batch is taken", self.queue.bytes
            )
        self._moved()

    def retire_unusable(
        self, task: Task, state: FinalState, reason: str, reward_mean: float | None = None
    ) -> None:
        """A rollout gave nothing to train on. NothingTrainableError if too many in a row did."""
        del self._running[task.ordinal]
        self._retire(task.ordinal, state, reason, reward_mean=reward_mean)
        self._watchdog.made_progress(f"group {task.uid} {state}")
        if state == "failed":
            log.warning("%s failed: %s", task.uid, reason)
        self._count_unusable(state, reason)
        self._moved()

    # A step.

    def take(self) -> list[ReadyGroup] | None:
        """The next batch, chosen by expiry and sorted by ordinal: ready -> training. None if it has to wait.

        Where the staleness bound alone stands in the way, ``schedule.at_bound`` says whether the groups
        that it waits for are dropped, or postponed to steps that train those of their tokens that are young
        enough then.
        """
        if self._at_bound == "mask":
            self._drop_all_masked()
        outcome = self.queue.take()
        if isinstance(outcome, Shortfall) and outcome.missing and self._at_bound != "wait":
            if self._at_bound == "drop":
                self._drop(outcome.blocking)
            else:
                self._postpone(outcome.overdue)
            outcome = self.queue.take()
        if isinstance(outcome, Shortfall):
            return None
        for ready in outcome:
            self.ledger.start_training(ready.meta.ordinal)
        return sorted(outcome, key=lambda ready: sort_key(ready.meta))

    def retire_batch(
        self, version: int, groups: Sequence[ReadyGroup], *, skipped: bool, recorded: bool = False
    ) -> None:
        """The update from ``version`` is over: the policy moved, unless the update was ``skipped``, or the
        groups were only ``recorded`` and there was none."""
        state: FinalState = "dropped" if skipped or recorded else "trained"
        reason = "recorded" if recorded else "bad_step" if skipped else "trained"
        if recorded:
            self.budget.forgo_updates()
        elif not skipped:
            self.budget.complete_update()
        if not skipped:
            self._unusable = _Unusable()
        for ready in groups:
            self._retire_ready(ready, state, reason, lag=group_lag(version, ready.meta))
        self.ledger.check()
        self._watchdog.made_progress(f"update {self.step}")
        self._moved()

    def retire_idle(self, groups: Sequence[ReadyGroup]) -> None:
        """Groups of a batch that its update did without, because their rewards are all the same."""
        for ready in groups:
            self._retire_ready(ready, "filtered", "zero_variance")
            self._count_unusable("filtered", "zero_variance")
        if groups:
            self.ledger.check()
            self._moved()

    # What users see.

    def handles(self) -> Iterator[asyncio.Task[None]]:
        """The tasks of the running groups."""
        return (running.handle for running in self._running.values() if running.handle is not None)

    def note_starvation(self) -> None:
        """Bring ``times.wait_for_policy`` up to this moment."""
        moment = now()
        if self._starved_since is not None:
            self._times.spent("wait_for_policy", self._starved_since, moment)
            self._starved_since = None
        if not self._running and self.room() == 0:
            self._starved_since = moment

    def metrics(self) -> Metrics:
        """How many groups are where."""
        queue = self.queue.statistics()
        return {
            **{f"ledger/{name}": float(count) for name, count in self.ledger.counts().items()},
            "queue/ready": float(queue.ready),
            "queue/bytes": float(queue.bytes),
            "queue/outstanding": float(self.budget.outstanding),
        }

    def describe(self, holder: Callable[[str, int], str]) -> list[str]:
        """For a stall report, a line each. ``holder`` names who has the group of a uid and an ordinal."""
        budget, counts, moment = self.budget, self.ledger.counts(), now()
        oldest = sorted(self._running.values(), key=lambda running: running.since)[:_DESCRIBED]
        return [
            f"policy version {budget.version}, live version {budget.live_version}, "
            f"{budget.outstanding} groups outstanding: {counts['running']} running, "
            f"{counts['ready']} ready, {counts['training']} in the update; {budget.binding()} binds",
            *(
                f"{r.task.uid} (ordinal {r.task.ordinal}) runs for {moment - r.since:.0f} s, "
                f"try {r.attempt}, on {holder(r.task.uid, r.task.ordinal)}"
                for r in oldest
            ),
        ]

    # The parts of the moves.

    def _drop(self, ordinals: Iterable[int]) -> None:
        """Cancel groups that would go stale; the budget admits others in their place."""
        for ordinal in ordinals:
            running = self._running.pop(ordinal)
            assert running.handle is not None
            running.handle.cancel()
            self._retire(ordinal, "dropped", "at_bound")
        self._moved()

    def _postpone(self, overdue: Iterable[tuple[int, int]]) -> None:
        for ordinal, expiry in overdue:
            self.budget.postpone(ordinal, expiry)
            log.debug("%s is postponed to step %d", self._running[ordinal].task.uid, expiry)

    def _drop_all_masked(self) -> None:
        """Retire postponed groups that landed too late for any of their tokens."""
        for ordinal in self.queue.all_masked():
            self._retire_ready(self.queue.remove(ordinal), "dropped", "all_masked")
            self._moved()

    def _retire_ready(
        self, ready: ReadyGroup, state: FinalState, reason: str, *, lag: int | None = None
    ) -> None:
        meta = ready.meta
        self._retire(meta.ordinal, state, reason, lag=lag, reward_mean=meta.reward_mean)

    def _retire(
        self,
        ordinal: int,
        state: FinalState,
        reason: str,
        *,
        lag: int | None = None,
        reward_mean: float | None = None,
    ) -> None:
        self.ledger.retire(ordinal, state, reason, step=self.step, lag=lag, reward_mean=reward_mean)
        self.budget.retire(ordinal)

    def _count_unusable(self, state: FinalState, reason: str) -> None:
        unusable = self._unusable
        unusable.in_a_row += 1
        unusable.reasons[f"{state}: {reason}"] += 1
        if unusable.in_a_row >= self._max_unusable:
            most = "; ".join(f"{n} x {why}" for why, n in unusable.reasons.most_common(3))
            raise NothingTrainableError(
                f"{unusable.in_a_row} groups in a row could not be trained on "
                f"(run.max_unusable_groups = {self._max_unusable}): {most}"
            )

    def _moved(self) -> None:
        self.note_starvation()
        self._changed.notify()
