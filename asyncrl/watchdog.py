"""The watchdog: says who holds what when a run stands still.

Invariants:
- It only reports. Waits that may not last have deadlines of their own, and these end them.
- While nothing moves it reports after ``stall_after_s``, and then each time after twice as long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from asyncrl.waiting import now

log = logging.getLogger(__name__)


class Watchdog:
    """Hears of progress, and warns of its absence.

    ``describe`` names, a line each, what the run is busy with at that moment.
    """

    def __init__(self, stall_after_s: float, describe: Callable[[], Iterable[str]]) -> None:
        self._stall_after_s = stall_after_s
        self._describe = describe
        self._since = 0.0
        self._last = "nothing"

    def made_progress(self, what: str) -> None:
        """Something moved: ``what`` stands in the report if it was the last thing that did."""
        self._since, self._last = now(), what

    async def watch(self) -> None:
        """Warn of each stall; runs until it is cancelled."""
        patience = self._stall_after_s
        while True:
            due = self._since + patience
            if now() < due:
                await asyncio.sleep(due - now())
                continue
            log.warning("%s", self.report())
            await asyncio.sleep(patience)
            patience = 2 * patience if now() - self._since >= patience else self._stall_after_s

    def report(self) -> str:
        """How long nothing has moved, and who holds what."""
        stalled_s = now() - self._since
        lines = [f"no progress for {stalled_s:.0f} s, the last was {self._last}", *self._describe()]
        return "\n  ".join(lines)
