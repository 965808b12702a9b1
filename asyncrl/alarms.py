"""Warnings about numbers that should be small and are not."""

from __future__ import annotations

import logging

from asyncrl.types import Metrics

log = logging.getLogger(__name__)

DEFAULT_LOGPROB_DIFF = {"float32": 1e-2, "bfloat16": 0.1}
"""Far above what rounding does (1e-4, 2e-2), far below what a wrong temperature or weight does."""


class LogprobAlarm:
    """Warns when engine and learner disagree about tokens of one and the same version.

    Once when the mean difference passes ``threshold``, then again each time that it has doubled, so
    that a run which drifts away is heard of and one that is steadily off does not flood the log.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._next = threshold

    @classmethod
    def for_dtype(cls, threshold: float | None, dtype: str) -> LogprobAlarm:
        """The configured threshold, or the default one of the dtype."""
        return cls(DEFAULT_LOGPROB_DIFF[dtype] if threshold is None else threshold)

    def check(self, version: int, metrics: Metrics) -> bool:
        """Look at ``generator/logprob_diff_*`` of one update; True if that raised the alarm."""
        mean = metrics.get("generator/logprob_diff_mean")
        if mean is None or mean <= self._next:
            return False
        self._next = max(2.0 * self._next, mean)
        log.warning(
            "the update of version %d: log-probs of engine and learner differ by %.3g on average "
            "(at most %.3g) on tokens of that very version, expected at most "
            "generators.logprob_diff_alarm = %g: the engine samples from other weights, another "
            "temperature or another dtype than the learner trains with",
            version,
            mean,
            metrics.get("generator/logprob_diff_max", mean),
            self._threshold,
        )
        return True
