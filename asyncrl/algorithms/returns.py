"""Advantages that differ from token to token, or need the whole batch: returns, GAE, whitening.

Shapes: B sequences, T response positions, padded on the right; the mask may have holes.

Invariants:
- Time passes from one masked-in token to the next: tokens of tools and environments in between
  neither discount nor carry a value.
- A value outside the mask reaches nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.masks import AllSum, alone, masked, whiten

WHITENED = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"})
"""Advantages that are whitened over all tokens of the step."""
DISCOUNTED = frozenset({"reinforce_plus_plus"})
"""Advantages that are discounted returns of a reward at the last token."""


def outcome_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """One reward a sequence, put on its last token. (B, 1), (B, T) -> (B, T)."""
    tokens_left = mask.flip(-1).cumsum(-1).flip(-1)  # this one included
    return torch.where(mask & (tokens_left == 1), rewards, 0.0)


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1}, 0 outside the mask. (B, T)."""
    rewards = masked(rewards, mask)
    returns = torch.zeros_like(rewards)
    following = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        following = torch.where(mask[:, t], rewards[:, t] + gamma * following, following)
        returns[:, t] = following
    return masked(returns, mask)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates, not whitened yet, and returns A + V (1506.02438). Two (B, T).

    delta_t = r_t + gamma V_{t+1} - V_t, and A_t = delta_t + gamma lam A_{t+1}.
    """
    rewards, values = masked(rewards, mask), masked(values, mask)
    advantages = torch.zeros_like(rewards)
    following = next_value = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        following = torch.where(mask[:, t], delta + gamma * lam * following, following)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = following
    advantages = masked(advantages, mask)
    return advantages, advantages + values


def token_advantages(
    name: str,
    advantages: Tensor,
    mask: Tensor,
    gamma: float,
    all_sum: AllSum = alone,
    penalties: Tensor | None = None,
) -> Tensor:
    """What the learner makes of a group's scalars: (B, 1), (B, T) -> (B, 1) or (B, T).

    All but the batch-wide ones stay as they are. ``all_sum`` spans the ranks; collective for those.
    ``penalties`` (B, T) come off the reward of each token, for those that look at tokens.
    """
    if name in DISCOUNTED:
        rewards = outcome_rewards(advantages, mask)
        rewards = rewards if penalties is None else rewards - penalties
        advantages = discounted_returns(rewards, mask, gamma)
    return whiten(advantages, mask, all_sum) if name in WHITENED else advantages
