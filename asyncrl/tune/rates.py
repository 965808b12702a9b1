"""How long one more token takes by the number of running sequences, from when answers had their slots.

Invariants:
- Only time in which an engine sampled counts: its standstills for pushes are taken out.
- What prompts take is part of the tokens' time: an engine that takes prompts in samples more slowly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import UsageError
from asyncrl.simulate.parts import token_seconds

Floats = NDArray[np.floating[Any]]

_MOST_STAYS = 20_000
"""The last ones of a replica that are looked at."""
_MOST_KNOTS = 5
_ITERATIONS = 40
_NOISE = 0.02
"""Of the largest time of a token: how much less another may be with more sequences."""


@dataclass(frozen=True, slots=True)
class Stay:
    """An answer's time in a slot, in seconds, and the tokens that it came to."""

    begun: float
    ended: float
    tokens: int


def fit_token_seconds(
    replicas: Sequence[Sequence[Stay]], standstills: Sequence[tuple[float, float]]
) -> dict[int, float]:
    """``workload.generation.token_s`` under which every stay lasts as long as it did, by least squares.

    ``replicas``: the stays on each; ``standstills``: (start, end) in which none sampled. UsageError where no
    stay has a length.
    """
    exposure, tokens = _measured(replicas, standstills)
    for count in range(_MOST_KNOTS, 1, -1):
        knots = _knots(exposure, count)
        seconds = _solve(exposure, tokens, knots)
        if seconds is not None:
            return dict(zip(knots, seconds.tolist(), strict=True))
    # One speed for all: the sum of all time over that of all tokens.
    return {exposure.shape[1]: float(exposure.sum() / tokens.sum())}


def slowdown(
    replicas: Sequence[Sequence[Stay]],
    standstills: Sequence[tuple[float, float]],
    token_s: Mapping[int, float],
) -> float:
    """How many times ``token_s`` the tokens of these stays took, all in all; UsageError as above."""
    exposure, tokens = _measured(replicas, standstills)
    numbers = np.arange(1, exposure.shape[1] + 1)
    seconds = np.array([token_seconds(token_s, int(number)) for number in numbers])
    return float((exposure / seconds).sum() / tokens.sum())


def _measured(
    replicas: Sequence[Sequence[Stay]], standstills: Sequence[tuple[float, float]]
) -> tuple[Floats, Floats]:
    """(stays, n) exposure and (stays,) tokens of all replicas."""
    recent = [replica[-_MOST_STAYS:] for replica in replicas if replica]
    stays = [stay for replica in recent for stay in replica]
    parts = [_exposure(replica, standstills) for replica in recent]
    widest = max((part.shape[1] for part in parts), default=0)
    if not sum(float(part.sum()) for part in parts):
        raise UsageError(
            f"found {len(stays)} answers, in slots for 0 s together; expected some time to measure by"
        )
    exposure = np.vstack([np.pad(part, ((0, 0), (0, widest - part.shape[1]))) for part in parts])
    return exposure, np.array([stay.tokens for stay in stays], dtype=float)


def _exposure(stays: Sequence[Stay], standstills: Sequence[tuple[float, float]]) -> Floats:
    """(stays, n): seconds of each stay in which n + 1 sequences ran on its replica."""
    begun = np.array([stay.begun for stay in stays])
    ended = np.array([stay.ended for stay in stays])
    stops = np.array(standstills, dtype=float).reshape(-1, 2)
    times = np.unique(np.concatenate([begun, ended, stops.ravel()]))
    middles = (times[:-1] + times[1:]) / 2
    running = np.searchsorted(np.sort(begun), middles) - np.searchsorted(np.sort(ended), middles)
    still = np.searchsorted(np.sort(stops[:, 0]), middles) - np.searchsorted(np.sort(stops[:, 1]), middles)
    sampled = np.where((running > 0) & (still == 0), np.diff(times), 0.0)
    total = np.zeros((len(times), int(max(running.max(initial=1), 1))))  # up to each time, by n
    total[np.arange(1, len(times)), np.maximum(running, 1) - 1] = sampled
    total = np.cumsum(total, axis=0)
    found: Floats = total[np.searchsorted(times, ended)] - total[np.searchsorted(times, begun)]
    return found


def _knots(exposure: Floats, count: int) -> list[int]:
    """Numbers of sequences between which a token's time is linear, with equal exposure between them."""
    seen = exposure.sum(axis=0)
    share = np.cumsum(seen) / seen.sum()
    places = np.searchsorted(share, np.linspace(0.02, 0.98, count))
    return sorted({int(place) + 1 for place in places})


def _solve(exposure: Floats, tokens: Floats, knots: Sequence[int]) -> Floats | None:
    """Seconds a token at the knots; None where no increasing ones are found.

    Time is regressed on tokens, which are counted without error; a machine's moods are in the time alone. How
    many of a stay's tokens fell to which number of sequences follows from the seconds, so that both are found
    in turn.
    """
    if len(knots) < 2:
        return None
    numbers = np.arange(1, exposure.shape[1] + 1)
    basis = np.stack([np.interp(numbers, knots, row) for row in np.eye(len(knots))], axis=1)  # (n, knots)
    lasted = exposure.sum(axis=1)
    seconds = np.full(len(knots), lasted.sum() / tokens.sum())
    for _ in range(_ITERATIONS):
        shares = exposure / (basis @ seconds)  # (stays, n): where the tokens fell, up to a factor a stay
        fell = (shares * (tokens / np.maximum(shares.sum(axis=1), 1e-12))[:, None]) @ basis
        found, *_ = np.linalg.lstsq(fell, lasted, rcond=None)
        before = seconds
        # No further than to half or double at once.
        seconds = np.clip(found, before / 2, before * 2)
        if np.abs(seconds - before).max() <= 1e-9 * seconds.max():
            break
    total = fell @ seconds
    seconds = seconds * (lasted.sum() / total.sum())
    rises = np.diff(seconds).min() >= -_NOISE * seconds.max()
    return seconds if rises and seconds.min() > 0 else None
