"""The learner's part of the advantages: what spans the batch, and users' own functions.

The controller sends one scalar a sample. For most advantages that is all there is to it.

Invariants:
- Whitening spans the trained tokens of the whole step, over all ranks, masked ones left out.
- A user's function sees whole groups: a group never lies on two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch

from asyncrl.algorithms.advantages import GroupAdvantage
from asyncrl.algorithms.masks import AllSum
from asyncrl.algorithms.returns import WHITENED, token_advantages
from asyncrl.learners.base import TrainSample


def from_user(samples: Sequence[TrainSample], function: GroupAdvantage) -> tuple[TrainSample, ...]:
    """The samples, group by group, with a user's advantages in place of the rewards that came."""
    found: list[TrainSample] = []
    for _, members in groupby(samples, key=lambda sample: sample.ordinal):
        group = list(members)
        lengths = [int(sample.trajectory.loss_mask.sum()) for sample in group]
        advantages = function([sample.advantage for sample in group], lengths)
        found += [replace(s, advantage=a) for s, a in zip(group, advantages, strict=True)]
    return tuple(found)


def batch_wide(
    samples: Sequence[TrainSample],
    name: str,
    gamma: float,
    all_sum: AllSum,
    device: torch.device,
    kl_coef: float = 0.0,
) -> tuple[TrainSample, ...]:
    """The samples with advantages by token where ``name`` asks for them; then a collective call.

    ``kl_coef`` times ``TrainSample.kl`` comes off the reward of each token, where samples have one.
    """
    if name not in WHITENED:
        return tuple(samples)
    rows, width = max(len(samples), 1), max((len(s.trajectory.token_ids) for s in samples), default=1)
    mask = np.zeros((rows, max(width, 1)), np.bool_)
    scalars = np.zeros((rows, 1), np.float64)
    penalties = np.zeros(mask.shape, np.float64)
    for row, sample in enumerate(samples):
        if sample.kl is not None:
            penalties[row, : len(sample.kl)] = kl_coef * sample.kl
        mask[row, : len(sample.trajectory.token_ids)] = sample.trajectory.loss_mask
        scalars[row] = sample.advantage
    advantages = token_advantages(
        name,
        torch.from_numpy(scalars).to(device),
        torch.from_numpy(mask).to(device),
        gamma,
        all_sum,
        torch.from_numpy(penalties).to(device),
    )
    by_token = advantages.to("cpu", torch.float32).numpy()  # (B, T)
    return tuple(
        replace(sample, token_advantages=by_token[row, : len(sample.trajectory.token_ids)])
        for row, sample in enumerate(samples)
    )
