"""What the push tests run in the ranks' processes: real ranks, a real receiver in a thread of rank 0."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.errors import WeightSyncError
from asyncrl.learners.policy_rank import PolicyRank
from asyncrl.learners.runs import adjacent_runs
from asyncrl.learners.sender import PushSender
from asyncrl.weight_sync.base import Manifest, PushGroupSpec, plan_buckets
from asyncrl.weight_sync.broadcast import PushGroup, create_store
from asyncrl.weight_sync.verify import state_checksum
from tests.e2e.deepspeed_worker import Rank, learner, share_of

BUCKET_BYTES = 1 << 14
"""Several buckets, and some tensors larger than one."""
WAIT_S = 60.0


class Pushes:
    """One rank's sender, and on rank 0 a receiver that waits until it is let go."""

    def __init__(self, sender: PushSender, manifest: Manifest, rank: int, timeout_s: float) -> None:
        self.sender = sender
        self.rank = rank
        self.threads = ThreadPoolExecutor(3)
        self.store = create_store("127.0.0.1", timeout_s) if rank == 0 else None
        port = [self.store.port if self.store is not None else None]
        dist.broadcast_object_list(port, src=0)
        self.spec = PushGroupSpec(
            "127.0.0.1", port[0], "push0", 0, 2, "gloo", BUCKET_BYTES, timeout_s, manifest
        )
        self.receiver: PushGroup | None = None
        self.generation = 0

    def open(self) -> None:
        self.generation += 1
        spec = replace(self.spec, prefix=f"push{self.generation}")
        joining = self.threads.submit(PushGroup, replace(spec, rank=1)) if self.rank == 0 else None
        self.sender.open(spec, self.store)
        self.receiver = joining.result(WAIT_S) if joining is not None else None

    def start(self, version: int, release: threading.Event) -> Future[tuple[str, str] | None]:
        """Send in one thread; receive in another, once released. Checksums of sender and receiver."""

        def receive() -> str:
            assert self.receiver is not None
            staging = {
                s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in self.spec.manifest
            }
            assert release.wait(WAIT_S)
            self.receiver.receive(version, staging)
            return state_checksum(staging.items())

        def both() -> tuple[str, str] | None:
            received = self.threads.submit(receive) if self.rank == 0 else None
            report = self.sender.send(version)
            if report is None or received is None:
                return None
            return report.checksum, received.result(WAIT_S)

        return self.threads.submit(both)


def make_sender(at: Rank, rank: PolicyRank, manifest: Manifest, *, overlap: bool) -> PushSender:
    buckets = plan_buckets(manifest, BUCKET_BYTES)
    sharded = rank._engine.is_sharded or at.tensor_parallel > 1
    return PushSender(rank, buckets, rank=at.rank, ranks=at.ranks, sharded=sharded, overlap=overlap)


def push_beside_updates(at: Rank, updates: int) -> dict[str, Any]:
    """Each version is received only when the update after it is over."""
    with learner(at) as (rank, manifest):
        sender = make_sender(at, rank, manifest, overlap=True)
        pushes = Pushes(sender, manifest, at.rank, WAIT_S)
        pushes.open()
        held, sent, addresses, sizes = [], [], set(), []
        rank.step(share_of(at, 0))
        shards = [rank.shards(bucket) for bucket in plan_buckets(manifest, BUCKET_BYTES)]
        for version in range(1, updates + 1):
            held.append(rank.checksum())
            sender.copy_out(version)
            release = threading.Event()
            push = pushes.start(version, release)
            rank.step(share_of(at, version))
            release.set()
            sent.append(push.result(WAIT_S))
            assert sender._copies is not None
            addresses.add(tuple(flat.data_ptr() for flat in sender._copies.flats))
            sizes.append(sum(flat.numel() for flat in sender._copies.flats))
        sender.close()
        return {
            "held": held,
            "sent": sent,
            "allocations": len(addresses),
            "copied": sizes[0],
            "tensors": [len(found) for found in shards],
            "runs": [len(adjacent_runs(found)) for found in shards],
        }


def push_to_a_receiver_that_dies(at: Rank, overlap: bool) -> dict[str, Any]:
    """The receiver leaves in the middle; the push is sent again in a new group, beside an update."""
    with learner(at) as (rank, manifest):
        sender = make_sender(at, rank, manifest, overlap=overlap)
        pushes = Pushes(sender, manifest, at.rank, timeout_s=20.0)
        pushes.open()
        held = rank.checksum()
        if overlap:
            sender.copy_out(0)
        if pushes.receiver is not None:
            pushes.receiver.close()
        failure = None
        try:
            sender.send(0)
        except WeightSyncError as error:
            failure = str(error)
        if overlap:
            rank.step(share_of(at, 0))
        pushes.open()
        release = threading.Event()
        release.set()
        sent = pushes.start(0, release).result(WAIT_S)
        sender.close()
        return {"held": held, "failure": failure, "sent": sent}
