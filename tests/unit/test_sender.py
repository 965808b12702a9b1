"""Shards on the way to rank 0: real process groups between threads, each a rank with its part."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from asyncrl.errors import InvariantError
from asyncrl.learners.sender import PushSender, ShardCopies, ShardGroup
from asyncrl.weight_sync.base import PushGroupSpec, TensorSpec, plan_buckets
from asyncrl.weight_sync.broadcast import connect_store, create_store

MANIFEST = (
    TensorSpec("embed", (50, 8), "float32"),
    TensorSpec("half", (33,), "bfloat16"),
    TensorSpec("weight", (16, 24), "float32"),
    TensorSpec("two", (2,), "float32"),
    TensorSpec("scalar", (), "float32"),
)


class ShardedWeights:
    """Weights as one of ``ranks`` holds them with ZeRO 3: equal parts, the last ones padded."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.set(0)

    def set(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.full = {
            s.name: torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype)) for s in MANIFEST
        }

    def shards(self, bucket) -> list[Tensor]:
        found = []
        for spec in bucket:
            size = -(-spec.numel // self.ranks)
            padded = torch.full((size * self.ranks,), float("nan"), dtype=getattr(torch, spec.dtype))
            padded[: spec.numel] = self.full[spec.name].reshape(-1)
            found.append(padded[self.rank * size : (self.rank + 1) * size])
        return found


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("ranks", [2, 3])
def test_gathered_buckets_are_those_of_the_copied_weights(ranks: int, bucket_bytes: int) -> None:
    buckets = plan_buckets(MANIFEST, bucket_bytes)
    weights = [ShardedWeights(rank, ranks) for rank in range(ranks)]
    copies = [ShardCopies(buckets, w.shards) for w in weights]
    store = create_store("127.0.0.1", 20.0)
    spec = PushGroupSpec("127.0.0.1", store.port, "s", 0, ranks, "gloo", bucket_bytes, 20.0, MANIFEST)

    def join(rank: int) -> ShardGroup:
        own = store if rank == 0 else connect_store(spec)
        return ShardGroup(replace(spec, rank=rank), own, copies[rank])

    with ThreadPoolExecutor(ranks) as threads:
        groups = list(threads.map(join, range(ranks)))
        for version in (1, 2):
            for w, c in zip(weights, copies, strict=True):
                w.set(version)
                c.take(version)
                w.set(99)  # the next update is over before the push begins
            contributing = [threads.submit(group.contribute) for group in groups[1:]]
            expected = ShardedWeights(0, ranks)
            expected.set(version)
            for bucket in buckets:
                found = groups[0].gather(bucket)
                wanted = torch.cat([expected.full[s.name].reshape(-1) for s in bucket])
                assert torch.equal(found, wanted)
            for future in contributing:
                future.result(20)
        for group in groups:
            group.close()
            group.close()


class FlatWeights:
    """Whole tensors as ZeRO 1 and 2 keep them: views of one buffer, which may move."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.move()

    def move(self, names: tuple[str, ...] = ()) -> None:
        """To new memory, ``names`` each to its own; the old is overwritten."""
        old = list(self.tensors.values())
        size = sum(s.numel for s in FLAT)
        views = torch.empty(size).split([s.numel for s in FLAT])
        self.tensors = {
            s.name: torch.empty(s.numel) if s.name in names else view
            for s, view in zip(FLAT, views, strict=True)
        }
        for tensor in old:
            tensor.fill_(float("nan"))

    def set(self, seed: int) -> Tensor:
        expected = torch.randn(sum(s.numel for s in FLAT), generator=torch.Generator().manual_seed(seed))
        for tensor, values in zip(
            self.tensors.values(), expected.split([s.numel for s in FLAT]), strict=True
        ):
            tensor.copy_(values)
        return expected

    def shards(self, bucket) -> list[Tensor]:
        return [self.tensors[spec.name] for spec in bucket]


FLAT = tuple(TensorSpec(f"{i}", (size,), "float32") for i, size in enumerate((7, 1, 30, 12, 25)))


@pytest.mark.parametrize("bucket_bytes", [1, 150, 1 << 20])
def test_weights_that_move_between_two_pushes_are_found_where_they_are(bucket_bytes: int) -> None:
    buckets = plan_buckets(FLAT, bucket_bytes)
    weights = FlatWeights()
    copies = ShardCopies(buckets, weights.shards)
    addresses = [flat.data_ptr() for flat in copies.flats]
    for version, moved in enumerate([None, (), ("1",), ("0", "4"), ()]):
        if moved is not None:
            weights.move(moved)
        expected = weights.set(version)
        copies.take(version)
        assert torch.equal(torch.cat([copies.flat(bucket) for bucket in buckets]), expected)
        weights.set(99)
        assert torch.equal(torch.cat([copies.flat(bucket) for bucket in buckets]), expected)
    assert [flat.data_ptr() for flat in copies.flats] == addresses


def test_weights_are_converted_to_the_dtype_that_travels() -> None:
    manifest = tuple(replace(spec, dtype="bfloat16") for spec in FLAT)
    weights = FlatWeights()
    expected = weights.set(0)
    (bucket,) = buckets = plan_buckets(manifest, 1 << 20)
    copies = ShardCopies(buckets, weights.shards)
    copies.take(0)
    assert torch.equal(copies.flat(bucket), expected.bfloat16())


def test_shards_of_other_sizes_are_refused() -> None:
    weights = FlatWeights()
    copies = ShardCopies(plan_buckets(FLAT, 1 << 20), weights.shards)
    weights.tensors |= {"0": torch.zeros(8), "2": torch.zeros(29)}
    with pytest.raises(
        InvariantError, match=r"\[8, 1, 29, 12, 25\] elements.* made for \[7, 1, 30, 12, 25\]"
    ):
        copies.take(0)
    assert copies.version is None


def test_only_the_version_that_was_copied_out_can_be_sent() -> None:
    weights = ShardedWeights(0, 1)
    buckets = plan_buckets(MANIFEST, 1 << 20)
    without = PushSender(weights, buckets, rank=0, ranks=1, sharded=False, overlap=False)
    with pytest.raises(InvariantError, match=r"copy version 1 out, but weight_sync.overlap is off"):
        without.copy_out(1)
    sender = PushSender(weights, buckets, rank=0, ranks=1, sharded=False, overlap=True)
    store = create_store("127.0.0.1", 20.0)
    spec = PushGroupSpec("127.0.0.1", store.port, "p", 0, 1, "gloo", 1 << 20, 20.0, MANIFEST)
    with pytest.raises(InvariantError, match=r"other buckets than the 3 of the sender.* here 100 bytes"):
        sender.open(replace(spec, bucket_bytes=100), store)
    sender.open(spec, store)
    with pytest.raises(InvariantError, match="send version 1, the copies hold None"):
        sender.send(1)
    sender.copy_out(1)
    assert sender.shard_bytes == sum(s.nbytes for s in MANIFEST)
    with pytest.raises(InvariantError, match="send version 2, the copies hold 1"):
        sender.send(2)
    report = sender.send(1)
    assert report is not None
    assert (report.version, report.nbytes) == (1, sender.shard_bytes)
    sender.close()


def test_channels_gather_the_same_copies_in_groups_of_their_own() -> None:
    weights = [ShardedWeights(rank, 2) for rank in range(2)]
    buckets = plan_buckets(MANIFEST, 200)
    senders = [
        PushSender(w, buckets, rank=rank, ranks=2, sharded=True, overlap=True)
        for rank, w in enumerate(weights)
    ]
    store = create_store("127.0.0.1", 20.0)

    def spec(prefix: str) -> PushGroupSpec:
        return PushGroupSpec("127.0.0.1", store.port, prefix, 0, 1, "gloo", 200, 20.0, MANIFEST)

    with ThreadPoolExecutor(2) as threads:

        def both(act) -> list:
            return [future.result(20) for future in [threads.submit(act, sender) for sender in senders]]

        both(lambda sender: sender.copy_out(4))
        both(lambda sender: sender.open(spec("reference1"), store, "reference"))
        found = []
        # The generators' group is built anew, the reference's stands.
        for prefix in ("push1", "push2"):
            both(lambda sender, prefix=prefix: sender.open(spec(prefix), store))
            found += both(lambda sender: sender.send(4))
        found += both(lambda sender: sender.send(4, "reference"))
        reports = [report for report in found if report is not None]
        assert [report.version for report in reports] == [4] * 3
        assert len({report.checksum for report in reports}) == 1
        both(lambda sender: sender.close())
