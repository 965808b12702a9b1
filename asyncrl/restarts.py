"""Starting a run again, after a failure that is none of its own: after which, how often, and how soon.

Invariants:
- A failure counts as infrastructure's only if all that went wrong was: a dead or hung process, a lost node, a
  broken connection. What config, data, numbers or code did would happen again, and ends the run.
- The limit is on failures in a row: a checkpoint of a later step is progress, and the count begins anew.
- Each wait of a row is twice the one before, and none is longer than ten minutes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from asyncrl.errors import (
    CanaryError,
    ChecksumError,
    DeadlineError,
    InfrastructureError,
    NoGeneratorError,
    PlacementError,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

_LONGEST_WAIT_S = 600.0
_OWN = (ChecksumError, CanaryError)
"""Infrastructure's by their kind, but the same weights would give them again."""


def is_infrastructure(error: BaseException) -> bool:
    """Whether all that went wrong is what another start may not meet again."""
    return all(_is_infrastructure(leaf) for leaf in _leaves(error))


class Restarts:
    """At most ``limit`` in a row, the first after ``backoff_s``. ``newest_step``: that of the newest
    checkpoint, -1 where there is none."""

    def __init__(self, limit: int, backoff_s: float, newest_step: Callable[[], int]) -> None:
        self.total = 0
        """Restarts so far, over all."""
        self._limit = limit
        self._backoff_s = backoff_s
        self._newest_step = newest_step
        self._in_a_row = 0
        self._step = newest_step()

    def run(
        self,
        attempt: Callable[[], T],
        *,
        wanted: Callable[[], bool] = lambda: True,
        sleep: Callable[[float], None] = time.sleep,
    ) -> T:
        """What ``attempt`` returns, called again after each failure that another start may mend.

        ``wanted``: whether it still is, after a failure. Raises what the last attempt raised.
        """
        while True:
            try:
                return attempt()
            except Exception as error:
                # A cluster that has just lost a node may be short of it for a while.
                mends = is_infrastructure(error) or (self.total > 0 and isinstance(error, PlacementError))
                if self._limit == 0 or not mends or not wanted():
                    raise
                if not self._is_left():
                    log.error("%d restarts in a row came to no new checkpoint", self._limit)
                    raise
                delay_s = min(_LONGEST_WAIT_S, self._backoff_s * 2 ** (self._in_a_row - 1))
                log.error(
                    "the run failed; restart %d of at most %d in a row (run.max_restarts) in %g s, from %s",
                    self._in_a_row,
                    self._limit,
                    delay_s,
                    f"the checkpoint of step {self._step}" if self._step >= 0 else "the beginning",
                    exc_info=next(_leaves(error)),
                )
            sleep(delay_s)

    def _is_left(self) -> bool:
        """Count one more, if there may be one."""
        newest = self._newest_step()
        if newest > self._step:
            self._in_a_row = 0
        self._step = newest
        if self._in_a_row >= self._limit:
            return False
        self._in_a_row += 1
        self.total += 1
        return True


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _is_infrastructure(error: BaseException) -> bool:
    if isinstance(error, (InfrastructureError, DeadlineError, NoGeneratorError)):
        return not isinstance(error, _OWN)
    from ray.exceptions import RayError, RayTaskError

    if isinstance(error, RayTaskError):  # that of the code which ran in the task, or of what it was handed
        return isinstance(error.cause, Exception) and _is_infrastructure(error.cause)
    return isinstance(error, RayError)
