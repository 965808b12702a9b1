"""The loop: batch N+1 rolls out while batch N updates, and nobody is further behind than allowed.

One asyncio loop owns the whole path. It decides, and never computes: rollouts, updates and pushes
happen elsewhere, and only their metas come through here.

Invariants:
- Every admission and retirement goes through ``OutstandingGroups``, every version that goes live through
  ``Pushes``.
- One update at a time, and none while the weights that it moves are pushed, or out of turn.
- All tasks live in one TaskGroup: a task that fails ends the run with its traceback.
- Nothing polls. Every wait ends by an event or by a deadline that names what was waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from asyncrl.alarms import LogprobAlarm
from asyncrl.attempts import Attempts, GroupSource, PoisonedGroupError
from asyncrl.checkpoint.books import Books
from asyncrl.checkpoint.compatibility import Origin
from asyncrl.checkpoint.resume import Resumed
from asyncrl.checkpoint.saver import Kind, Saver
from asyncrl.config import Config
from asyncrl.credit import CreditAssignment
from asyncrl.errors import BadStepsError, NoGeneratorError
from asyncrl.evaluation import Evaluator
from asyncrl.generators.pool import GeneratorPool
from asyncrl.learners.base import Learner, StepResult
from asyncrl.metrics import StepMeter, batch_metrics
from asyncrl.metrics_lines import MetricsLines
from asyncrl.observer import Observer
from asyncrl.outstanding import OutstandingGroups, Running
from asyncrl.pushes import Publisher, Pushes, Reference
from asyncrl.roles.annotator import Annotator
from asyncrl.roles.kl_control import KLControl
from asyncrl.screening import Screening
from asyncrl.timeline import NoTimeline, Timeline
from asyncrl.turns import NoTurns, Turns
from asyncrl.types import Batch, BatchItem, GroupMeta, Metrics, ReadyGroup, Task, unmasked
from asyncrl.waiting import Signal, now, within
from asyncrl.watchdog import Watchdog

log = logging.getLogger(__name__)


class TaskSource(Protocol):
    """The stream of the run: a pure function of the ordinal."""

    def task(self, ordinal: int) -> Task: ...


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


class Controller:
    """Runs ``config.run.steps`` updates. Build it, then await ``run()`` once.

    ``source``: what makes the groups that are trained, where that is not ``pool``.
    """

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
        source: GroupSource | None = None,
        annotator: Annotator | None = None,
        reference: Reference | None = None,
        turns: Turns | None = None,
        saver: Saver | None = None,
        resumed: Resumed | None = None,
        max_queue_bytes: int = 4 << 30,
        timeline: Timeline | None = None,
    ) -> None:
        self.config = config
        self._tasks = tasks
        self._pool = pool
        self._learner = learner
        self._publisher = publisher
        self._evaluator = evaluator
        self._annotator = annotator or Annotator(())
        self._reference = reference
        self._turns: Turns = turns or NoTurns()
        self._observer = observer
        self._saver = saver
        self._resumed = resumed
        self._credit = CreditAssignment(config)
        self._screening = Screening(config, self._credit)
        self._kl = KLControl(config.algorithm)
        self._changed = Signal()
        self._timeline = timeline or NoTimeline()
        self._meter = StepMeter(config.generators.slots, self._timeline)
        self._times = self._meter.times
        self._watchdog = Watchdog(
            config.run.stall_after_s, lambda: [*self._groups.describe(self._holder), *pool.describe()]
        )
        self._groups = OutstandingGroups(
            config,
            retired=observer.retired,
            changed=self._changed,
            watchdog=self._watchdog,
            times=self._times,
            max_queue_bytes=max_queue_bytes,
        )
        self._lines = MetricsLines(observer.recorded, last_version=config.run.steps)
        self._books = Books(
            groups=self._groups,
            credit=self._credit,
            kl=self._kl,
            meter=self._meter,
            lines=self._lines,
            reference=reference,
            seed=config.run.seed,
            of=Origin("", {}) if saver is None else saver.of,
        )
        if resumed is not None:
            self._books.restore(resumed.state, resumed.ready)
        self.budget, self.ledger = self._groups.budget, self._groups.ledger
        self._attempts = Attempts(
            config,
            source or pool,
            reissue=lambda ordinal: self.budget.reissue(ordinal).start_version,
            greedy_baseline=self._credit.needs_greedy,
            poisoned=self._books.poisoned,
        )
        self._pushes = Pushes(
            config,
            self.budget,
            learner,
            publisher,
            pool,
            evaluator,
            reference=reference,
            evaluated=observer.evaluated,
            changed=self._changed,
            watchdog=self._watchdog,
            times=self._times,
        )
        self._alarm = LogprobAlarm.for_dtype(config.generators.logprob_diff_alarm, config.model.dtype)
        self._stopped_by: str | None = None
        self._starting: asyncio.Task[Metrics | None] | None = None
        self._keepers: list[asyncio.Task[None]] = []
        """What keeps both sides at work while there is any."""
        self._shortage: NoGeneratorError | None = None
        """Why the run ends, where too few generators are left."""

    # ------------------------------------------------------------------ the run

    async def run(self) -> Summary:
        """Train. Returns after the last step, or after ``request_stop`` took effect.

        Raises what ended the run, as the ExceptionGroup of the TaskGroup.
        """
        self._books.started_at = began = now()
        self._watchdog.made_progress("the start")
        first_step, checksum = self._groups.step, None
        before: Metrics | None = None
        after: Metrics | None = None
        try:
            async with asyncio.TaskGroup() as group:
                self._starting = group.create_task(self._start_up(group), name="start")
                if self._stopped_by is not None:
                    self._starting.cancel()
                await asyncio.wait([self._starting])
                started = not self._starting.cancelled()
                if started:
                    after = before = self._starting.result()
                    began = now()
                    await self._train(group)
                for task in self._keepers:
                    task.cancel()
                if self._shortage is not None:
                    await self._end_short(self._shortage)
            if started and self._groups.step:
                after, checksum = await self._finish()
        finally:
            self._lines.close()
        return Summary(
            steps=self._groups.step - first_step,
            policy_version=self.budget.version,
            wall_s=now() - began,
            eval_before=before,
            eval_after=after,
            checksum=checksum,
            counts=self.ledger.counts(),
            last=self._lines.last,
            stopped_by=self._stopped_by,
        )

    def request_stop(self, why: str) -> None:
        """End after the running update: admission stops, unfinished rollouts are cancelled.

        Before the first update there is nothing to wait for: what is being started is given up.
        """
        if self._stopped_by is not None:
            return
        self._stopped_by = why
        self._groups.close()
        if self._starting is None or not self._starting.done():
            log.warning("%s: ending before training began", why)
            if self._starting is not None:
                self._starting.cancel()
        else:
            log.warning("%s: ending after the running update", why)

    async def _watch_generators(self) -> None:
        """End the run once too few generators are left: after a checkpoint, if the learner is still there."""
        self._shortage = await self._pool.shortage()
        if self.config.placement.mode == "colocated":  # a rank of the learner went with each of them
            raise self._shortage
        self.request_stop("too few generators")

    async def _end_short(self, shortage: NoGeneratorError) -> None:
        if self._saver is not None:
            await self._saver.written()
            log.error(
                "too few generators: stopped after step %d, with a checkpoint of it to go on from",
                self._groups.step,
            )
        raise shortage

    async def _start_up(self, group: asyncio.TaskGroup) -> Metrics | None:
        """All that comes before the first update; returns the evaluation that the run began with."""
        await self._start_sides(group)
        return await self._write_first_lines(group)

    async def _train(self, group: asyncio.TaskGroup) -> None:
        """From the first update to the last."""
        self._observer.phase("training")
        pump = group.create_task(self._rollout_pump(group), name="rollout pump")
        self._keepers.append(group.create_task(self._watchdog.watch(), name="watchdog"))
        await self._train_pump(group)
        if self._stopped_by is not None and self.config.checkpoint.at_end:
            await self._save(group, required=True)
        for task in [pump, *self._groups.handles()]:
            task.cancel()
        if self._stopped_by is not None:
            self._lines.give_up_evaluations()
        # Replicas may still be needed, and so restarted, for these.
        await self._pushes.settled()

    async def _start_sides(self, group: asyncio.TaskGroup) -> None:
        """Start both sides at one version, and the tasks that keep generators at work from then on."""
        self._observer.phase("starting all actors")
        async with asyncio.TaskGroup() as starting:
            learner = starting.create_task(self._learner.start(), name="start learner")
            starting.create_task(self._pool.start(), name="start generators")
            starting.create_task(self._annotator.start(), name="start roles")
        info = learner.result()
        log.info("learner has %s parameters in %d tensors", f"{info.parameters:,}", len(info.manifest))
        if self._resumed is not None:
            assert self._saver is not None, "who resumes takes checkpoints too"
            self._observer.phase(f"loading the checkpoint of step {self._resumed.state.step}")
            await self._saver.load(self._resumed.folder, self._resumed.state)
        self._keepers.append(group.create_task(self._pool.supervise(), name="supervise generators"))
        await self._pushes.open(info)
        self._watchdog.made_progress("the start of generators and learner")
        self._keepers += [
            group.create_task(self._watch_generators(), name="watch generators"),
            group.create_task(self._pushes.let_in_restarted(), name="let in generators"),
            group.create_task(self._pushes.restore_reference(), name="restore reference"),
        ]

    async def _write_first_lines(self, group: asyncio.TaskGroup) -> Metrics | None:
        """The line of the start model, with its evaluation; after a resume, the lines that were not written.

        Returns the evaluation that the run began with.
        """
        resumed = self._resumed
        if self._saver is not None and (resumed is None or resumed.elsewhere):
            # Before the first line: a folder with lines has a checkpoint from its beginning.
            await self._save(group, required=True)
            await self._saver.written()
        lines = [] if resumed is None else list(resumed.lines)
        if resumed is None or resumed.lacks_line:
            lines.append({**self._line_head(), **self._publisher.take_metrics()})
        version, step = self.budget.version, self._groups.step
        result = None
        if lines and lines[-1]["step"] == step and self._pushes.is_evaluated(version):
            self._observer.phase(f"evaluating version {version}")
            result = await self._pushes.evaluate(version)
            lines[-1].update(result)
            if self._saver is not None and result["eval/policy_version"] == version:
                await self._saver.note_evaluation(step, result)
        if lines:
            self._times.add_to(lines[-1])
        # Not before: a run that is stopped during the evaluation has it when it is started again.
        known = {int(record["policy_version"]) for record in lines if "eval/reward_mean" in record}
        for record in lines:
            of = int(record["policy_version"])
            if of not in known and self._pushes.is_evaluated(of):
                known.add(of)
                log.warning("version %d stays without an evaluation: the run was ended in it", of)
            self._lines.add(record)
        return result if resumed is None or (result and not version) else resumed.first_evaluation

    # ------------------------------------------------------------------ checkpoints

    async def _save(
        self,
        group: asyncio.TaskGroup,
        *,
        kind: Kind = "whole",
        evaluation: asyncio.Task[Metrics] | None = None,
        required: bool = False,
    ) -> None:
        """Take a checkpoint of now, between two updates, unless there is one of this step."""
        if self._saver is None:
            return
        if required:
            await self._saver.written()  # it may be of this step, and fail
        if self._saver.last_step == self._groups.step:
            return
        start = now()
        async with self._pushes.reference_turn():
            await self._saver.take(
                group, self._books.capture, kind=kind, evaluation=evaluation, required=required
            )
        self._times.spent("checkpoint", start)

    async def _finish(self) -> tuple[Metrics | None, str]:
        """What the last line still lacks: its evaluation and the checksum; then the export."""
        after = self._lines.last_evaluation()
        await self._turns.to_learner(self._pushes.evaluated)
        timeout_s, setting = self.config.learner.step_timeout_s, "learner.step_timeout_s"
        checksum = await within(timeout_s, "checksum of the parameters", setting, self._learner.checksum())
        # JSON holds it as text; every other figure of a line is a number.
        self._lines.last["model/checksum"] = checksum  # type: ignore[assignment]
        if self._saver is not None and self.config.checkpoint.hf != "never":
            self._observer.phase("exporting the model")
            await within(timeout_s, "export of the model", setting, self._saver.export(self._groups.step))
        self._times.add_to(self._lines.last)
        return after, checksum

    # ------------------------------------------------------------------ rollouts

    async def _rollout_pump(self, group: asyncio.TaskGroup) -> None:
        while True:
            await self._changed.until(lambda: self._groups.room() > 0)
            for _ in range(self._groups.room()):
                task = self._tasks.task(self.ledger.next_ordinal)
                running = self._groups.admit(task)
                rollout = self._rollout(running, self.budget.start_version(task.ordinal))
                running.handle = group.create_task(rollout, name=f"rollout {task.uid}")

    async def _rollout(self, running: Running, start_version: int) -> None:
        """One group, from its request to the queue or to its retirement."""
        try:
            made = await self._attempts.run(running, start_version)
        except PoisonedGroupError as error:
            self._groups.retire_unusable(running.task, "failed", f"GeneratorError: {error}")
            return
        if made is not None:  # else the run ends, and issues the group again when it goes on
            await self._land(running.task, *made)

    async def _land(self, task: Task, meta: GroupMeta, payload: Any) -> None:
        """A group came back: scored, annotated and into the queue, or retired with the reason why not."""
        landed_at = now()
        meta, payload = await self._annotator.score(task, meta, payload)
        self._meter.bias.add_finished(meta)
        verdict = self._screening.unusable_because(meta)
        if verdict is not None:
            self._groups.retire_unusable(task, *verdict, reward_mean=meta.reward_mean)
            return
        annotations = await self._annotator.annotate(meta, payload)
        self._groups.land(meta, payload, annotations, landed_at)

    # ------------------------------------------------------------------ updates

    async def _train_pump(self, group: asyncio.TaskGroup) -> None:
        statistics = await self._pool.statistics()
        self._meter.begin(now(), statistics)
        while self.budget.version < self.budget.steps:
            groups = await self._take()
            if groups is None:
                return
            version = self.budget.version
            record: Metrics = {}
            landed_as = {g.meta.ordinal: g for g in groups}
            if self.config.schedule.at_bound == "mask":
                landed = sum(g.meta.loss_tokens for g in groups)
                # The counts of what is trained; the learner masks the tokens themselves.
                bound = self.budget.max_staleness
                groups = [replace(g, meta=unmasked(version, bound, g.meta)) for g in groups]
                record["staleness/masked_tokens"] = float(landed - sum(g.meta.loss_tokens for g in groups))
            record |= batch_metrics(version, [g.meta for g in groups])
            idle: list[ReadyGroup] = []
            if self.config.algorithm.filter_zero_variance == "drop":
                idle = [g for g in groups if self._credit.without_signal(g.meta)]
                groups = [g for g in groups if not self._credit.without_signal(g.meta)]
            if not groups:
                self._groups.retire_idle(idle)
                continue
            metas = [g.meta for g in groups]
            await self._turns.to_learner(self._pushes.evaluated)
            async with self._pushes.update_turn():
                result = await self._update(version, groups)
                self._groups.step += 1
                self._alarm.check(version, result.metrics)
                self._observer.trained(self._groups.step, [*groups, *idle])
                self._retire_batch(version, groups, result)
                self._groups.retire_idle(idle)
            evaluation = await self._pushes.publish_if_due(group)
            # Where nothing was published, they sleep still.
            await self._turns.to_generators(self.budget.version)
            # Their KL was taken of all tokens that they landed with.
            scored = [landed_as[meta.ordinal] for meta in metas]
            record |= {**result.metrics, **self._kl.end_step(scored, result)}
            await self._end_step(record, metas, evaluation)
            last = self.budget.version == self.budget.steps
            if self._saver is not None:
                kind = self._saver.due(self._groups.step, last=last, evaluated=evaluation is not None)
                if kind is not None:
                    must = last and kind == "whole"
                    await self._save(group, kind=kind, evaluation=evaluation, required=must)

    async def _take(self) -> list[ReadyGroup] | None:
        """The next batch by expiry; None once a stop was asked for."""
        start = now()
        batch: list[ReadyGroup] | None = None

        def stopped_or_taken() -> bool:
            nonlocal batch
            if self._stopped_by is None:
                batch = self._groups.take()
            return batch is not None or self._stopped_by is not None

        await self._changed.until(stopped_or_taken)
        self._times.spent("wait_for_batch", start)
        self._annotator.waited(batch or (), start, now())
        return batch

    async def _update(self, version: int, groups: Sequence[ReadyGroup]) -> StepResult:
        advantages = self._credit.advantages(
            [g.meta for g in groups], [self._kl.penalties(g) for g in groups]
        )
        items = tuple(
            BatchItem(g.meta, g.payload, of_group, g.annotations)
            for g, of_group in zip(groups, advantages, strict=True)
        )
        start = now()
        timeout_s = self.config.learner.step_timeout_s
        result = await within(
            timeout_s,
            f"update {version} -> {version + 1} on {len(items)} groups",
            "learner.step_timeout_s",
            self._learner.step(Batch(version, items, self._kl.coefficient)),
        )
        self._times.spent("train", start, version=version)
        self._timeline.ranks(version, result.ranks)
        return result

    def _retire_batch(self, version: int, groups: Sequence[ReadyGroup], result: StepResult) -> None:
        """The update's groups are through. BadStepsError if too many updates in a row changed nothing."""
        self._groups.retire_batch(version, groups, skipped=result.skipped, recorded=result.recorded)
        if result.recorded:
            return
        if not result.skipped:
            self._books.bad_steps = 0
            self._meter.bias.add_trained([g.meta for g in groups])
            return
        self._books.bad_steps += 1
        limit = self.config.learner.max_bad_steps
        log.error("step %d was not finite and changed nothing: %s", self._groups.step, result.metrics)
        if self._books.bad_steps > limit:
            raise BadStepsError(
                f"{self._books.bad_steps} updates in a row had a non-finite loss or gradient "
                f"(learner.max_bad_steps = {limit}); lower learner.lr or look at the rewards"
            )

    # ------------------------------------------------------------------ what users see

    def _holder(self, uid: str, ordinal: int) -> str:
        """Who works on a running group, for the report of a stall."""
        return self._annotator.holder(ordinal) or self._pool.holder(uid, ordinal)

    async def _end_step(
        self, record: Metrics, metas: Sequence[GroupMeta], evaluation: asyncio.Task[Metrics] | None
    ) -> None:
        self._groups.note_starvation()
        statistics = await self._pool.statistics()
        record = {
            **self._line_head(),
            **record,
            **self._meter.end_step(now(), statistics, metas),
            **self._pool.metrics(),
            **self._publisher.take_metrics(),
            **self._turns.take_metrics(),
            **self._annotator.take_metrics(),
            **(self._reference.take_metrics() if self._reference is not None else {}),
            **({"checkpoint/failed": float(self._saver.failed)} if self._saver is not None else {}),
        }
        self._lines.add(record, evaluation)
        self._observer.stepped(record)
        self._lines.flush()

    def _line_head(self) -> Metrics:
        return {
            "step": self._groups.step,
            "policy_version": self.budget.version,
            "time": self._books.elapsed_s(),
            **self._groups.metrics(),
        }
