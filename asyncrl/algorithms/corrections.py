"""Weights that correct for tokens sampled by another policy (b) than the proximal one (p).

Invariants:
- Weights carry no gradient.
- They are zero outside the mask, whatever stands there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.losses import log_ratio


@dataclass(frozen=True, slots=True)
class CorrectionSettings:
    """The constants of all corrections; each reads its own."""

    tis_cap: float = 2.0


@dataclass(frozen=True, slots=True)
class Correction:
    """What each token's loss is multiplied by."""

    weights: Tensor  # (B, T) zero outside the mask
    clipped: Tensor  # (B, T) bool, where p/b was outside what the correction lets pass


CorrectionFunction = Callable[[Tensor, Tensor, Tensor, CorrectionSettings], Correction]
"""(log p (B, T), log b (B, T), mask (B, T), settings) -> Correction"""


def none(proximal: Tensor, behaviour: Tensor, mask: Tensor, settings: CorrectionSettings) -> Correction:
    """Weight 1 everywhere: the ratio is left uncorrected."""
    return Correction(weights=mask.to(proximal.dtype), clipped=torch.zeros_like(mask))


def tis(proximal: Tensor, behaviour: Tensor, mask: Tensor, settings: CorrectionSettings) -> Correction:
    """Truncated importance sampling, token by token: min(p/b, cap)."""
    with torch.no_grad():
        ratio = log_ratio(proximal, behaviour, mask).exp()
        weights = torch.where(mask, ratio.clamp(max=settings.tis_cap), 0.0)
        return Correction(weights=weights, clipped=(ratio > settings.tis_cap) & mask)


CORRECTIONS: Mapping[str, CorrectionFunction] = {"none": none, "tis": tis}


def effective_sample_size(total: float, total_squared: float, count: float) -> float:
    """(sum w)^2 / (n sum w^2), in (0, 1]: the share of ``count`` tokens that really weigh in."""
    return total * total / (count * total_squared) if total_squared > 0 else 0.0
