"""The critic's loss, token by token, and how much of the returns it explains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.masks import AllSum, alone, masked

_ROUNDING = 1e-24
"""Far above the share of a sum of squares that a variance of 0 can come to in float64."""


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


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, all_sum: AllSum = alone) -> float:
    """1 - Var(R - V) / Var(R) over the tokens of the mask: 1 is perfect, 0 no better than a constant.

    ``all_sum`` takes both variances over all ranks; then this is a collective call. NaN where there are
    fewer than two tokens or the returns do not vary, beyond rounding.
    """
    returns, errors = returns[mask].double(), (returns - values)[mask].double()
    both = torch.stack([returns, errors])  # (2, N)
    count = both.new_full((1,), float(len(returns)))
    sums = torch.cat([both.sum(-1), returns.square().sum(-1, keepdim=True), count])
    all_sum(sums)
    squares = (both - (sums[:2] / sums[3].clamp(min=1.0))[:, None]).square().sum(-1)
    all_sum(squares)
    of_returns, of_errors = squares.tolist()
    return 1.0 - of_errors / of_returns if of_returns > _ROUNDING * float(sums[2]) else float("nan")
