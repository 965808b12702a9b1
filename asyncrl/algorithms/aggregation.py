"""From a loss a token to one number, normalised over the whole step.

Invariant: the divisor is the step's count, never the micro-batch's, so the values of any split of a
step into micro-batches and ranks add up to the value of the step, and so do the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from asyncrl.algorithms.masks import masked, sequence_mean, smoothed_mean


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What a step is normalised by, over all ranks and micro-batches."""

    tokens: int
    """Trained tokens."""
    sequences: int
    """Sequences with at least one trained token."""
    length_norm: float = 1.0
    """The constant of ``seq-mean-token-sum-norm``, in tokens."""


Aggregation = Callable[[Tensor, Tensor, StepCounts], Tensor]
"""(loss (B, T), mask (B, T) bool, the step's counts) -> scalar share of the step's loss"""


def token_mean(loss: Tensor, mask: Tensor, step: StepCounts) -> Tensor:
    """Every token of the step weighs the same (DAPO, 2503.14476)."""
    return masked(loss, mask).sum() / max(step.tokens, 1)


def seq_mean_token_sum(loss: Tensor, mask: Tensor, step: StepCounts) -> Tensor:
    """Sum over a sequence's tokens, mean over sequences: REINFORCE with whole answers as actions."""
    return masked(loss, mask).sum() / max(step.sequences, 1)


def seq_mean_token_mean(loss: Tensor, mask: Tensor, step: StepCounts) -> Tensor:
    """Every sequence weighs the same, whatever its length (GRPO as published, 2402.03300)."""
    return smoothed_mean(loss, mask).sum() / max(step.sequences, 1)


def seq_mean_token_sum_norm(loss: Tensor, mask: Tensor, step: StepCounts) -> Tensor:
    """Sum over tokens over a constant, mean over sequences: no bias by length (Dr. GRPO, 2503.20783)."""
    return seq_mean_token_sum(loss, mask, step) / step.length_norm


def seq_mean(loss: Tensor, mask: Tensor, step: StepCounts) -> Tensor:
    """Plain mean over sequences, of losses that are one number a sequence (GMPO, 2507.20673)."""
    return sequence_mean(loss, mask).sum() / max(step.sequences, 1)


AGGREGATIONS: Mapping[str, Aggregation] = {
    "token-mean": token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
    "seq-mean": seq_mean,
}
