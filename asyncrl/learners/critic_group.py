"""All ranks of the critic: a Ray actor a rank, a ``Role`` towards rollouts and a ``Critic`` towards updates.

Invariants:
- A group's values are those of the weights at the moment when a rank gets to it: an actor makes one call at
  a time, so that an update and a group wait for each other and never overlap.
- At most ``_CALLS_A_RANK`` groups are with a rank, so that an update does not queue behind all that landed.
- Weights die with their rank: nothing is restarted, and the run ends. A checkpoint of them is written in a
  thread of its own, which holds nothing up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from asyncrl.checkpoint.files import FileEntry
from asyncrl.config import Config
from asyncrl.errors import RoleError
from asyncrl.learners.base import StepResult
from asyncrl.learners.packing import RankPlan, plan_step
from asyncrl.learners.ranks import STATE_LANE, RayRanks, free_port
from asyncrl.learners.samples import SentGroup, rank_step, sent_groups
from asyncrl.placement import Placement, pin_process, rank_options
from asyncrl.roles.worker import annotated
from asyncrl.types import Annotation, AnnotationMeta, Batch, GroupMeta

_CALLS_A_RANK = 2
"""One that is computed, and one whose payload is fetched meanwhile."""


class CriticActor:
    """A thin shell around one ``CriticRank``."""

    def __init__(
        self, config: Config, model_path: str, rank: int, host: str, cores: tuple[int, ...] | None
    ) -> None:
        pin_process(cores)
        self._config = config
        self._model_path = model_path
        self._rank = rank
        self._host = host
        self._critic: Any = None

    def free_port(self) -> int:
        return free_port(self._host)

    def start(self, port: int) -> None:
        from asyncrl.learners.build import build_critic

        self._critic = build_critic(self._config, self._model_path, self._rank, self._host, port)
        self._critic.start()

    def annotate(self, payload: bytes, expected: int) -> tuple[AnnotationMeta, bytes]:
        return annotated("critic", self._critic, payload, expected)

    def step(
        self, version: int, kl_coef: float, plan: RankPlan, groups: Sequence[SentGroup], *payloads: bytes
    ) -> StepResult:
        result: StepResult = self._critic.step(rank_step(version, kl_coef, plan, groups, payloads))
        return result

    def copy_state(self) -> None:
        self._critic.copy_state()

    def write_state(self, folder: str) -> list[FileEntry]:
        entries: list[FileEntry] = self._critic.write_state(Path(folder))
        return entries

    def load_state(self, folder: str) -> None:
        self._critic.load_state(Path(folder))

    def close(self) -> None:
        self._critic.close()


_RemoteCritic: Any = ray.remote(concurrency_groups={STATE_LANE: 1})(CriticActor)


class RayCritic:
    """The ranks as one. ``model_path``: what the critic starts from; ``cores``: those of each rank."""

    name = "critic"

    def __init__(
        self,
        config: Config,
        model_path: str,
        placement: Placement,
        *,
        cores: Sequence[tuple[int, ...] | None],
    ) -> None:
        self._config = config
        ranks = config.critic.ranks
        host = placement.host("critic")
        self._ranks = RayRanks(
            "critic",
            [
                _RemoteCritic.options(**options).remote(config, model_path, rank, host, cores[rank])
                for rank, options in enumerate(rank_options(placement, "critic", ranks))
            ],
        )
        self._together = config.critic.is_sharded
        """Whether a forward pass takes all ranks."""
        self._busy = [0] * ranks
        """Groups that each rank has."""
        self._free = asyncio.Semaphore(_CALLS_A_RANK * (1 if self._together else ranks))

    async def start(self) -> None:
        await self._ranks.start(self._config.critic.start_timeout_s)

    async def annotate(self, meta: GroupMeta, payload: Any) -> Annotation:
        """The values of a group's trained tokens. RoleError after critic.step_timeout_s."""
        timeout_s = self._config.critic.step_timeout_s
        async with self._free:
            rank = min(range(len(self._busy)), key=lambda r: (self._busy[r], r))
            self._busy[rank] += 1
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._annotate(rank, meta, payload)
            except TimeoutError:
                raise RoleError(
                    f"critic rank {rank} gave {meta.uid} no values in critic.step_timeout_s = {timeout_s:g} s"
                ) from None
            finally:
                self._busy[rank] -= 1

    async def _annotate(self, rank: int, meta: GroupMeta, payload: Any) -> Annotation:
        actors = self._ranks.actors
        chosen = tuple(enumerate(actors)) if self._together else ((rank, actors[rank]),)
        # Never cancelled: of a call that takes all ranks, some may have begun.
        refs = [actor.annotate.options(num_returns=2).remote(payload, meta.checksum) for _, actor in chosen]
        metas: list[AnnotationMeta] = await asyncio.gather(
            *(self._ranks.call(of_rank, r) for (of_rank, _), (r, _) in zip(refs, chosen, strict=True))
        )
        return Annotation(metas[0], refs[0][1])

    async def step(self, batch: Batch) -> StepResult:
        """One update on all ranks; whoever awaits it holds the deadline."""
        settings = self._config.critic
        plans = plan_step(
            batch,
            settings.ranks,
            settings.micro_batch_tokens,
            self._config.algorithm.mini_batches,
            section="critic",
        )
        arguments = []
        for plan in plans:
            groups, payloads = sent_groups([batch.items[i] for i in plan.items])
            # As arguments of their own, so that Ray resolves them in the rank's process.
            arguments.append((batch.version, batch.kl_coef, plan, groups, *payloads))
        results: list[StepResult] = await self._ranks.each("step", arguments)
        return results[0]

    async def copy_state(self) -> None:
        await self._ranks.all("copy_state")

    async def write_state(self, folder: Path) -> list[FileEntry]:
        return await self._ranks.write_state(folder)

    async def load_state(self, folder: Path) -> None:
        await self._ranks.load_state(folder)

    async def close(self) -> None:
        await self._ranks.close()
