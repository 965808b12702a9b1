"""The learner's part of the advantages: what spans the batch, and users' own functions.

The controller sends one scalar a sample. For most advantages that is all there is to it.

Invariants:
- Estimates (GAE) are a pure function of samples: the policy's learner and the critic, which have other
  samples each, make the same of the same. An answer's reward is that of its last trained token; nothing is
  expected after that, of an answer that was cut off neither.
- Whitening spans the trained tokens of the whole step, over all ranks, masked ones left out.
- A user's function sees whole groups: a group never lies on two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.advantages import GroupAdvantage
from asyncrl.algorithms.masks import AllSum, whiten
from asyncrl.algorithms.returns import WHITENED, gae, outcome_rewards, token_advantages
from asyncrl.errors import InvariantError
from asyncrl.learners.base import TrainSample
from asyncrl.types import Float32Array


def from_user(samples: Sequence[TrainSample], function: GroupAdvantage) -> tuple[TrainSample, ...]:
    """The samples, group by group, with a user's advantages in place of the rewards that came."""
    found: list[TrainSample] = []
    for _, members in groupby(samples, key=lambda sample: sample.ordinal):
        group = list(members)
        rewards: dict[int, float] = {}
        lengths: dict[int, int] = {}
        for sample in group:  # with all its rows
            number = sample.trajectory.sample
            rewards.setdefault(number, sample.advantage)
            lengths[number] = lengths.get(number, 0) + int(sample.trajectory.loss_mask.sum())
        advantages = function(list(rewards.values()), list(lengths.values()))
        by_sample = dict(zip(rewards, advantages, strict=True))
        found += [replace(s, advantage=by_sample[s.trajectory.sample]) for s in group]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Estimates:
    """All (B, T), float64 on the CPU, a row a sample; 0 outside the mask."""

    advantages: Tensor
    """Not whitened."""
    returns: Tensor
    """Advantages + values: what the critic learns."""
    values: Tensor
    mask: Tensor  # bool


def gae_estimates(
    samples: Sequence[TrainSample], gamma: float, lam: float, kl_coef: float = 0.0
) -> Estimates:
    """GAE of the samples' rewards (their ``advantage``, less ``kl_coef`` times ``kl`` a token) and values.

    Raises InvariantError for a sample without values.
    """
    for sample in samples:
        if sample.values is None:
            raise InvariantError(
                f"sample {sample.trajectory.sample} of ordinal {sample.ordinal} has no values of a critic, "
                f"expected {len(sample.trajectory.token_ids)}"
            )
    mask = padded_mask(samples)
    rewards = outcome_rewards(answer_scalars(samples), mask)
    rewards = rewards - kl_coef * _padded(samples, mask, lambda sample: sample.kl)
    values = _padded(samples, mask, lambda sample: sample.values)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    return Estimates(advantages, returns, torch.where(mask, values, 0.0), mask)


def batch_wide(
    samples: Sequence[TrainSample],
    name: str,
    gamma: float,
    all_sum: AllSum,
    device: torch.device,
    kl_coef: float = 0.0,
    lam: float = 1.0,
) -> tuple[TrainSample, ...]:
    """The samples with advantages by token where ``name`` asks for them; then a collective call.

    ``kl_coef`` times ``TrainSample.kl`` comes off the reward of each token, where samples have one.
    """
    if name not in WHITENED:
        return tuple(samples)
    if name == "gae":
        estimates = gae_estimates(samples, gamma, lam, kl_coef)
        advantages = whiten(estimates.advantages.to(device), estimates.mask.to(device), all_sum)
    else:
        scalars, mask = answer_scalars(samples), padded_mask(samples)
        penalties = kl_coef * _padded(samples, mask, lambda sample: sample.kl)
        advantages = token_advantages(
            name, scalars.to(device), mask.to(device), gamma, all_sum, penalties.to(device)
        )
    by_token = advantages.to("cpu", torch.float32).numpy()  # (B, T)
    return tuple(
        replace(sample, token_advantages=by_token[row, : len(sample.trajectory.token_ids)])
        for row, sample in enumerate(samples)
    )


def padded_mask(samples: Sequence[TrainSample]) -> Tensor:
    """Loss masks, padded on the right: (B, T) bool, at least one row and one column."""
    width = max((len(sample.trajectory.token_ids) for sample in samples), default=1)
    mask = np.zeros((max(len(samples), 1), max(width, 1)), np.bool_)
    for row, sample in enumerate(samples):
        mask[row, : len(sample.trajectory.token_ids)] = sample.trajectory.loss_mask
    return torch.from_numpy(mask)


def answer_scalars(samples: Sequence[TrainSample]) -> Tensor:
    """What the controller made of each answer's reward: (B, 1) float64, at least one row."""
    return torch.tensor([[s.advantage] for s in samples] or [[0.0]], dtype=torch.float64)


def _padded(
    samples: Sequence[TrainSample], mask: Tensor, field: Callable[[TrainSample], Float32Array | None]
) -> Tensor:
    """An array (T,) of each sample, padded with 0 to the mask's shape; None is all 0. (B, T) float64."""
    padded = np.zeros(mask.shape, np.float64)
    for row, sample in enumerate(samples):
        array = field(sample)
        if array is not None:
            padded[row, : len(array)] = array
    return torch.from_numpy(padded)
