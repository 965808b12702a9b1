"""The endless stream of training tasks.

Invariants:
- ``task(ordinal)`` is a pure function of the rows, the seed and the ordinal: a resumed run needs no
  cursor, and nothing that ran ahead of training can skip a row.
- Each epoch has every row once. Its order is a pure function of (seed, epoch).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import count

import numpy as np
import numpy.typing as npt

from asyncrl.data.sources import Rows
from asyncrl.data.templates import PromptTemplate
from asyncrl.types import Task

Indices = npt.NDArray[np.int64]


def permutation(length: int, seed: int, epoch: int) -> Indices:
    """An order of 0..length-1, (length,), the same on every machine and with every numpy.

    It sorts the raw output of Philox, whose stream numpy guarantees; ``Generator.permutation`` is
    free to change between versions.
    """
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(length)
    return np.argsort(keys, kind="stable").astype(np.int64)


class PromptStream:
    """Tasks 0, 1, 2, ... over the rows at ``indices``, epoch after epoch without end."""

    def __init__(
        self,
        rows: Rows,
        template: PromptTemplate,
        indices: Indices,
        *,
        name: str,
        max_prompt_tokens: int,
        seed: int,
        shuffle: bool,
        fingerprint: str = "",
    ) -> None:
        if len(indices) == 0:
            raise ValueError("found no indices; expected at least one row")
        self._rows = rows
        self._template = template
        self._indices = indices
        self._name = name
        self._max_prompt_tokens = max_prompt_tokens
        self._seed = seed
        self._shuffle = shuffle
        self.fingerprint = fingerprint
        """Equal for equal prompts in equal order: two streams of one seed are then the same."""
        # Two, because ordinals from both sides of an epoch's end are asked for in turn.
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def __len__(self) -> int:
        """Rows in an epoch."""
        return len(self._indices)

    def task(self, ordinal: int) -> Task:
        """The task at ``ordinal``, whatever was asked for before."""
        if ordinal < 0:
            raise ValueError(f"ordinal: found {ordinal}; expected 0 or more")
        epoch, position = divmod(ordinal, len(self))
        return self._task(ordinal, int(self._order(epoch)[position]))

    def iterate(self, ordinal: int = 0) -> Iterator[Task]:
        """All tasks from ``ordinal`` on; never ends."""
        return map(self.task, count(ordinal))

    def _epoch_order(self, epoch: int) -> Indices:
        if not self._shuffle:
            return self._indices
        order: Indices = self._indices[permutation(len(self), self._seed, epoch)]
        return order

    def _task(self, ordinal: int, index: int) -> Task:
        row = self._rows[index]
        text = self._template.text(row, self._rows.where(index))
        ids = self._template.encode([text])[0]
        if len(ids) > self._max_prompt_tokens:
            # Only where data.over_long is truncate_left: other policies leave no such row.
            ids = ids[-self._max_prompt_tokens :]
            text = self._template.decode(ids)
        return Task(ordinal=ordinal, uid=f"{self._name}-{index}", prompt=text, prompt_ids=tuple(ids), row=row)
