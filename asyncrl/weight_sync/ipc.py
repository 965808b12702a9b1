"""Memory of a GPU that two processes have open, by CUDA IPC: for weights that a learner rank hands over.

No byte leaves the device. The sender's two buckets are its only memory beside the weights, and are given
back after each push, before the generator gets the rest of the device.

Invariants:
- A handle travels as plain values. What is opened by it is memory of CUDA and nothing else.
- Both processes see the device under the index of their own; the memory is opened on the receiver's.
- A copy is complete on the device before the other end hears of it: neither waits for the other's stream.
- The receiver has let go of the memory before the sender frees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from asyncrl.weight_sync.handed import Offer
from asyncrl.weight_sync.verify import Method

_FIELDS = (
    "handle",
    "nbytes",
    "offset",
    "counter_handle",
    "counter_offset",
    "event_handle",
    "event_sync_required",
)
"""What torch says of a storage that it shares, after the device, and in the order that it takes it back."""


class DeviceMemory:
    """The ``PushMemory`` of GPUs, on this process's current device."""

    keeps = False
    checksum: Method = "sums"

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def offer(self, nbytes: int) -> Offer:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        storage: Any = memory.untyped_storage()
        _, *values = storage._share_cuda_()
        return Offer(memory, dict(zip(_FIELDS, map(_plain, values), strict=True)))

    def take(self, nbytes: int, handle: Mapping[str, Any], descriptors: Sequence[int]) -> torch.Tensor:
        values = [_shared(handle[field]) for field in _FIELDS]
        storage: Any = torch.UntypedStorage._new_shared_cuda(self.device.index, *values)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (nbytes,), (1,))

    def settle(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def collect(self) -> None:
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _plain(value: Any) -> Any:
    """Bytes as text."""
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def _shared(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
