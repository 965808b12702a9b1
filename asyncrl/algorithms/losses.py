"""Policy losses: a loss a token, before any aggregation.

Shapes: B sequences of one micro-batch, T response positions, padded on the right.

Invariants:
- A value where the mask is False, NaN included, reaches neither a loss, a gradient nor a statistic.
- A loss knows nothing of micro-batches, ranks or divisors: those are ``aggregation``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this before exp, so that one broken token cannot overflow."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a policy loss may look at. All but the mask are floats; gradients flow by ``logprobs``."""

    logprobs: Tensor  # (B, T) log pi, the policy that is being updated
    proximal: Tensor  # (B, T) log p, the policy that the ratio is taken to; no gradient
    behaviour: Tensor  # (B, T) log b, the policy that sampled; no gradient
    advantages: Tensor  # (B, 1) or (B, T)
    mask: Tensor  # (B, T) bool, True where a token is trained


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The constants of all losses; each reads its own."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = 3.0
    """Bound on the loss of a negative advantage, in units of -A; None: off."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A policy loss of each token; zero outside the mask."""

    loss: Tensor  # (B, T)
    clipped: Tensor  # (B, T) bool, where the clip decided
    kl: Tensor  # (B, T) log p - log pi, no gradient: its mean estimates KL(p || pi)


PolicyLoss = Callable[[LossInputs, LossSettings], TokenLoss]


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """log(numerator / denominator), clamped to +-20; 0 outside the mask. (B, T)."""
    # The operands are masked before they meet: where() on the result alone would still let the
    # backward pass multiply a NaN by zero.
    difference = torch.where(mask, numerator, 0.0) - torch.where(mask, denominator, 0.0)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ppo_clip(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """Clipped surrogate with two bounds (PPO, 1707.06347; clip-higher, DAPO, 2503.14476).

    max(-uA, -clip(u, 1 - low, 1 + high) A) with u = pi/p; where A < 0 also at most -cA (dual clip,
    1912.09729).
    """
    mask = inputs.mask
    advantages = torch.where(mask, inputs.advantages, 0.0)  # (B, T)
    log_u = log_ratio(inputs.logprobs, inputs.proximal, mask)
    u = log_u.exp()
    unclipped = -advantages * u
    bounded = -advantages * u.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    loss = torch.maximum(unclipped, bounded)
    if settings.clip_dual is not None:
        capped = torch.minimum(loss, -settings.clip_dual * advantages)
        loss = torch.where(advantages < 0, capped, loss)
    return TokenLoss(loss=loss, clipped=(bounded > unclipped) & mask, kl=-log_u.detach())


LOSSES: Mapping[str, PolicyLoss] = {"ppo_clip": ppo_clip}
