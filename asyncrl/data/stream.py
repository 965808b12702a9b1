"""The endless stream of training tasks.

Invariant: ``task(ordinal)`` is a pure function of the rows, the order and the ordinal: a resumed run needs
no cursor, and nothing that ran ahead of training can skip a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from asyncrl.data.order import Order
from asyncrl.data.rendered import RenderedRows
from asyncrl.types import Task


class PromptStream:
    """Tasks 0, 1, 2, ... over ``rows`` in ``order``, without end."""

    def __init__(
        self,
        rows: RenderedRows,
        order: Order,
        *,
        name: str,
        max_prompt_tokens: int,
        fingerprint: str = "",
    ) -> None:
        self._rows = rows
        self._order = order
        self._name = name
        self._max_prompt_tokens = max_prompt_tokens
        self.fingerprint = fingerprint
        """Equal for equal prompts in equal order: two streams of one seed are then the same."""

    def __len__(self) -> int:
        """Rows in an epoch."""
        return len(self._order)

    def task(self, ordinal: int) -> Task:
        """The task at ``ordinal``, whatever was asked for before."""
        if ordinal < 0:
            raise ValueError(f"ordinal: found {ordinal}; expected 0 or more")
        index = self._order.index(ordinal)
        rows = self._rows
        text = rows.text(index)
        ids = rows.encode([text])[0]
        if len(ids) > self._max_prompt_tokens:
            # Only where data.over_long is truncate_left: other policies leave no such row.
            ids = ids[-self._max_prompt_tokens :]
            text = rows.decode(ids)
        return Task(
            ordinal=ordinal,
            uid=f"{self._name}-{index}",
            prompt=text,
            prompt_ids=tuple(ids),
            row=rows.row(index),
        )

    def iterate(self, ordinal: int = 0) -> Iterator[Task]:
        """All tasks from ``ordinal`` on; never ends."""
        return map(self.task, count(ordinal))
