"""Which row comes at which place of the endless stream: plain epochs, or a mixture by weight.

Invariants:
- ``index(ordinal)`` is a pure function of the rows' indices, the seed and the ordinal.
- In each epoch of a part every row of it comes once.
- Of a mixture, each ``BLOCK`` places in a row hold each part as often as its weight says, rounded to one
  place: no run gets a mixture that was only meant on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

BLOCK = 1000
"""Places after which a mixture has its weights exactly."""


def permutation(length: int, seed: int, epoch: int) -> Indices:
    """An order of 0..length-1, (length,), the same on every machine and with every numpy.

    It sorts the raw output of Philox, whose stream numpy guarantees; ``Generator.permutation`` is
    free to change between versions.
    """
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(length)
    return np.argsort(keys, kind="stable").astype(np.int64)


class Order(Protocol):
    """A sequence of indices without end."""

    def __len__(self) -> int:
        """Rows that it goes through."""
        ...

    def index(self, ordinal: int) -> int: ...


class EpochOrder:
    """Epoch after epoch over ``indices``. ``stream``: equal seeds of different streams differ by it."""

    def __init__(self, indices: Indices, *, seed: int, shuffle: bool, stream: int = 0) -> None:
        if len(indices) == 0:
            raise ValueError("found no indices; expected at least one row")
        self._indices = indices
        self._seed = seed
        self._shuffle = shuffle
        self._stream = stream
        # Two, because ordinals from both sides of an epoch's end are asked for in turn.
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def __len__(self) -> int:
        return len(self._indices)

    def index(self, ordinal: int) -> int:
        epoch, position = divmod(ordinal, len(self))
        return int(self._order(epoch)[position])

    def _epoch_order(self, epoch: int) -> Indices:
        if not self._shuffle:
            return self._indices
        order: Indices = self._indices[permutation(len(self), self._seed, (self._stream << 32) + epoch)]
        return order


class WeightedOrder:
    """Places dealt out to ``parts`` by their ``weights``; each part goes through its rows at its own pace."""

    def __init__(
        self, parts: Sequence[EpochOrder], weights: Sequence[float], *, seed: int, shuffle: bool
    ) -> None:
        self._parts = tuple(parts)
        self.counts = places(weights)
        """Places of each part in a block."""
        self._seed = seed
        self._shuffle = shuffle
        self._block = lru_cache(maxsize=2)(self._dealt)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def index(self, ordinal: int) -> int:
        block, position = divmod(ordinal, BLOCK)
        owners, turns = self._block(block)
        owner = int(owners[position])
        return self._parts[owner].index(block * self.counts[owner] + int(turns[position]))

    def _dealt(self, block: int) -> tuple[Indices, Indices]:
        """Of each place: the part that has it, and which of the part's places in this block it is."""
        # The k-th of a part's n places belongs at (k + 1/2) / n of the block.
        marks = np.concatenate([(np.arange(n) + 0.5) / n for n in self.counts])
        owners = np.repeat(np.arange(len(self.counts)), self.counts)[np.argsort(marks, kind="stable")]
        if self._shuffle:
            owners = owners[permutation(BLOCK, self._seed, (1 << 48) + block)]
        turns = np.empty(BLOCK, np.int64)
        for owner, count in enumerate(self.counts):
            turns[owners == owner] = np.arange(count)
        return owners.astype(np.int64), turns


def places(weights: Sequence[float]) -> tuple[int, ...]:
    """``BLOCK`` places shared out by ``weights``: rounded down, the rest to the largest remainders."""
    shares = np.asarray(weights, np.float64) * (BLOCK / sum(weights))
    counts = np.maximum(np.floor(shares + 1e-9), 1).astype(np.int64)
    for owner in np.argsort(counts - shares, kind="stable")[: max(BLOCK - int(counts.sum()), 0)]:
        counts[owner] += 1
    return tuple(int(count) for count in counts)
