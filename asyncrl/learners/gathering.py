"""Tensors of which every rank has a part, brought to rank 0.

Invariants:
- What arrives is received where it belongs: rank 0 needs the room for the whole tensors and no more.
- Another rank holds a copy of one part at most, and only where parts travel in another dtype.
- Every rank does the same in the same order, tensor by tensor, so that making a part may be collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def collect(
    group: Any,
    rank: int,
    numels: Sequence[int],
    parts: Iterable[Tensor],
    dtype: torch.dtype,
    whole: Tensor | None,
) -> None:
    """Put tensors of ``numels`` elements together, one after the other, in ``whole`` on rank 0; collective.

    ``group``: a process group of all ranks. ``parts``: this rank's part of each tensor, flat, of one size on
    every rank, the last ones padded. ``whole``: (sum of numels,) of ``dtype`` on rank 0, None elsewhere.
    """
    arriving: list[Any] = []
    start = 0
    for tag, (numel, part) in enumerate(zip(numels, parts, strict=True)):
        size = part.numel()
        if whole is None:
            own = part[: max(min(size, numel - rank * size), 0)]  # without padding
            if own.numel():
                group.send([own.to(dtype)], 0, tag).wait()
            continue
        # As many pieces as there are ranks with more than padding.
        for source, piece in enumerate(torch.split(whole[start : start + numel], size)):
            if source == rank:
                piece.copy_(part[: piece.numel()])
            else:
                arriving.append(group.recv([piece], source, tag))
        start += numel
    for work in arriving:
        work.wait()
