"""Counting to n, with n from a log-normal: answers whose lengths have a long tail.

A workload for overlap and staleness rather than a skill worth learning: most answers are short, and
a few are so long that a batch would wait for them.
"""

from __future__ import annotations

import random
from math import log


def rows(
    count: int = 2_000, median: float = 8.0, sigma: float = 0.8, maximum: int = 60, seed: int = 0
) -> list[dict[str, str]]:
    """``count`` rows ``{"question": "count 3:", "answer": "1 2 3"}``, drawn from ``seed``.

    n is log-normal with the given median and sigma (of log n), rounded and cut off to 1..``maximum``.
    Questions repeat: there are only ``maximum`` of them. Raises ValueError for values out of range.
    """
    if count < 1 or median < 1 or sigma < 0 or maximum < 1:
        raise ValueError(
            f"count={count}, median={median}, sigma={sigma}, maximum={maximum}; "
            "expected count, median and maximum of at least 1 and sigma of at least 0"
        )
    rng = random.Random(seed)
    drawn = (round(rng.lognormvariate(log(median), sigma)) for _ in range(count))
    return [row(min(max(n, 1), maximum)) for n in drawn]


def every(step: int, maximum: int = 60) -> list[dict[str, str]]:
    """The tasks of counting to ``step``, twice that, ... up to ``maximum``: to hold out some of every length.

    Raises ValueError for a ``step`` that is not 1 to ``maximum``.
    """
    if not 1 <= step <= maximum:
        raise ValueError(f"step is {step}; expected 1 to maximum = {maximum}")
    return [row(n) for n in range(step, maximum + 1, step)]


def row(n: int) -> dict[str, str]:
    """The task of counting to ``n``."""
    return {"question": f"count {n}:", "answer": " ".join(map(str, range(1, n + 1)))}


def reward(completion: str, answer: str) -> float:
    """Share of the numbers that are right before the first wrong, missing or surplus one.

    1.0 only for the exact answer: counting on past n divides by the longer of the two.
    """
    said, expected = completion.split(" "), answer.split(" ")
    right = 0
    for mine, true in zip(said, expected, strict=False):
        if mine != true:
            break
        right += 1
    return right / max(len(said), len(expected))
