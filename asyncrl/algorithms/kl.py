"""KL divergence of the policy from a reference, token by token.

Shapes: B sequences, T response positions. All estimate KL(pi || ref) from tokens that pi sampled
(Schulman, "Approximating KL Divergence", joschu.net/blog/kl-approx.html).

Invariants:
- 0 outside the mask, in value and in gradient, whatever stands there.
- k2, k3 and their straight-through kin are never negative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from asyncrl.algorithms.ratios import log_difference, log_ratio

KLEstimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log pi (B, T), log ref (B, T), mask (B, T) bool) -> (B, T)"""


def k1(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """log pi - log ref: unbiased in value; its gradient has mean 0, so that it is for rewards alone."""
    return log_difference(logprobs, reference, mask)


def absolute(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """|log pi - log ref|."""
    return k1(logprobs, reference, mask).abs()


def k2(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """(log pi - log ref)^2 / 2: biased in value; its gradient is that of the KL."""
    return 0.5 * k1(logprobs, reference, mask).square()


def k3(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """ref/pi - 1 - log(ref/pi): unbiased in value, of low variance, with a biased gradient."""
    log_r = log_ratio(reference, logprobs, mask)
    return log_r.exp() - 1.0 - log_r


def k1_straight_through(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """``k1+``: the value of k1 with the gradient of k2."""
    return straight_through(k1(logprobs, reference, mask), k2(logprobs, reference, mask))


def k3_straight_through(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """``k3+``: the value of k3 with the gradient of k2, so that both are unbiased."""
    return straight_through(k3(logprobs, reference, mask), k2(logprobs, reference, mask))


def straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    """The first in the forward pass, the second in the backward pass."""
    return value.detach() + (gradient - gradient.detach())


KL_ESTIMATORS: Mapping[str, KLEstimator] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k1+": k1_straight_through,
    "k3+": k3_straight_through,
}


def with_kl_penalty(rewards: Tensor, kl: Tensor, coefficient: float) -> Tensor:
    """KL in the reward: r_t - coefficient KL_t, with no gradient. All (B, T)."""
    return rewards - coefficient * kl.detach()
