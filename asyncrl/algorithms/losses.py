"""Policy losses: a loss a token, before any aggregation.

Shapes: B sequences of one micro-batch, T response positions, padded on the right.

u is the ratio that a loss clips: pi/p, or pi/b where p is not recomputed (``proximal`` then holds
log b). Losses that are named after a policy gradient (cispo, aipo, topr) multiply log pi by a weight
without gradient; the others differentiate a ratio.

Invariants:
- A value where the mask is False, NaN included, reaches neither a loss, a gradient nor a statistic.
- A loss knows nothing of micro-batches, ranks or divisors: those are ``aggregation``'s.
- An advantage of 0 has no gradient, dppo's penalty aside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.masks import masked, sequence_mean, smoothed_mean
from asyncrl.algorithms.ratios import log_difference, log_ratio

GSPO_LOG_RATIO_BOUND = 10.0
"""Upper bound of a sequence's log-ratio in gspo."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a policy loss may look at. All but the mask are floats; gradients flow by ``logprobs``."""

    logprobs: Tensor  # (B, T) log pi, the policy that is being updated
    proximal: Tensor  # (B, T) log p, the policy that the ratio is taken to; no gradient
    behaviour: Tensor  # (B, T) log b, the policy that sampled; no gradient
    advantages: Tensor  # (B, 1) or (B, T)
    mask: Tensor  # (B, T) bool, True where a token is trained
    m2po_limit: Tensor | None = None  # () the step's ``m2po_limit``; None: these tokens are the step


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The constants of all losses; each reads its own."""

    clip_low: float = 0.2
    """ppo_clip, gspo, cispo clip u below at 1 - this; gmpo clips log u at - this."""
    clip_high: float = 0.2
    """... and above at 1 + this; gmpo clips log u at this."""
    clip_dual: float | None = 3.0
    """ppo_clip: bound on the loss of a negative advantage, in units of -A; None: off."""
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    aipo_cap: float = 5.0
    """aipo: largest weight pi/b."""
    dppo_threshold: float = 0.2
    """dppo: largest change of a token's probability, in the direction that its advantage asks for."""
    dppo_penalty: float = 1e-3
    """dppo: factor of (log pi/b)^2."""
    m2po_tau: float = 0.04
    """m2po: bound on the mean of (log pi/b)^2 over the step."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A policy loss of each token; zero outside the mask."""

    loss: Tensor  # (B, T)
    clipped: Tensor  # (B, T) bool, where a clip, cap or mask decided
    kl: Tensor  # (B, T) log p - log pi, no gradient: its mean estimates KL(p || pi)
    clipped_lower: Tensor | None = None  # (B, T) bool, where a second bound, for A < 0, decided


PolicyLoss = Callable[[LossInputs, LossSettings], TokenLoss]


def ppo_clip(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """Clipped surrogate with two bounds (PPO, 1707.06347; clip-higher, DAPO, 2503.14476).

    max(-uA, -clip(u, 1 - low, 1 + high) A); where A < 0 also at most -cA (dual clip, 1912.09729).
    """
    mask = inputs.mask
    advantages = masked(inputs.advantages, mask)  # (B, T)
    log_u = log_ratio(inputs.logprobs, inputs.proximal, mask)
    u = log_u.exp()
    unclipped = -advantages * u
    bounded = -advantages * u.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    loss = torch.maximum(unclipped, bounded)
    lower = torch.zeros_like(mask)
    if settings.clip_dual is not None:
        ceiling = -settings.clip_dual * advantages
        capped = torch.minimum(loss, ceiling)
        lower = (loss > ceiling) & (advantages < 0) & mask
        loss = torch.where(advantages < 0, capped, loss)
    return TokenLoss(loss, (bounded > unclipped) & mask, -log_u.detach(), lower)


def gspo(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """Clipped surrogate of the sequence's ratio s = exp(mean of log u) (GSPO, 2507.18071).

    The value is the sequence's, the gradient goes through each token: s is sg(s) u / sg(u).
    """
    mask = inputs.mask
    advantages = masked(inputs.advantages, mask)  # (B, T)
    logprobs = masked(inputs.logprobs, mask)
    log_u = log_difference(inputs.logprobs, inputs.proximal, mask).detach()
    log_s = logprobs - logprobs.detach() + sequence_mean(log_u, mask)  # (B, T)
    s = log_s.clamp(max=GSPO_LOG_RATIO_BOUND).exp()
    unclipped = -advantages * s
    bounded = -advantages * s.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    loss = masked(torch.maximum(unclipped, bounded), mask)
    return TokenLoss(loss, (bounded > unclipped) & mask, -log_u)


def cispo(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """Policy gradient with a clipped weight: -sg(clip(u, 1 - low, 1 + high)) A log pi (2506.13585)."""
    log_u = log_ratio(inputs.logprobs, inputs.proximal, inputs.mask).detach()
    u = log_u.exp()
    weights = u.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return _policy_gradient(inputs, weights, clipped=weights != u, kl=-log_u)


def gmpo(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """-A times the geometric mean of a sequence's clipped ratios (GMPO, 2507.20673).

    Clips log u to [-low, high], on the side that ppo_clip would. Every token carries the loss of its
    sequence, so ``seq-mean`` is the aggregation that it is meant for.
    """
    mask = inputs.mask
    advantages = masked(inputs.advantages, mask)  # (B, T)
    log_u = log_difference(inputs.logprobs, inputs.proximal, mask)
    bounded = log_u.clamp(-settings.clip_low, settings.clip_high)
    sign = advantages.sign()
    pessimistic = sign * torch.minimum(sign * log_u, sign * bounded)
    ratio = smoothed_mean(pessimistic, mask).exp()  # (B, 1)
    loss = masked(-smoothed_mean(advantages, mask) * ratio, mask)
    outside = (bounded != log_u) & mask
    kl = -log_ratio(inputs.logprobs, inputs.proximal, mask).detach()
    return TokenLoss(loss, outside & (advantages > 0), kl, outside & (advantages < 0))


def sapo(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """A soft gate for the clip: -(4 / tau) sigmoid(tau (u - 1)) A, tau by the sign of A (2511.20347)."""
    mask = inputs.mask
    advantages = masked(inputs.advantages, mask)  # (B, T)
    log_u = log_ratio(inputs.logprobs, inputs.proximal, mask)
    u = log_u.exp()

    def gate(tau: float) -> Tensor:
        return torch.sigmoid(tau * (u - 1.0)) * (4.0 / tau)

    gates = torch.where(advantages > 0, gate(settings.sapo_tau_positive), gate(settings.sapo_tau_negative))
    return TokenLoss(-gates * advantages, torch.zeros_like(mask), -log_u.detach())


def aipo(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """Policy gradient with a truncated weight: -sg(min(pi/b, cap)) A log pi (LlamaRL, 2505.24034)."""
    ratio = _behaviour_ratio(inputs)
    weights = ratio.clamp(max=settings.aipo_cap)
    return _policy_gradient(inputs, weights, clipped=ratio > weights, kl=_kl(inputs))


def topr(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """Tapered policy gradient (TOPR, 2503.14286): good answers weigh 1, bad ones clip(pi/b, 0, 1)."""
    ratio = _behaviour_ratio(inputs)
    negative = inputs.advantages < 0  # (B, 1) or (B, T)
    weights = torch.where(negative, ratio.clamp(max=1.0), 1.0)
    return _policy_gradient(inputs, weights, clipped=negative & (ratio > 1.0), kl=_kl(inputs))


def dppo(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """A trust region in probabilities: -keep A pi/b + k (log pi/b)^2 (DPPO, 2602.04879).

    A token is dropped where pi - b has gone beyond the threshold in the direction of its advantage.
    A ratio can be large where both probabilities are tiny; their difference cannot.
    """
    mask = inputs.mask
    advantages = masked(inputs.advantages, mask)  # (B, T)
    log_r = log_ratio(inputs.logprobs, inputs.behaviour, mask)
    moved = (masked(inputs.logprobs, mask).exp() - masked(inputs.behaviour, mask).exp()).detach()
    threshold = settings.dppo_threshold
    dropped = ((advantages > 0) & (moved > threshold)) | ((advantages < 0) & (moved < -threshold))
    surrogate = torch.where(dropped, 0.0, -advantages * log_r.exp())
    loss = surrogate + settings.dppo_penalty * log_r.square()
    return TokenLoss(loss, dropped & mask, _kl(inputs))


def m2po(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """-keep A pi/b without the tokens that have moved furthest from b (M2PO, 2510.01161).

    Tokens with the largest (log pi/b)^2 are dropped until the mean over those that stay is under tau.
    """
    mask = inputs.mask
    log_r = log_ratio(inputs.logprobs, inputs.behaviour, mask)
    squares = log_r.detach().square()
    limit = inputs.m2po_limit
    if limit is None:
        limit = m2po_limit(squares[mask], settings.m2po_tau)
    kept = (squares < limit) & mask
    loss = torch.where(kept, -masked(inputs.advantages, mask) * log_r.exp(), 0.0)
    return TokenLoss(loss, mask & ~kept, _kl(inputs))


def m2po_limit(squares: Tensor, tau: float) -> Tensor:
    """What (log pi/b)^2 must stay below, so that the mean of those that do is under ``tau``: () scalar.

    ``squares`` (N,) of all tokens of the step; infinity where none has to go. Equal values go together.
    """
    ordered = squares.sort().values
    means = ordered.double().cumsum(0) / torch.arange(1, len(ordered) + 1, device=squares.device)
    kept = (means < tau).sum()
    return torch.cat([ordered, ordered.new_full((1,), torch.inf)])[kept]


def _policy_gradient(inputs: LossInputs, weights: Tensor, *, clipped: Tensor, kl: Tensor) -> TokenLoss:
    """-w A log pi with weights that carry no gradient."""
    mask = inputs.mask
    loss = -weights.detach() * masked(inputs.advantages, mask) * masked(inputs.logprobs, mask)
    return TokenLoss(loss, clipped & mask, kl)


def _behaviour_ratio(inputs: LossInputs) -> Tensor:
    """pi/b, 1 outside the mask; no gradient. (B, T)."""
    return log_ratio(inputs.logprobs, inputs.behaviour, inputs.mask).detach().exp()


def _kl(inputs: LossInputs) -> Tensor:
    return -log_ratio(inputs.logprobs, inputs.proximal, inputs.mask).detach()


LOSSES: Mapping[str, PolicyLoss] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "aipo": aipo,
    "topr": topr,
    "dppo": dppo,
    "m2po": m2po,
}
