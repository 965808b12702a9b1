"""Sums and means over the tokens of a mask, and whitening.

Invariant: a value outside the mask, NaN and infinity included, reaches neither a result nor a
gradient. ``torch.where`` comes before the arithmetic and not after it, because the backward pass of a
``where`` on a result still multiplies a NaN by zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MEAN_EPSILON = 1e-8
"""Added to the number of tokens that a mean divides by, so that no token at all divides by no zero."""

AllSum = Callable[[Tensor], None]
"""Adds a tensor up over all ranks, in place."""


def alone(values: Tensor) -> None:
    """The ``AllSum`` of a single rank: nothing to add."""


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """The values where the mask is True, 0 elsewhere. (B, T)."""
    return torch.where(mask, values, 0.0)


def sequence_lengths(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Tokens of each sequence, (B, T) -> (B, 1), as a float that can be divided by."""
    return mask.sum(-1, keepdim=True, dtype=dtype)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over a sequence's tokens, (B, T) -> (B, 1); 0 for a sequence without any."""
    return masked(values, mask).sum(-1, keepdim=True) / sequence_lengths(mask, values.dtype).clamp(min=1.0)


def smoothed_mean(values: Tensor, mask: Tensor) -> Tensor:
    """``sequence_mean`` that divides by n + 1e-8, as the field's implementations of some losses do."""
    return masked(values, mask).sum(-1, keepdim=True) / (sequence_lengths(mask, values.dtype) + MEAN_EPSILON)


def whiten(values: Tensor, mask: Tensor, all_sum: AllSum = alone) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over all tokens of the batch, 0 outside the mask. (B, T).

    The variance is the unbiased one, and 0 for a batch of one token. ``all_sum`` takes mean and
    variance over all ranks; then this is a collective call.
    """
    values = masked(values, mask)
    sums = torch.stack([values.sum(dtype=torch.float64), mask.sum(dtype=torch.float64)])
    all_sum(sums)
    total, count = sums
    centred = masked(values - (total / (count + MEAN_EPSILON)).to(values.dtype), mask)
    squares = centred.square().sum(dtype=torch.float64)
    all_sum(squares)
    variance = squares / (count + MEAN_EPSILON) * count / (count - 1.0).clamp(min=1.0)
    return centred * torch.rsqrt(variance + MEAN_EPSILON).to(values.dtype)
