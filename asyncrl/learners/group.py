"""All learner ranks together: a Ray actor a rank, and the ``Learner`` that the controller awaits.

Invariants:
- Every rank gets the same calls in the same order; a rank that fails fails the call.
- A rank fetches the payloads of its own groups only, resolved by Ray in the rank's process.
- With ``weight_sync.overlap``, pushes have a thread of their own in each rank, and so has always what writes
  a checkpoint: an update neither waits for them nor holds them up. Everything else, copying out included,
  happens in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from asyncrl.checkpoint.files import FileEntry
from asyncrl.config import Config
from asyncrl.errors import ChecksumError, StalenessError
from asyncrl.learners.base import LearnerInfo, LearnerRank, PushReport, StepResult
from asyncrl.learners.packing import RankPlan, plan_step
from asyncrl.learners.ranks import STATE_LANE, RayRanks, free_port
from asyncrl.learners.samples import SentGroup, rank_step, sent_groups
from asyncrl.placement import Placement, pin_process, rank_options
from asyncrl.timeline import unix_offset
from asyncrl.types import Batch, Float32Array, group_lag
from asyncrl.weight_sync.base import Channel, PushGroupSpec, plan_buckets

_PUSH_LANE = "push"
"""The concurrency group of pushes beside updates. Ray gives each group threads of its own; one limit
for all calls would let an update and a push wait for each other."""


class LearnerActor:
    """A thin shell around one ``LearnerRank``."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        rank: int,
        host: str,
        cores: tuple[int, ...] | None,
        folder: str,
        started: Callable[[LearnerRank], None] = lambda rank: None,
    ) -> None:
        """``started`` hears of the rank once it stands."""
        pin_process(cores)
        self._started = started
        self._config = config
        self._model_path = model_path
        self._rank = rank
        self._host = host
        self._folder = Path(folder)
        self._learner: Any = None
        self._store: Any = None
        self._sender: Any = None

    def free_port(self) -> int:
        return free_port(self._host)

    def start(self, port: int) -> LearnerInfo:
        from asyncrl.learners.build import build_rank
        from asyncrl.learners.sender import PushSender
        from asyncrl.weight_sync.broadcast import create_store

        self._learner = build_rank(self._config, self._model_path, self._rank, self._host, port, self._folder)
        info: LearnerInfo = self._learner.start()
        settings, sync = self._config.learner, self._config.weight_sync
        self._sender = PushSender(
            self._learner,
            plan_buckets(info.manifest, sync.bucket_bytes),
            rank=self._rank,
            ranks=settings.ranks,
            sharded=settings.is_sharded or settings.tensor_parallel > 1,
            overlap=sync.overlap,
        )
        self._started(self._learner)
        if self._rank != 0:
            return info
        self._store = create_store(self._host, self._config.weight_sync.timeout_s)
        return replace(info, store=(self._host, self._store.port))

    def step(
        self, version: int, kl_coef: float, plan: RankPlan, groups: Sequence[SentGroup], *payloads: bytes
    ) -> StepResult:
        begun = time.time()
        result: StepResult = self._learner.step(rank_step(version, kl_coef, plan, groups, payloads))
        return replace(result, ranks=((begun, time.time()),))

    def open_push_group(self, spec: PushGroupSpec, channel: Channel) -> None:
        self._sender.open(spec, self._store, channel)

    def copy_out(self, version: int) -> float:
        seconds: float = self._sender.copy_out(version)
        return seconds

    def push(self, version: int, channel: Channel) -> PushReport | None:
        report: PushReport | None = self._sender.send(version, channel)
        return report

    def score(self, token_ids: Sequence[int]) -> Float32Array:
        logprobs: Float32Array = self._learner.score(token_ids)
        return logprobs

    def offload(self) -> None:
        self._learner.offload()

    def reload(self) -> None:
        self._learner.reload()

    def checksum(self) -> str:
        result: str = self._learner.checksum()
        return result

    def export(self, folder: str) -> None:
        self._learner.export(Path(folder))

    def copy_state(self, weights_only: bool) -> None:
        self._learner.copy_state(weights_only=weights_only)

    def write_state(self, folder: str) -> list[FileEntry]:
        entries: list[FileEntry] = self._learner.write_state(Path(folder))
        return entries

    def load_state(self, folder: str) -> None:
        self._learner.load_state(Path(folder))

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._learner.close()


_RemoteLearner: Any = ray.remote(concurrency_groups={_PUSH_LANE: 1, STATE_LANE: 1})(LearnerActor)


def learner_actors(
    config: Config,
    model_path: str,
    placement: Placement,
    *,
    cores: Sequence[tuple[int, ...] | None],
    options: Sequence[Mapping[str, Any]] | None = None,
) -> list[Any]:
    """A Ray actor for each rank, in its place, or with the ``options`` that place it."""
    if options is None:
        options = rank_options(placement, "learner", config.learner.ranks)
    host = placement.host("learner")
    return [
        _RemoteLearner.options(**of_rank).remote(config, model_path, rank, host, cores[rank], str(Path.cwd()))
        for rank, of_rank in enumerate(options)
    ]


class RayLearner:
    """The ranks as one ``Learner``. Deaths and timeouts of a rank are LearnerErrors.

    ``actors`` and ``handles`` are those of ``RayRanks``, a rank each. ``after`` is awaited before they start:
    for as long as the memory that they take belongs to others.
    """

    def __init__(
        self,
        config: Config,
        actors: Sequence[Any],
        handles: Sequence[Any] = (),
        *,
        after: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._config = config
        self._after = after
        self._push_lane = _PUSH_LANE if config.weight_sync.overlap else None
        self._ranks = RayRanks("learner", actors, handles)

    async def start(self) -> LearnerInfo:
        if self._after is not None:
            await self._after()
        infos = await self._ranks.start(self._config.learner.start_timeout_s)
        info: LearnerInfo = infos[0]
        return info

    async def step(self, batch: Batch) -> StepResult:
        self._check_staleness(batch)
        settings = self._config.learner
        plans = plan_step(
            batch,
            settings.replicas,
            settings.micro_batch_tokens,
            self._config.algorithm.mini_batches,
            settings.layout,
        )
        arguments: list[Sequence[Any]] = []
        for plan in plans:
            groups, payloads = sent_groups([batch.items[i] for i in plan.items])
            # As arguments of their own, so that Ray resolves them in the rank's process.
            arguments += [(batch.version, batch.kl_coef, plan, groups, *payloads)] * settings.shared
        results: list[StepResult] = await self._ranks.each("step", arguments)
        computed = {"perf/computed_tokens": float(sum(plan.computed_tokens for plan in plans))}
        offset = unix_offset()
        spans = (span for result in results for span in result.ranks)
        metrics = {**results[0].metrics, **computed}
        return replace(
            results[0],
            metrics=metrics,
            ranks=tuple((begun - offset, ended - offset) for begun, ended in spans),
        )

    async def open_push_group(self, spec: PushGroupSpec, channel: Channel = "generators") -> None:
        await self._ranks.all("open_push_group", spec, channel, lane=self._push_lane)

    async def copy_out(self, version: int) -> float:
        return float(max(await self._ranks.all("copy_out", version)))

    async def push(self, version: int, channel: Channel = "generators") -> PushReport:
        found = await self._ranks.all("push", version, channel, lane=self._push_lane)
        reports: list[PushReport] = [report for report in found if report is not None]
        if len({report.checksum for report in reports}) > 1:
            sums = ", ".join(report.checksum for report in reports)
            raise ChecksumError(f"version {version}: the ranks that sent it hold different weights: {sums}")
        return max(reports, key=lambda report: report.send_s)

    async def score(self, token_ids: Sequence[int]) -> Float32Array:
        first, *_ = await self._ranks.all("score", token_ids)
        logprobs: Float32Array = first
        return logprobs

    async def offload(self) -> None:
        await self._ranks.all("offload")

    async def reload(self) -> None:
        await self._ranks.all("reload")

    async def checksum(self) -> str:
        sums = await self._ranks.all("checksum")
        return str(sums[0])

    async def export(self, folder: Path) -> None:
        await self._ranks.all("export", str(folder))

    async def copy_state(self, *, weights_only: bool = False) -> None:
        await self._ranks.all("copy_state", weights_only)

    async def write_state(self, folder: Path) -> list[FileEntry]:
        return await self._ranks.write_state(folder)

    async def load_state(self, folder: Path) -> None:
        await self._ranks.load_state(folder)

    async def close(self) -> None:
        await self._ranks.close()

    def _check_staleness(self, batch: Batch) -> None:
        bound = self._config.schedule.max_staleness
        for item in batch.items:
            lag = group_lag(batch.version, item.meta)
            if lag is not None and lag > bound:
                raise StalenessError(
                    f"{item.meta.uid} (ordinal {item.meta.ordinal}) has lag {lag} in the update of version "
                    f"{batch.version}, schedule.max_staleness = {bound}"
                )
