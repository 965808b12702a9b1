"""The two ways of a push, behind one seam: a broadcast over a process group, or memory that is handed over.

Sender and receivers ask for a group by its spec, and do the same with either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from asyncrl.weight_sync.base import BESIDE, PushGroupSpec, TensorSpec
from asyncrl.weight_sync.broadcast import PushGroup, Staging
from asyncrl.weight_sync.handed import HandedGroup, PushMemory
from asyncrl.weight_sync.ipc import DeviceMemory
from asyncrl.weight_sync.shm import HostMemory

Gather = Callable[[Sequence[TensorSpec]], torch.Tensor]
"""Gives one bucket's tensors as one flat tensor."""


class WeightGroup(Protocol):
    """One end of a push group. All calls block, each for ``spec.timeout_s`` at most."""

    spec: PushGroupSpec
    buckets: list[list[TensorSpec]]
    device: torch.device
    """Where the bytes of a push lie."""
    wire_s: float
    """Seconds of the last ``receive`` that waited for bytes."""

    def room(self, bucket: Sequence[TensorSpec]) -> torch.Tensor | None:
        """Inside ``send``: where the bucket that it asks for is best gathered to; None: anywhere."""
        ...

    def send(self, version: int, gather: Gather) -> tuple[str, int]:
        """Send all buckets; the checksum of what was sent, and its bytes. Raises WeightSyncError."""
        ...

    def receive(self, version: int, staging: Staging) -> str:
        """Fill ``staging``; the checksum of what arrived. Raises WeightSyncError."""
        ...

    def close(self) -> None:
        """Leave. Safe to call when the peers are gone, and again."""
        ...


def join_group(spec: PushGroupSpec, store: Any = None) -> WeightGroup:
    """Meet the other members of ``spec``'s group at ``store``, by default a new connection to it.

    Raises WeightSyncError.
    """
    if spec.backend not in BESIDE:
        return PushGroup(spec, store)
    memory: PushMemory = DeviceMemory() if spec.backend == "ipc" else HostMemory()
    return HandedGroup(spec, memory, store)
