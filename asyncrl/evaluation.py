"""Evaluation: held-out tasks, answered by one version of the policy.

Invariants:
- An evaluation is of one version: while it runs, the controller makes no other version live. What a dead
  replica had of a prompt is of that version too, and is continued by another that holds it.
- It stands outside the staleness budget and the ledger.
- The reward model, if there is one, scores them as it scores what is trained on.
- ``eval/reward_mean`` is that of the set without a name; where all have one, of all their answers.
- Items are keyed by ordinal, never by prompt text. A sample that fails is counted, never scored 0.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Mapping, Sequence

from asyncrl.config import Config
from asyncrl.errors import DeadlineError, LostGroupError, NothingTrainableError, VersionGoneError
from asyncrl.generators.pool import GeneratorPool
from asyncrl.roles.reward_group import RewardModelGroup
from asyncrl.rollout import GroupRequest
from asyncrl.snapshot import Salvage
from asyncrl.types import GroupMeta, Metrics, SampleFailure, SamplingParams, Task, TrajectoryMeta

log = logging.getLogger(__name__)

# Draws of an evaluation never coincide with those of training.
_SEED_OFFSET = 1 << 32
_UNNAMED = ""


class Evaluator:
    """Answers all held-out tasks through the pool and averages their rewards."""

    def __init__(
        self,
        pool: GeneratorPool,
        tasks: Sequence[Task],
        config: Config,
        reward_model: RewardModelGroup | None = None,
        sets: Mapping[str, Sequence[Task]] | None = None,
    ) -> None:
        """``sets``: more tasks, by the name of their set; ordinals differ through all of them."""
        self._pool = pool
        self._reward_model = reward_model
        self._sets = {_UNNAMED: tasks, **(sets or {})} if tasks else dict(sets or {})
        self._tasks = tuple(task for members in self._sets.values() for task in members)
        self._config = config
        settings = config.eval
        self._sampling = SamplingParams(
            max_new_tokens=settings.max_new_tokens or config.rollout.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop=config.rollout.stop,
        )

    @property
    def enabled(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self._tasks)

    async def run(self, version: int) -> Metrics:
        """Metrics ``eval/...`` of ``version``. Raises DeadlineError after ``eval.timeout_s``.

        When all replicas that held ``version`` die and the learner has moved on, it starts again with
        the version that came after; ``eval/policy_version`` says which one it was.
        """
        timeout_s = self._config.eval.timeout_s
        done: list[GroupMeta] = []
        lost: list[SampleFailure] = []
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await self._all(version, done, lost)
                        return self._summarise(version, done, lost)
                    except VersionGoneError as error:
                        newer = self._pool.newest_version
                        log.warning(
                            "the evaluation of version %d becomes one of %d: %s", version, newer, error
                        )
                        version = newer
                        done.clear()
                        lost.clear()
        except TimeoutError:
            raise DeadlineError(
                f"evaluation of version {version}: {len(done)} of {len(self._tasks)} prompts were done "
                f"after eval.timeout_s = {timeout_s:g} s; raise it, or lower eval.max_prompts"
            ) from None

    async def _all(self, version: int, done: list[GroupMeta], lost: list[SampleFailure]) -> None:
        """All tasks at once; the first failure cancels the rest."""
        tasks = [
            asyncio.create_task(self._one(task, version, done, lost), name=f"eval {task.uid}")
            for task in self._tasks
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, task: Task, version: int, done: list[GroupMeta], lost: list[SampleFailure]) -> None:
        config = self._config
        request = GroupRequest(
            task=task,
            start_version=version,
            samples=config.eval.samples,
            sampling=self._sampling,
            seed=config.run.seed + _SEED_OFFSET,
            deadline_s=config.eval.timeout_s,
        )
        limit = config.rollout.max_attempts
        salvage: Salvage | None = None
        for attempt in range(1, limit + 1):
            try:
                alone = 1 < attempt == limit
                meta, payload = await self._pool.run_group(
                    request, version=version, alone=alone, salvage=salvage
                )
                if self._reward_model is not None:
                    meta, _ = await self._reward_model.score(task, meta, payload)
                done.append(meta)
                return
            except LostGroupError as error:
                # The replica is given up, and the pool has said so: this prompt goes to another one.
                salvage = error.salvage
                if attempt == limit:
                    log.error("evaluation: %d replicas died with %s: %s", limit, task.uid, error)
                    kind = type(error).__name__
                    lost += [SampleFailure(i, 0, kind, str(error)) for i in range(request.samples)]

    def _summarise(self, version: int, done: Sequence[GroupMeta], lost: Sequence[SampleFailure]) -> Metrics:
        answers = {meta.uid: meta.samples for meta in done}
        by_set = {
            name: [t for task in tasks for t in answers.get(task.uid, ())]
            for name, tasks in self._sets.items()
        }
        everything = [t for own in by_set.values() for t in own]
        main = by_set.pop(_UNNAMED, everything)
        failures = [*(f for meta in done for f in meta.failures), *lost]
        if not main:
            raise NothingTrainableError(
                f"evaluation of version {version}: all {len(failures)} samples failed, the first with "
                f"{failures[0].kind}: {failures[0].message}"
            )
        metrics: Metrics = {
            **_figures("eval", main),
            "eval/prompts": float(len(done)),
            "eval/failed": float(len(failures)),
            "eval/policy_version": float(version),
        }
        for name, own in by_set.items():
            if own:
                metrics |= _figures(f"eval/{name}", own)
        return metrics


def _figures(prefix: str, trajectories: Sequence[TrajectoryMeta]) -> Metrics:
    """Means over the answers of one set."""
    metrics: Metrics = {
        f"{prefix}/reward_mean": statistics.fmean(t.reward for t in trajectories),
        f"{prefix}/response_length_mean": statistics.fmean(t.sampled_tokens for t in trajectories),
        f"{prefix}/clip_ratio": statistics.fmean(t.finish_reason == "length" for t in trajectories),
    }
    names = {name for t in trajectories for name in t.rewards}
    if len(names) > 1:
        for name in sorted(names):
            values = [t.rewards[name] for t in trajectories if name in t.rewards]
            metrics[f"{prefix}/{name}_mean"] = statistics.fmean(values)
    return metrics
