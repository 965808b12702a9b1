"""From a loss a token to one number, normalised over the whole step.

Invariant: the divisor is the step's count, never the micro-batch's, so the values of any split of a
step into micro-batches and ranks add up to the value of the step, and so do the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MEAN_EPSILON = 1e-8
"""Added to a sequence's token count, so that a sequence with no trained token divides by no zero."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What a step is normalised by, over all ranks and micro-batches."""

    tokens: int
    """Trained tokens."""
    sequences: int
    """Sequences with at least one trained token."""


Aggregation = Callable[[Tensor, Tensor, StepCounts], Tensor]
"""(loss (B, T), mask (B, T) bool, the step's counts) -> scalar share of the step's loss"""


def token_mean(loss: Tensor, mask: Tensor, step: StepCounts) -> Tensor:
    """Every token of the step weighs the same."""
    return torch.where(mask, loss, 0.0).sum() / max(step.tokens, 1)


def seq_mean_token_sum(loss: Tensor, mask: Tensor, step: StepCounts) -> Tensor:
    """Sum over a sequence's tokens, mean over sequences."""
    return torch.where(mask, loss, 0.0).sum() / max(step.sequences, 1)


def seq_mean_token_mean(loss: Tensor, mask: Tensor, step: StepCounts) -> Tensor:
    """Every sequence weighs the same, whatever its length."""
    lengths = mask.sum(-1, dtype=loss.dtype) + MEAN_EPSILON  # (B,)
    means = torch.where(mask, loss, 0.0).sum(-1) / lengths  # (B,)
    return means.sum() / max(step.sequences, 1)


AGGREGATIONS: Mapping[str, Aggregation] = {
    "token-mean": token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-mean": seq_mean_token_mean,
}
