"""Weights that correct for tokens sampled by another policy (b) than the proximal one (p).

Invariants:
- Weights carry no gradient.
- They are zero outside the mask, whatever stands there.
- With p = b every weight is 1: a correction changes nothing where there is nothing to correct.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.masks import masked
from asyncrl.algorithms.ratios import geometric_ratio, log_ratio, sequence_ratio


@dataclass(frozen=True, slots=True)
class CorrectionSettings:
    """The constants of all corrections; each reads its own."""

    tis_cap: float = 2.0
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    mask_low: float = 0.5
    mask_high: float = 2.0
    decoupled_cap: float = 5.0


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


@torch.no_grad()
def tis(proximal: Tensor, behaviour: Tensor, mask: Tensor, settings: CorrectionSettings) -> Correction:
    """Truncated importance sampling, token by token: min(p/b, cap) (Ionides, 2008)."""
    ratio = log_ratio(proximal, behaviour, mask).exp()
    return _truncated(ratio, mask, settings.tis_cap)


@torch.no_grad()
def tis_sequence(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, settings: CorrectionSettings
) -> Correction:
    """Truncated importance sampling of whole answers: min(exp(sum of log p/b), cap) on each token."""
    ratio = sequence_ratio(proximal, behaviour, mask).expand_as(mask)
    return _truncated(ratio, mask, settings.tis_cap)


@torch.no_grad()
def icepop(proximal: Tensor, behaviour: Tensor, mask: Tensor, settings: CorrectionSettings) -> Correction:
    """p/b where it lies in [low, high], 0 elsewhere (IcePop, Ling team, 2510.18855)."""
    ratio = log_ratio(proximal, behaviour, mask).exp()
    return _banded(ratio, ratio, mask, settings.icepop_low, settings.icepop_high)


@torch.no_grad()
def token_mask(proximal: Tensor, behaviour: Tensor, mask: Tensor, settings: CorrectionSettings) -> Correction:
    """1 where a token's p/b lies in [low, high], 0 elsewhere."""
    ratio = log_ratio(proximal, behaviour, mask).exp()
    return _banded(torch.ones_like(ratio), ratio, mask, settings.mask_low, settings.mask_high)


@torch.no_grad()
def seq_mask(proximal: Tensor, behaviour: Tensor, mask: Tensor, settings: CorrectionSettings) -> Correction:
    """1 for answers whose geometric mean of p/b lies in [low, high]; others are dropped whole."""
    ratio = geometric_ratio(proximal, behaviour, mask).expand_as(mask)
    return _banded(torch.ones_like(ratio), ratio, mask, settings.mask_low, settings.mask_high)


@torch.no_grad()
def decoupled_ppo(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, settings: CorrectionSettings
) -> Correction:
    """p/b, and 0 above the cap (decoupled PPO, 2110.00641; with the cap as in AReaL, 2505.24298)."""
    ratio = log_ratio(proximal, behaviour, mask).exp()
    return _banded(ratio, ratio, mask, 0.0, settings.decoupled_cap)


def _truncated(ratio: Tensor, mask: Tensor, cap: float) -> Correction:
    return Correction(weights=masked(ratio.clamp(max=cap), mask), clipped=(ratio > cap) & mask)


def _banded(weights: Tensor, ratio: Tensor, mask: Tensor, low: float, high: float) -> Correction:
    """The weights where the ratio lies in [low, high]."""
    outside = (ratio < low) | (ratio > high)
    # A ratio that is no number is a fault to be seen, and not a token to be dropped.
    weights = torch.where(ratio.isnan(), ratio, weights)
    return Correction(weights=masked(weights, mask & ~outside), clipped=mask & outside)


CORRECTIONS: Mapping[str, CorrectionFunction] = {
    "none": none,
    "tis": tis,
    "tis_sequence": tis_sequence,
    "icepop": icepop,
    "token_mask": token_mask,
    "seq_mask": seq_mask,
    "decoupled_ppo": decoupled_ppo,
}


def effective_sample_size(total: float, total_squared: float, count: float) -> float:
    """(sum w)^2 / (n sum w^2), in (0, 1]: the share of ``count`` tokens that really weigh in."""
    return total * total / (count * total_squared) if total_squared > 0 else 0.0
