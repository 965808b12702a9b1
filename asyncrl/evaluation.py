"""Evaluation: held-out tasks, answered by one version of the policy.

Invariants:
- An evaluation is of one version: while it runs, the controller makes no other version live.
- It stands outside the staleness budget and the ledger.
- Items are keyed by ordinal, never by prompt text. A sample that fails is counted, never scored 0.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

from asyncrl.config import Config
from asyncrl.errors import DeadlineError, GeneratorError, NothingTrainableError
from asyncrl.generators.pool import GeneratorPool
from asyncrl.rollout import GroupRequest
from asyncrl.types import GroupMeta, Metrics, SamplingParams, Task

# Draws of an evaluation never coincide with those of training.
_SEED_OFFSET = 1 << 32


class Evaluator:
    """Answers all held-out tasks through the pool and averages their rewards."""

    def __init__(self, pool: GeneratorPool, tasks: Sequence[Task], config: Config) -> None:
        self._pool = pool
        self._tasks = tasks
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
        """Metrics ``eval/...`` of ``version``. Raises DeadlineError after ``eval.timeout_s``."""
        timeout_s = self._config.eval.timeout_s
        done: list[GroupMeta] = []
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for task in self._tasks:
                    group.create_task(self._one(task, version, done), name=f"eval {task.uid}")
        except TimeoutError:
            raise DeadlineError(
                f"evaluation of version {version}: {len(done)} of {len(self._tasks)} prompts were done "
                f"after eval.timeout_s = {timeout_s:g} s; raise it, or lower eval.max_prompts"
            ) from None
        return self._summarise(version, done)

    async def _one(self, task: Task, version: int, done: list[GroupMeta]) -> None:
        config = self._config
        request = GroupRequest(
            task=task,
            start_version=version,
            samples=config.eval.samples,
            sampling=self._sampling,
            seed=config.run.seed + _SEED_OFFSET,
            deadline_s=config.eval.timeout_s,
        )
        for attempt in range(1, config.rollout.max_attempts + 1):
            try:
                meta, _ = await self._pool.run_group(request)
                done.append(meta)
                return
            except GeneratorError:
                # The pool has logged it and given the replica up: this prompt goes to another one.
                if attempt == config.rollout.max_attempts:
                    raise

    def _summarise(self, version: int, done: Sequence[GroupMeta]) -> Metrics:
        trajectories = [t for meta in done for t in meta.trajectories]
        failures = [f for meta in done for f in meta.failures]
        if not trajectories:
            raise NothingTrainableError(
                f"evaluation of version {version}: all {len(failures)} samples failed, the first with "
                f"{failures[0].kind}: {failures[0].message}"
            )
        metrics: Metrics = {
            "eval/reward_mean": statistics.fmean(t.reward for t in trajectories),
            "eval/response_length_mean": statistics.fmean(t.response_tokens for t in trajectories),
            "eval/clip_ratio": statistics.fmean(t.finish_reason == "length" for t in trajectories),
            "eval/prompts": float(len(done)),
            "eval/failed": float(len(failures)),
            "eval/policy_version": float(version),
        }
        names = {name for t in trajectories for name in t.rewards}
        if len(names) > 1:
            for name in sorted(names):
                values = [t.rewards[name] for t in trajectories if name in t.rewards]
                metrics[f"eval/{name}_mean"] = statistics.fmean(values)
        return metrics
