"""The critic's loss, token by token, and how much of the returns it explains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.masks import masked


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Both are zero outside the mask."""

    loss: Tensor  # (B, T)
    clipped: Tensor  # (B, T) bool, where the clip decided


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float = 0.2
) -> ValueLoss:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2, token by token (PPO's code, 1707.06347).

    All (B, T); gradients flow by ``values``. An infinite ``clip`` is the plain squared error.
    """
    values, old, returns = masked(values, mask), masked(old_values, mask), masked(returns, mask)
    bounded = torch.minimum(torch.maximum(values, old - clip), old + clip)
    unclipped_error, clipped_error = (values - returns).square(), (bounded - returns).square()
    loss = 0.5 * torch.maximum(unclipped_error, clipped_error)
    return ValueLoss(loss, (clipped_error > unclipped_error) & mask)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over the tokens of the mask: 1 is perfect, 0 no better than a constant.

    NaN where there are fewer than two tokens or the returns do not vary.
    """
    returns, errors = returns[mask].double(), (returns - values)[mask].double()
    variance = float(returns.var(correction=0)) if len(returns) > 1 else 0.0
    return 1.0 - float(errors.var(correction=0)) / variance if variance > 0 else float("nan")
