"""Bucketed broadcast of weights from learner rank 0 to every generator worker, over nccl or gloo.

The process group is built by hand from a ``TCPStore``, because DeepSpeed and vLLM each own the
default group of their process and ``new_group`` cannot span them.

Invariants:
- One code path: the backend is a string, and tensors live where the backend needs them.
- Each push starts with a header (magic, version, number of buckets), so that a receiver that is out
  of step fails with both versions named instead of filling its weights with the wrong bytes.
- A sender holds two buckets at most: one on the wire, one being packed. So does a receiver that unpacks;
  one with a ``Staging`` gives the whole of it to the wire at once.
- All calls block and belong in a thread; each is bounded by the group's timeout.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from asyncrl.errors import WeightSyncError
from asyncrl.network import own_address
from asyncrl.weight_sync.base import PushGroupSpec, TensorSpec, plan_buckets
from asyncrl.weight_sync.buffers import TwoBuffers
from asyncrl.weight_sync.verify import ChecksumBuilder, Method

# The stores and process groups are public in the documentation, but not in the type stubs.
dist: Any = torch.distributed

_MAGIC = 0x61737263726C

MEETING_S = 30.0
"""Longest that a sender waits for its receivers to come to the store; receivers wait twice as long."""


def create_store(host: str, timeout_s: float) -> Any:
    """The meeting point of push groups, on a free port of ``host``; lives as long as the object."""
    # Bound by us to that one address: left to itself the store listens on every interface.
    listener = socket.create_server((host, 0))
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )


def connect_store(spec: PushGroupSpec) -> Any:
    """Join the store that learner rank 0 serves."""
    timeout = timedelta(seconds=spec.timeout_s)
    return dist.TCPStore(spec.host, spec.port, is_master=False, timeout=timeout)


@dataclass(frozen=True, slots=True)
class Staging:
    """Room for one version, in the buckets that it arrives in: nothing is unpacked."""

    flats: tuple[torch.Tensor, ...]
    """One flat tensor a bucket, with the bucket's dtype."""
    tensors: dict[str, torch.Tensor]
    """Views of them, by name."""


def make_staging(buckets: Sequence[Sequence[TensorSpec]], device: torch.device) -> Staging:
    """Room for ``buckets`` on ``device``."""
    flats = tuple(_flat(bucket, device) for bucket in buckets)
    views = (pair for flat, bucket in zip(flats, buckets, strict=True) for pair in split_bucket(flat, bucket))
    return Staging(flats, dict(views))


class PushGroup:
    """A process group of one sender (rank 0) and its receivers."""

    def __init__(self, spec: PushGroupSpec, store: Any = None) -> None:
        self.spec = spec
        self.buckets = plan_buckets(spec.manifest, spec.bucket_bytes)
        self.wire_s = 0.0
        """Seconds of the last ``receive`` that waited for bytes; the rest unpacked and summed them up."""
        # The bytes of nccl lie on a GPU.
        self._checksum: Method = "sums" if spec.backend == "nccl" else "xxh3"
        with as_weight_sync_error(f"joining push group {spec.prefix!r} as rank {spec.rank}"):
            # Kept: the group uses the store as long as it lives.
            self._store = store if store is not None else connect_store(spec)
            prefixed = dist.PrefixStore(spec.prefix, self._store)
            _meet(prefixed, spec)
            self._group: Any = create_group(prefixed, spec)
            self.device = torch.device("cuda" if spec.backend == "nccl" else "cpu")
            if spec.world_size > 1:
                self._broadcast(torch.zeros(1, device=self.device)).wait()

    def room(self, bucket: Sequence[TensorSpec]) -> torch.Tensor | None:
        """Anywhere: a bucket is broadcast from where it lies."""
        return None

    def send(self, version: int, gather: Callable[[Sequence[TensorSpec]], torch.Tensor]) -> tuple[str, int]:
        """Broadcast all buckets; ``gather`` returns one bucket's tensors as one flat tensor.

        When it is called, all buckets but the last have left: it may reuse their memory.

        Returns the checksum of what was sent and its bytes. Raises WeightSyncError.
        """
        checksum, nbytes = ChecksumBuilder(self._checksum), 0
        with as_weight_sync_error(f"sending version {version} in push group {self.spec.prefix!r}"):
            header = torch.tensor([_MAGIC, version, len(self.buckets)], device=self.device)
            pending = deque([self._broadcast(header)])
            for bucket in self.buckets:
                # The bucket before the last one has left: its memory is free for this one.
                while len(pending) > 1:
                    pending.popleft().wait()
                flat = gather(bucket).to(self.device)
                pending.append(self._broadcast(flat))
                for name, tensor in split_bucket(flat, bucket):
                    checksum.add(name, tensor)
                nbytes += flat.numel() * flat.element_size()
            for work in pending:
                work.wait()
        return checksum.hexdigest(), nbytes

    def receive(self, version: int, staging: Mapping[str, torch.Tensor] | Staging) -> str:
        """Fill ``staging`` with ``version``'s weights; returns their checksum.

        Into a ``Staging`` they arrive directly; into tensors by name they are copied.

        Raises WeightSyncError when the group fails or the sender sends another version.
        """
        checksum = ChecksumBuilder(self._checksum)
        self.wire_s = 0.0
        with as_weight_sync_error(f"receiving version {version} in push group {self.spec.prefix!r}"):
            header = torch.zeros(3, dtype=torch.int64, device=self.device)
            self._broadcast(header).wait()
            found = header.tolist()
            expected = [_MAGIC, version, len(self.buckets)]
            if found != expected:
                raise WeightSyncError(
                    f"out of step: the sender announced version {found[1]} in {found[2]} buckets, "
                    f"expected version {version} in {len(self.buckets)} buckets"
                )
            for bucket, flat in zip(self.buckets, self._arrivals(staging), strict=True):
                for name, tensor in split_bucket(flat, bucket):
                    if not isinstance(staging, Staging):
                        tensor = staging[name].copy_(tensor)
                    checksum.add(name, tensor)
        return checksum.hexdigest()

    def close(self) -> None:
        """Leave the group. Safe to call when peers are already gone."""
        if self._group is not None:
            self._group.abort()
            self._group = None  # its sockets close with the last reference

    def _arrivals(self, staging: Mapping[str, torch.Tensor] | Staging) -> Iterator[torch.Tensor]:
        """The buckets, each once it is there."""
        if isinstance(staging, Staging):
            # All posted at once: nothing of this process stands between two then, however busy its cores are.
            for flat, work in [(flat, self._broadcast(flat)) for flat in staging.flats]:
                self._wait(work)
                yield flat
            return
        room = TwoBuffers(self.buckets, self.device)
        following = self._post(0, room)
        for i in range(len(self.buckets)):
            flat, work = following
            self._wait(work)
            if i + 1 < len(self.buckets):
                following = self._post(i + 1, room)
            yield flat

    def _post(self, index: int, room: TwoBuffers) -> tuple[torch.Tensor, Any]:
        flat = room.next(self.buckets[index])
        return flat, self._broadcast(flat)

    def _wait(self, work: Any) -> None:
        began = time.perf_counter()
        work.wait()
        self.wire_s += time.perf_counter() - began

    def _broadcast(self, tensor: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._group.broadcast([tensor], options)


def _meet(store: Any, spec: PushGroupSpec) -> None:
    """Wait until all members are there: what builds the group has no deadline but that of a push.

    Receivers are the more patient: a sender that waited in vain for an earlier group is on its way.
    """
    seconds = min(spec.timeout_s, MEETING_S * (1 if spec.rank == 0 else 2))
    store.set(f"here{spec.rank}", "")
    store.wait([f"here{rank}" for rank in range(spec.world_size)], timedelta(seconds=seconds))


def create_group(store: Any, spec: PushGroupSpec) -> Any:
    """A process group apart from the default one, whose members meet at ``store``."""
    timeout = timedelta(seconds=spec.timeout_s)
    if spec.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, spec.rank, spec.world_size, options)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._timeout = timeout
    # Bound to the interface that the store is reached on: loopback stays loopback.
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(spec.host))]
    return dist.ProcessGroupGloo(store, spec.rank, spec.world_size, gloo)


def _flat(bucket: Sequence[TensorSpec], device: torch.device) -> torch.Tensor:
    numel = sum(spec.numel for spec in bucket)
    return torch.empty(numel, dtype=getattr(torch, bucket[0].dtype), device=device)


def split_bucket(flat: torch.Tensor, bucket: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """A bucket's tensors by name, as views of ``flat``."""
    offset = 0
    for spec in bucket:
        yield spec.name, flat[offset : offset + spec.numel].view(spec.shape)
        offset += spec.numel


@contextmanager
def as_weight_sync_error(doing: str) -> Iterator[None]:
    """Turn what torch raises inside the block into a WeightSyncError that says what was being done."""
    start = time.perf_counter()
    try:
        yield
    except WeightSyncError:
        raise
    except (RuntimeError, OSError, dist.DistError) as error:
        raise WeightSyncError(f"{doing} failed after {time.perf_counter() - start:.1f} s: {error}") from error
