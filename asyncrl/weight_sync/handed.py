"""Weights handed over between two processes of one machine: buckets in memory that both have open.

The sender fills one of two buckets while the receiver copies the other out. They talk over a local socket of
their own, so that either notices at once when the other's process ends.

Invariants:
- Each push starts with its version and number of buckets, as a broadcast does: an end that is out of step
  fails with both versions named.
- A bucket is written only when it has been taken; it is read only when all of it is there.
- Nothing has a name in any file system: not the memory, which is passed on by its open descriptor or by a
  handle, and not the socket. So nothing is left behind, however an end dies.
- The other end is a process of the same user. What it says is data, never code.
- After a failure the end is closed, and the other hears so.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from asyncrl.errors import WeightSyncError
from asyncrl.weight_sync.base import PushGroupSpec, TensorSpec, plan_buckets
from asyncrl.weight_sync.broadcast import (
    MEETING_S,
    Staging,
    as_weight_sync_error,
    connect_store,
    split_bucket,
)
from asyncrl.weight_sync.verify import ChecksumBuilder, Method

dist: Any = torch.distributed

_MESSAGE_BYTES = 1 << 16
_AT_A_TIME = 2
"""Buckets in shared memory: one is filled, one is copied out."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Memory of this process that another may open."""

    memory: torch.Tensor
    """Flat, uint8."""
    handle: Mapping[str, Any]
    """What the other process needs to open it, as plain values."""
    descriptors: tuple[int, ...] = ()
    """Open files that have to be passed on beside it; whoever gets them closes them."""


class PushMemory(Protocol):
    """Where buckets lie: in host memory (shm.py) or on a GPU (ipc.py)."""

    device: torch.device
    keeps: bool
    """Whether a sender keeps it from one push to the next; else it is given back after each."""
    checksum: Method

    def offer(self, nbytes: int) -> Offer:
        """New memory. The sender closes the offer's descriptors once they are passed on."""
        ...

    def take(self, nbytes: int, handle: Mapping[str, Any], descriptors: Sequence[int]) -> torch.Tensor:
        """The memory that another process offers, open here: flat, uint8. Closes the descriptors."""
        ...

    def settle(self) -> None:
        """Return once all that was asked to be copied here has been."""
        ...

    def collect(self) -> None:
        """Give back what was dropped."""
        ...


class HandedGroup:
    """One end of a group of two: the sender is rank 0, the receiver rank 1. Made once both have met."""

    def __init__(self, spec: PushGroupSpec, memory: PushMemory, store: Any = None) -> None:
        self.spec = spec
        self.buckets = plan_buckets(spec.manifest, spec.bucket_bytes)
        self.device = memory.device
        self.wire_s = 0.0
        """Seconds of the last ``receive`` that waited for a bucket; the rest copied and summed them up."""
        self._memory = memory
        self._bytes = max((_nbytes(bucket) for bucket in self.buckets), default=0)
        self._held: list[torch.Tensor] = []
        """The buckets in shared memory, used by turns."""
        self._filling = 0
        with as_weight_sync_error(f"meeting in push group {spec.prefix!r} as rank {spec.rank}"):
            if spec.world_size != 2:
                raise WeightSyncError(
                    f"push group {spec.prefix!r} of {spec.world_size} members; expected 2, a sender and the "
                    f"receiver beside it, because weight_sync.backend is {spec.backend}"
                )
            self._wire = _meet(spec, store)

    def room(self, bucket: Sequence[TensorSpec]) -> torch.Tensor:
        """The part of shared memory that this bucket is going to be handed over in."""
        return self._view(self._filling, bucket)

    def send(self, version: int, gather: Callable[[Sequence[TensorSpec]], torch.Tensor]) -> tuple[str, int]:
        """Hand all buckets over; ``gather`` returns one bucket's tensors as one flat tensor.

        The checksum of what was sent, and its bytes. Raises WeightSyncError, at once when the receiver ends.
        """
        checksum = ChecksumBuilder(self._memory.checksum)
        with self._failing(f"handing version {version} over in push group {self.spec.prefix!r}"):
            self._announce(version)
            for i, bucket in enumerate(self.buckets):
                if i >= _AT_A_TIME:
                    self._wire.hear("taken", i - _AT_A_TIME)
                self._hand_over(i, bucket, gather, checksum)
            for i in range(max(0, len(self.buckets) - _AT_A_TIME), len(self.buckets)):
                self._wire.hear("taken", i)
            digest = checksum.hexdigest()
            if not self._memory.keeps:
                self._wire.hear("dropped", version)
                self._drop()
        return digest, sum(_nbytes(bucket) for bucket in self.buckets)

    def _hand_over(
        self,
        index: int,
        bucket: Sequence[TensorSpec],
        gather: Callable[[Sequence[TensorSpec]], torch.Tensor],
        checksum: ChecksumBuilder,
    ) -> None:
        self._filling = index
        flat, room = gather(bucket), self.room(bucket)
        if flat.data_ptr() != room.data_ptr():
            room.copy_(flat)
        self._memory.settle()
        self._wire.say({"filled": index})
        for name, tensor in split_bucket(room, bucket):  # while the receiver copies it out
            checksum.add(name, tensor)

    def receive(self, version: int, staging: Staging) -> str:
        """Fill ``staging`` with ``version``'s weights; returns their checksum.

        Raises WeightSyncError when the sender ends, or sends another version.
        """
        checksum = ChecksumBuilder(self._memory.checksum)
        self.wire_s = 0.0
        with self._failing(f"taking version {version} over in push group {self.spec.prefix!r}"):
            self._expect(version)
            for i, bucket in enumerate(self.buckets):
                began = time.perf_counter()
                self._wire.hear("filled", i)
                self.wire_s += time.perf_counter() - began
                staging.flats[i].copy_(self._view(i, bucket))
                self._memory.settle()
                self._wire.say({"taken": i})
                for name, tensor in split_bucket(staging.flats[i], bucket):
                    checksum.add(name, tensor)
            if not self._memory.keeps:
                self._drop()
                self._wire.say({"dropped": version})
        return checksum.hexdigest()

    def close(self) -> None:
        """Leave; whoever waits for this end hears so. Safe to call again, and from another thread."""
        self._wire.close()
        self._held = []

    def _announce(self, version: int) -> None:
        """Say what comes; and where, unless the receiver has that open from the push before."""
        message: dict[str, Any] = {"version": version, "buckets": len(self.buckets)}
        if self._held:
            self._wire.say(message)
            return
        offers = [self._memory.offer(self._bytes) for _ in self.buckets[:_AT_A_TIME]]
        self._held = [offer.memory for offer in offers]
        message["memory"] = [dict(offer.handle) for offer in offers]
        descriptors = [descriptor for offer in offers for descriptor in offer.descriptors]
        try:
            self._wire.say(message, descriptors)
        finally:
            _close_all(descriptors)

    def _expect(self, version: int) -> None:
        message, descriptors = self._wire.read()
        if (message.get("version"), message.get("buckets")) != (version, len(self.buckets)):
            _close_all(descriptors)
            raise WeightSyncError(
                f"out of step: the sender announced version {message.get('version')} in "
                f"{message.get('buckets')} buckets, expected version {version} in {len(self.buckets)} buckets"
            )
        handles = message.get("memory")
        if handles is None:
            return
        self._drop()
        each = len(descriptors) // max(1, len(handles))
        for i, handle in enumerate(handles):
            own = descriptors[i * each : (i + 1) * each]
            self._held.append(self._memory.take(self._bytes, handle, own))

    def _drop(self) -> None:
        self._held = []
        self._memory.collect()

    def _view(self, index: int, bucket: Sequence[TensorSpec]) -> torch.Tensor:
        held = self._held[index % _AT_A_TIME]
        return held[: _nbytes(bucket)].view(getattr(torch, bucket[0].dtype))

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        try:
            with as_weight_sync_error(doing):
                yield
        except BaseException:
            self.close()
            raise


class _Wire:
    """Short messages to and from the other end, whole or not at all."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        connection.settimeout(timeout_s)
        self._socket = connection

    def say(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)

    def read(self) -> tuple[dict[str, Any], list[int]]:
        """The next message, with the open files that came with it."""
        flags = socket.MSG_CMSG_CLOEXEC
        data, descriptors, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, _AT_A_TIME, flags)
        if not data:
            raise WeightSyncError("the other end is gone: its process ended, or it left the group")
        message: dict[str, Any] = json.loads(data)
        return message, descriptors

    def hear(self, what: str, which: int) -> None:
        """Wait for this very message."""
        message, descriptors = self.read()
        _close_all(descriptors)
        if message != {what: which}:
            raise WeightSyncError(f"out of step: heard {message}, expected {what} {which}")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other end is gone, or it was closed before
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _meet(spec: PushGroupSpec, store: Any) -> _Wire:
    """A connection to the other end. The receiver is the more patient, as in a broadcast."""
    prefixed = dist.PrefixStore(spec.prefix, store if store is not None else connect_store(spec))
    patience_s = min(spec.timeout_s, MEETING_S * (1 if spec.rank == 0 else 2))
    if spec.rank == 0:
        name = f"asyncrl-{uuid.uuid4().hex}"
        with _local_socket() as listener:
            listener.bind(f"\0{name}")  # in the kernel alone: there is no file of that name
            listener.listen(1)
            listener.settimeout(patience_s)
            prefixed.set("address", name)
            connection, _ = listener.accept()
    else:
        prefixed.wait(["address"], timedelta(seconds=patience_s))
        connection = _local_socket()
        connection.settimeout(patience_s)
        try:
            connection.connect(f"\0{prefixed.get('address').decode()}")
        except ConnectionRefusedError:
            connection.close()
            raise WeightSyncError(
                f"no learner rank listens on this machine: weight_sync.backend {spec.backend} connects a "
                "generator with the rank beside it alone; use gloo, or see to it that both share a machine"
            ) from None
    user = _user_of(connection)
    if user != os.getuid():
        connection.close()
        raise WeightSyncError(f"the other end runs as user {user}, expected {os.getuid()}, as this one does")
    return _Wire(connection, spec.timeout_s)


def _local_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _user_of(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[1])


def _nbytes(bucket: Sequence[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in bucket)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
