"""Host memory that two processes have open: for weights that a learner rank hands over on a CPU.

Invariants:
- It has no name. It lives as long as someone has it open, so that no death leaves any behind; and it is no
  part of ``/dev/shm``, which containers make small.
- Linux alone has it (``memfd_create``): see ``HAS_SHM``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.weight_sync.handed import Offer
from asyncrl.weight_sync.verify import Method


class HostMemory:
    """The ``PushMemory`` of CPUs: kept from push to push, since new pages cost as much as filling them."""

    device = torch.device("cpu")
    keeps = True
    checksum: Method = "xxh3"

    def offer(self, nbytes: int) -> Offer:
        descriptor = os.memfd_create("asyncrl-weights", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        return Offer(_mapped(descriptor, nbytes), {}, (descriptor,))

    def take(self, nbytes: int, handle: Mapping[str, Any], descriptors: Sequence[int]) -> torch.Tensor:
        """Raises WeightSyncError where what came is no memory of this size."""
        try:
            sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
            if sizes != [nbytes]:
                raise WeightSyncError(f"got memory of {sizes} bytes for a bucket, expected [{nbytes}]")
            return _mapped(descriptors[0], nbytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def settle(self) -> None:
        """Nothing: a copy on a CPU is done when it returns."""

    def collect(self) -> None:
        """Nothing: memory goes with the last tensor on it."""


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    """The memory behind an open file; it stays mapped as long as the tensor lives."""
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
