"""Room for the buckets of a push, one on the wire and one being filled or unpacked.

Invariant: a sender or a receiver that takes all its room from one ``TwoBuffers`` holds twice its largest
bucket, whatever its allocator does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.weight_sync.base import TensorSpec


class TwoBuffers:
    """Memory for two buckets, used by turns: new pages for each would cost as much as filling them."""

    def __init__(self, buckets: Sequence[Sequence[TensorSpec]], device: torch.device) -> None:
        largest = max((sum(spec.nbytes for spec in bucket) for bucket in buckets), default=0)
        self._buffers = [
            torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(min(2, len(buckets)))
        ]
        self._turn = 0

    def next(self, bucket: Sequence[TensorSpec]) -> Tensor:
        """A flat tensor for this bucket; what the last but one call returned is overwritten."""
        self._turn = (self._turn + 1) % len(self._buffers)
        nbytes = sum(spec.nbytes for spec in bucket)
        return self._buffers[self._turn][:nbytes].view(getattr(torch, bucket[0].dtype))
