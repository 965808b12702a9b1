"""Pushes and evaluations: when a version goes live, and when one is evaluated.

Invariants:
- One push at a time. A version is live only after ``Publisher.publish`` returned.
- Whoever holds the weights' turn finds the weights that are pushed unchanged: no update runs, or with
  ``weight_sync.overlap`` no copy is made. With it a push runs beside the next update, from a copy that
  the learner made between the two.
- An evaluation is of one version: it starts when that is live, and the push of the next waits for its end.
- The reference follows to a version before that goes live: under pipeline_depth 0 all groups of a version are
  annotated by one reference.
- Restarted replicas are let in between two updates, also where no push is due: a run whose only replica
  died would wait for ever otherwise, with no rollout, no update and so no push.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

from asyncrl.config import Config
from asyncrl.errors import NoGeneratorError
from asyncrl.evaluation import Evaluator
from asyncrl.generators.pool import GeneratorPool
from asyncrl.learners.base import Learner, LearnerInfo
from asyncrl.metrics import PhaseTimes
from asyncrl.queues.budget import StalenessBudget
from asyncrl.types import Metrics
from asyncrl.waiting import Signal, now, within
from asyncrl.watchdog import Watchdog
from asyncrl.weight_sync.publish import PublishReport

log = logging.getLogger(__name__)


class Publisher(Protocol):
    """Delivers versions; see weight_sync/publish.py."""

    async def open(self, info: LearnerInfo) -> None: ...

    async def copied_out(self, version: int) -> None: ...

    async def publish(self, version: int) -> PublishReport: ...

    async def catch_up(self, version: int) -> bool: ...

    def take_metrics(self) -> Metrics: ...


class Reference(Protocol):
    """A reference that follows the policy; see roles/moving.py."""

    async def open(self, info: LearnerInfo) -> None: ...

    def is_due(self, version: int) -> bool: ...

    async def refresh(self, version: int) -> None: ...

    async def until_lost(self) -> None: ...

    async def restore(self, version: int) -> None: ...

    @property
    def version(self) -> int: ...

    def take_metrics(self) -> Metrics: ...


class Pushes:
    """Brings the learner's versions to the generators, and has those evaluated that are due.

    ``evaluated`` hears of the metrics of each evaluation; ``changed`` is notified of each new live version.
    """

    def __init__(
        self,
        config: Config,
        budget: StalenessBudget,
        learner: Learner,
        publisher: Publisher,
        pool: GeneratorPool,
        evaluator: Evaluator,
        *,
        reference: Reference | None = None,
        evaluated: Callable[[Metrics], None],
        changed: Signal,
        watchdog: Watchdog,
        times: PhaseTimes,
    ) -> None:
        self._overlap = config.weight_sync.overlap
        self._timeout_s = config.weight_sync.timeout_s
        self._evaluate_every = config.eval.every
        self._steps = config.run.steps
        self._budget = budget
        self._learner = learner
        self._publisher = publisher
        self._pool = pool
        self._evaluator = evaluator
        self._reference = reference
        self._evaluated = evaluated
        self._changed = changed
        self._watchdog = watchdog
        self._times = times
        self._turn = asyncio.Lock()
        self._push: asyncio.Task[None] | None = None
        self._version = 0  # the newest one that was handed to the publisher
        self.evaluation: asyncio.Task[Metrics] | None = None
        """That of the newest version handed to the publisher, running or done; None where none was due."""

    async def open(self, info: LearnerInfo) -> None:
        """Make the budget's version live: what generates is what trains, whatever the model's files said."""
        version = self._version = self._budget.version
        await self._publisher.open(info)
        if self._reference is not None:
            await self._reference.open(info)
        if self._overlap:
            await self._copy_out(version)
        await self._follow(version)
        await self._publisher.publish(version)

    def update_turn(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """What an update has to hold: it moves the weights that are pushed, unless those are a copy."""
        return contextlib.nullcontext() if self._overlap else self._turn

    def reference_turn(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Inside, a reference that follows the policy stays what it is."""
        return contextlib.nullcontext() if self._reference is None else self._turn

    async def publish_if_due(self, group: asyncio.TaskGroup) -> asyncio.Task[Metrics] | None:
        """Publish the newest version where it is due, and return the evaluation that it started.

        Live on return; with ``weight_sync.overlap`` only copied out, and live some time later.
        """
        version = self._budget.version
        if version == self._version:
            return None
        last = version == self._steps
        evaluate = self.is_evaluated(version)
        if not (self._budget.is_due(version) or evaluate or last):
            return None
        before = self.evaluation
        if self._overlap:
            await self._await_push()
            start = now()
            async with self._turn:
                await self._copy_out(version)
                self._version = version
            self._times.spent("weight_sync_stall", start, version=version)
            name = f"push of version {version}"
            self._push = group.create_task(self._publish(version, before), name=name)
        else:
            await self._publish(version, before)
        self._version = version
        self.evaluation = None
        if evaluate:
            name = f"evaluation of version {version}"
            self.evaluation = group.create_task(self.evaluate(version, self._push), name=name)
        return self.evaluation

    async def evaluate(self, version: int, push: asyncio.Task[None] | None = None) -> Metrics:
        """Evaluate ``version``, once it is live: now, or after ``push``.

        Nothing is found where too few generators are left, of which the run ends.
        """
        if push is not None:
            await asyncio.wait([push])
            push.result()
        try:
            result = await self._evaluator.run(version)
        except NoGeneratorError as error:
            log.error("version %d is not evaluated: %s", version, error)
            return {}
        self._watchdog.made_progress(f"evaluation of version {version}")
        self._evaluated(result)
        return result

    async def evaluated(self) -> None:
        """Wait for the end of the evaluation that runs, if one does; raises what it raised."""
        await self._await_evaluation(self.evaluation)

    async def let_in_restarted(self) -> None:
        """Push to restarted replicas as soon as there are whole weights to push; runs until cancelled."""
        while True:
            try:
                await self._pool.until(lambda pool: pool.joining)
            except NoGeneratorError:
                return  # the run ends of it
            async with self._turn:
                version = self._held_version
                if await self._publisher.catch_up(version) and self._pool.live:
                    # Newer than before only where no replica was live: g is the oldest of them.
                    self._budget.set_live(self._pool.live_version)
                    self._changed.notify()

    async def restore_reference(self) -> None:
        """Push to the reference where an actor lost it, out of turn; runs until cancelled."""
        while self._reference is not None:
            await self._reference.until_lost()
            async with self._turn:
                await self._reference.restore(self._held_version)

    async def settled(self) -> None:
        """Wait for the push and the evaluation that still run; how they end is their TaskGroup's to see."""
        for last in (self._push, self.evaluation):
            if last is not None:
                await asyncio.wait([last])

    @property
    def _held_version(self) -> int:
        """The version that can be pushed: of the learner's copy, or of its weights between two updates."""
        return self._version if self._overlap else self._budget.version

    def is_evaluated(self, version: int) -> bool:
        """Whether ``version`` is evaluated: every so often, before the first step and after the last."""
        every = self._evaluate_every
        at_an_end = version in (0, self._steps)
        return self._evaluator.enabled and (at_an_end or (every > 0 and version % every == 0))

    async def _copy_out(self, version: int) -> None:
        """Have the learner copy its weights out: all that it stands still for."""
        await within(
            self._timeout_s,
            f"copying version {version} out",
            "weight_sync.timeout_s",
            self._learner.copy_out(version),
        )
        await self._publisher.copied_out(version)

    async def _publish(self, version: int, evaluation: asyncio.Task[Metrics] | None) -> None:
        """Make ``version`` live, as soon as the evaluation of the one before has ended."""
        await self._await_evaluation(evaluation)
        async with self._turn:
            await self._follow(version)
            if version != self._budget.live_version:  # else replicas were restarted with it
                start = now()
                try:
                    report = await self._publisher.publish(version)
                except NoGeneratorError as error:
                    log.error("version %d is pushed to nobody: %s", version, error)
                    return
                facts = {
                    "version": version,
                    "bytes": report.nbytes,
                    "attempts": report.attempts,
                    "pause_s": report.pause_s,
                }
                self._times.spent("weight_sync", start, **facts)
                if not self._overlap:  # else the learner goes on meanwhile
                    self._times.spent("weight_sync_stall", start, version=version)
                self._times.weight_pause += report.pause_s
                self._budget.set_live(version)
        self._watchdog.made_progress(f"version {version} live")
        self._changed.notify()

    async def _follow(self, version: int) -> None:
        """Have the reference follow to ``version``, if it is due and has not yet."""
        # Of the last version no group is annotated any more.
        if self._reference is not None and self._reference.is_due(version) and version < self._steps:
            await self._reference.refresh(version)

    async def _await_evaluation(self, evaluation: asyncio.Task[Metrics] | None) -> None:
        if evaluation is not None:
            start = now()
            await asyncio.wait([evaluation])
            evaluation.result()
            self._times.spent("eval", start)

    async def _await_push(self) -> None:
        """One push at a time, and one copy to push from: the next waits for the one before."""
        if self._push is not None:
            start = now()
            await asyncio.wait([self._push])
            self._push.result()
            self._times.spent("wait_for_push", start)
