"""Where in a forward pass each sequence of a micro-batch stands.

``padded``: a row each, padded to the longest. ``packed``: as many in a row as fit into the length of the
longest, one after the other. ``one_row``: all in a single row, for kernels that compute nothing between
two sequences; a mask would cost them the square of the row. ``shared``: a row for each prompt, with all of
its answers behind it.

Invariants:
- A sequence lies in one piece, and no two overlap; shared prompts alone are apart from their answers.
- The layout of a micro-batch depends on the lengths of its sequences, in their order, and nothing else:
  the planner and ``collate`` find the same one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

Layout = Literal["padded", "packed", "one_row", "shared"]


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
    answers: tuple[int, ...] | None = None
    """First column of each answer, where it does not follow its prompt at once."""


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


def shared_row(prompt: int, answers: Sequence[int]) -> int:
    """Tokens of a row with one prompt and its answers. The last token of an answer is no input."""
    return prompt + sum(answers) - len(answers) + 1


def lay_out_shared(prompts: Sequence[Hashable], lengths: Sequence[int], answers: Sequence[int]) -> Places:
    """Places of answers whose neighbours with an equal one of ``prompts`` share it, and its row.

    ``lengths``: tokens of each one's prompt; ``answers``: of each answer.
    """
    places: list[tuple[int, int]] = []
    starts: list[int] = []
    width = end = 1
    before: Hashable | None = None
    for prompt, length, answer in zip(prompts, lengths, answers, strict=True):
        if not places or prompt != before:
            places.append((places[-1][0] + 1 if places else 0, 0))
            end = length
        else:
            places.append(places[-1])
        before = prompt
        starts.append(end)
        end += answer - 1
        width = max(width, end + 1)
    return Places(tuple(places), places[-1][0] + 1 if places else 1, width, tuple(starts))
