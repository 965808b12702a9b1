"""The seam between the loop and whoever shows or stores what it does.

Invariants:
- Every call is synchronous and must not block: it comes from the event loop.
- An observer decides nothing. It may raise, which ends the run (a full disk, say).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncrl.ledger import Retired
from asyncrl.types import Metrics, ReadyGroup


class Observer(Protocol):
    """Hears of everything that a user may want to see."""

    def retired(self, retired: Retired) -> None:
        """A group came to its end: a line of ledger.jsonl."""
        ...

    def stepped(self, record: Metrics) -> None:
        """A step ended, its evaluation not yet known: for a live display."""
        ...

    def evaluated(self, result: Metrics) -> None:
        """An evaluation ended."""
        ...

    def recorded(self, record: Metrics) -> None:
        """A line of metrics.jsonl is complete."""
        ...

    def trained(self, step: int, groups: Sequence[ReadyGroup]) -> None:
        """The batch of a step, for ``rollouts/``: with groups that its update did without, but no others."""
        ...

    def phase(self, name: str) -> None:
        """What the run does now, in words."""
        ...
