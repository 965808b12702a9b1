"""Which waiting rows are prefilled together.

Invariants:
- Every row is in exactly one batch, and no batch is longer than ``max_sequence``.
- Relaxed plans waste at most ``MAX_PADDING`` of a batch's tokens on padding, alignment aside.
- Fixed plans give a row a shape that depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 8
"""Prefill lengths are rounded up to a multiple of this, to keep kernels on their fast paths."""
MAX_PADDING = 0.25
FIXED_BUCKET = 16
"""Fixed plans round lengths up to a multiple of this."""
FIXED_ROWS = 4
"""Rows of every fixed batch. Matrix kernels treat 1 to 3 rows differently from 4 or more."""


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Indices into the planned lengths, and the shape (rows, length) to run them at."""

    members: tuple[int, ...]
    rows: int
    length: int


def _round_up(length: int, multiple: int, ceiling: int) -> int:
    return min(-(-length // multiple) * multiple, ceiling)


def plan_relaxed(lengths: Sequence[int], *, max_sequence: int, max_tokens: int) -> list[PrefillBatch]:
    """Sort by length, and cut where padding or ``max_tokens`` would be exceeded."""
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    batches: list[PrefillBatch] = []
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        padded = _round_up(longest, ALIGN, max_sequence)
        total, stop = 0, start
        while stop < len(order):
            count = stop - start + 1
            total += lengths[order[stop]]
            if count > 1 and (count * padded > max_tokens or total < (1 - MAX_PADDING) * count * longest):
                break
            stop += 1
        batches.append(PrefillBatch(tuple(order[start:stop]), stop - start, padded))
        start = stop
    return batches


def plan_fixed(lengths: Sequence[int], *, max_sequence: int) -> list[PrefillBatch]:
    """Batches of exactly ``FIXED_ROWS`` rows of one bucket, filler rows at the end."""
    buckets: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        if length:
            buckets.setdefault(_round_up(length, FIXED_BUCKET, max_sequence), []).append(i)
    return [
        PrefillBatch(tuple(members[start : start + FIXED_ROWS]), FIXED_ROWS, length)
        for length, members in sorted(buckets.items())
        for start in range(0, len(members), FIXED_ROWS)
    ]
