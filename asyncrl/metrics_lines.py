"""The lines of metrics.jsonl: one a step, some of which wait for the evaluation that their step started.

Invariants:
- Lines are handed over in the order in which they were added, each once. A line that waits holds up
  those after it.
- The line of the run's last version is handed over at the end only: the checksum is still to come.
- A line whose evaluation failed or was given up is handed over without its figures.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.types import Metrics


@dataclass(slots=True)
class _Line:
    record: Metrics
    evaluation: asyncio.Task[Metrics] | None

    @property
    def waits(self) -> bool:
        return self.evaluation is not None and not self.evaluation.done()

    def complete(self) -> None:
        """Add the evaluation's figures, if it came to its end."""
        task = self.evaluation
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            self.record.update(task.result())


class MetricsLines:
    """Hands each line to ``sink`` as soon as it is complete.

    ``last_version`` is what the run's last step makes.
    """

    def __init__(self, sink: Callable[[Metrics], None], *, last_version: int) -> None:
        self._sink = sink
        self._last_version = last_version
        self._lines: deque[_Line] = deque()
        self._last = _Line({}, None)

    @property
    def last(self) -> Metrics:
        """The record that was added last; what is put into it before it is handed over is part of it."""
        return self._last.record

    @property
    def waiting(self) -> list[Metrics]:
        """Copies of the records that were not handed over yet."""
        return [dict(line.record) for line in self._lines]

    def add(self, record: Metrics, evaluation: asyncio.Task[Metrics] | None = None) -> None:
        """One more line, complete once ``evaluation`` has ended; ``record`` names its policy_version."""
        self._last = _Line(record, evaluation)
        self._lines.append(self._last)

    def flush(self) -> None:
        """Hand over the lines that are complete, up to the first that is not."""
        while self._lines:
            line = self._lines[0]
            if line.waits or line.record["policy_version"] == self._last_version:
                return
            self._hand_over()

    def give_up_evaluations(self) -> None:
        """Cancel the evaluations that lines still wait for."""
        for line in self._lines:
            if line.evaluation is not None:
                line.evaluation.cancel()

    def last_evaluation(self) -> Metrics | None:
        """What the evaluation of the last line found; None without one, or where it was given up.

        Raises what ended it.
        """
        evaluation = self._last.evaluation
        return None if evaluation is None or evaluation.cancelled() else evaluation.result()

    def close(self) -> None:
        """Hand over all that is left, as it is."""
        while self._lines:
            self._hand_over()

    def _hand_over(self) -> None:
        line = self._lines[0]
        line.complete()
        self._sink(line.record)
        self._lines.popleft()
