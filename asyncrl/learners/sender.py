"""The sending half of weight pushes, inside the process of one learner rank.

A push either happens between two updates, reading the parameters themselves, or beside them
(``weight_sync.overlap``): then ``copy_out`` copies the rank's own shard at the step's boundary, which
is all that training waits for, and ``send`` works from the copies, in a thread of its own.

Invariants:
- What is sent as version v are the bytes that the parameters had when v was complete, whatever step
  runs meanwhile. A push that is sent again sends the same copy.
- The copies are allocated once; each rank holds its shard alone.
- Beside shard and copy, rank 0 holds two buckets, into which everything arrives; the others at most a part of
  one tensor, where it travels in another dtype.
- Each channel has a push group of its own: a rebuilt one, or a broken one, touches no other channel's.
- A push that fails on rank 0 leaves no other rank waiting for it: they fail, or have been served.
- Where weights are handed over between neighbours, each rank that has a receiver beside it sends to that one,
  all of them the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import InvariantError
from asyncrl.learners.base import LearnerRank, PushReport
from asyncrl.learners.gathering import collect
from asyncrl.learners.runs import adjacent_runs, copy_run
from asyncrl.weight_sync.base import BESIDE, Channel, PushGroupSpec, TensorSpec, plan_buckets
from asyncrl.weight_sync.broadcast import as_weight_sync_error, connect_store, create_group
from asyncrl.weight_sync.buffers import TwoBuffers
from asyncrl.weight_sync.transport import WeightGroup, join_group

Bucket = Sequence[TensorSpec]


class PushSender:
    """Pushes for one rank of ``ranks``; ``sharded`` says that each holds a part of every tensor.

    ``learner`` is started, ``buckets`` are those of every push group to come. All calls block. Every
    rank gets the same calls in the same order, ``copy_out`` between two updates; with ``overlap``,
    ``open`` and ``send`` may run beside an update.
    """

    def __init__(
        self,
        learner: LearnerRank,
        buckets: list[list[TensorSpec]],
        *,
        rank: int,
        ranks: int,
        sharded: bool,
        overlap: bool,
    ) -> None:
        self._learner = learner
        self._rank = rank
        self._ranks = ranks
        self._gathers = sharded and ranks > 1
        self._buckets = buckets
        self._copies = ShardCopies(buckets, learner.shards) if overlap else None
        self._buffers: TwoBuffers | None = None
        self._lines: dict[Channel, _Line] = {}

    @property
    def shard_bytes(self) -> int:
        """Size of this rank's copies; 0 where it has no part in them."""
        return 0 if self._copies is None else sum(flat.nbytes for flat in self._copies.flats)

    def open(self, spec: PushGroupSpec, store: Any = None, channel: Channel = "generators") -> None:
        """Leave the channel's push group before, if any, and join this one: rank 0 that of the receivers,
        and with copies of shards all ranks one of their own; or each rank its receiver's, which is beside
        it. ``store`` is the one that rank 0 serves.

        Raises WeightSyncError, and InvariantError where the group would have other buckets.
        """
        if channel in self._lines:
            self._lines.pop(channel).close()
        if plan_buckets(spec.manifest, spec.bucket_bytes) != self._buckets:
            raise InvariantError(
                f"push group {spec.prefix!r} has other buckets than the {len(self._buckets)} of the sender: "
                f"make both from one manifest and one bucket size, here {spec.bucket_bytes} bytes"
            )
        line = self._lines[channel] = _Line()
        if spec.backend in BESIDE:
            line.beside = True
            if self._rank in spec.slots:
                line.group = join_group(spec.of_slot(self._rank, 0), store)
            return
        if self._copies is not None and self._gathers:
            store = store if self._rank == 0 else connect_store(spec)
            own = replace(
                spec,
                prefix=f"{spec.prefix}-shards",
                rank=self._rank,
                world_size=self._ranks,
                backend="nccl" if self._copies.device.type == "cuda" else "gloo",
            )
            line.shards = ShardGroup(own, store, self._copies)
        if self._rank == 0:
            line.group = join_group(spec, store)

    def copy_out(self, version: int) -> float:
        """Copy this rank's shard as ``version``; returns the seconds that it took."""
        if self._copies is None:
            raise InvariantError(f"asked to copy version {version} out, but weight_sync.overlap is off")
        return self._copies.take(version)

    def send(self, version: int, channel: Channel = "generators") -> PushReport | None:
        """Send ``version`` to all receivers of ``channel``; the report, on ranks that send to any.

        Raises WeightSyncError.
        """
        start = time.perf_counter()
        line = self._lines.get(channel, _Line())
        if self._copies is not None:
            found = self._send_copies(version, self._copies, line)
        else:
            found = self._send_parameters(version, line)
        return None if found is None else PushReport(version, *found, time.perf_counter() - start)

    def close(self) -> None:
        """Leave all groups. The copies stay, for a push that is sent again."""
        while self._lines:
            self._lines.popitem()[1].close()

    def _send_parameters(self, version: int, line: _Line) -> tuple[str, int] | None:
        """Who has receivers sends; where parameters are sharded, the others help to gather buckets."""
        group = line.group
        if group is None:
            assert line.beside or self._rank != 0, "open() comes first"
            for bucket in self._buckets:
                self._learner.gather_bucket(bucket, everywhere=line.beside)
            return None
        left = list(self._buckets)

        def gather(bucket: Bucket) -> Tensor:
            room = group.room(bucket)
            into = self._room(bucket) if room is None else room
            flat = self._learner.gather_bucket(left.pop(0), into, everywhere=line.beside)
            assert flat is not None, "who sends has every bucket"
            return flat

        try:
            return group.send(version, gather)
        finally:
            # After a failure: the other ranks do not know of it, and gather to the end.
            for bucket in left if self._gathers else ():
                self._learner.gather_bucket(bucket, everywhere=line.beside)

    def _send_copies(self, version: int, copies: ShardCopies, line: _Line) -> tuple[str, int] | None:
        if copies.version != version:
            raise InvariantError(
                f"asked to send version {version}, the copies hold {copies.version}: copy_out() first"
            )
        with copies.reading():
            if self._rank != 0:
                if line.shards is not None:
                    line.shards.contribute()
                return None
            assert line.group is not None, "open() comes first"
            shards = line.shards
            try:
                if shards is None:
                    return line.group.send(version, copies.flat)
                return line.group.send(version, lambda bucket: shards.gather(bucket, self._room(bucket)))
            except BaseException:
                if shards is not None:
                    shards.close()  # which the other ranks notice at once
                raise

    def _room(self, bucket: Bucket) -> Tensor:
        """Host memory for a bucket, valid until the next but one is asked for."""
        if self._buffers is None:
            self._buffers = TwoBuffers(self._buckets, torch.device("cpu"))
        return self._buffers.next(bucket)


class ShardCopies:
    """A copy of one rank's shard, one flat tensor a bucket, in the buckets' order and dtype."""

    def __init__(self, buckets: list[list[TensorSpec]], shards: Callable[[Bucket], list[Tensor]]) -> None:
        self.buckets = buckets
        self.version: int | None = None
        """The version that the copies hold."""
        self.device = torch.device("cpu")
        self.sizes: list[list[int]] = []
        """Elements of this rank's part of each tensor, by bucket; [] where it has none."""
        self.flats: list[Tensor] = []
        self._shards = shards
        self._stream: torch.cuda.Stream | None = None
        self._index = {bucket[0].name: i for i, bucket in enumerate(buckets)}
        for bucket in buckets:
            found = shards(bucket)
            self.device = found[0].device if found else self.device
            sizes = [shard.numel() for shard in found]
            # Zeros, written: the first copy would pay for the pages otherwise.
            flat = torch.empty(sum(sizes), dtype=getattr(torch, bucket[0].dtype), device=self.device).zero_()
            self.sizes.append(sizes)
            self.flats.append(flat)
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def take(self, version: int) -> float:
        """Overwrite the copies with the parameters of now; seconds, the device's work included."""
        start = time.perf_counter()
        self.version = None  # of neither version, should it fail half-way
        for bucket, sizes, flat in zip(self.buckets, self.sizes, self.flats, strict=True):
            if flat.numel():
                self._copy(bucket, sizes, flat)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.version = version
        return time.perf_counter() - start

    def _copy(self, bucket: Bucket, sizes: list[int], flat: Tensor) -> None:
        found = self._shards(bucket)
        if [shard.numel() for shard in found] != sizes:
            raise InvariantError(
                f"the shards of the bucket of {bucket[0].name!r} have {[s.numel() for s in found]} elements, "
                f"the copies were made for {sizes}: make a new sender when the shards change"
            )
        runs = adjacent_runs(found)
        for target, run in zip(torch.split(flat, [run.numel() for run in runs]), runs, strict=True):
            copy_run(target, run)

    def flat(self, bucket: Bucket) -> Tensor:
        """The copy itself of a bucket: all of it on a rank that holds whole tensors, else its parts."""
        return self.flats[self.index(bucket)]

    def index(self, bucket: Bucket) -> int:
        """Which of ``buckets`` this is."""
        return self._index[bucket[0].name]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Reads happen on a stream of their own, which does not wait for the updates' work."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield


class ShardGroup:
    """A process group of all ranks, apart from the one that trains: brings shards to rank 0."""

    def __init__(self, spec: PushGroupSpec, store: Any, copies: ShardCopies) -> None:
        self._spec = spec
        self._copies = copies
        with self._errors("joining"):
            from torch.distributed import PrefixStore  # type: ignore[attr-defined]

            self._store = store  # the group uses it as long as it lives
            self._group: Any = create_group(PrefixStore(spec.prefix, store), spec)

    def contribute(self) -> None:
        """Send this rank's part of every bucket to rank 0."""
        with self._errors("sending shards in"):
            for bucket in self._copies.buckets:
                self._collect(bucket, None)

    def gather(self, bucket: Bucket, into: Tensor | None = None) -> Tensor:
        """One bucket, whole, on rank 0: in ``into``, if that lies where the copies do."""
        own = self._copies.flat(bucket)
        if into is None or into.device != own.device:
            into = own.new_empty(sum(spec.numel for spec in bucket))
        with self._errors("gathering shards in"):
            self._collect(bucket, into)
        return into

    def _collect(self, bucket: Bucket, whole: Tensor | None) -> None:
        own, sizes = self._copies.flat(bucket), self._copies.sizes[self._copies.index(bucket)]
        numels = [spec.numel for spec in bucket]
        collect(self._group, self._spec.rank, numels, torch.split(own, sizes), own.dtype, whole)

    def close(self) -> None:
        """Leave the group; ranks that wait in it fail. Safe to call twice, and from another thread."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _errors(self, doing: str) -> Any:
        return as_weight_sync_error(f"{doing} shard group {self._spec.prefix!r} as rank {self._spec.rank}")


@dataclass(slots=True)
class _Line:
    """The groups of one channel that this rank is in."""

    group: WeightGroup | None = None
    """With the receivers: on rank 0, or on each rank that has one beside it."""
    beside: bool = False
    """Whether each rank sends to its neighbour."""
    shards: ShardGroup | None = None
    """Of all ranks, where shards are gathered from copies."""

    def close(self) -> None:
        for group in (self.group, self.shards):
            if group is not None:
                group.close()
        self.group = self.shards = None
