"""Weights that are handed over in memory: whole, or not at all and at once; and nothing is left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch

from asyncrl.errors import WeightSyncError
from asyncrl.learners.sender import PushSender
from asyncrl.weight_sync.base import HAS_SHM, PushGroupSpec, TensorSpec, plan_buckets
from asyncrl.weight_sync.broadcast import Staging, connect_store, create_store, make_staging
from asyncrl.weight_sync.handed import HandedGroup
from asyncrl.weight_sync.transport import WeightGroup, join_group

pytestmark = pytest.mark.skipif(not HAS_SHM, reason="shared memory without a name is Linux's")
MANIFEST = (
    TensorSpec("embed", (50, 8), "float32"),
    TensorSpec("half", (33,), "bfloat16"),
    TensorSpec("weight", (16, 24), "float32"),
    TensorSpec("bias", (24,), "float32"),
    TensorSpec("scalar", (), "float32"),
)
TIMEOUT_S = 20.0
AT_ONCE_S = 5.0
STARTS_WITHIN_S = 300.0


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {s.name: torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype)) for s in MANIFEST}


def gather(tensors: dict[str, torch.Tensor]):
    return lambda bucket: torch.cat([tensors[spec.name].reshape(-1) for spec in bucket])


def staging(bucket_bytes: int) -> Staging:
    return make_staging(plan_buckets(MANIFEST, bucket_bytes), torch.device("cpu"))


def spec_at(port: int, *, bucket_bytes: int = 200, slots: tuple[int, ...] = (0,)) -> PushGroupSpec:
    return PushGroupSpec(
        "127.0.0.1", port, "push1", 0, 2, "shm", bucket_bytes, TIMEOUT_S, MANIFEST, slots=slots
    )


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    open_files = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    mapped = Path("/proc/self/maps").read_text()
    assert not any("asyncrl-weights" in name for name in (*open_files, *mapped.splitlines()))


def join(threads: ThreadPoolExecutor, bucket_bytes: int = 200) -> tuple[WeightGroup, WeightGroup]:
    store = create_store("127.0.0.1", TIMEOUT_S)
    spec = spec_at(store.port, bucket_bytes=bucket_bytes)
    sending = threads.submit(join_group, spec.of_slot(0, 0), store)
    receiver = join_group(spec.of_slot(0, 1))
    return sending.result(TIMEOUT_S), receiver


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_the_receiver_holds_the_senders_bits(threads: ThreadPoolExecutor, bucket_bytes: int) -> None:
    sender, receiver = join(threads, bucket_bytes)
    for version in (1, 2, 3):
        sent, staged = weights(version), staging(bucket_bytes)
        receiving = threads.submit(receiver.receive, version, staged)
        checksum, nbytes = sender.send(version, gather(sent))
        assert receiving.result(TIMEOUT_S) == checksum
        assert nbytes == sum(spec.nbytes for spec in MANIFEST)
        assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in sent.items())
    sender.close()
    receiver.close()


def test_a_bucket_is_gathered_in_shared_memory_two_at_a_time(threads: ThreadPoolExecutor) -> None:
    sender, receiver = join(threads, bucket_bytes=1)
    places: list[int] = []

    def into_room(bucket: Sequence[TensorSpec]) -> torch.Tensor:
        room = sender.room(bucket)
        assert room is not None
        places.append(room.data_ptr())
        return torch.cat([values[spec.name].reshape(-1) for spec in bucket], out=room)

    values = weights(1)
    for version in (1, 2):
        receiving = threads.submit(receiver.receive, version, staging(1))
        checksum, _ = sender.send(version, into_room)
        assert receiving.result(TIMEOUT_S) == checksum
    first, second = places[:2]
    assert first != second
    assert places == [first, second, first, second, first] * 2, "new memory, or none that is free"
    sender.close()
    receiver.close()


def test_an_end_that_is_out_of_step_names_both_versions_and_the_other_hears_at_once(
    threads: ThreadPoolExecutor,
) -> None:
    sender, receiver = join(threads, bucket_bytes=1)
    sending = threads.submit(sender.send, 8, gather(weights(0)))
    with pytest.raises(WeightSyncError, match=r"announced version 8 .* expected version 7"):
        receiver.receive(7, staging(1))
    with pytest.raises(WeightSyncError, match=r"handing version 8 over in push group 'push1-0'|gone"):
        sending.result(AT_ONCE_S)


def test_an_end_that_leaves_ends_the_others_wait(threads: ThreadPoolExecutor) -> None:
    sender, receiver = join(threads)
    receiving = threads.submit(receiver.receive, 1, staging(200))
    sender.close()
    with pytest.raises(WeightSyncError, match="the other end is gone"):
        receiving.result(AT_ONCE_S)
    receiver.close()
    receiver.close()


def test_a_receiver_that_never_comes_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.weight_sync import handed

    monkeypatch.setattr(handed, "MEETING_S", 0.3)
    store = create_store("127.0.0.1", TIMEOUT_S)
    with pytest.raises(WeightSyncError, match=r"meeting in push group 'push1-0' as rank 0 failed after 0\."):
        join_group(spec_at(store.port).of_slot(0, 0), store)


def test_a_group_of_more_than_two_is_refused() -> None:
    store = create_store("127.0.0.1", TIMEOUT_S)
    with pytest.raises(WeightSyncError, match="of 3 members; expected 2"):
        join_group(replace(spec_at(store.port), world_size=3), store)


def _take_over(port: int, deaf: bool, ready: Event) -> None:
    """A receiver in a process of its own; ``deaf``: it takes nothing that it is sent."""
    ready.set()  # all is imported
    group = join_group(spec_at(port, bucket_bytes=1).of_slot(0, 1))
    version = 0
    while True:
        version += 1
        if deaf:
            signal.pause()
        group.receive(version, staging(1))


@pytest.mark.parametrize("deaf", [False, True], ids=["between two pushes", "in the middle of one"])
def test_a_killed_receiver_is_noticed_at_once_and_leaves_nothing_behind(
    threads: ThreadPoolExecutor, deaf: bool
) -> None:
    store = create_store("127.0.0.1", TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_take_over, args=(store.port, deaf, ready))
    process.start()
    assert ready.wait(STARTS_WITHIN_S)
    group = join_group(spec_at(store.port, bucket_bytes=1).of_slot(0, 0), store)
    if not deaf:
        group.send(1, gather(weights(1)))
    early = threads.submit(group.send, 1, gather(weights(1))) if deaf else None
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    began = time.monotonic()
    sending = early or threads.submit(group.send, 2, gather(weights(2)))
    with pytest.raises(WeightSyncError, match="handing version"):
        sending.result(TIMEOUT_S)
    assert time.monotonic() - began < AT_ONCE_S


class WholeWeights:
    """What a rank below ZeRO 3 has; it counts what it was asked to gather, and for whom."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.asked: list[bool] = []

    def gather_bucket(self, bucket, into=None, *, everywhere=False):
        self.asked.append(everywhere)
        if self.rank and not everywhere:
            return None
        return torch.cat([weights(1)[spec.name].reshape(-1) for spec in bucket], out=into)


def test_every_rank_sends_to_the_receiver_beside_it_and_only_there(threads: ThreadPoolExecutor) -> None:
    """Of three ranks, the last has lost its receiver: it takes part, and sends nothing."""
    store = create_store("127.0.0.1", TIMEOUT_S)
    spec = spec_at(store.port, slots=(0, 1))
    buckets = plan_buckets(MANIFEST, spec.bucket_bytes)
    ranks = [WholeWeights(rank) for rank in range(3)]
    senders = [
        PushSender(weights, buckets, rank=i, ranks=3, sharded=False, overlap=False)  # type: ignore[arg-type]
        for i, weights in enumerate(ranks)
    ]
    joining: list[Future[WeightGroup]] = [
        threads.submit(join_group, spec.of_slot(slot, 1)) for slot in (0, 1)
    ]
    for i, sender in enumerate(senders):
        sender.open(spec, store if i == 0 else connect_store(spec))
    receivers = [future.result(TIMEOUT_S) for future in joining]
    staged = [staging(spec.bucket_bytes) for _ in receivers]
    receiving = [threads.submit(r.receive, 1, s) for r, s in zip(receivers, staged, strict=True)]
    reports = [sender.send(1) for sender in senders]
    sums = [future.result(TIMEOUT_S) for future in receiving]
    assert [report and report.checksum for report in reports] == [sums[0], sums[0], None]
    assert sums[0] == sums[1]
    for held in staged:
        assert all(torch.equal(held.tensors[name], tensor) for name, tensor in weights(1).items())
    assert [rank.asked for rank in ranks] == [
        [True] * len(buckets),
        [True] * len(buckets),
        [True] * len(buckets),
    ]
    for sender in senders:
        sender.close()
    assert all(isinstance(receiver, HandedGroup) for receiver in receivers)
    for receiver in receivers:
        receiver.close()
