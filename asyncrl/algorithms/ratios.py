"""Ratios of two policies' probabilities of the same tokens, and what stands in for one of the two.

Symbols, here and in the modules beside it: pi is the policy that is being updated, b the behaviour
policy that sampled, p the proximal policy that the loss keeps pi close to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.masks import masked, sequence_mean

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this before exp, so that one broken token cannot overflow."""


def log_difference(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """log(numerator / denominator) of two log-probs, 0 outside the mask. (B, T)."""
    return masked(numerator, mask) - masked(denominator, mask)


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """``log_difference``, clamped to +-20. (B, T)."""
    difference = log_difference(numerator, denominator, mask)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def sequence_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """Ratio of the probabilities of whole answers: exp of the sum of log-ratios. (B, T) -> (B, 1)."""
    total = log_difference(numerator, denominator, mask).sum(-1, keepdim=True)
    return total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def geometric_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """Geometric mean of the ratios of an answer's tokens. (B, T) -> (B, 1); 1 for an empty answer."""
    mean = sequence_mean(log_difference(numerator, denominator, mask), mask)
    return mean.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def log_linear_proximal(logprobs: Tensor, behaviour: Tensor, ages: Tensor) -> Tensor:
    """log p without a forward pass: on the line from log b to log pi, one version behind pi. (B, T).

    log p = log b + alpha (log pi - log b) with alpha = (v_p - v_b) / (v_pi - v_b) and v_p = v_pi - 1;
    ``ages`` are v_pi - v_b. A token of age 0 or 1 has p = b. (A-3PO, 2512.06547.) No gradient.
    """
    with torch.no_grad():
        alpha = ((ages - 1.0) / ages.clamp(min=1)).clamp(0.0, 1.0).to(logprobs.dtype)
        # Not b + 0 * (pi - b): with alpha 0, p is b to the bit, and pi may be anything.
        return torch.where(alpha > 0, behaviour + alpha * (logprobs - behaviour), behaviour)
