"""Replicas of several workers take as many ranks in a row of the push group."""

from __future__ import annotations

from typing import Any

from asyncrl.generators.base import KVAfterSwap
from asyncrl.generators.pool import GeneratorPool
from asyncrl.learners.base import LearnerInfo, PushReport
from asyncrl.weight_sync.base import PushGroupSpec, WeightEcho
from asyncrl.weight_sync.publish import WeightPublisher


class Joiner:
    """The part of a replica, or of the learner, that a push needs."""

    def __init__(self, push_ranks: int) -> None:
        self.name = f"{push_ranks} ranks"
        self.push_ranks = push_ranks
        self.specs: list[PushGroupSpec] = []

    async def join(self, spec: PushGroupSpec) -> None:
        self.specs.append(spec)

    async def open_push_group(self, spec: PushGroupSpec) -> None:
        self.specs.append(spec)

    async def push(self, version: int) -> PushReport:
        return PushReport(version, "sum", 8, 0.0)

    async def receive(self, version: int) -> None:
        pass

    async def swap(self, version: int, *, in_flight: bool, kv: KVAfterSwap) -> WeightEcho:
        return WeightEcho(version, "sum", 0.0, 0.0)


async def test_ranks_follow_the_workers_of_each_replica() -> None:
    replicas = [Joiner(1), Joiner(2), Joiner(4)]
    learner: Any = Joiner(1)
    pool = GeneratorPool(replicas)  # type: ignore[arg-type]
    for member in pool.members:
        member.started()
    publisher = WeightPublisher(
        learner,
        pool,
        backend="gloo",
        bucket_bytes=1,
        timeout_s=5,
        in_flight=True,
        kv="keep",
    )
    await publisher.open(LearnerInfo(manifest=(), parameters=0))
    await publisher.publish(1)
    specs = [joiner.specs[0] for joiner in (learner, *replicas)]
    assert [spec.rank for spec in specs] == [0, 1, 2, 4]
    assert {spec.world_size for spec in specs} == {8}
