"""The loop: batch N+1 rolls out while batch N updates, and nobody is further behind than allowed.

One asyncio loop owns the whole path. It decides, and never computes: rollouts, updates and pushes
happen elsewhere, and only their metas come through here.

Invariants:
- Every admission, retirement and version change goes through ``StalenessBudget`` and ``Ledger``;
  the ledger's conservation law is asserted at every step.
- One update at a time, one push at a time; a version is live only after ``publish`` returned. With
  ``weight_sync.overlap`` a push runs beside the next update, from a copy made between the two.
- Whoever holds ``_weights_turn`` finds the weights that are pushed unchanged: no update runs, or with
  ``weight_sync.overlap`` no copy is made.
- All tasks live in one TaskGroup: a task that fails ends the run with its traceback.
- Nothing polls. Every wait ends by an event or by a deadline that names what was waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from asyncrl.alarms import LogprobAlarm
from asyncrl.config import Config
from asyncrl.credit import CreditAssignment
from asyncrl.errors import (
    BadStepsError,
    LostGroupError,
    NothingTrainableError,
)
from asyncrl.evaluation import Evaluator
from asyncrl.generators.pool import GeneratorPool
from asyncrl.learners.base import Learner, LearnerInfo, StepResult
from asyncrl.ledger import FinalState, Ledger, Retired
from asyncrl.metrics import (
    GeneratorUse,
    LengthBias,
    PhaseTimes,
    batch_metrics,
    throughput_metrics,
)
from asyncrl.queues.budget import StalenessBudget
from asyncrl.queues.experience import ExperienceQueue, Shortfall
from asyncrl.rollout import GroupRequest
from asyncrl.snapshot import Salvage
from asyncrl.types import (
    Batch,
    BatchItem,
    GroupMeta,
    Metrics,
    ReadyGroup,
    SamplingParams,
    Task,
    group_lag,
    sort_key,
    unmasked,
)
from asyncrl.waiting import Signal, within
from asyncrl.weight_sync.publish import PublishReport

log = logging.getLogger(__name__)

_ROLLOUT_GRACE_S = 30.0
"""What a replica gets beyond rollout.deadline_s to answer before it is taken for hung."""


class TaskSource(Protocol):
    """The stream of the run: a pure function of the ordinal."""

    def task(self, ordinal: int) -> Task: ...


class Publisher(Protocol):
    """Makes versions live; see weight_sync/publish.py."""

    async def open(self, info: LearnerInfo) -> None: ...

    async def copied_out(self, version: int) -> None: ...

    async def publish(self, version: int) -> PublishReport: ...

    async def catch_up(self, version: int) -> bool: ...

    def take_metrics(self) -> Metrics: ...


class Observer(Protocol):
    """Hears of everything that a user may want to see. Must not block."""

    def retired(self, retired: Retired) -> None: ...

    def stepped(self, record: Metrics) -> None:
        """A step ended, its evaluation not yet known: for a live display."""
        ...

    def evaluated(self, result: Metrics) -> None:
        """An evaluation ended."""
        ...

    def recorded(self, record: Metrics) -> None:
        """A line of metrics.jsonl is complete."""
        ...

    def trained(self, step: int, groups: Sequence[ReadyGroup]) -> None:
        """Groups that went into a step, for ``rollouts/``."""
        ...

    def phase(self, name: str) -> None:
        """What the run does now, in words."""
        ...


@dataclass(slots=True)
class Summary:
    """How a run ended."""

    steps: int
    policy_version: int
    wall_s: float
    eval_before: Metrics | None
    eval_after: Metrics | None
    checksum: str | None
    counts: dict[str, int]
    last: Metrics
    stopped_by: str | None = None


@dataclass(slots=True)
class _Line:
    """A line of metrics.jsonl that may still wait for its evaluation."""

    record: Metrics
    evaluation: asyncio.Task[Metrics] | None = None

    @property
    def pending(self) -> bool:
        return self.evaluation is not None and not self.evaluation.done()

    def give_up(self) -> None:
        """Wait for no evaluation."""
        if self.evaluation is not None:
            self.evaluation.cancel()

    def complete(self) -> None:
        """Add the evaluation's figures, if it came to its end."""
        task = self.evaluation
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            self.record.update(task.result())


@dataclass(slots=True)
class _Running:
    """A group that is out for rollout."""

    task: Task
    since: float
    attempt: int = 1
    handle: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Unusable:
    """Groups in a row that nothing could be trained on, and why."""

    in_a_row: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class Controller:
    """Runs ``config.run.steps`` updates. Build it, then await ``run()`` once."""

    def __init__(
        self,
        config: Config,
        tasks: TaskSource,
        pool: GeneratorPool,
        learner: Learner,
        publisher: Publisher,
        evaluator: Evaluator,
        observer: Observer,
        *,
        checkpoints: Path | None = None,
        max_queue_bytes: int = 4 << 30,
    ) -> None:
        schedule, rollout = config.schedule, config.rollout
        self.config = config
        self.budget = StalenessBudget(
            groups_per_step=rollout.groups_per_step,
            pipeline_depth=schedule.pipeline_depth,
            max_staleness=schedule.max_staleness,
            publish_every=schedule.publish_every,
            steps=config.run.steps,
        )
        capacity = (schedule.pipeline_depth + 1) * rollout.groups_per_step
        self.queue = ExperienceQueue(self.budget, capacity_groups=capacity, max_bytes=max_queue_bytes)
        self.ledger = Ledger(observer.retired)
        self._tasks = tasks
        self._pool = pool
        self._learner = learner
        self._publisher = publisher
        self._evaluator = evaluator
        self._observer = observer
        self._checkpoints = checkpoints
        self._sampling = SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=rollout.stop,
        )
        self._credit = CreditAssignment(config)
        self._changed = Signal()
        self._weights_turn = asyncio.Lock()
        self._running: dict[int, _Running] = {}
        self._unusable = _Unusable()
        self._step = 0
        self._bad_in_a_row = 0
        self._times = PhaseTimes()
        self._bias = LengthBias()
        self._alarm = LogprobAlarm.for_dtype(config.generators.logprob_diff_alarm, config.model.dtype)
        self._use = GeneratorUse(slots=config.generators.slots)
        self._lines: list[_Line] = []
        self._last = _Line({})
        self._evaluation: asyncio.Task[Metrics] | None = None
        self._push: asyncio.Task[None] | None = None
        self._push_version = 0  # the newest one that was handed to the publisher
        self._starved_since: float | None = None
        self._started_at = 0.0
        self._progress_at = 0.0
        self._progress = "the start"
        self._stopped_by: str | None = None

    # ------------------------------------------------------------------ the run

    async def run(self) -> Summary:
        """Train. Returns after the last step, or after ``request_stop`` took effect.

        Raises what ended the run, as the ExceptionGroup of the TaskGroup.
        """
        start = self._started_at = self._now()
        self._made_progress("the start")
        checksum = None
        try:
            async with asyncio.TaskGroup() as group:
                keepers = await self._start_up(group)
                after = before = await self._evaluate_first()
                training_start = self._now()
                self._observer.phase("training")
                pump = group.create_task(self._rollout_pump(group), name="rollout pump")
                keepers.append(group.create_task(self._watchdog(), name="watchdog"))
                await self._train_pump(group)
                for task in [pump, *(r.handle for r in self._running.values() if r.handle)]:
                    task.cancel()
                if self._stopped_by is not None:
                    for line in self._lines:
                        line.give_up()
                # Replicas may still be needed, and so restarted, for these.
                for last in (self._push, self._evaluation):
                    if last is not None:
                        await asyncio.wait([last])
                for task in keepers:
                    task.cancel()
            if self._step:
                after, checksum = await self._finish()
        finally:
            self._flush_lines(final=True)
        return Summary(
            steps=self._step,
            policy_version=self.budget.version,
            wall_s=self._now() - training_start if self._step else self._now() - start,
            eval_before=before,
            eval_after=after,
            checksum=checksum,
            counts=self.ledger.counts(),
            last=self._last.record,
            stopped_by=self._stopped_by,
        )

    def request_stop(self, why: str) -> None:
        """End after the running update: admission stops, unfinished rollouts are cancelled."""
        if self._stopped_by is None:
            self._stopped_by = why
            log.warning("%s: ending after the running update", why)
            self._changed.notify()

    async def _start_up(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Start both sides at version 0; returns the tasks that keep generators at work from then on."""
        self._observer.phase("starting generators and learner")
        async with asyncio.TaskGroup() as starting:
            learner = starting.create_task(self._learner.start(), name="start learner")
            starting.create_task(self._pool.start(), name="start generators")
        info = learner.result()
        log.info("learner has %s parameters in %d tensors", f"{info.parameters:,}", len(info.manifest))
        supervisor = group.create_task(self._pool.supervise(), name="supervise generators")
        await self._publisher.open(info)
        # Version 0 is pushed too: what generates is then what trains, whatever the files said.
        if self.config.weight_sync.overlap:
            await self._copy_out(0)
        await self._publisher.publish(0)
        self._made_progress("the start of generators and learner")
        return [supervisor, group.create_task(self._let_in_restarted(), name="let in generators")]

    async def _evaluate_first(self) -> Metrics | None:
        record = self._last.record
        record.update(self._line_head())
        record.update(self._publisher.take_metrics())
        self._lines.append(self._last)
        if not self._evaluator.enabled:
            return None
        self._observer.phase("evaluating the start model")
        result = await self._evaluate(0)
        record.update(result)
        return result

    async def _finish(self) -> tuple[Metrics | None, str]:
        """What the last line still lacks: its evaluation and the checksum; then the export."""
        line = self._last
        after = None
        if line.evaluation is not None and not line.evaluation.cancelled():
            after = line.evaluation.result()
        step_timeout_s = self.config.learner.step_timeout_s
        checksum = await within(
            step_timeout_s, "checksum of the parameters", "learner.step_timeout_s", self._learner.checksum()
        )
        # JSON holds it as text; every other figure of a line is a number.
        line.record["model/checksum"] = checksum  # type: ignore[assignment]
        if self._checkpoints is not None:
            self._observer.phase("exporting the model")
            target = self._checkpoints / f"step_{self.budget.version}" / "hf"
            await within(
                step_timeout_s, "export of the model", "learner.step_timeout_s", self._learner.export(target)
            )
        return after, checksum

    # ------------------------------------------------------------------ rollouts

    async def _rollout_pump(self, group: asyncio.TaskGroup) -> None:
        while True:
            await self._changed.until(lambda: self._room() > 0)
            for _ in range(self._room()):
                task = self._tasks.task(self.ledger.next_ordinal)
                admission = self.budget.admit(task.ordinal)
                self.ledger.submit(task.ordinal, task.uid)
                running = _Running(task, self._now())
                self._running[task.ordinal] = running
                running.handle = group.create_task(
                    self._rollout(running, admission.start_version), name=f"rollout {task.uid}"
                )
            self._note_starvation()

    def _room(self) -> int:
        """Groups that may be admitted now."""
        if self._stopped_by is not None or self.queue.full:
            return 0
        return self.budget.admissible()

    async def _rollout(self, running: _Running, start_version: int) -> None:
        """One group, from its request to the queue or to its retirement.

        When its replica dies it goes on elsewhere from what that had, under the admission that it has: none
        of its tokens is older than its first start, so that its expiry bounds the lag of old and new ones
        alike. Where nothing is left of it, it starts from nothing, and from the version of now.
        """
        settings, task = self.config.rollout, running.task
        deaths: list[str] = []
        salvage: Salvage | None = None
        limit_s = settings.deadline_s + self.config.reward.timeout_s + _ROLLOUT_GRACE_S
        while True:
            request = GroupRequest(
                task=task,
                start_version=start_version,
                samples=settings.group_size,
                sampling=self._sampling,
                seed=self.config.run.seed,
                deadline_s=settings.deadline_s,
                greedy_baseline=self._credit.needs_greedy,
            )
            try:
                alone = 0 < len(deaths) == settings.max_attempts - 1
                meta, payload = await self._pool.run_group(
                    request, limit_s=limit_s, alone=alone, salvage=salvage
                )
                break
            except LostGroupError as error:
                deaths.append(str(error))
                log.warning("try %d of %s failed: %s", running.attempt, task.uid, error)
                if len(deaths) >= settings.max_attempts:
                    self._retire_unusable(task, "failed", poisoned(task.uid, deaths))
                    return
                salvage = error.salvage
            running.attempt += 1
            if salvage is None:
                start_version = self.budget.reissue(task.ordinal).start_version
        self._land(task, meta, payload)

    def _land(self, task: Task, meta: GroupMeta, payload: Any) -> None:
        """A group came back: into the queue, or retired with the reason why not."""
        self._bias.add_finished(meta)
        verdict = self._unusable_because(meta)
        if verdict is not None:
            state, reason = verdict
            rewards = meta.rewards
            mean = sum(rewards) / len(rewards) if rewards else None
            self._retire_unusable(task, state, reason, mean)
            return
        del self._running[task.ordinal]
        self.ledger.mark_ready(task.ordinal)
        self.queue.put(ReadyGroup(meta, payload, self.budget.expiries()[task.ordinal]))
        self._made_progress(f"group {task.uid} landed")
        if self.queue.full:
            log.warning(
                "the queue holds %d bytes: no rollout is admitted until a batch is taken", self.queue.bytes
            )
        self._note_starvation()
        self._changed.notify()

    def _unusable_because(self, meta: GroupMeta) -> tuple[FinalState, str] | None:
        settings = self.config
        own_fault = [f for f in meta.failures if f.kind != "DeadlineError"]
        survivors = len(meta.trajectories)
        if meta.failures and (
            (own_fault and settings.reward.on_error == "fail") or survivors < settings.rollout.min_group
        ):
            first = (own_fault or list(meta.failures))[0]
            return "failed", f"{first.kind}: {first.message}"
        if meta.loss_tokens == 0:
            return "dropped", "no_trained_token"
        if self._credit.needs_greedy and meta.baseline is None:
            return "dropped", "no_greedy_answer"
        if settings.algorithm.filter_zero_variance == "refill" and self._credit.without_signal(meta):
            return "filtered", "zero_variance"
        return None

    def _retire_unusable(
        self, task: Task, state: FinalState, reason: str, reward_mean: float | None = None
    ) -> None:
        del self._running[task.ordinal]
        self.ledger.retire(task.ordinal, state, reason, step=self._step, lag=None, reward_mean=reward_mean)
        self.budget.retire(task.ordinal)
        self._made_progress(f"group {task.uid} {state}")
        if state == "failed":
            log.warning("%s failed: %s", task.uid, reason)
        self._count_unusable(state, reason)
        self._note_starvation()
        self._changed.notify()

    def _count_unusable(self, state: FinalState, reason: str) -> None:
        """Raises NothingTrainableError at ``run.max_unusable_groups`` in a row."""
        unusable, limit = self._unusable, self.config.run.max_unusable_groups
        unusable.in_a_row += 1
        unusable.reasons[f"{state}: {reason}"] += 1
        if unusable.in_a_row >= limit:
            most = "; ".join(f"{n} x {why}" for why, n in unusable.reasons.most_common(3))
            raise NothingTrainableError(
                f"{unusable.in_a_row} groups in a row could not be trained on "
                f"(run.max_unusable_groups = {limit}): {most}"
            )

    # ------------------------------------------------------------------ updates

    async def _train_pump(self, group: asyncio.TaskGroup) -> None:
        self._use.begin(await self._pool.statistics())
        step_start = self._now()
        while self.budget.version < self.config.run.steps:
            groups = await self._take()
            if groups is None:
                return
            version = self.budget.version
            record: Metrics = {}
            if self.config.schedule.at_bound == "mask":
                landed = sum(g.meta.loss_tokens for g in groups)
                groups = self._mask(groups)
                record["staleness/masked_tokens"] = float(landed - sum(g.meta.loss_tokens for g in groups))
            record |= batch_metrics(version, [g.meta for g in groups])
            idle: list[ReadyGroup] = []
            if self.config.algorithm.filter_zero_variance == "drop":
                idle = [g for g in groups if self._credit.without_signal(g.meta)]
                groups = [g for g in groups if not self._credit.without_signal(g.meta)]
            if not groups:
                self._retire_idle(idle)
                continue
            metas = [g.meta for g in groups]
            async with self._update_turn():
                result = await self._update(version, groups)
                self._step += 1
                self._alarm.check(version, result.metrics)
                self._observer.trained(self._step, groups)
                self._retire_batch(version, groups, result)
                self._retire_idle(idle)
            evaluation = await self._publish_if_due(group)
            record.update(result.metrics)
            step_start = await self._end_step(record, metas, step_start, evaluation)

    async def _take(self) -> list[ReadyGroup] | None:
        """The next batch by expiry; None once a stop was asked for."""
        start = self._now()
        taken: list[ReadyGroup] = []
        at_bound = self.config.schedule.at_bound

        def stopped_or_taken() -> bool:
            if self._stopped_by is not None:
                return True
            if at_bound == "mask":
                self._drop_all_masked()
            outcome = self.queue.take()
            if isinstance(outcome, Shortfall) and outcome.missing and at_bound != "wait":
                if at_bound == "drop":
                    self._drop(outcome.blocking)
                else:
                    self._postpone(outcome.overdue)
                outcome = self.queue.take()
            if not isinstance(outcome, Shortfall):
                taken.extend(outcome)
            return bool(taken)

        await self._changed.until(stopped_or_taken)
        self._times.wait_for_batch += self._now() - start
        if not taken:
            return None
        for ready in taken:
            self.ledger.start_training(ready.meta.ordinal)
        return sorted(taken, key=lambda ready: sort_key(ready.meta))

    def _drop(self, ordinals: Sequence[int]) -> None:
        """Cancel groups that would go stale; the budget admits others in their place."""
        for ordinal in ordinals:
            running = self._running.pop(ordinal)
            assert running.handle is not None
            running.handle.cancel()
            self.ledger.retire(ordinal, "dropped", "at_bound", step=self._step, lag=None, reward_mean=None)
            self.budget.retire(ordinal)
        self._note_starvation()
        self._changed.notify()

    def _postpone(self, overdue: Sequence[tuple[int, int]]) -> None:
        """Leave running groups to later steps, which train those of their tokens that are young enough."""
        for ordinal, expiry in overdue:
            self.budget.postpone(ordinal, expiry)
            log.debug("%s is postponed to step %d", self._running[ordinal].task.uid, expiry)

    def _drop_all_masked(self) -> None:
        """Retire postponed groups that landed too late for any of their tokens."""
        for ordinal in self.queue.all_masked():
            meta = self.queue.remove(ordinal).meta
            mean = sum(meta.rewards) / len(meta.rewards)
            self.ledger.retire(ordinal, "dropped", "all_masked", step=self._step, lag=None, reward_mean=mean)
            self.budget.retire(ordinal)
            self._note_starvation()
            self._changed.notify()

    def _mask(self, groups: Sequence[ReadyGroup]) -> list[ReadyGroup]:
        """The batch with the counts of what it trains; the learner masks the tokens themselves."""
        version, bound = self.budget.version, self.config.schedule.max_staleness
        return [replace(group, meta=unmasked(version, bound, group.meta)) for group in groups]

    async def _update(self, version: int, groups: Sequence[ReadyGroup]) -> StepResult:
        advantages = self._credit.advantages([g.meta for g in groups])
        items = tuple(BatchItem(g.meta, g.payload, a) for g, a in zip(groups, advantages, strict=True))
        start = self._now()
        timeout_s = self.config.learner.step_timeout_s
        result = await within(
            timeout_s,
            f"update {version} -> {version + 1} on {len(items)} groups",
            "learner.step_timeout_s",
            self._learner.step(Batch(version, items)),
        )
        self._times.train += self._now() - start
        return result

    def _retire_idle(self, groups: Sequence[ReadyGroup]) -> None:
        """Groups that a step did without, because their rewards are all the same."""
        for ready in groups:
            meta = ready.meta
            mean = sum(meta.rewards) / len(meta.rewards)
            self.ledger.retire(
                meta.ordinal, "filtered", "zero_variance", step=self._step, lag=None, reward_mean=mean
            )
            self.budget.retire(meta.ordinal)
            self._count_unusable("filtered", "zero_variance")
        if groups:
            self.ledger.check()
            self._changed.notify()

    def _retire_batch(self, version: int, groups: Sequence[ReadyGroup], result: StepResult) -> None:
        state: FinalState = "dropped" if result.skipped else "trained"
        reason = "bad_step" if result.skipped else "trained"
        if not result.skipped:
            self.budget.complete_update()
        for ready in groups:
            meta = ready.meta
            self.ledger.retire(
                meta.ordinal,
                state,
                reason,
                step=self._step,
                lag=group_lag(version, meta),
                reward_mean=sum(meta.rewards) / len(meta.rewards),
            )
            self.budget.retire(meta.ordinal)
        if result.skipped:
            self._bad_in_a_row += 1
            limit = self.config.learner.max_bad_steps
            log.error("step %d was not finite and changed nothing: %s", self._step, result.metrics)
            if self._bad_in_a_row > limit:
                raise BadStepsError(
                    f"{self._bad_in_a_row} updates in a row had a non-finite loss or gradient "
                    f"(learner.max_bad_steps = {limit}); lower learner.lr or look at the rewards"
                )
        else:
            self._bad_in_a_row = 0
            self._unusable = _Unusable()
            self._bias.add_trained([g.meta for g in groups])
        self.ledger.check()
        self._made_progress(f"update {self._step}")
        self._changed.notify()

    # ------------------------------------------------------------------ pushes and evaluations

    def _evaluation_due(self) -> bool:
        """Whether the newest version is one to evaluate."""
        version, every = self.budget.version, self.config.eval.every
        if not self._evaluator.enabled:
            return False
        last = version == self.config.run.steps
        return last or (every > 0 and version % every == 0)

    async def _publish_if_due(self, group: asyncio.TaskGroup) -> asyncio.Task[Metrics] | None:
        """Publish the newest version where it is due, and return the evaluation that it started.

        Live on return; with ``weight_sync.overlap`` only copied out, and live some time later.
        """
        version = self.budget.version
        if version == self._push_version:
            return None
        evaluate = self._evaluation_due()
        if not (self.budget.is_due(version) or evaluate or version == self.config.run.steps):
            return None
        before, synced = self._evaluation, self._times.weight_sync
        if self.config.weight_sync.overlap:
            await self._await_push()
            start = self._now()
            async with self._weights_turn:
                await self._copy_out(version)
                self._push_version = version
            self._times.weight_sync_stall += self._now() - start
            name = f"push of version {version}"
            self._push = group.create_task(self._publish(version, before), name=name)
        else:
            await self._publish(version, before)
            self._times.weight_sync_stall += self._times.weight_sync - synced
        self._push_version = version
        self._evaluation = None
        if evaluate:
            name = f"evaluation of version {version}"
            self._evaluation = group.create_task(self._evaluate(version, self._push), name=name)
        return self._evaluation

    async def _copy_out(self, version: int) -> None:
        """Have the learner copy its weights out: all that it stands still for."""
        await within(
            self.config.weight_sync.timeout_s,
            f"copying version {version} out",
            "weight_sync.timeout_s",
            self._learner.copy_out(version),
        )
        await self._publisher.copied_out(version)

    async def _publish(self, version: int, evaluation: asyncio.Task[Metrics] | None) -> None:
        """Make ``version`` live, as soon as the evaluation of the one before has ended."""
        if evaluation is not None:
            start = self._now()
            await asyncio.wait([evaluation])
            evaluation.result()
            self._times.eval += self._now() - start
        async with self._weights_turn:
            if version != self.budget.live_version:  # else replicas were restarted with it
                start = self._now()
                report = await self._publisher.publish(version)
                self._times.weight_sync += self._now() - start
                self._times.weight_pause += report.pause_s
                self.budget.set_live(version)
        self._made_progress(f"version {version} live")
        self._changed.notify()

    def _update_turn(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """What an update has to hold: it moves the weights that are pushed, unless those are a copy."""
        return contextlib.nullcontext() if self.config.weight_sync.overlap else self._weights_turn

    async def _let_in_restarted(self) -> None:
        """Push to restarted replicas as soon as there are whole weights to push, between two updates.

        Without this a run whose only replica died would wait for ever: no rollout, no update, no push.
        """
        while True:
            await self._pool.until(lambda pool: pool.joining)
            async with self._weights_turn:
                overlap = self.config.weight_sync.overlap
                version = self._push_version if overlap else self.budget.version
                if await self._publisher.catch_up(version) and self._pool.live:
                    # Newer than before only where no replica was live: g is the oldest of them.
                    self.budget.set_live(self._pool.live_version)
                    self._changed.notify()

    async def _await_push(self) -> None:
        """One push at a time, and one copy to push from: the next waits for the one before."""
        if self._push is not None:
            start = self._now()
            await asyncio.wait([self._push])
            self._push.result()
            self._times.wait_for_push += self._now() - start

    async def _evaluate(self, version: int, push: asyncio.Task[None] | None = None) -> Metrics:
        """Evaluate ``version``, once it is live."""
        if push is not None:
            await asyncio.wait([push])
            push.result()
        result = await self._evaluator.run(version)
        self._made_progress(f"evaluation of version {version}")
        self._observer.evaluated(result)
        return result

    # ------------------------------------------------------------------ what users see

    async def _end_step(
        self,
        record: Metrics,
        metas: Sequence[GroupMeta],
        start: float,
        evaluation: asyncio.Task[Metrics] | None,
    ) -> float:
        self._note_starvation()
        statistics = await self._pool.statistics()
        now = self._now()
        step_s, times = now - start, self._times
        record = {
            **self._line_head(),
            **record,
            **times.metrics(step_s),
            **throughput_metrics(metas, step_s, times.train),
            **self._use.metrics(statistics, step_s),
            "generator/replicas_live": float(len(self._pool.live)),
            "generator/restarts": float(self._pool.restarts),
            "generator/continued_samples": float(self._pool.continued_samples),
            "generator/continued_tokens": float(self._pool.continued_tokens),
            **self._bias.metrics(),
            **self._publisher.take_metrics(),
        }
        self._times = PhaseTimes()
        self._last = _Line(record, evaluation)
        self._lines.append(self._last)
        self._observer.stepped(record)
        self._flush_lines()
        return now

    def _line_head(self) -> Metrics:
        counts = self.ledger.counts()
        queue = self.queue.statistics()
        return {
            "step": self._step,
            "policy_version": self.budget.version,
            "time": self._now() - self._started_at,
            **{f"ledger/{name}": float(count) for name, count in counts.items()},
            "queue/ready": float(queue.ready),
            "queue/bytes": float(queue.bytes),
            "queue/outstanding": float(self.budget.outstanding),
        }

    def _flush_lines(self, *, final: bool = False) -> None:
        """Hand over, in order, the lines whose evaluation is known; the last step's at the end."""
        while self._lines:
            line = self._lines[0]
            if not final and (line.pending or line.record["policy_version"] == self.config.run.steps):
                return
            line.complete()
            self._observer.recorded(line.record)
            self._lines.pop(0)

    def _note_starvation(self) -> None:
        """Account the time in which no rollout runs because the budget admits none."""
        now = self._now()
        if self._starved_since is not None:
            self._times.wait_for_policy += now - self._starved_since
            self._starved_since = None
        if not self._running and self._room() == 0:
            self._starved_since = now

    # ------------------------------------------------------------------ the watchdog

    def _made_progress(self, what: str) -> None:
        self._progress_at, self._progress = self._now(), what

    async def _watchdog(self) -> None:
        """Report when nothing has moved for ``run.stall_after_s``, then again after twice as long."""
        patience = self.config.run.stall_after_s
        while True:
            due = self._progress_at + patience
            if self._now() < due:
                await asyncio.sleep(due - self._now())
                continue
            log.warning("%s", self.stall_report())
            await asyncio.sleep(patience)
            patience = (
                2 * patience if self._now() - self._progress_at >= patience else self.config.run.stall_after_s
            )

    def stall_report(self) -> str:
        """Who holds what, and since when."""
        now = self._now()
        queue, counts = self.queue.statistics(), self.ledger.counts()
        oldest = sorted(self._running.values(), key=lambda r: r.since)[:5]
        lines = [
            f"no progress for {now - self._progress_at:.0f} s, the last was {self._progress}",
            f"policy version {self.budget.version}, live version {self.budget.live_version}, "
            f"{self.budget.outstanding} groups outstanding: {counts['running']} running, "
            f"{queue.ready} ready, {counts['training']} in the update; {self.budget.binding()} binds",
            *self._pool.describe(),
            *(
                f"{r.task.uid} (ordinal {r.task.ordinal}) runs for {now - r.since:.0f} s, try {r.attempt}, "
                f"on {self._pool.holder(r.task.uid, r.task.ordinal)}"
                for r in oldest
            ),
        ]
        return "\n  ".join(lines)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def poisoned(uid: str, deaths: Sequence[str]) -> str:
    """The reason of a group that is given up because each replica that had it died."""
    return (
        f"GeneratorError: {uid} was on {len(deaths)} replicas when they died (rollout.max_attempts = "
        f"{len(deaths)}), the last time with no other group beside it: {deaths[-1]}"
    )
