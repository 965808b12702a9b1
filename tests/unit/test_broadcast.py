"""Weights arrive whole, under the right version, or fail with a name and within the timeout."""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from asyncrl.errors import WeightSyncError
from asyncrl.weight_sync import broadcast
from asyncrl.weight_sync.base import PushGroupSpec, TensorSpec, plan_buckets
from asyncrl.weight_sync.broadcast import PushGroup, create_store

MANIFEST = (
    TensorSpec("embed", (50, 8), "float32"),
    TensorSpec("half", (33,), "bfloat16"),
    TensorSpec("weight", (16, 24), "float32"),
    TensorSpec("bias", (24,), "float32"),
    TensorSpec("scalar", (), "float32"),
)


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {s.name: torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype)) for s in MANIFEST}


def gather(tensors: dict[str, torch.Tensor]):
    return lambda bucket: torch.cat([tensors[spec.name].reshape(-1) for spec in bucket])


def staging() -> dict[str, torch.Tensor]:
    return {s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in MANIFEST}


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def join(
    threads: ThreadPoolExecutor, receivers: int, *, bucket_bytes: int = 1 << 20, timeout_s: float = 20.0
):
    store = create_store("127.0.0.1", timeout_s)
    spec = PushGroupSpec(
        host="127.0.0.1",
        port=store.port,
        prefix="push1",
        rank=0,
        world_size=receivers + 1,
        backend="gloo",
        bucket_bytes=bucket_bytes,
        timeout_s=timeout_s,
        manifest=MANIFEST,
    )
    joining: list[Future[PushGroup]] = [threads.submit(PushGroup, spec, store)]
    joining += [threads.submit(PushGroup, replace(spec, rank=i)) for i in range(1, receivers + 1)]
    return [future.result(timeout=30) for future in joining]


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_every_receiver_holds_the_senders_bits(threads: ThreadPoolExecutor, bucket_bytes: int) -> None:
    sender, *receivers = join(threads, 2, bucket_bytes=bucket_bytes)
    for version in (1, 2):
        sent = weights(version)
        staged = [staging() for _ in receivers]
        sums = [threads.submit(r.receive, version, s) for r, s in zip(receivers, staged, strict=True)]
        checksum, nbytes = sender.send(version, gather(sent))
        assert [s.result(timeout=20) for s in sums] == [checksum, checksum]
        assert nbytes == sum(spec.nbytes for spec in MANIFEST)
        for held in staged:
            assert all(torch.equal(held[name], tensor) for name, tensor in sent.items())


def test_a_receiver_out_of_step_names_both_versions(threads: ThreadPoolExecutor) -> None:
    sender, receiver = join(threads, 1, timeout_s=2.0)
    waiting = threads.submit(receiver.receive, 7, staging())
    threads.submit(sender.send, 8, gather(weights(0)))
    with pytest.raises(WeightSyncError, match=r"announced version 8 .* expected version 7"):
        waiting.result(timeout=20)
    receiver.close()
    sender.close()


def test_a_receiver_that_never_answers_fails_the_push_within_the_timeout(threads: ThreadPoolExecutor) -> None:
    sender, _receiver = join(threads, 1, timeout_s=2.0, bucket_bytes=1)
    # The receiver stays in the group and posts nothing, as one that hangs would.
    with pytest.raises(WeightSyncError, match=r"sending version 3 .* failed after 2"):
        sender.send(3, gather(weights(0)))


def test_joining_a_store_that_is_not_there_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    spec = PushGroupSpec("127.0.0.1", port, "push1", 1, 2, "gloo", 1 << 20, 1.0, MANIFEST)
    with pytest.raises(WeightSyncError, match="joining push group 'push1' as rank 1"):
        PushGroup(spec)


def test_a_sender_whose_receiver_never_comes_is_free_long_before_the_push_timeout(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "MEETING_S", 0.5)
    store = create_store("127.0.0.1", 20.0)
    spec = PushGroupSpec("127.0.0.1", store.port, "push1", 0, 3, "gloo", 1 << 20, 20.0, MANIFEST)
    first = threads.submit(PushGroup, replace(spec, rank=1))
    with pytest.raises(WeightSyncError, match=r"joining push group 'push1' as rank 0 failed after 0\.\d s"):
        PushGroup(spec, store)
    with pytest.raises(WeightSyncError, match=r"as rank 1 failed after 1\.\d s"):
        first.result(timeout=10)


def test_buckets_keep_order_dtype_and_size() -> None:
    buckets = plan_buckets(MANIFEST, 2000)
    assert [spec for bucket in buckets for spec in bucket] == list(MANIFEST)
    for bucket in buckets:
        assert len({spec.dtype for spec in bucket}) == 1
        assert len(bucket) == 1 or sum(spec.nbytes for spec in bucket) <= 2000
