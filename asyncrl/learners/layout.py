"""Where in a forward pass each sequence of a micro-batch stands.

``padded``: a row each, padded to the longest. ``packed``: as many in a row as fit into the length of the
longest, one after the other. ``one_row``: all in a single row, for kernels that compute nothing between
two sequences; a mask would cost them the square of the row.

Invariants:
- A sequence lies in one piece, and no two overlap.
- The layout of a micro-batch depends on the lengths of its sequences, in their order, and nothing else:
  the planner and ``collate`` find the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Layout = Literal["padded", "packed", "one_row"]


@dataclass(slots=True)
class Row:
    """A row of ``width`` tokens that fills up from the left."""

    width: int
    filled: int = 0

    def fits(self, length: int) -> bool:
        return self.filled + length <= self.width

    def put(self, length: int) -> int:
        """Where a sequence of that length starts."""
        start = self.filled
        self.filled += length
        return start


@dataclass(frozen=True, slots=True)
class Places:
    """Row and first column of each sequence, and the shape of all."""

    places: tuple[tuple[int, int], ...]
    rows: int
    width: int


def lay_out(lengths: Sequence[int], layout: Layout) -> Places:
    """Places of sequences of ``lengths`` tokens, first come first served; at least one row of one token."""
    longest = max(lengths, default=1)
    if layout == "padded":
        return Places(tuple((row, 0) for row in range(len(lengths))), max(len(lengths), 1), max(longest, 1))
    width = sum(lengths) if layout == "one_row" else longest
    rows: list[Row] = []
    places = []
    for length in lengths:
        number = next((i for i, row in enumerate(rows) if row.fits(length)), len(rows))
        if number == len(rows):
            rows.append(Row(width))
        places.append((number, rows[number].put(length)))
    return Places(tuple(places), max(len(rows), 1), max((row.filled for row in rows), default=1) or 1)
